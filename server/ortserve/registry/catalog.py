"""The catalog holds the record and state of each version, and finds the version that answers a request."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Final

from ortserve.core.version_names import STABLE
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry.load.progress import WAITING, Progress
from ortserve.registry.repository.source import VersionSource
from ortserve.registry.residency.ledger import HostAccount
from ortserve.registry.rollout import Rollout
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.series import ModelMetrics

ON_DEMAND: Final = "not in memory: the next request loads it"
"""Reason of versions that the next request loads: they were evicted, or have not been loaded yet."""
UNLOADED: Final = "unloaded"
"""Reason of versions that were taken out of service, by a call or because another version replaced them."""


class State(IntEnum):
    """States of one load of a version, in order. A record never returns to an earlier state; a reload has a new one."""

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

        ``version`` is 0, and ``source`` is None, for a model whose versions could not be read. The server is ready only
        once a version that ``is_required`` is ready. ``metrics`` are those of an earlier load, to continue; None starts
        new ones. ``on_change`` is called after each change of state.
        """
        self.model = model
        self.version = version
        self.is_required = is_required
        self.source = source
        self._on_change = on_change
        self.state = State.LOADING
        self.reason = ""
        """Why the load failed, ``UNLOADED`` or ``ON_DEMAND``; in the state READY, why the last reload failed."""
        self.progress: Progress | None = None
        """Progress of the load; None before the load begins."""
        self.metrics = metrics or ModelMetrics(model, self.shown_version)
        if source is not None:
            self.metrics.tags = source.configuration.options.metric_labels
        self.metrics.set_state(self.state.name.lower())
        self.served: ServedVersion | None = None
        """Answers requests. Set in the states READY and DRAINING, and until a version that failed later is freed."""
        self.account: HostAccount | None = None
        """Account of its host memory; None before memory is reserved, after it was freed, and for an ensemble."""
        self.is_awaited = False
        """Whether requests may wait for the load."""
        self.continues = False
        """Whether the load follows that of another version of the model in the same change."""
        self.cancelled_because = ""
        """Why the load was cancelled; empty if it was not."""
        self.is_superseded = False
        """Whether the load was cancelled because a newer one of the model follows, or a reconnection of its members."""
        self.will_be_replaced = False
        """Whether the version abandoned an instance, and a new load of it follows."""
        self.is_reconnection = False
        """Whether the load connects an ensemble to its present members. If it fails, the load before ends, too."""
        self.is_retiring = False
        """Whether the change of the model that is under way retires the version, which the model's source lacks."""
        self.waiting: asyncio.Timeout | None = None
        """Ends the wait of the load for a slot and for room; None while the load does not wait."""
        self.waits_since_ns = 0
        """When the load first had to wait for room (monotonic); 0 before."""
        self.ready_ns = 0
        """When the version became READY (monotonic)."""
        self.stays_until_ns = 0
        """Earliest time of an eviction (monotonic)."""
        self.no_room: ServeError | None = None
        """Why the load got no room in memory now; None if it got room, or never will."""

    @property
    def shown_version(self) -> str:
        """The version as clients see it; empty for version 0."""
        return str(self.version) if self.version else ""

    @property
    def is_unloaded(self) -> bool:
        """Whether the version was taken out of service on purpose."""
        return self.reason == UNLOADED

    @property
    def is_on_demand(self) -> bool:
        """Whether the version is not in memory, or is being evicted, and a request for it begins a load."""
        return self.reason == ON_DEMAND

    @property
    def is_loading(self) -> bool:
        """Whether a load of the version waits or is under way."""
        return self.state < State.READY

    @property
    def makes_requests_wait(self) -> bool:
        """Whether a request for the version waits for a load, which is under way or begins with the request."""
        return self.is_on_demand or (self.is_awaited and self.is_loading)

    @property
    def is_held(self) -> bool:
        """Whether an ensemble holds the version open."""
        return self.served is not None and self.served.is_held

    @property
    def explanation(self) -> str:
        """Why the version is in its state: ``reason``, or during a load the current step and its duration."""
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
    """Holds records by model and version, and the version that answers each name. Loop thread only.

    While a version is reloaded, the catalog keeps the record that serves.
    """

    def __init__(self, *, is_polled: bool = False) -> None:
        """``is_polled`` tells whether failed loads are tried again without a call."""
        self._is_polled: Final = is_polled
        self._records: dict[str, dict[int, VersionRecord]] = {}
        self._serving: dict[tuple[str, str], ServedVersion] = {}
        """Serving versions by model and by the version that a request names: a number, a label, or the empty string."""
        self._keys: dict[str, list[tuple[str, str]]] = {}
        """The keys in ``_serving`` of each model of which a version serves."""
        self._labels: dict[str, Mapping[str, int]] = {}
        self._rollouts: dict[str, Rollout] = {}
        self.is_complete = False
        """Whether initial loading has ended. Until then, an unknown model may still be added."""

    def find(self, name: str, version: str) -> ServedVersion:
        """Find the version that answers a request.

        It is the named version; without a name, the version labelled ``stable``; without that label, the highest ready
        one.

        Args:
            name: Name of the model.
            version: A number without leading zeros, a label, or ``""`` for any.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._serving.get((name, version))
        if served is not None:
            return served
        raise self._error(name, version)

    def serves(self, name: str, version: str) -> bool:
        """Whether a version would answer a request, as ``find`` chooses it."""
        return (name, version) in self._serving

    def knows(self, name: str) -> bool:
        """Whether the model has ever had a record."""
        return name in self._records

    def names(self) -> list[str]:
        """The known models, in the order of their first records."""
        return list(self._records)

    def serving(self) -> list[str]:
        """The models of which a version serves."""
        return list(self._keys)

    def of(self, name: str) -> Mapping[int, VersionRecord]:
        """The records of a model by version; empty for an unknown model."""
        return self._records.get(name, {})

    def records(self) -> Iterator[VersionRecord]:
        """All records."""
        for records in self._records.values():
            yield from records.values()

    def ready(self, name: str) -> list[VersionRecord]:
        """The versions of a model that serve now, ascending."""
        ready = [record for record in self.of(name).values() if record.state is State.READY]
        return sorted(ready, key=lambda record: record.version) if len(ready) > 1 else ready

    def lacks_room(self, name: str) -> bool:
        """Whether a version of a model was evicted, or got no room in memory, which it may get later."""
        return any(record.is_on_demand or record.no_room is not None for record in self.of(name).values())

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

        If a version is labelled ``stable``, it answers requests without a version, and such requests fail while it is
        not ready. Otherwise the highest ready version answers them. While a model is loaded of which no version served,
        lower versions do not answer them, so that their answers do not depend on which version is ready first.
        """
        was_answered = (name, "") in self._serving
        coming = max((record.version for record in self.of(name).values() if record.is_loading), default=0)
        for key in self._keys.pop(name, ()):
            del self._serving[key]
        found: dict[str, ServedVersion] = {}
        for record in self.ready(name):
            assert record.served is not None
            found[str(record.version)] = record.served
            if was_answered or record.version > coming:
                found[""] = record.served
        labels = self.labels(name)
        for label, version in labels.items():
            if (served := found.get(str(version))) is not None:
                found[label] = served
        if STABLE in labels:
            found.pop("", None)
            if (served := found.get(STABLE)) is not None:
                found[""] = served
        if found:
            self._keys[name] = [(name, version) for version in found]
            self._serving.update(zip(self._keys[name], found.values(), strict=True))
        self._attach_rollout(name)

    def set_rollout(self, name: str, rollout: Rollout | None) -> None:
        """Attach a rollout to the version of a model that is labelled ``stable``. It replaces an earlier rollout."""
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
        """Version number of each label of a model, whether the version serves or not."""
        return self._labels.get(name, {})

    def set_labels(self, name: str, labels: Mapping[str, int]) -> None:
        """Replace all labels of a model in one step."""
        self._labels[name] = labels
        self.route(name)

    def _error(self, name: str, version: str) -> ServeError:
        """The error for a request that no version answers."""
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
            record = next((record for record in records.values() if record.shown_version == number), None)
            if record is None:
                return ServeError(ErrorKind.NOT_FOUND, f"{text} is not found")
            candidates = [record]
            text += " is not at ready state"
        else:
            candidates = list(records.values())
            text = f"Request for unknown model: '{name}' has no available versions"
        if any(record.makes_requests_wait for record in candidates):
            return NotInMemoryError(f"{text}: {ON_DEMAND}")
        # A retry would not help: versions that were unloaded on purpose are not reloaded without a call.
        if all(record.is_unloaded for record in candidates):
            return ServeError(ErrorKind.NOT_FOUND, f"{text}: it was unloaded")
        states = "; ".join(
            f"{record.state.name}{f' ({why})' if (why := record.explanation) else ''}"
            for record in candidates
            if record.state is not State.READY  # a lower version than one that is loading
        )
        may_pass = self._is_polled or any(
            record.is_loading or record.is_superseded or record.will_be_replaced for record in candidates
        )
        return ServeError(ErrorKind.NOT_READY, f"{text}: {states}", retry_after_s=1 if may_pass else None)
