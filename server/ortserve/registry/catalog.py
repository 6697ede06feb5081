"""Finding: every version that was asked for, and the one that answers a request."""

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Final

from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.coordination import WAITING, Progress
from ortserve.registry.repository.source import VersionSource
from ortserve.registry.served import ServedModel
from ortserve.telemetry.metrics import ModelMetrics

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


class Catalog:
    """Records by model and version, and the routes of requests. Loop thread only.

    Of a version that is loaded anew while the old load serves, the record here is the one that serves.
    """

    def __init__(self) -> None:
        self._records: dict[str, dict[int, VersionRecord]] = {}
        self._serving: dict[tuple[str, str], ServedModel] = {}
        self.is_whole = False
        """Whether all that is served from the start was asked for; until then no model is unknown for good."""

    def find(self, name: str, version: str) -> ServedModel:
        """The version that answers: the one named, or the highest that is ready.

        Args:
            name: Of the model.
            version: A number without leading zeros, or ``""`` for any.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._serving.get((name, version))
        if served is not None:
            return served
        raise self._refusal(name, version)

    def knows(self, name: str) -> bool:
        """Whether the model was ever asked for."""
        return name in self._records

    def names(self) -> list[str]:
        """The models that are known, in the order they came."""
        return list(self._records)

    def of(self, name: str) -> Mapping[int, VersionRecord]:
        """A model's records by version; none for an unknown one."""
        return self._records.get(name, {})

    def records(self) -> Iterator[VersionRecord]:
        """Every version that was asked for; a model that could not even be read counts as version 0."""
        for records in self._records.values():
            yield from records.values()

    def ready(self, name: str) -> list[VersionRecord]:
        """The versions of a model that serve now, ascending."""
        return sorted(
            (record for record in self.of(name).values() if record.state is State.READY),
            key=lambda record: record.version,
        )

    def put(self, record: VersionRecord) -> VersionRecord | None:
        """Show a record, in the place of the one before, which is returned."""
        records = self._records.setdefault(record.model, {})
        before = records.get(record.version)
        records[record.version] = record
        return before

    def drop(self, record: VersionRecord) -> None:
        """Forget a record; the model stays known."""
        del self._records[record.model][record.version]

    def route(self, name: str) -> None:
        """Point requests for a model at its ready versions, and those without a version at the highest."""
        for key in [key for key in self._serving if key[0] == name]:
            del self._serving[key]
        for record in self.ready(name):
            assert record.served is not None
            self._serving[name, str(record.version)] = record.served
            self._serving[name, ""] = record.served

    def _refusal(self, name: str, version: str) -> ServeError:
        records = self._records.get(name)
        if records is None and not self.is_whole:
            text = f"Request for unknown model: '{name}' is not at ready state: the server is still loading its models"
            return ServeError(ErrorKind.NOT_READY, text, retry_after_s=1)
        if records is None:
            return ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version:
            record = next((record for record in records.values() if record.label == version), None)
            if record is None:
                return ServeError(
                    ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found"
                )
            asked = [record]
            text = f"Request for unknown model: '{name}' version {version} is not at ready state"
        else:
            asked = list(records.values())
            text = f"Request for unknown model: '{name}' has no available versions"
        # What was unloaded on purpose is not coming back by itself: no use in trying again.
        if all(record.is_unloaded for record in asked):
            return ServeError(ErrorKind.NOT_FOUND, f"{text}: it was unloaded")
        told = "; ".join(f"{record.state.name}{f' ({why})' if (why := record.explanation) else ''}" for record in asked)
        return ServeError(ErrorKind.NOT_READY, f"{text}: {told}", retry_after_s=1)
