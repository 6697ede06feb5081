"""Values that other rooms provide to the metrics: devices, runs on devices, batchers, and the event loop.

A scrape takes the readings on its own thread. The event loop writes ``LoopActivity``, and the watchdog reads it.
"""

from collections import Counter
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
        latency_s: Predicted time of a batch, by number of rows.
        latency_error_s: 95th percentile of the time by which batches exceed their predicted time.
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
        """This reading with the counts of an earlier load of the version added."""
        return replace(
            self,
            decisions=add_counts(earlier.decisions, self.decisions),
            row_checks=add_counts(earlier.row_checks, self.row_checks),
        )


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """State of one device.

    Attributes:
        name: Name of the device, for example ``cuda:0``.
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
        batches: Batches by kind of run.
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
        """These counts with those of an earlier load of the version added."""
        return DeviceRuns(
            batches=add_counts(earlier.batches, self.batches),
            captures=add_counts(earlier.captures, self.captures),
            copied_bytes=add_counts(earlier.copied_bytes, self.copied_bytes),
            timed_copy_s=add_counts(earlier.timed_copy_s, self.timed_copy_s),
            timed_copy_bytes=add_counts(earlier.timed_copy_bytes, self.timed_copy_bytes),
        )


@dataclass(frozen=True, slots=True)
class RolloutReading:
    """A running rollout.

    Attributes:
        model: Name of the model.
        candidate: The version on trial.
        mode: ``shadow`` or ``canary``.
        outcomes: Requests of the candidate by outcome.
        worst: Largest error of any compared request, by measure.
        p99_s: 99th percentile of times in seconds, by side; None without measured times.
    """

    model: str
    candidate: str
    mode: str
    outcomes: Mapping[str, int]
    worst: Mapping[str, float]
    p99_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class StoreReading:
    """State of one repository in a store, and its counts since the start.

    Attributes:
        repository: URL of the repository.
        is_up: Whether the last listing succeeded.
        fetched_bytes: Bytes of fetched files.
        failed_lists: Number of failed listings.
        failed_models: Number of failed attempts to fetch the files of a model.
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
class LoopReading:
    """The event loop so far.

    Attributes:
        stalls: Number of stalls that the watchdog detected, including a current one.
        stalled_ns: Their total time.
        cpu_ns: Processor time of the loop's thread.
    """

    stalls: int = 0
    stalled_ns: int = 0
    cpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class PollReading:
    """Time of busy polling, and number of polls that ended with a request (hit) or without one (miss)."""

    polled_ns: int = 0
    hits: int = 0
    misses: int = 0


DECODE: Final = "decode"
RUN: Final = "run"
ENCODE: Final = "encode"
NOTHING: Final = ""


class LoopActivity:
    """The current step of the event loop, and the request that it began to answer last.

    Only steps that can take long because of a request are recorded: decoding, a run on the loop, encoding. The watchdog
    can learn no more, because compiled modules have no frames that another thread could inspect. The loop thread stores
    each attribute without a call; any thread may read it. The attributes may belong to consecutive requests.

    Attributes:
        step: The current step; ``NOTHING`` between two steps.
        protocol: ``http`` or ``grpc``: the protocol of the last request that was decoded or encoded.
        model: The model of the last run on the loop, or of the last answer.
        request_id: The id of the last answer's request, as the caller sent it.
    """

    __slots__ = ("model", "protocol", "request_id", "step")

    def __init__(self) -> None:
        self.step = NOTHING
        self.protocol = ""
        self.model = ""
        self.request_id = ""


@dataclass(slots=True)
class CacheCounts:
    """Lookups of one model version in the response cache.

    Attributes:
        hits: Requests that were answered without a run of their own, by an entry or by the run of an equal request.
        hit_ns: Time of lookups that hit.
        misses: Requests that ran.
        miss_ns: Time of lookups that missed, and of storing their outputs.
        saved_ns: Time of the runs that hits saved.
    """

    hits: int = 0
    hit_ns: int = 0
    misses: int = 0
    miss_ns: int = 0
    saved_ns: int = 0


class ResidencyCounts:
    """Counts of loads on demand and evictions of models. The event loop writes; any thread may read.

    Attributes:
        evictions: Evictions by model.
        refusals: Loads that were rejected for lack of memory, by reason.
        requests: Requests for models that were not in memory, by model and outcome.
        waited_ns: Total waiting time of these requests.
    """

    def __init__(self) -> None:
        self.evictions: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.waited_ns = 0

    def forget(self, model: str) -> None:
        """Drop the counts of a model that is unknown from now on."""
        self.evictions.pop(model, None)
        for labels in [labels for labels in self.requests if labels[0] == model]:
            del self.requests[labels]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The host memory of all models.

    Attributes:
        held_bytes: Bytes that models hold; models that are being loaded count with their expected memory.
        budget_bytes: Maximum bytes that models may hold; None without a budget.
        evictions: Evictions of all models that the server knows.
        refused_loads: Loads that were rejected for lack of memory.
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
        nbytes: Memory of the entries.
        max_bytes: Maximum memory.
        evictions: Entries evicted because others needed their memory.
        hits: As in ``CacheCounts``; so are ``misses``.
        lookup_ns: Time of all lookups.
        store_ns: Time of storing outputs.
    """

    entries: int = 0
    nbytes: int = 0
    max_bytes: int = 0
    evictions: int = 0
    hits: int = 0
    misses: int = 0
    lookup_ns: int = 0
    store_ns: int = 0


@dataclass(frozen=True, slots=True)
class SequenceReading:
    """The sequences of a model version.

    Attributes:
        active: Sequences with a slot.
        waiting: Sequences that wait for a slot.
        state_bytes: Bytes of all states.
        ended: Ended sequences by reason.
    """

    active: int = 0
    waiting: int = 0
    state_bytes: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)

    def after(self, earlier: "SequenceReading") -> "SequenceReading":
        """This reading with the counts of an earlier load of the version added."""
        return replace(self, ended=add_counts(earlier.ended, self.ended))


def add_counts(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The sum of two mappings of counts, all integers or all floats. mypyc has no type for either."""
    return {**some, **{name: count + some.get(name, 0) for name, count in others.items()}}
