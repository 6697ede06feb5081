"""Values that other rooms hand to the metrics: devices, runs on devices, batchers, and the event loop.

A scrape takes the readings, on its own thread. The loop writes ``LoopActivity``, and its watchdog reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ortserve.core.timing import Timing


@dataclass(frozen=True, slots=True)
class BatchingNumbers:
    """State and counts of one batcher. Times are seconds.

    Attributes:
        queue_rows: Rows in the queue.
        decisions: Counts by decision.
        latency_s: Predicted time of a batch, by its rows.
        latency_error_s: 95th percentile of how much longer batches take than predicted.
        queue_requests: Requests in the queue.
        row_checks: Checked requests, by outcome.
    """

    queue_rows: int = 0
    decisions: Mapping[str, int] = field(default_factory=dict)
    latency_s: Mapping[int, float] = field(default_factory=dict)
    latency_error_s: float = 0.0
    queue_requests: int = 0
    row_checks: Mapping[str, int] = field(default_factory=dict)

    def after(self, earlier: "BatchingNumbers") -> "BatchingNumbers":
        """With the counts of an earlier load of the version added."""
        return replace(
            self,
            decisions=add_counts(earlier.decisions, self.decisions),
            row_checks=add_counts(earlier.row_checks, self.row_checks),
        )


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """State of one device.

    Attributes:
        name: For example ``cuda:0``.
        memory: Bytes by kind, ``free`` and ``total``; empty if the device does not report them.
        ledger: Bytes of device memory by owner and purpose.
        utilization: Share of recent time in which the device computed; None if unknown.
        pinned: Bytes of host memory that is pinned for copies to and from the device, by owner and purpose.
    """

    name: str
    memory: Mapping[str, int] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    utilization: float | None = None
    pinned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """Runs of one model version on devices since it was loaded.

    Attributes:
        batches: Batches by how they ran.
        captures: Graph captures by result.
        copied_bytes: Copied bytes by direction.
        timed_copy_s: Seconds of the timed copies, by direction.
        timed_copy_bytes: Bytes of the timed copies, by direction.
    """

    batches: Mapping[str, int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    timed_copy_s: Mapping[str, float] = field(default_factory=dict)
    timed_copy_bytes: Mapping[str, int] = field(default_factory=dict)

    def after(self, earlier: "DeviceRuns") -> "DeviceRuns":
        """With those of an earlier load of the version added."""
        return DeviceRuns(
            add_counts(earlier.batches, self.batches),
            add_counts(earlier.captures, self.captures),
            add_counts(earlier.copied_bytes, self.copied_bytes),
            add_counts(earlier.timed_copy_s, self.timed_copy_s),
            add_counts(earlier.timed_copy_bytes, self.timed_copy_bytes),
        )


@dataclass(frozen=True, slots=True)
class RolloutReading:
    """A rollout that runs.

    Attributes:
        model: Name of the model.
        candidate: The version that is tried.
        mode: ``shadow`` or ``canary``.
        outcomes: Requests of the candidate by outcome.
        worst: Largest error of any compared request, by measure.
        p99_s: 99th percentile of times by side, in seconds; None while there are none.
    """

    model: str
    candidate: str
    mode: str
    outcomes: Mapping[str, int]
    worst: Mapping[str, float]
    p99_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class StoreReading:
    """State of one repository in a store, and what happened since the start.

    Attributes:
        repository: Its URL.
        is_up: Whether its last listing succeeded.
        fetched_bytes: Of its files.
        failed_lists: Listings that failed.
        failed_models: Attempts at a model whose files could not be fetched.
    """

    repository: str
    is_up: bool
    fetched_bytes: int
    failed_lists: int
    failed_models: int


@dataclass(frozen=True, slots=True)
class StoresReading:
    """State of all repositories in stores, and the size of their cache."""

    stores: Sequence[StoreReading] = ()
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StallReading:
    """Stalls of the event loop that the watchdog saw, and their total time; a stall that lasts is included."""

    stalls: int = 0
    stalled_ns: int = 0


@dataclass(frozen=True, slots=True)
class PollReading:
    """Time of busy polling, and how often a request arrived while the loop polled (hit) or did not (miss)."""

    polled_ns: int = 0
    hits: int = 0
    misses: int = 0


DECODE: Final = "decode"
RUN: Final = "run"
ENCODE: Final = "encode"
NOTHING: Final = ""


class LoopActivity:
    """The current step of the event loop, and the request that it began to answer last.

    Only steps that a request can make long are recorded: decoding, a run on the loop, encoding. Compiled modules have
    no frames that another thread could inspect, so this is all that the watchdog can learn about them. The loop thread
    stores each attribute without a call; any thread may read it. The attributes may belong to consecutive requests.

    Attributes:
        step: ``NOTHING`` between two steps.
        protocol: ``http`` or ``grpc``; of the last request that was decoded or encoded.
        model: Of the last run on the loop, or of the last answer.
        request_id: Of the last answer, as the caller sent it.
    """

    __slots__ = ("model", "protocol", "request_id", "step")

    def __init__(self) -> None:
        self.step = NOTHING
        self.protocol = ""
        self.model = ""
        self.request_id = ""


@dataclass(slots=True)
class CacheCounts:
    """Lookups of one model version.

    Attributes:
        hits: Requests that were answered without a run of their own, by an entry or by the run of an equal request.
        hit_rows: Their rows.
        hit_ns: Time of their lookups.
        misses: Requests that ran.
        miss_ns: Time of their lookups and of storing their outputs.
        saved_ns: Time of the runs that hits did not need.
    """

    hits: int = 0
    hit_rows: int = 0
    hit_ns: int = 0
    misses: int = 0
    miss_ns: int = 0
    saved_ns: int = 0


class ResidencyCounts:
    """Counts of models that come and go in memory. The event loop writes; any thread may read.

    Attributes:
        evictions: By model.
        refusals: Loads that got no room, by reason.
        requests: Requests for models that were not in memory, by model and outcome.
        waited_ns: Sum of their waits.
    """

    def __init__(self) -> None:
        self.evictions: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.requests: dict[tuple[str, str], int] = {}
        self.waited_ns = 0

    def count_eviction(self, model: str) -> None:
        self.evictions[model] = self.evictions.get(model, 0) + 1

    def count_refusal(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def count_request(self, model: str, outcome: str) -> None:
        self.requests[model, outcome] = self.requests.get((model, outcome), 0) + 1

    def forget(self, model: str) -> None:
        """Drop the counts of a model that is unknown from now on."""
        self.evictions.pop(model, None)
        for labels in [labels for labels in self.requests if labels[0] == model]:
            del self.requests[labels]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The host memory of all models.

    Attributes:
        held_bytes: What models hold, those of loads under way as expected.
        budget_bytes: Most that they may hold; None without a budget.
        evictions: Of all models that the server knows.
        refused_loads: Loads that got no room.
    """

    held_bytes: int = 0
    budget_bytes: int | None = None
    evictions: int = 0
    refused_loads: int = 0


@dataclass(slots=True)
class StepTimes:
    """Sums over the steps of an ensemble's requests.

    Attributes:
        stage_ns: Time of gathering inputs.
        compute_ns: Time of computing.
        return_ns: Time from the end of computing until the outputs are on the event loop.
    """

    stage_ns: int = 0
    compute_ns: int = 0
    return_ns: int = 0

    def add(self, timing: Timing) -> None:
        """Add a step that has ended."""
        self.stage_ns += timing.staged_ns - timing.taken_ns
        self.compute_ns += timing.computed_ns - timing.staged_ns
        self.return_ns += timing.done_ns - timing.computed_ns


@dataclass(frozen=True, slots=True)
class CacheReading:
    """The response cache of all models.

    Attributes:
        entries: Number of entries.
        nbytes: Their memory.
        max_bytes: Most memory.
        evictions: Entries that went because others needed their memory.
    """

    entries: int = 0
    nbytes: int = 0
    max_bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class SequenceReading:
    """The sequences of a model version.

    Attributes:
        active: With a slot.
        waiting: For a slot.
        state_bytes: Of all their states.
        ended: By reason.
    """

    active: int = 0
    waiting: int = 0
    state_bytes: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)

    def after(self, earlier: "SequenceReading") -> "SequenceReading":
        """With the counts of an earlier load of the version added."""
        return replace(self, ended=add_counts(earlier.ended, self.ended))


def add_counts(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The sum of two mappings of counts, all integers or all floats. mypyc has no type for either."""
    return {**some, **{name: count + some.get(name, 0) for name, count in others.items()}}
