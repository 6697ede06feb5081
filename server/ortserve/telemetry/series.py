"""The series of one model version, in which the event loop counts requests, phases and batches.

The histograms are plain lists of counts, because each request adds six observations. ``metrics`` converts them to
Prometheus' families at a scrape.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ortserve.core.batch import BatchResult
from ortserve.core.padding import StagedElements
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import BATCH_ROWS, MODEL_STATES, PHASE_DURATION, REQUEST_DURATION, Tags
from ortserve.telemetry.readings import (
    BatchingNumbers,
    CacheCounts,
    DeviceRuns,
    SequenceReading,
    StepTimes,
    add_counts,
)

_Counts = TypeVar("_Counts")

_NS_PER_S: Final = 1_000_000_000
_DURATION_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in REQUEST_DURATION.buckets)
_PHASE_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in PHASE_DURATION.buckets)
_ROW_BOUNDS: Final = tuple(round(bound) for bound in BATCH_ROWS.buckets)


class HistogramSeries:
    """Counts of one label set. ``bounds`` and observed values are integers of the same unit: nanoseconds or rows."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int, count: int = 1) -> None:
        """Count ``count`` equal values."""
        # Find the first bound that is not less than the value: Prometheus' buckets include their upper bound.
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class BatchSeries:
    """Batches of one size: their number, and the time spent in each part of running them."""

    count: int = 0
    stage_ns: int = 0
    compute_ns: int = 0
    return_ns: int = 0


class CountSource(Generic[_Counts]):
    """Counts of a version that another room holds.

    They continue those of an earlier load of the version, whose source was released. ``connect`` and ``release`` run on
    the event loop; any thread may read.
    """

    def __init__(self, nothing: _Counts, add: Callable[[_Counts, _Counts], _Counts]) -> None:
        """``nothing`` are the counts before any load. ``add`` adds earlier counts to later ones."""
        self._add = add
        self._state: tuple[_Counts, Callable[[], _Counts] | None] = (nothing, None)
        self.was_connected = False

    def connect(self, source: Callable[[], _Counts]) -> None:
        """Call ``source`` at each scrape, on the scraping thread: it must only read."""
        self._state = (self.read(), source)
        self.was_connected = True

    def release(self) -> None:
        """Drop the source before its owner is freed. Its last counts stay."""
        self._state = (self.read(), None)

    def read(self) -> _Counts:
        """The counts of all loads."""
        earlier, source = self._state  # read once: the loop may replace both meanwhile
        return earlier if source is None else self._add(source(), earlier)


class ModelMetrics:
    """The series of one model version, with its labels bound. All methods run on the event loop.

    Attributes:
        labels: Model and version, the first labels of its metrics.
        load_ns: Duration of the load; 0 before it has ended.
        rows: Rows of answered requests.
        ran_requests: Answered requests that ran: without those that the response cache answered.
        ran_rows: Rows of ``ran_requests``.
        last_done_ns: Monotonic time of the last answer; 0 before the first.
        answered: Durations of answered requests, by protocol.
        failed: Durations of failed requests, by protocol and kind of error.
        batches: Series by number of rows.
        cache: Lookups in the response cache; None for a model without a cache.
        steps: Times of the steps of an ensemble; None for other models.
        tags: Further labels of all series of the model, as its configuration sets them.
        batching: Numbers of the batchers.
        staging: Counts of staged elements.
        device_runs: Runs on devices; never connected for a model without devices.
        recorded: Recorded requests by outcome. Released versions keep the source, because their last requests may still
            be written.
        sequences: Sequences; never connected for a model without sequences.
        saturation: Returns the ratio of offered rows to the capacity, None while it is unknown. Called at each scrape,
            on the scraping thread, and by ``Metrics.total_saturation``: it must only read.
        memory: Reads the host memory of the version by kind, at each scrape.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.labels: Final = (name, version)
        self.tags: Tags = ()
        self.state = ""
        self.load_ns = 0
        self.rows = 0
        self.ran_requests = 0
        self.ran_rows = 0
        self.last_done_ns = 0
        self.answered: dict[str, HistogramSeries] = {}
        self.failed: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self.phases = tuple(HistogramSeries(_PHASE_BOUNDS_NS) for _ in PHASES)
        self.batches: dict[int, BatchSeries] = {}
        self.cache: CacheCounts | None = None
        self.steps: StepTimes | None = None
        self.batching: Final = CountSource(BatchingNumbers(), BatchingNumbers.after)
        self.staging: Final = CountSource(StagedElements(), StagedElements.__add__)
        self.device_runs: Final = CountSource(DeviceRuns(), DeviceRuns.after)
        self.recorded: Final[CountSource[dict[str, int]]] = CountSource({}, add_counts)
        self.sequences: Final = CountSource(SequenceReading(), SequenceReading.after)
        self.saturation: Callable[[], float | None] = lambda: None
        self.memory: Callable[[], dict[str, int]] = dict

    @property
    def batch_count(self) -> int:
        """Number of batches that ran. Any thread may read it."""
        return sum(series.count for series in list(self.batches.values()))

    @property
    def batch_rows(self) -> HistogramSeries:
        """Batches by rows, computed from ``batches``. Any thread may read it."""
        histogram = HistogramSeries(_ROW_BOUNDS)
        for rows, series in list(self.batches.items()):
            histogram.observe(rows, series.count)
        return histogram

    def observe_success(self, protocol: str, timing: Timing, rows: int) -> None:
        """Count an answered request. All points of ``timing`` are set; callers cannot choose ``protocol`` freely."""
        self.rows += rows
        if not timing.is_cached:
            self.ran_requests += 1
            self.ran_rows += rows
        self.last_done_ns = timing.done_ns
        series = self.answered.get(protocol)
        if series is None:
            series = self.answered[protocol] = HistogramSeries(_DURATION_BOUNDS_NS)
        series.observe(timing.done_ns - timing.received_ns)
        # This is ``observe``, inlined to save a call for each phase.
        for phase, duration_ns in zip(self.phases, timing.phases_ns(), strict=True):
            phase.counts[bisect_left(_PHASE_BOUNDS_NS, duration_ns)] += 1
            phase.total += duration_ns

    def observe_failure(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that failed or was cancelled ``duration_ns`` after it was received."""
        add_failure(self.failed, protocol, kind, duration_ns)

    def observe_batch(self, rows: int, taken_ns: int, result: BatchResult, returned_ns: int) -> None:
        """Count a batch that ran: scheduled at ``taken_ns``, its result received by the loop at ``returned_ns``."""
        series = self.batches.get(rows)
        if series is None:
            series = self.batches[rows] = BatchSeries()
        series.count += 1
        series.stage_ns += result.staged_ns - taken_ns
        series.compute_ns += result.computed_ns - result.staged_ns
        series.return_ns += returned_ns - result.computed_ns

    def release_sources(self) -> None:
        """Drop the sources before their instances are freed. Their last counts stay; the saturation becomes unknown."""
        self.saturation = lambda: None
        self.batching.release()
        self.staging.release()
        self.device_runs.release()
        self.sequences.release()

    def set_state(self, state: str) -> None:
        """Set the state of the version.

        Raises:
            ValueError: ``state`` is not one of ``MODEL_STATES``.
        """
        if state not in MODEL_STATES:
            raise ValueError(f"state: expected one of {', '.join(MODEL_STATES)}, got {state!r}")
        self.state = state


def add_failure(
    failed: dict[tuple[str, ErrorKind], HistogramSeries], protocol: str, kind: ErrorKind, duration_ns: int
) -> None:
    """Observe a duration in the series of a protocol and a kind of error."""
    series = failed.get((protocol, kind))
    if series is None:
        series = failed[protocol, kind] = HistogramSeries(_DURATION_BOUNDS_NS)
    series.observe(duration_ns)
