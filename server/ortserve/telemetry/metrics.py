"""Every metric of the server: declared here, counted here, handed to Prometheus here.

Counting happens on the event loop, up to seven observations a request, so the histograms are not prometheus_client's
but plain lists of counts that a ``Collector`` (the library's documented extension) turns into families when somebody
scrapes. For the total and five phases of a request that costs 1.1 µs instead of 5.5 µs of the loop's time (Python 3.11;
``python loadtests/metrics_cost.py`` prints both).

There is no lock, because only the event loop writes. A scrape reads from its own thread: the buckets of a series always
agree with its count, but its sum, and other series, may be a request ahead.
"""

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ortserve import __version__
from ortserve.core.padding import StagedElements
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ErrorKind

_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as Prometheus and the reference page know it. ``buckets`` are upper bounds in the metric's unit."""

    name: str
    type: Literal["histogram", "gauge", "counter"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_FROM_100_US: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)

REQUEST_DURATION: Final = Declaration(
    "ortserve_request_duration_seconds",
    "histogram",
    ("model", "version", "protocol", "outcome"),
    "Time from a request's complete body to its answer handed to the transport. The outcome is ok or the kind of "
    "error; model and version are empty where the request named none that is served.",
    _FROM_100_US,
)
PHASE_DURATION: Final = Declaration(
    "ortserve_request_phase_duration_seconds",
    "histogram",
    ("model", "version", "phase"),
    f"Time that an answered request spent in each phase: {', '.join(PHASES)}. They follow one another and sum to its "
    "duration.",
    (0.00001, 0.000025, 0.00005, *_FROM_100_US),
)
BATCH_ROWS: Final = Declaration(
    "ortserve_batch_rows",
    "histogram",
    ("model", "version"),
    "Rows that ran together in one batch.",
    tuple(float(2**power) for power in range(11)),
)
QUEUE_ROWS: Final = Declaration(
    "ortserve_queue_rows", "gauge", ("model", "version"), "Rows that wait for a free instance."
)
BATCHING_DECISIONS: Final = Declaration(
    "ortserve_batching_decisions_total",
    "counter",
    ("model", "version", "decision"),
    "What the batcher decided, in numbers of batches, requests or rows: batches, inline and retries (batches that ran, "
    "on the event loop, or again in part); refused_full, refused_late, dropped_late and left (requests); delayed "
    "(waits for a set delay); wasted_rows and padding_rows (rows computed for nobody).",
)
BATCH_LATENCY: Final = Declaration(
    "ortserve_batch_latency_seconds",
    "gauge",
    ("model", "version", "rows"),
    "Time that a batch of so many rows is expected to take, for the shape used last.",
)
BATCH_LATENCY_ERROR: Final = Declaration(
    "ortserve_batch_latency_error_seconds",
    "gauge",
    ("model", "version"),
    "By how much batches take longer than expected, in all but one of twenty.",
)
STAGED_ELEMENTS: Final = Declaration(
    "ortserve_staged_elements_total",
    "counter",
    ("model", "version"),
    "Elements of the inputs of batches, padding included; 0 for a model without pad and buckets.",
)
PADDED_ELEMENTS: Final = Declaration(
    "ortserve_padded_elements_total",
    "counter",
    ("model", "version"),
    "Of the staged elements, those that no request brought: what pad added to axes and buckets to rows.",
)
REJECTED: Final = Declaration(
    "ortserve_rejected_requests_total",
    "counter",
    ("model", "reason"),
    "Requests refused before any work was done for them, by the kind of error. The model is empty where the request "
    "named none that is served.",
)
MODEL_STATE: Final = Declaration(
    "ortserve_model_state",
    "gauge",
    ("model", "version", "state"),
    "1 for the state that a model version is in, 0 for the others.",
)
GRPC_STREAMS: Final = Declaration(
    "ortserve_grpc_streams", "gauge", (), "gRPC streams that are open: of inference, of health and of reflection."
)
BUILD_INFO: Final = Declaration(
    "ortserve_build_info", "gauge", ("version", "python", "onnxruntime"), "Always 1; the labels say what is running."
)

DECLARATIONS: Final = (
    REQUEST_DURATION,
    PHASE_DURATION,
    BATCH_ROWS,
    QUEUE_ROWS,
    BATCHING_DECISIONS,
    BATCH_LATENCY,
    BATCH_LATENCY_ERROR,
    STAGED_ELEMENTS,
    PADDED_ELEMENTS,
    REJECTED,
    MODEL_STATE,
    GRPC_STREAMS,
    BUILD_INFO,
)

MODEL_STATES: Final = ("loading", "warming", "ready", "draining", "gone", "failed")
"""Values of the ``state`` label, in the order that a version passes through them."""


class HistogramSeries:
    """Counts of one label set. ``bounds`` and observed values are integers of the same unit: nanoseconds or rows."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        # The first bound that is not less: Prometheus' buckets include their upper bound.
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


_DURATION_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in REQUEST_DURATION.buckets)
_PHASE_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in PHASE_DURATION.buckets)
_ROW_BOUNDS: Final = tuple(round(bound) for bound in BATCH_ROWS.buckets)


@dataclass(frozen=True, slots=True)
class BatchingNumbers:
    """What a batcher shows of itself at a scrape; times are seconds, latencies by rows."""

    queue_rows: int = 0
    decisions: Mapping[str, int] = field(default_factory=dict)
    latency_s: Mapping[int, float] = field(default_factory=dict)
    latency_error_s: float = 0.0


class ModelMetrics:
    """The series of one model version, with its labels bound. All methods run on the event loop."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.state = ""
        self.answered: dict[str, HistogramSeries] = {}
        """By protocol."""
        self.failed: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self.phases = tuple(HistogramSeries(_PHASE_BOUNDS_NS) for _ in PHASES)
        self.batch_rows = HistogramSeries(_ROW_BOUNDS)
        self.batching: Callable[[], BatchingNumbers] = BatchingNumbers
        self.staging: Callable[[], StagedElements] = StagedElements

    def observe_success(self, protocol: str, timing: Timing) -> None:
        """Count an answered request. ``timing`` has all its points, ``protocol`` is one of the server's own names."""
        series = self.answered.get(protocol)
        if series is None:
            series = self.answered[protocol] = HistogramSeries(_DURATION_BOUNDS_NS)
        series.observe(timing.done_ns - timing.received_ns)
        # Unrolled: a loop over zip() takes a quarter more time for the phases.
        decode, queue, stage, compute, encode = self.phases
        decode_ns, queue_ns, stage_ns, compute_ns, encode_ns = timing.phases_ns()
        decode.observe(decode_ns)
        queue.observe(queue_ns)
        stage.observe(stage_ns)
        compute.observe(compute_ns)
        encode.observe(encode_ns)

    def observe_failure(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that got an error, or whose caller left, ``duration_ns`` after it was received."""
        _observe_failure(self.failed, protocol, kind, duration_ns)

    def observe_batch(self, rows: int) -> None:
        """Count a batch that ran."""
        self.batch_rows.observe(rows)

    def set_batching_source(self, source: Callable[[], BatchingNumbers]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self.batching = source

    def set_staging_source(self, source: Callable[[], StagedElements]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self.staging = source

    def set_state(self, state: str) -> None:
        """Say which of ``MODEL_STATES`` the version is in now.

        Raises:
            ValueError: ``state`` is none of them.
        """
        if state not in MODEL_STATES:
            raise ValueError(f"state: expected one of {', '.join(MODEL_STATES)}, got {state!r}")
        self.state = state


class Metrics(Collector):
    """All metrics of a server. Registers itself, and the numbers of the process, with ``registry``.

    Callers cannot create label values: names of models are only those that ``model`` was asked for, all else is "".
    All methods but ``collect`` and ``describe`` run on the event loop.

    Args:
        registry: What the metrics port exposes.
        onnxruntime_version: For ``ortserve_build_info``; the room that imports ONNX Runtime knows it.
    """

    def __init__(self, registry: CollectorRegistry, *, onnxruntime_version: str = "") -> None:
        self._onnxruntime_version = onnxruntime_version
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._unknown: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self._rejected: dict[str, dict[str, int]] = {"": {}}
        self._streams: Callable[[], int] = int
        registry.register(self)
        ProcessCollector(registry=registry)

    def model(self, name: str, version: str) -> ModelMetrics:
        """The series of a model version, the same object until it is forgotten. Keep it rather than ask again."""
        series = self._models.get((name, version))
        if series is None:
            series = self._models[name, version] = ModelMetrics(name, version)
            self._rejected.setdefault(name, {})
        return series

    def forget(self, name: str, version: str) -> None:
        """Drop the series of an unloaded version; what its last requests still observe is lost."""
        self._models.pop((name, version), None)
        if name and not any(known == name for known, _ in self._models):
            self._rejected.pop(name, None)

    def set_streams_source(self, source: Callable[[], int]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self._streams = source

    def observe_unknown(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that failed before a model was found for it."""
        _observe_failure(self._unknown, protocol, kind, duration_ns)

    def rejected(self, model: str, reason: str) -> None:
        """Count a refusal. ``model`` may be what the caller sent; ``reason`` is the server's own, an ``ErrorKind``."""
        by_reason = self._rejected.get(model)
        if by_reason is None:
            by_reason = self._rejected[""]
        by_reason[reason] = by_reason.get(reason, 0) + 1

    def describe(self) -> Iterable[Metric]:
        """The families without samples, by which the registry refuses a second server's metrics."""
        return [Metric(known.name.removesuffix("_total"), known.help, known.type) for known in DECLARATIONS]

    def collect(self) -> Iterator[Metric]:
        """The families as they stand. Called by the registry on the scraping thread."""
        # list() of a dictionary's view is one step under the GIL, so that the loop may add series meanwhile.
        models = list(self._models.values())
        yield _histogram(REQUEST_DURATION, self._durations(models), _NS_PER_S)
        yield _histogram(
            PHASE_DURATION,
            (
                ((model.name, model.version, phase), series)
                for model in models
                for phase, series in zip(PHASES, model.phases, strict=True)
            ),
            _NS_PER_S,
        )
        yield _histogram(BATCH_ROWS, (((model.name, model.version), model.batch_rows) for model in models), 1)
        batching = [((model.name, model.version), model.batching()) for model in models]
        yield _filled(GaugeMetricFamily, QUEUE_ROWS, {labels: numbers.queue_rows for labels, numbers in batching})
        yield _filled(
            CounterMetricFamily,
            BATCHING_DECISIONS,
            {
                (*labels, decision): count
                for labels, numbers in batching
                for decision, count in numbers.decisions.items()
            },
        )
        yield _filled(
            GaugeMetricFamily,
            BATCH_LATENCY,
            {(*labels, str(rows)): ns for labels, numbers in batching for rows, ns in numbers.latency_s.items()},
        )
        yield _filled(
            GaugeMetricFamily, BATCH_LATENCY_ERROR, {labels: numbers.latency_error_s for labels, numbers in batching}
        )
        staging = [((model.name, model.version), model.staging()) for model in models]
        yield _filled(CounterMetricFamily, STAGED_ELEMENTS, {labels: count.staged for labels, count in staging})
        yield _filled(CounterMetricFamily, PADDED_ELEMENTS, {labels: count.padded for labels, count in staging})
        yield _filled(
            CounterMetricFamily,
            REJECTED,
            {
                (model, reason): count
                for model, by_reason in list(self._rejected.items())
                for reason, count in list(by_reason.items())
            },
        )
        yield _filled(
            GaugeMetricFamily,
            MODEL_STATE,
            {
                (model.name, model.version, state): int(state == model.state)
                for model in models
                if model.state
                for state in MODEL_STATES
            },
        )
        yield _filled(GaugeMetricFamily, GRPC_STREAMS, {(): self._streams()})
        yield _filled(
            GaugeMetricFamily, BUILD_INFO, {(__version__, platform.python_version(), self._onnxruntime_version): 1}
        )

    def _durations(self, models: Iterable[ModelMetrics]) -> Iterator[tuple[tuple[str, ...], HistogramSeries]]:
        for model in models:
            for protocol, series in list(model.answered.items()):
                yield (model.name, model.version, protocol, "ok"), series
            for (protocol, kind), series in list(model.failed.items()):
                yield (model.name, model.version, protocol, kind.value), series
        for (protocol, kind), series in list(self._unknown.items()):
            yield ("", "", protocol, kind.value), series


def _observe_failure(
    failed: dict[tuple[str, ErrorKind], HistogramSeries], protocol: str, kind: ErrorKind, duration_ns: int
) -> None:
    series = failed.get((protocol, kind))
    if series is None:
        series = failed[protocol, kind] = HistogramSeries(_DURATION_BOUNDS_NS)
    series.observe(duration_ns)


def _histogram(
    declaration: Declaration, labelled: Iterable[tuple[tuple[str, ...], HistogramSeries]], scale: int
) -> Metric:
    """Prometheus wants cumulative counts by upper bound; ``scale`` is how many of a series' units make one of its."""
    family = HistogramMetricFamily(declaration.name, declaration.help, labels=declaration.labels)
    bounds = [*map(floatToGoString, declaration.buckets), "+Inf"]
    for labels, series in labelled:
        sum_value = series.total / scale
        below = 0
        buckets = []
        for bound, count in zip(bounds, list(series.counts), strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric(labels, buckets, sum_value)
    return family


def _filled(
    family_type: type[GaugeMetricFamily] | type[CounterMetricFamily],
    declaration: Declaration,
    samples: Mapping[tuple[str, ...], float],
) -> Metric:
    family = family_type(declaration.name, declaration.help, labels=declaration.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
