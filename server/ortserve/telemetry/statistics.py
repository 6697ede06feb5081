"""Triton's statistics of a model version, for the statistics call and as ``nv_inference_...`` metrics.

Both are computed from the counts of ``series`` on demand: on the event loop for the statistics call, on the scraping
thread for the metrics. The fields of the records have the names of the protocol.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import Declaration, Labels, counter, gauge
from ortserve.telemetry.families import Family, with_tags
from ortserve.telemetry.machine import MACHINE_DECLARATIONS, CpuReading, GpuReading, machine_families
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import CacheCounts, CacheReading
from ortserve.telemetry.series import HistogramSeries, ModelMetrics

FAILURE_REASONS: Final[Mapping[ErrorKind, str]] = {
    ErrorKind.OVERLOADED: "REJECTED",
    ErrorKind.DEADLINE: "REJECTED",
    ErrorKind.NOT_READY: "REJECTED",
    ErrorKind.CANCELLED: "CANCELED",
    ErrorKind.REJECTED_BY_MODEL: "BACKEND",
    ErrorKind.INTERNAL: "BACKEND",
    ErrorKind.CONFLICT: "OTHER",
}
"""Triton's reasons of failures, by this server's kinds of errors. Other kinds are errors of the caller, found before a
request is accepted; the protocol's statistics do not count them. Unlike in Triton, requests that are rejected because a
queue is full are counted."""

REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@dataclass(frozen=True, slots=True)
class Duration:
    """Number of occurrences, and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchSizeStatistics:
    """Batches of one size; the counts are executions."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class InferStatistics:
    """Durations of requests. ``success`` and ``fail`` last from the complete body to the answer.

    The other durations are parts of successful requests. For an ensemble, the compute parts are sums over its steps,
    which may run in parallel.

    Answers from the response cache count only in ``success``, ``queue`` and ``cache_hit``. The times of the cache are
    those of lookups and of storing outputs.
    """

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """Statistics of a model version since it was loaded.

    Attributes:
        last_done_ns: Monotonic time of the last answer; 0 before the first.
        inference_count: Rows of answered requests, without answers from the response cache.
        execution_count: Batches that ran.
        failures: Failed requests, by Triton's reasons.
        batches: Statistics of each batch size, in ascending order.
    """

    name: str
    version: str
    last_done_ns: int
    inference_count: int
    execution_count: int
    inference: InferStatistics
    failures: Mapping[str, int]
    batches: tuple[BatchSizeStatistics, ...]


def read_statistics(model: ModelMetrics) -> VersionStatistics:
    """Compute the statistics. On another thread than the event loop's, values may differ by one request."""
    success = _sum(model.answered.copy().values())
    by_reason = {reason: Duration() for reason in REASONS}
    for (_, kind), series in model.failed.copy().items():
        reason = FAILURE_REASONS.get(kind)
        if reason is not None:
            known = by_reason[reason]
            by_reason[reason] = Duration(known.count + sum(series.counts), known.ns + series.total)
    cache = model.cache or CacheCounts()
    ran = model.ran_requests
    queue, stage, compute, encode = (phase.total for phase in model.phases[1:])
    executions = model.batch_count
    if model.steps is not None:  # count as Triton does: an ensemble has no queue of its own
        steps = model.steps
        queue, stage, compute, encode = 0, steps.stage_ns, steps.compute_ns, steps.return_ns
        executions = ran
    return VersionStatistics(
        name=model.name,
        version=model.version,
        last_done_ns=model.last_done_ns,
        inference_count=model.ran_rows,
        execution_count=executions,
        inference=InferStatistics(
            success=success,
            fail=Duration(sum(d.count for d in by_reason.values()), sum(d.ns for d in by_reason.values())),
            queue=Duration(success.count, queue),
            compute_input=Duration(ran, stage),
            compute_infer=Duration(ran, compute),
            compute_output=Duration(ran, encode),
            cache_hit=Duration(cache.hits, cache.hit_ns),
            cache_miss=Duration(cache.misses, cache.miss_ns),
        ),
        failures={reason: duration.count for reason, duration in by_reason.items()},
        batches=tuple(
            BatchSizeStatistics(
                rows,
                compute_input=Duration(series.count, series.stage_ns),
                compute_infer=Duration(series.count, series.compute_ns),
                compute_output=Duration(series.count, series.return_ns),
            )
            for rows, series in sorted(model.batches.copy().items())
        ),
    )


def _sum(series: Iterable[HistogramSeries]) -> Duration:
    known = list(series)
    return Duration(sum(sum(one.counts) for one in known), sum(one.total for one in known))


_VERSION: Final = ("model", "version")
_WHOLE_BATCH: Final = "in microseconds; each request of a batch counts the whole time of the batch."

_FAILURES: Final = counter(
    "nv_inference_request_failure",
    (*_VERSION, "reason"),
    "Failed requests: REJECTED (queue full or deadline not met), CANCELED, BACKEND (failed in a run) or OTHER. "
    "Malformed requests are not counted.",
)

_OF_VERSION: Final[tuple[tuple[Declaration, Callable[[ModelMetrics, VersionStatistics], float | None]], ...]] = (
    (
        counter("nv_inference_request_success", _VERSION, "Answered requests."),
        lambda _, known: known.inference.success.count,
    ),
    (
        counter(
            "nv_inference_count", _VERSION, "Rows of answered requests, without those that the response cache answered."
        ),
        lambda _, known: known.inference_count,
    ),
    (counter("nv_inference_exec_count", _VERSION, "Batches that ran."), lambda _, known: known.execution_count),
    (
        counter(
            "nv_inference_request_duration_us",
            _VERSION,
            "Time of answered requests from the complete body to the answer, in microseconds.",
        ),
        lambda _, known: known.inference.success.ns // 1000,
    ),
    (
        counter("nv_inference_queue_duration_us", _VERSION, "Time of answered requests in the queue, in microseconds."),
        lambda _, known: known.inference.queue.ns // 1000,
    ),
    (
        counter("nv_inference_compute_input_duration_us", _VERSION, f"Time of gathering inputs, {_WHOLE_BATCH}"),
        lambda _, known: known.inference.compute_input.ns // 1000,
    ),
    (
        counter("nv_inference_compute_infer_duration_us", _VERSION, f"Time of computing, {_WHOLE_BATCH}"),
        lambda _, known: known.inference.compute_infer.ns // 1000,
    ),
    (
        counter(
            "nv_inference_compute_output_duration_us",
            _VERSION,
            "Time from the end of computing to the answer, in microseconds.",
        ),
        lambda _, known: known.inference.compute_output.ns // 1000,
    ),
    (
        gauge("nv_inference_pending_request_count", _VERSION, "Requests in the queue."),
        lambda model, _: model.batching.read().queue_requests,
    ),
    (
        counter("nv_cache_num_hits_per_model", _VERSION, "Requests answered from the response cache."),
        lambda model, _: None if model.cache is None else model.cache.hits,
    ),
    (
        counter("nv_cache_num_misses_per_model", _VERSION, "Requests that the response cache missed."),
        lambda model, _: None if model.cache is None else model.cache.misses,
    ),
    (
        counter("nv_cache_hit_duration_per_model", _VERSION, "Time of lookups that hit, in microseconds."),
        lambda model, _: None if model.cache is None else model.cache.hit_ns // 1000,
    ),
    (
        counter(
            "nv_cache_miss_duration_per_model",
            _VERSION,
            "Time of lookups that missed and of storing their outputs, in microseconds.",
        ),
        lambda model, _: None if model.cache is None else model.cache.miss_ns // 1000,
    ),
    (
        gauge("nv_model_load_duration_secs", _VERSION, "Time that loading a serving version took, in seconds."),
        lambda model, _: model.load_ns / 1e9 if model.load_ns else None,
    ),
)
"""The metrics of a version, and their values. A version has no series of a metric while the value is None."""

_OF_CACHE: Final[tuple[tuple[Declaration, Callable[[CacheReading], float]], ...]] = (
    (gauge("nv_cache_num_entries", (), "Entries of the response cache."), lambda cache: cache.entries),
    (
        gauge("nv_cache_num_lookups", (), "Requests of all models that the response cache answered or missed."),
        lambda cache: cache.hits + cache.misses,
    ),
    (
        gauge("nv_cache_num_hits", (), "Requests of all models answered from the response cache."),
        lambda cache: cache.hits,
    ),
    (
        gauge("nv_cache_num_misses", (), "Requests of all models that the response cache missed."),
        lambda cache: cache.misses,
    ),
    (gauge("nv_cache_num_evictions", (), "Entries evicted from the response cache."), lambda cache: cache.evictions),
    (
        gauge("nv_cache_lookup_duration", (), "Time of lookups, in microseconds."),
        lambda cache: cache.lookup_ns // 1000,
    ),
    (
        gauge("nv_cache_insertion_duration", (), "Time of storing outputs, in microseconds."),
        lambda cache: cache.store_ns // 1000,
    ),
    (
        gauge("nv_cache_util", (), "Share of its memory that the response cache uses, from 0 to 1."),
        lambda cache: cache.nbytes / cache.max_bytes if cache.max_bytes else 0.0,
    ),
)
"""The metrics of the cache of all models. Triton has gauges here, also for counts."""

TRITON_DECLARATIONS: Final = (
    _FAILURES,
    *(declaration for declaration, _ in _OF_VERSION),
    *(declaration for declaration, _ in _OF_CACHE),
    *MACHINE_DECLARATIONS,
)


class TritonMetrics(Collector):
    """Exposes ``metrics`` under Triton's names. This costs time only at a scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        metrics: Metrics,
        *,
        read_gpus: Callable[[], Sequence[GpuReading]] = tuple,
        read_cpu: Callable[[], CpuReading] = CpuReading,
    ) -> None:
        """``read_gpus`` and ``read_cpu`` are called at each scrape, on the scraping thread."""
        self._metrics = metrics
        self._read_gpus = read_gpus
        self._read_cpu = read_cpu
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return [Family(declaration) for declaration in TRITON_DECLARATIONS]

    def collect(self) -> Iterator[Metric]:
        """The families with their current samples. The registry calls this on the scraping thread."""
        return with_tags(self._collect(), self._metrics.tags())

    def _collect(self) -> Iterator[Metric]:
        known = [(model, read_statistics(model)) for model in self._metrics.models()]
        failures: dict[Labels, float] = {
            (*model.labels, reason): count for model, read in known for reason, count in read.failures.items()
        }
        yield Family(_FAILURES, failures)
        for declaration, of_version in _OF_VERSION:
            read_all = ((model.labels, of_version(model, read)) for model, read in known)
            yield Family(declaration, {labels: value for labels, value in read_all if value is not None})
        cache = self._metrics.read_cache()
        for declaration, of_cache in _OF_CACHE:
            yield Family(declaration, {(): of_cache(cache)})
        yield from machine_families(self._read_gpus(), self._read_cpu())
