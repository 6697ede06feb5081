"""The metrics that ``declarations`` names: counted here, handed to Prometheus here.

Counting happens on the event loop, up to seven observations a request, so the histograms are not prometheus_client's
but plain lists of counts that a ``Collector`` (the library's documented extension) turns into families when somebody
scrapes. For the total and five phases of a request that costs a fifth of the loop's time (0.8 against 4.0 µs,
``loadtests/results/metrics_cost.md``).

A histogram shows from its first observation on, so that a thousand models that nobody asks cost a scrape little.

There is no lock, because only the event loop writes. A scrape reads from its own thread: the buckets of a series always
agree with its count, but its sum, and other series, may be a request ahead.
"""

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ortserve import __version__
from ortserve.core.batch import BatchResult
from ortserve.core.padding import StagedElements
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import (
    BATCH_LATENCY,
    BATCH_LATENCY_ERROR,
    BATCH_ROWS,
    BATCHING_DECISIONS,
    BUILD_INFO,
    CERTIFICATE_EXPIRATION,
    CERTIFICATE_RELOADS,
    CHECKED_REQUESTS,
    DECLARATIONS,
    DROPPED_SPANS,
    EXPORTED_SPANS,
    GRPC_CONNECTION_ERRORS,
    GRPC_CUT_ANSWERS,
    GRPC_STREAMS,
    LOAD_DURATION,
    LOADS,
    MODEL_STATE,
    MODEL_STATES,
    OVERDUE_BATCHES,
    PADDED_ELEMENTS,
    PHASE_DURATION,
    QUEUE_ROWS,
    REJECTED,
    REQUEST_DURATION,
    SATURATION,
    STAGED_ELEMENTS,
    UNAUTHORIZED,
)
from ortserve.telemetry.devices import DeviceReading, DeviceRuns, device_families
from ortserve.telemetry.families import Family, Labels
from ortserve.telemetry.histogram import HistogramSeries, observe_each
from ortserve.telemetry.loop import PollReading, StallReading, loop_families
from ortserve.telemetry.tracing import Tracing

_NS_PER_S: Final = 1_000_000_000

_DURATION_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in REQUEST_DURATION.buckets)
_PHASE_BOUNDS_NS: Final = tuple(round(bound * _NS_PER_S) for bound in PHASE_DURATION.buckets)
_FAULTS: Final = frozenset((ErrorKind.OVERLOADED, ErrorKind.NOT_READY, ErrorKind.DEADLINE, ErrorKind.INTERNAL))
"""Of which another server might have made an answer."""

_OVERDUE_OUTCOMES: Final = ("terminated", "abandoned")
_ROW_BOUNDS: Final = tuple(round(bound) for bound in BATCH_ROWS.buckets)


@dataclass(slots=True)
class BatchSeries:
    """The batches of one size: how many, and nanoseconds spent in each part of running them."""

    count: int = 0
    stage_ns: int = 0
    compute_ns: int = 0
    return_ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchingNumbers:
    """What a batcher shows of itself at a scrape; times are seconds, latencies by rows, checks of rows by outcome."""

    queue_rows: int = 0
    decisions: Mapping[str, int] = field(default_factory=dict)
    latency_s: Mapping[int, float] = field(default_factory=dict)
    latency_error_s: float = 0.0
    queue_requests: int = 0
    row_checks: Mapping[str, int] = field(default_factory=dict)


class ModelMetrics:
    """The series of one model version, with its labels bound. All methods run on the event loop."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.state = ""
        self.load_ns = 0
        """How long loading took; 0 before it has ended."""
        self.rows = 0
        """Of answered requests."""
        self.last_done_ns = 0
        """When a request was last answered (monotonic); 0 if none was."""
        self.answered: dict[str, HistogramSeries] = {}
        """By protocol."""
        self.failed: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self.phases = tuple(HistogramSeries(_PHASE_BOUNDS_NS) for _ in PHASES)
        self.batch_rows = HistogramSeries(_ROW_BOUNDS)
        self.batches: dict[int, BatchSeries] = {}
        """By their rows."""
        self.batching: Callable[[], BatchingNumbers] = BatchingNumbers
        self.staging: Callable[[], StagedElements] = StagedElements
        self.saturation: Callable[[], float | None] = lambda: None
        self.device_runs: Callable[[], DeviceRuns] | None = None

    @property
    def batch_count(self) -> int:
        """How many batches ran. From any thread."""
        return sum(series.count for series in list(self.batches.values()))

    def observe_success(self, protocol: str, timing: Timing, rows: int) -> None:
        """Count an answered request. ``timing`` has all its points, ``protocol`` is one of the server's own names."""
        self.rows += rows
        self.last_done_ns = timing.done_ns
        series = self.answered.get(protocol)
        if series is None:
            series = self.answered[protocol] = HistogramSeries(_DURATION_BOUNDS_NS)
        series.observe(timing.done_ns - timing.received_ns)
        observe_each(self.phases, timing.phases_ns())

    def observe_failure(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that got an error, or whose caller left, ``duration_ns`` after it was received."""
        _observe_failure(self.failed, protocol, kind, duration_ns)

    def observe_batch(self, rows: int, taken_ns: int, result: BatchResult, returned_ns: int) -> None:
        """Count a batch that ran: when it was chosen, what came of it, when the event loop had that."""
        self.batch_rows.observe(rows)
        series = self.batches.get(rows)
        if series is None:
            series = self.batches[rows] = BatchSeries()
        series.count += 1
        series.stage_ns += result.staged_ns - taken_ns
        series.compute_ns += result.computed_ns - result.staged_ns
        series.return_ns += returned_ns - result.computed_ns

    def set_batching_source(self, source: Callable[[], BatchingNumbers]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self.batching = source

    def set_saturation_source(self, source: Callable[[], float | None]) -> None:
        """Have ``source`` asked for offered rows by those that can be computed, None where that is not known.

        It is asked at each scrape, on the scraping thread, and by ``Metrics.total_saturation``: it must only read.
        """
        self.saturation = source

    def set_staging_source(self, source: Callable[[], StagedElements]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self.staging = source

    def set_device_source(self, source: Callable[[], DeviceRuns]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self.device_runs = source

    def release_sources(self) -> None:
        """Let go of what the sources read, which is freed now: what they counted stays, nothing is offered any more."""
        numbers, staged = self.batching(), self.staging()
        self.batching, self.staging = lambda: numbers, lambda: staged
        self.saturation = lambda: None
        if self.device_runs is not None:
            runs = self.device_runs()
            self.device_runs = lambda: runs

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
    All methods but ``unauthorized``, ``collect`` and ``describe`` run on the event loop.

    Args:
        registry: What the metrics port exposes.
        onnxruntime_version: For ``ortserve_build_info``; the room that imports ONNX Runtime knows it.
    """

    def __init__(self, registry: CollectorRegistry, *, onnxruntime_version: str = "") -> None:
        self._onnxruntime_version = onnxruntime_version
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._unknown: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self._rejected: dict[str, dict[str, int]] = {"": {}}
        self._loads: dict[tuple[str, ...], int] = {}
        self._overdue_batches: dict[Labels, int] = {}
        self._unauthorized: dict[Labels, int] = {}
        self._unauthorized_lock = threading.Lock()
        self._cut_answers: dict[Labels, int] = {}
        self._connection_errors: dict[Labels, int] = {}
        self._streams: Callable[[], int] = int
        self._certificate_expires_s: float | None = None
        self._certificate_reloads: dict[Labels, int] = {}
        self._tracing: Tracing | None = None
        self._devices: Callable[[], Sequence[DeviceReading]] = tuple
        self._stalls: Callable[[], StallReading] = StallReading
        self._polls: Callable[[], PollReading] = PollReading
        registry.register(self)
        ProcessCollector(registry=registry)

    def model(self, name: str, version: str) -> ModelMetrics:
        """The series of a model version, the same object until it is forgotten. Keep it rather than ask again."""
        series = self._models.get((name, version))
        if series is None:
            series = ModelMetrics(name, version)
            self.show(series)
        return series

    def show(self, series: ModelMetrics) -> None:
        """Expose a version's series, in the place of those of the load before; what those still observe is lost."""
        self._models[series.name, series.version] = series
        self._rejected.setdefault(series.name, {})

    def models(self) -> list[ModelMetrics]:
        """The series of every version, from any thread."""
        # list() of a dictionary's view is one step under the GIL, so that the loop may add series meanwhile.
        return list(self._models.values())

    def forget(self, name: str, version: str) -> None:
        """Drop the series of an unloaded version; what its last requests still observe is lost."""
        self._models.pop((name, version), None)
        if name and not any(known == name for known, _ in self._models):
            self._rejected.pop(name, None)
            for outcome in ("ok", "failed"):
                self._loads.pop((name, outcome), None)
            for outcome in _OVERDUE_OUTCOMES:
                self._overdue_batches.pop((name, outcome), None)

    def loaded(self, model: str, *, is_ok: bool) -> None:
        """Count a load of a version that has ended. ``model`` is one that the registry knows."""
        labels = (model, "ok" if is_ok else "failed")
        self._loads[labels] = self._loads.get(labels, 0) + 1

    def batch_overdue(self, model: str, *, is_abandoned: bool = False) -> None:
        """Count a run over its limit that was asked to end, or one of these that did not."""
        for outcome in _OVERDUE_OUTCOMES:
            self._overdue_batches.setdefault((model, outcome), 0)
        self._overdue_batches[model, _OVERDUE_OUTCOMES[is_abandoned]] += 1

    def certificate_serves(self, expires_s: float) -> None:
        """Say when the certificate that is shown from now on expires, in seconds since 1970."""
        self._certificate_expires_s = expires_s
        for outcome in ("ok", "failed"):
            self._certificate_reloads.setdefault((outcome,), 0)

    def certificate_reloaded(self, *, is_ok: bool) -> None:
        """Count new contents of the certificate's files."""
        self._certificate_reloads["ok" if is_ok else "failed",] += 1

    def cut_answer(self, cause: str) -> None:
        """Count a gRPC answer that ended before its caller took all of it."""
        self._cut_answers[cause,] = self._cut_answers.get((cause,), 0) + 1

    def connection_error(self, code: str) -> None:
        """Count a gRPC connection that was ended with an error, by the name of its code."""
        self._connection_errors[code,] = self._connection_errors.get((code,), 0) + 1

    def set_streams_source(self, source: Callable[[], int]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread: it must only read."""
        self._streams = source

    def set_tracing(self, tracing: Tracing) -> None:
        """Show the numbers of what exports traces."""
        self._tracing = tracing

    def set_devices_source(self, source: Callable[[], Sequence[DeviceReading]]) -> None:
        """Have ``source`` asked at each scrape, on the scraping thread."""
        self._devices = source

    def set_loop_sources(self, stalls: Callable[[], StallReading], polls: Callable[[], PollReading]) -> None:
        """Have both asked at each scrape, on the scraping thread: they must only read."""
        self._stalls, self._polls = stalls, polls

    def observe_unknown(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that failed before a model was found for it."""
        _observe_failure(self._unknown, protocol, kind, duration_ns)

    def rejected(self, model: str, reason: str) -> None:
        """Count a refusal. ``model`` may be what the caller sent; ``reason`` is the server's own, an ``ErrorKind``."""
        by_reason = self._rejected.get(model)
        if by_reason is None:
            by_reason = self._rejected[""]
        by_reason[reason] = by_reason.get(reason, 0) + 1

    def unauthorized(self, group: str, kind: ErrorKind) -> None:
        """Count a refusal for want of a key, from any thread: the metrics port refuses, too."""
        with self._unauthorized_lock:
            labels = (group, kind.value)
            self._unauthorized[labels] = self._unauthorized.get(labels, 0) + 1

    def total_requests(self) -> tuple[int, int]:
        """Requests that were counted, of versions that are not forgotten; and those of them that ``_FAULTS`` ended."""
        requests = faults = 0
        failed = [self._unknown]
        for model in self._models.values():
            requests += sum(sum(series.counts) for series in model.answered.values())
            failed.append(model.failed)
        for by_kind in failed:
            for (_, kind), series in by_kind.items():
                count = sum(series.counts)
                requests += count
                faults += count if kind in _FAULTS else 0
        return requests, faults

    def total_saturation(self) -> float:
        """Of all versions that were ever asked, the sum of what is known of it."""
        return sum(model.saturation() or 0.0 for model in self._models.values() if model.answered or model.failed)

    def describe(self) -> Iterable[Metric]:
        """The families without samples, by which the registry refuses a second server's metrics."""
        return [Family(declaration) for declaration in DECLARATIONS]

    def collect(self) -> Iterator[Metric]:
        """The families as they stand. Called by the registry on the scraping thread."""
        models = self.models()
        yield Family(REQUEST_DURATION, histograms=self._durations(models), scale=_NS_PER_S)
        phases = (
            ((model.name, model.version, phase), series)
            for model in models
            for phase, series in zip(PHASES, model.phases, strict=True)
        )
        yield Family(PHASE_DURATION, histograms=phases, scale=_NS_PER_S)
        rows = (((model.name, model.version), model.batch_rows) for model in models)
        yield Family(BATCH_ROWS, histograms=rows)
        saturations = (((model.name, model.version), model.saturation()) for model in models)
        yield Family(SATURATION, {labels: value for labels, value in saturations if value is not None})
        yield from _batching([((model.name, model.version), model.batching()) for model in models])
        staging = [((model.name, model.version), model.staging()) for model in models]
        yield Family(STAGED_ELEMENTS, {labels: count.staged for labels, count in staging})
        yield Family(PADDED_ELEMENTS, {labels: count.padded for labels, count in staging})
        rejected: dict[Labels, float] = {
            (model, reason): count
            for model, by_reason in list(self._rejected.items())
            for reason, count in list(by_reason.items())
        }
        yield Family(REJECTED, rejected)
        yield Family(UNAUTHORIZED, self._unauthorized.copy())
        yield Family(LOADS, self._loads.copy())
        yield Family(OVERDUE_BATCHES, self._overdue_batches.copy())
        loading: dict[Labels, float] = {
            (model.name, model.version): model.load_ns / _NS_PER_S for model in models if model.load_ns
        }
        yield Family(LOAD_DURATION, loading)
        states: dict[Labels, float] = {
            (model.name, model.version, state): int(state == model.state)
            for model in models
            if model.state
            for state in MODEL_STATES
        }
        yield Family(MODEL_STATE, states)
        runs = (((model.name, model.version), model.device_runs()) for model in models if model.device_runs)
        yield from device_families(self._devices(), runs)
        yield from loop_families(self._stalls(), self._polls())
        yield Family(GRPC_STREAMS, {(): self._streams()})
        yield Family(GRPC_CUT_ANSWERS, self._cut_answers.copy())
        yield Family(GRPC_CONNECTION_ERRORS, self._connection_errors.copy())
        if self._certificate_expires_s is not None:
            yield Family(CERTIFICATE_EXPIRATION, {(): self._certificate_expires_s})
            yield Family(CERTIFICATE_RELOADS, dict(self._certificate_reloads))
        tracing = self._tracing
        yield Family(EXPORTED_SPANS, {(): 0 if tracing is None else tracing.exported_spans})
        yield Family(DROPPED_SPANS, {(): 0 if tracing is None else tracing.dropped_spans})
        yield Family(BUILD_INFO, {(__version__, platform.python_version(), self._onnxruntime_version): 1})

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


def _batching(known: Sequence[tuple[Labels, BatchingNumbers]]) -> Iterator[Metric]:
    yield Family(QUEUE_ROWS, {labels: numbers.queue_rows for labels, numbers in known})
    decisions = {
        (*labels, decision): count for labels, numbers in known for decision, count in numbers.decisions.items()
    }
    yield Family(BATCHING_DECISIONS, decisions)
    checks = {(*labels, outcome): count for labels, numbers in known for outcome, count in numbers.row_checks.items()}
    yield Family(CHECKED_REQUESTS, checks)
    latency = {(*labels, str(rows)): s for labels, numbers in known for rows, s in numbers.latency_s.items()}
    yield Family(BATCH_LATENCY, latency)
    yield Family(BATCH_LATENCY_ERROR, {labels: numbers.latency_error_s for labels, numbers in known})
