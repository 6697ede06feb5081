"""The states of a model version, which only ever move forward."""

from enum import IntEnum

from ortserve.registry.served import ServedModel


class State(IntEnum):
    """Ordered: a version never goes back. Whatever should serve again is a new load."""

    LOADING = 0
    WARMING = 1
    READY = 2
    DRAINING = 3
    GONE = 4
    FAILED = 5


class VersionRecord:
    """What the registry knows of one version. Loop thread only."""

    def __init__(self, model: str, version: int, *, is_required: bool) -> None:
        self.model = model
        self.version = version
        self.is_required = is_required
        self.state = State.LOADING
        self.reason = ""
        self.served: ServedModel | None = None
        """What answers its requests; there exactly while READY or DRAINING."""

    def advance(self, state: State, reason: str = "") -> None:
        assert state > self.state, f"{self.model}/{self.version} cannot go from {self.state.name} to {state.name}"
        self.state = state
        self.reason = reason
