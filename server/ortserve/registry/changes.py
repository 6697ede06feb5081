"""The changes of models: one after the other for each model. Newer ones supersede them, and failed ones are retried."""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from ortserve.registry.repository.source import ModelSource

MAX_AWAITED: Final = 3
"""Number of changes of a model, each superseded by the next one, for which the start and ensembles wait. A model whose
files are written again before each load has ended would keep the server from being ready."""

_FIRST_RETRY_S: Final = 60.0
_MAX_RETRY_S: Final = 3600.0
"""Maximum wait between two retries. The wait doubles with each failure."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a model that waits or is under way: its source, and the task that makes it."""

    source: ModelSource
    task: asyncio.Task[None]


class ModelLock(asyncio.Lock):
    """The lock that each change of a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.unload: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the next unload of the model begins. Changes that hold or await the lock should then end."""

    def note_unload(self) -> None:
        """End ``unload``, and begin the next one."""
        self.unload.set_result(None)
        self.unload = asyncio.get_running_loop().create_future()


class Changes:
    """The locks of models, and the newest change of each by ``Reconciler.apply_all``. Loop thread only.

    A change that holds the lock of a model may acquire the locks of the ensembles that contain it, never the other way
    round.
    """

    def __init__(self) -> None:
        self._coming: dict[str, _Change] = {}
        """The newest change of each model that waits or is under way."""
        self._locks: WeakValueDictionary[str, ModelLock] = WeakValueDictionary()

    def lock(self, name: str) -> ModelLock:
        """The lock that each change of a model holds."""
        return self._locks.setdefault(name, ModelLock())

    def is_under_way(self, name: str) -> bool:
        """Whether a change of a model is under way."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    @property
    def sources(self) -> dict[str, ModelSource]:
        """The source of the newest change of each model that waits or is under way."""
        return {name: change.source for name, change in self._coming.items()}

    def source(self, name: str) -> ModelSource | None:
        """As in ``sources``; None without a change of the model."""
        change = self._coming.get(name)
        return None if change is None else change.source

    def begin(self, source: ModelSource, task: asyncio.Task[None]) -> None:
        """Make a task the newest change of a model, until it ends."""
        self._coming[source.name] = _Change(source, task)
        task.add_done_callback(partial(self._on_end, source.name))

    def is_newest(self, name: str, task: asyncio.Task[None] | None) -> bool:
        """Whether a task is the newest change of a model: none has followed it, and the model was not unloaded."""
        change = self._coming.get(name)
        return change is not None and change.task is task

    async def wait(self, names: Collection[str]) -> None:
        """Wait for the changes of these models, and for those that begin during the wait.

        The wait for a model ends after ``MAX_AWAITED`` changes.
        """
        ended: Counter[str] = Counter()
        while changing := [name for name in names if name in self._coming and ended[name] < MAX_AWAITED]:
            await asyncio.wait([self._coming[name].task for name in changing])
            ended.update(changing)

    async def wait_for_locks(self, names: Collection[str]) -> None:
        """Wait until changes of these models that are under way have ended. The caller holds no lock."""
        for name in names:
            async with self.lock(name):
                pass

    def withdraw(self, name: str) -> ModelSource | None:
        """Prevent a change that waits for the model's lock, because the model is unloaded. Returns its source."""
        self.lock(name).note_unload()
        change = self._coming.pop(name, None)
        return None if change is None else change.source

    def _on_end(self, name: str, task: asyncio.Task[None]) -> None:
        if self.is_newest(name, task):
            del self._coming[name]


class LoadRetries:
    """Schedules retries of failed loads whose files have not changed, because the cause may pass."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, float]] = {}
        """By model: when the next retry is due (clock of the registry, ns), and the wait before it (s)."""

    def note_failure(self, name: str, now_ns: int) -> None:
        """Schedule the next retry of a model."""
        _, waited_s = self._due.get(name, (0, _FIRST_RETRY_S / 2))
        wait_s = min(2 * waited_s, _MAX_RETRY_S)
        self._due[name] = now_ns + round(wait_s * 1e9), wait_s

    def forget(self, name: str) -> None:
        """Cancel the retries of a model that serves, or that should not serve."""
        self._due.pop(name, None)

    def is_due(self, name: str, now_ns: int) -> bool:
        """Whether a retry of the model is due."""
        due = self._due.get(name)
        return due is not None and now_ns >= due[0]
