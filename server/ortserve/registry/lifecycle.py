"""The states of a model version, which only ever move forward."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from ortserve.registry.progress import WAITING, Progress
from ortserve.registry.served import ServedModel
from ortserve.registry.source import VersionSource
from ortserve.telemetry.series import ModelMetrics

UNLOADED: Final = "unloaded"
"""The reason of versions that were taken out of service, by request or for another version."""


class State(IntEnum):
    """Ordered: a version never goes back. Whatever should serve again is a new load."""

    LOADING = 0
    WARMING = 1
    READY = 2
    DRAINING = 3
    GONE = 4
    FAILED = 5


class VersionRecord:
    """What the registry knows of one load of one version. Loop thread only."""

    def __init__(
        self,
        model: str,
        version: int,
        on_change: Callable[[], None],
        *,
        is_required: bool = False,
        source: VersionSource | None = None,
    ) -> None:
        """``on_change`` is called after each change.

        ``source`` is None, and ``version`` 0, for a model of which not even that could be read.
        """
        self.model = model
        self.version = version
        self.is_required = is_required
        self.source = source
        self._on_change = on_change
        self.state = State.LOADING
        self.reason = ""
        """Why it failed, or ``UNLOADED``; of one that is READY, why its last reload failed."""
        self.progress: Progress | None = None
        """What its load is doing; None before that begins."""
        self.metrics = ModelMetrics(model, self.label)
        self.metrics.set_state(self.state.name.lower())
        self.served: ServedModel | None = None
        """What answers its requests; there while READY or DRAINING, and for a moment once its device is lost."""

    @property
    def label(self) -> str:
        """The version as it is shown: empty for a model of which none could be read."""
        return str(self.version) if self.version else ""

    @property
    def is_unloaded(self) -> bool:
        """Whether it was taken out of service on purpose, and is not missed."""
        return self.reason == UNLOADED

    @property
    def explanation(self) -> str:
        """Why it is in its state: ``reason``, or, before it is READY, what its load is doing, and for how long."""
        if self.state > State.WARMING:
            return self.reason
        return WAITING if self.progress is None else self.progress.describe()

    def advance(self, state: State, reason: str = "") -> None:
        assert state > self.state, f"{self.model}/{self.version} cannot go from {self.state.name} to {state.name}"
        self.state = state
        self.reason = reason
        self.metrics.set_state(state.name.lower())
        self._on_change()
