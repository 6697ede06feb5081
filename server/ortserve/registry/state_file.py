"""The state file is one JSON document with changes that calls made to models, such as labels. It outlives restarts.

A change is written to a new file, which is renamed over the old one, so that the file is complete at any time. Servers
may share the folder: each call changes the entry of one model only, and a server reads the changes of others when it
starts.
"""

import asyncio
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ortserve.config.rollout import RolloutOptions, make_rollout_options
from ortserve.core.version_names import MAX_VERSION, is_label
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

SCHEMA: Final = "ortserve.state/1"
FILE_NAME: Final = "state.json"

_MAX_BYTES: Final = 16 * 1024 * 1024
_MAX_MODELS: Final = 16_384
_MAX_TRIED: Final = 64
"""Maximum number of ended rollouts of a model, beside the last one, whose candidates are known: the highest."""
_LOCK_WAIT_S: Final = 5.0
_LOCK_RETRY_S: Final = 0.02
"""Interval between two attempts. Another server holds the lock for the duration of one write."""
_WRITE_S: Final = 10.0
"""Maximum time that a change waits for the folder, which may be on a file server that does not answer."""


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """How a rollout ended.

    Attributes:
        candidate: The version that was tried.
        result: ``promoted``, ``rolled_back`` or ``stopped``.
        reason: Reason in words, with measured values.
    """

    candidate: int
    result: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """The changes that calls made to one model.

    Attributes:
        labels: Versions by label. They take precedence over the labels of ``model.yaml``.
        previous: The version that was ``stable`` before the last promotion; None before the first promotion.
        rollout: Rollout that a call started. It takes precedence over that of ``model.yaml``.
        ended: How the last rollout ended. An ended rollout does not restart by itself.
        tried: The candidates of rollouts that ended before, ascending.
    """

    labels: Mapping[str, int] = field(default_factory=dict)
    previous: int | None = None
    rollout: RolloutOptions | None = None
    ended: EndedRollout | None = None
    tried: tuple[int, ...] = ()

    def has_tried(self, candidate: int) -> bool:
        """Whether a rollout of a candidate has ended, and no call has started another one since."""
        return candidate in self.tried or (self.ended is not None and self.ended.candidate == candidate)

    def with_rollout(self, rollout: RolloutOptions) -> "ModelState":
        """The state after a call has started a rollout."""
        return replace(self, rollout=rollout, ended=None, tried=self._tried_except(rollout.candidate))

    def with_end(self, ended: EndedRollout) -> "ModelState":
        """The state after the rollout has ended."""
        return replace(self, rollout=None, ended=ended, tried=self._tried_except(ended.candidate))

    def _tried_except(self, candidate: int) -> tuple[int, ...]:
        known = self.tried if self.ended is None else (*self.tried, self.ended.candidate)
        return tuple(sorted({*known} - {candidate})[-_MAX_TRIED:])

    @property
    def versions(self) -> frozenset[int]:
        """The version numbers that occur in the state."""
        candidate = None if self.rollout is None else self.rollout.candidate
        named = (*self.labels.values(), self.previous, candidate)
        return frozenset(version for version in named if version is not None)


NOTHING_CHANGED: Final = ModelState()


class StateFile:
    """Holds the states of all models, in memory and in a file. Loop thread only; another thread writes the file."""

    def __init__(self, folder: Path | None) -> None:
        """Read the file, if there is one. Blocks on the disk.

        Args:
            folder: Folder of the file, created by the first change; None for a server that cannot store changes.

        Raises:
            ServeError: invalid_input: the file cannot be read, or is not a state file.
        """
        self._folder = folder
        self._states = {} if folder is None else _read(folder / FILE_NAME)
        self._coming: list[tuple[str, ModelState]] = []
        """Changes that are being written, or wait for that: model and new state. Other threads iterate over the list.
        A change leaves it after it has taken effect, by a new list in its place."""
        self._writing = asyncio.Lock()
        self._late: asyncio.Future[None] | None = None
        """The latest write that took longer than its caller waited. It may still hold its thread."""
        self.on_change: Callable[[str], object] = lambda model: None
        """Called on the loop thread with a model whose new state is on the disk."""

    def of(self, model: str) -> ModelState:
        """The state of a model."""
        return self._states.get(model, NOTHING_CHANGED)

    def models(self) -> Iterable[str]:
        """The models that calls changed, including models that the server does not know."""
        return self._states.keys()

    def versions_of(self, model: str) -> frozenset[int]:
        """The version numbers in the state of a model, and in changes of it that may still take effect. Any thread."""
        coming = [state for name, state in self._coming if name == model]  # first: a change leaves the list last
        return frozenset[int]().union(*(state.versions for state in (self.of(model), *coming)))

    async def put(self, model: str, state: ModelState) -> None:
        """Replace the state of a model. The state is on the disk, and ``on_change`` was called, when this returns.

        If the folder does not answer in time, that may happen after this has raised an error, which then says so.

        Raises:
            ServeError: conflict, naming the option, if the file cannot be written, or not in time.
        """
        if self._folder is None:
            raise _not_kept("a folder to store the change in: the server has no repository in a folder")
        coming = model, state
        self._coming.append(coming)
        writing: asyncio.Future[None] | None = None
        try:
            async with self._writing:
                if self._late is not None and not self._late.done():
                    raise _not_kept(f"a folder that answers: an earlier write of {FILE_NAME} has not ended")
                timed_out = threading.Event()
                writing = asyncio.ensure_future(asyncio.to_thread(_change, self._folder, model, state, timed_out))
                writing.add_done_callback(partial(self._on_written, coming))  # also if the caller is cancelled
                # TimeoutError may also be what the file system answers, so that exceptions say nothing about the wait.
                if not (await asyncio.wait({writing}, timeout=_WRITE_S))[0]:
                    timed_out.set()
                    self._late = writing
                    raise _not_kept(
                        f"a folder that answers within {_WRITE_S:g} s: {FILE_NAME} is still being written, "
                        "and the change may take effect later"
                    )
                try:
                    writing.result()
                except OSError as error:
                    reason = f"{FILE_NAME}: {error.strerror or error}"
                    raise _not_kept(f"a folder to store the change in: {reason}") from None
        finally:
            if writing is None:
                self._coming = [change for change in self._coming if change is not coming]

    def _on_written(self, coming: tuple[str, ModelState], ended: asyncio.Future[None]) -> None:
        model, state = coming
        is_stored = not ended.cancelled() and ended.exception() is None
        if is_stored:
            self._states[model] = state
        self._coming = [change for change in self._coming if change is not coming]
        if is_stored:
            self.on_change(model)


def _not_kept(expected: str) -> ServeError:
    return ServeError(ErrorKind.CONFLICT, f"state_dir: expected {expected}")


def _read(path: Path) -> dict[str, ModelState]:
    """Read the states of all models; empty if the file does not exist. Raises ServeError: invalid_input."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise invalid_input(f"state_dir: {path} cannot be read: {error.strerror}") from None
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES} bytes")
        document = json.loads(content)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"expected an object with the schema '{SCHEMA}'")
        models = document.get("models")
        if not isinstance(models, dict):
            raise ValueError("expected an object 'models'")
        return {name: _state_of(name, given) for name, given in models.items()}
    except (ValueError, RecursionError) as error:
        raise invalid_input(f"state_dir: {path} is not a state file of this version: {error}") from None


def _state_of(name: str, given: Any) -> ModelState:
    """Check and convert the entry of one model. Raises ValueError."""
    labels, previous = (given.get("labels"), given.get("previous")) if isinstance(given, dict) else (None, None)
    if (
        not isinstance(labels, dict)
        or not all(is_label(label) and _is_version(version) for label, version in labels.items())
        or not (previous is None or _is_version(previous))
    ):
        raise ValueError(f"expected labels with versions of model '{name}', got {given!r:.200}")
    rollout, ended, tried = given.get("rollout"), given.get("ended"), given.get("tried", [])
    if any(not isinstance(part, dict | None) for part in (rollout, ended)) or (
        ended is not None and not _is_version(ended.get("candidate"))
    ):
        raise ValueError(f"expected a rollout, and the end of one, of model '{name}', got {given!r:.200}")
    if not isinstance(tried, list) or not all(map(_is_version, tried)):
        raise ValueError(f"expected the candidates of ended rollouts of model '{name}', got {given!r:.200}")
    try:
        return ModelState(
            labels,
            previous,
            None if rollout is None else make_rollout_options(rollout),
            None if ended is None else EndedRollout(ended["candidate"], str(ended["result"]), str(ended["reason"])),
            tuple(tried),
        )
    except (ServeError, LookupError) as error:
        raise ValueError(f"model '{name}': {error!s:.200}") from None


def _is_version(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_VERSION


def _document(state: ModelState) -> dict[str, Any]:
    rollout = None if state.rollout is None else state.rollout.model_dump(mode="json")
    ended = None if state.ended is None else asdict(state.ended)
    document = {"labels": dict(state.labels), "previous": state.previous, "rollout": rollout, "ended": ended}
    return document | ({"tried": state.tried} if state.tried else {})


def _change(folder: Path, model: str, state: ModelState, timed_out: threading.Event) -> None:
    """Replace the state of one model in the file. The states of other models stay as they are in the file.

    Raises:
        OSError: The file could not be written, or its caller has timed out before that. The file is as before.
    """
    folder.mkdir(mode=0o755, exist_ok=True)
    with _locked(folder / f".{FILE_NAME}.lock"):
        path = folder / FILE_NAME
        try:
            states = _read(path)
        except ServeError as error:
            raise OSError(error.message.removeprefix(f"state_dir: {path} ")) from None
        states.pop(model, None)
        if state != NOTHING_CHANGED:
            states[model] = state
        if len(states) > _MAX_MODELS:
            raise OSError(f"it already has the maximum of {_MAX_MODELS} models")
        document = {"schema": SCHEMA, "models": {name: _document(one) for name, one in sorted(states.items())}}
        content = json.dumps(document, indent=1)  # in ASCII
        if len(content) > _MAX_BYTES:
            raise OSError(f"it would have {len(content)} bytes, of which a start would read at most {_MAX_BYTES}")
        beside = folder / f".{FILE_NAME}.new"
        with beside.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if timed_out.is_set():
            raise OSError("the caller has timed out")
        beside.replace(path)
        _sync(folder)


def _sync(folder: Path) -> None:
    """Make the new name in a folder survive a loss of power. An error is only logged, because the change is made."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        message = "a change of a model may not survive a loss of power: its folder cannot be written to the disk"
        log_event(logger, logging.WARNING, message, file=FILE_NAME, reason=error.strerror)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder against other servers. Raises OSError, also if another server holds the lock for too long."""
    latest_s = time.monotonic() + _LOCK_WAIT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > latest_s:
                    raise OSError(f"another server has held its lock for {_LOCK_WAIT_S:g} s") from None
                time.sleep(_LOCK_RETRY_S)
        yield
