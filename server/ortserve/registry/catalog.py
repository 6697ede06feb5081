"""The catalog: a record of each version and its state, and which version answers a request."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Final

from ortserve.core.version_names import STABLE
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry.load.coordination import WAITING, Progress
from ortserve.registry.repository.source import VersionSource
from ortserve.registry.residency.ledger import HostAccount
from ortserve.registry.rollout import Rollout
from ortserve.registry.serving import ServedVersion
from ortserve.telemetry.series import ModelMetrics

ON_DEMAND: Final = "not in memory: the next request loads it"
"""The reason of versions that are loaded by the first request for them, or were evicted."""
UNLOADED: Final = "unloaded"
"""The reason of versions that were taken out of service, by request or for another version."""


class State(IntEnum):
    """States of one load of a version, in order. A state never goes back: serving again is a new load."""

    LOADING = 0
    WARMING = 1
    READY = 2
    DRAINING = 3
    GONE = 4
    FAILED = 5


class VersionRecord:
    """One load of one version: its state, source and metrics. Loop thread only."""

    def __init__(
        self,
        model: str,
        version: int,
        on_change: Callable[[], None],
        *,
        is_required: bool = False,
        source: VersionSource | None = None,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """Begin in the state LOADING.

        Args:
            model: Name of the model.
            version: 0 for a model whose versions could not be read.
            on_change: Called after each change of state.
            is_required: Whether the server is ready only if this version is.
            source: What is loaded; None for version 0.
            metrics: Of an earlier load of the version, which goes on counting; None for new ones.
        """
        self.model = model
        self.version = version
        self.is_required = is_required
        self.source = source
        self._on_change = on_change
        self.state = State.LOADING
        self.reason = ""
        """Why it failed, or ``UNLOADED``; if it is READY, why its last reload failed."""
        self.progress: Progress | None = None
        """The steps of its load; None before the load begins."""
        self.metrics = metrics or ModelMetrics(model, self.label)
        if source is not None:
            self.metrics.tags = source.configuration.options.metric_labels
        self.metrics.set_state(self.state.name.lower())
        self.served: ServedVersion | None = None
        """Answers its requests. Set while READY or DRAINING, and until it is freed after its device was lost."""
        self.account: HostAccount | None = None
        """Its host memory; None before its load begins, after it was freed, and for an ensemble."""
        self.is_awaited = False
        """Whether requests may wait for its load."""
        self.cancelled_because = ""
        """Why its load is not needed any more; empty while it is."""
        self.waiting: asyncio.Timeout | None = None
        """Ends the wait of its load for a slot and for room; None while it does not wait."""
        self.asked_ns = 0
        """When its load first asked for room and had to wait (monotonic)."""
        self.ready_ns = 0
        """When it became READY (monotonic)."""
        self.stays_until_ns = 0
        """It is not evicted before (monotonic)."""
        self.no_room: ServeError | None = None
        """Why its load got no room; None if it did."""

    @property
    def label(self) -> str:
        """The version as clients see it; empty for version 0."""
        return str(self.version) if self.version else ""

    @property
    def is_unloaded(self) -> bool:
        """Whether it was taken out of service on purpose."""
        return self.reason == UNLOADED

    @property
    def is_on_demand(self) -> bool:
        """Whether it is not in memory, or leaves it, and a request for it begins a load."""
        return self.reason == ON_DEMAND

    @property
    def makes_requests_wait(self) -> bool:
        """Whether a request for it waits for a load, which is under way or begins with the request."""
        return self.is_on_demand or (self.is_awaited and self.state < State.READY)

    @property
    def is_held(self) -> bool:
        """Whether an ensemble holds it open."""
        return self.served is not None and self.served.is_held

    @property
    def explanation(self) -> str:
        """Why it is in its state: ``reason``, or the present step of its load with its duration."""
        if self.state > State.WARMING:
            return self.reason
        return WAITING if self.progress is None else self.progress.describe()

    def advance(self, state: State, reason: str = "") -> None:
        """Enter a later state."""
        assert state > self.state, f"{self.model}/{self.version} cannot go from {self.state.name} to {state.name}"
        self.state = state
        self.reason = reason
        self.metrics.set_state(state.name.lower())
        self._on_change()


class Catalog:
    """Records by model and version, and the version that answers each name. Loop thread only.

    While a version is loaded again, its record here is the one that serves.
    """

    def __init__(self) -> None:
        self._records: dict[str, dict[int, VersionRecord]] = {}
        self._serving: dict[tuple[str, str], ServedVersion] = {}
        """By model and what requests may name: a number, a label, or nothing."""
        self._labels: dict[str, Mapping[str, int]] = {}
        self._rollouts: dict[str, Rollout] = {}
        self.is_complete = False
        """Whether initial loading is over. Until then a model that is unknown may still come."""

    def find(self, name: str, version: str) -> ServedVersion:
        """Find the version that answers: the one named; else the one labelled ``stable``; else the highest ready one.

        Args:
            name: Of the model.
            version: A number without leading zeros, a label, or ``""`` for any.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._serving.get((name, version))
        if served is not None:
            return served
        raise self._error(name, version)

    def knows(self, name: str) -> bool:
        """Whether a load of the model was ever begun."""
        return name in self._records

    def names(self) -> list[str]:
        """The known models, in the order of their first load."""
        return list(self._records)

    def of(self, name: str) -> Mapping[int, VersionRecord]:
        """The records of a model by version; empty for an unknown model."""
        return self._records.get(name, {})

    def records(self) -> Iterator[VersionRecord]:
        """All records."""
        for records in self._records.values():
            yield from records.values()

    def ready(self, name: str) -> list[VersionRecord]:
        """The versions of a model that serve now, ascending."""
        return sorted(
            (record for record in self.of(name).values() if record.state is State.READY),
            key=lambda record: record.version,
        )

    def put(self, record: VersionRecord) -> VersionRecord | None:
        """Add a record. Returns the record that it replaces."""
        records = self._records.setdefault(record.model, {})
        before = records.get(record.version)
        records[record.version] = record
        return before

    def drop(self, record: VersionRecord) -> None:
        """Remove a record. The model stays known."""
        del self._records[record.model][record.version]

    def route(self, name: str) -> None:
        """Send requests for a model to its ready versions, by number and label.

        Requests without a version go to the version labelled ``stable``, ready or not, or without that label to the
        highest ready one.
        """
        for key in [key for key in self._serving if key[0] == name]:
            del self._serving[key]
        for record in self.ready(name):
            assert record.served is not None
            self._serving[name, str(record.version)] = record.served
            self._serving[name, ""] = record.served
        labels = self.labels(name)
        for label, version in labels.items():
            if (served := self._serving.get((name, str(version)))) is not None:
                self._serving[name, label] = served
        if STABLE in labels:
            self._serving.pop((name, ""), None)
            if (served := self._serving.get((name, STABLE))) is not None:
                self._serving[name, ""] = served
        self._attach_rollout(name)

    def roll_out(self, name: str, rollout: Rollout | None) -> None:
        """Attach a rollout to the version of a model that is labelled ``stable``, instead of the one before."""
        if rollout is None:
            self._rollouts.pop(name, None)
        else:
            self._rollouts[name] = rollout
        self._attach_rollout(name)

    def _attach_rollout(self, name: str) -> None:
        stable = self._serving.get((name, STABLE)) if STABLE in self.labels(name) else None
        for record in self.ready(name):
            assert record.served is not None
            record.served.rollout = self._rollouts.get(name) if record.served is stable else None

    def labels(self, name: str) -> Mapping[str, int]:
        """Versions of a model by label, whether they serve or not."""
        return self._labels.get(name, {})

    def label(self, name: str, labels: Mapping[str, int]) -> None:
        """Replace the labels of a model, all in one step."""
        self._labels[name] = labels
        self.route(name)

    def _error(self, name: str, version: str) -> ServeError:
        """Why no version answers."""
        records = self._records.get(name)
        if records is None and not self.is_complete:
            text = f"Request for unknown model: '{name}' is not at ready state: the server is still loading its models"
            return ServeError(ErrorKind.NOT_READY, text, retry_after_s=1)
        if records is None:
            return ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        labels = self.labels(name)
        label = version or (STABLE if STABLE in labels else "")
        number = str(labels[label]) if label in labels else version
        if number:
            text = f"Request for unknown model: '{name}' version {number}"
            if label in labels:
                text += f", which is labelled '{label}',"
            record = next((record for record in records.values() if record.label == number), None)
            if record is None:
                return ServeError(ErrorKind.NOT_FOUND, f"{text} is not found")
            asked = [record]
            text += " is not at ready state"
        else:
            asked = list(records.values())
            text = f"Request for unknown model: '{name}' has no available versions"
        if any(record.makes_requests_wait for record in asked):
            return NotInMemoryError(f"{text}: {ON_DEMAND}")
        # A retry is of no use: versions that were unloaded on purpose do not come back by themselves.
        if all(record.is_unloaded for record in asked):
            return ServeError(ErrorKind.NOT_FOUND, f"{text}: it was unloaded")
        states = "; ".join(
            f"{record.state.name}{f' ({why})' if (why := record.explanation) else ''}" for record in asked
        )
        return ServeError(ErrorKind.NOT_READY, f"{text}: {states}", retry_after_s=1)
