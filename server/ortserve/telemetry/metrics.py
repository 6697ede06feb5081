"""All metrics of a server, passed to Prometheus as families at a scrape.

The event loop counts in ``series``. A ``Collector`` (prometheus_client's documented extension) reads the counts at a
scrape. For the total and five phases of a request, this costs a fifth of the loop's time that prometheus_client's own
histograms cost (0.8 against 4.0 us, ``loadtests/results/metrics_cost.md``).

A histogram is exposed from its first observation on, so that a thousand idle models cost a scrape little.

There is no lock, because only the event loop writes. A scrape reads on its own thread: the buckets of a series always
agree with its count, but its sum, and other series, may be one request ahead.
"""

import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ortserve import __version__
from ortserve.core.timing import PHASES
from ortserve.errors import ErrorKind
from ortserve.telemetry import declarations as declared
from ortserve.telemetry.declarations import MODEL_STATES, Declaration, Labels, Tags
from ortserve.telemetry.families import Family, with_tags
from ortserve.telemetry.readings import (
    BatchingNumbers,
    CacheReading,
    DeviceReading,
    DeviceRuns,
    LoopReading,
    PollReading,
    ResidencyCounts,
    RolloutReading,
    StoresReading,
)
from ortserve.telemetry.series import HistogramSeries, ModelMetrics, add_failure
from ortserve.telemetry.tracing import Tracing

_NS_PER_S: Final = 1_000_000_000

_FAULTS: Final = frozenset((ErrorKind.OVERLOADED, ErrorKind.NOT_READY, ErrorKind.DEADLINE, ErrorKind.INTERNAL))
"""Errors that are not the caller's fault: another server might have answered."""

_OVERDUE_OUTCOMES: Final = ("terminated", "abandoned")


class Metrics(Collector):
    """All metrics of a server. Registers itself, and the metrics of the process, with ``registry``.

    Callers cannot create label values: the label ``model`` holds names that the registry passed to ``model``, or "".
    Only a model's configuration adds labels, and their number is bounded. Methods run on the event loop, except for
    ``unauthorized``, ``collect``, ``describe`` and methods that allow any thread.

    Args:
        registry: The registry that the metrics port exposes.
        onnxruntime_version: The version for ``ortserve_build_info``, because this room does not import ONNX Runtime.

    Attributes:
        read_streams: Counts the open gRPC streams. This and the other ``read_`` functions are called at each scrape, on
            the scraping thread: they must only read. The composition root sets them.
        tracing: Counts exported and dropped spans; None without tracing.
        residency: Counts of loads on demand and evictions.
    """

    def __init__(self, registry: CollectorRegistry, *, onnxruntime_version: str = "") -> None:
        self._onnxruntime_version = onnxruntime_version
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._unknown: dict[tuple[str, ErrorKind], HistogramSeries] = {}
        self._rejected: dict[str, Counter[str]] = {"": Counter()}
        self._loads: Counter[Labels] = Counter()
        self._overdue_batches: Counter[Labels] = Counter()
        self._unauthorized: Counter[Labels] = Counter()
        self._unauthorized_lock = threading.Lock()
        self._grpc_cut_answers: Counter[Labels] = Counter()
        self._http_cut_answers: Counter[Labels] = Counter()
        self._grpc_connection_errors: Counter[Labels] = Counter()
        self._idle_evictions: Counter[Labels] = Counter()
        self.read_streams: Callable[[], int] = int
        self._certificate_expires_s: float | None = None
        self._certificate_reloads: Counter[Labels] = Counter()
        self.tracing: Tracing | None = None
        self.read_devices: Callable[[], Sequence[DeviceReading]] = tuple
        self.read_stores: Callable[[], StoresReading] | None = None
        self.read_loop: Callable[[], LoopReading] = LoopReading
        self.read_polls: Callable[[], PollReading] = PollReading
        self.read_cache: Callable[[], CacheReading] = CacheReading
        self.read_rollouts: Callable[[], Sequence[RolloutReading]] = tuple
        self.residency: Final = ResidencyCounts()
        self.memory_budget_bytes: int | None = None
        self.gpu_memory_budget_bytes: int | None = None
        registry.register(self)
        ProcessCollector(registry=registry)

    def model(self, name: str, version: str) -> ModelMetrics:
        """The series of a model version, the same object until ``forget``. Keep it instead of calling again."""
        series = self._models.get((name, version))
        if series is None:
            series = ModelMetrics(name, version)
            self.expose(series)
        return series

    def expose(self, series: ModelMetrics) -> None:
        """Expose a version's series instead of those of its previous load, whose later observations are lost."""
        self._models[series.name, series.version] = series
        self._rejected.setdefault(series.name, Counter())
        # Begin with 0: Prometheus sees no increase in a series that begins with the first overdue run.
        for outcome in _OVERDUE_OUTCOMES:
            self._overdue_batches[series.name, outcome] += 0

    def models(self) -> list[ModelMetrics]:
        """The series of every version. Any thread may call it."""
        # list() of a dictionary's view is one step under the GIL, so the loop may add series meanwhile.
        return list(self._models.values())

    def tags(self) -> dict[str, Tags]:
        """The tags of all models with tags, by name. Any thread may call it."""
        return {model.name: model.tags for model in self.models() if model.tags}

    def forget(self, name: str, version: str) -> None:
        """Drop the series of an unloaded version; observations of its last requests are lost."""
        self._models.pop((name, version), None)
        if name and not any(known == name for known, _ in self._models):
            self._rejected.pop(name, None)
            self.residency.forget(name)
            for outcome in ("ok", "failed"):
                self._loads.pop((name, outcome), None)
            for outcome in _OVERDUE_OUTCOMES:
                self._overdue_batches.pop((name, outcome), None)

    def loaded(self, model: str, *, is_ok: bool) -> None:
        """Count a finished load of a version. ``model`` is a model of the registry."""
        self._loads[model, "ok" if is_ok else "failed"] += 1

    def batch_overdue(self, model: str, *, is_abandoned: bool = False) -> None:
        """Count a run that exceeded its time limit and was terminated, or that was abandoned."""
        self._overdue_batches[model, _OVERDUE_OUTCOMES[is_abandoned]] += 1

    def certificate_serves(self, expires_s: float) -> None:
        """Set the expiration time of the certificate in use, in seconds since 1970."""
        self._certificate_expires_s = expires_s
        for outcome in ("ok", "failed"):
            self._certificate_reloads[outcome,] += 0

    def certificate_reloaded(self, *, is_ok: bool) -> None:
        """Count a change of the certificate's files."""
        self._certificate_reloads["ok" if is_ok else "failed",] += 1

    def grpc_cut_answer(self, cause: str) -> None:
        """Count a gRPC answer that ended before the caller had received it completely."""
        self._grpc_cut_answers[cause,] += 1

    def http_cut_answer(self, cause: str) -> None:
        """Count an HTTP answer that ended before the caller had received it completely."""
        self._http_cut_answers[cause,] += 1

    def grpc_connection_error(self, code: str) -> None:
        """Count a gRPC connection that the server closed with an error; ``code`` is the name of its code."""
        self._grpc_connection_errors[code,] += 1

    def evicted_idle(self, kind: str) -> None:
        """Count an idle connection or stream that was closed for a new one; ``kind`` as in ``IDLE_EVICTIONS``."""
        self._idle_evictions[kind,] += 1

    def observe_unknown(self, protocol: str, kind: ErrorKind, duration_ns: int) -> None:
        """Count a request that failed before its model was found."""
        add_failure(self._unknown, protocol, kind, duration_ns)

    def rejected(self, model: str, reason: str) -> None:
        """Count a rejected request. ``model`` may be unknown text of the caller; ``reason`` is an ``ErrorKind``."""
        by_reason = self._rejected.get(model)
        if by_reason is None:
            by_reason = self._rejected[""]
        by_reason[reason] += 1

    def unauthorized(self, group: str, kind: ErrorKind) -> None:
        """Count a request without a valid key. Thread-safe, because the metrics port rejects requests, too."""
        with self._unauthorized_lock:
            self._unauthorized[group, kind.value] += 1

    def total_requests(self) -> tuple[int, int]:
        """The number of counted requests, and the number of those that ended with one of ``_FAULTS``."""
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
        """The sum of the known saturations of all versions that received a request."""
        return sum(model.saturation() or 0.0 for model in self._models.values() if model.answered or model.failed)

    def describe(self) -> Iterable[Metric]:
        """The families without samples. The registry compares them to reject a second server's metrics."""
        return [Family(declaration) for declaration in declared.DECLARATIONS]

    def collect(self) -> Iterator[Metric]:
        """The families with their current samples. The registry calls this on the scraping thread."""
        return with_tags(self._collect(), self.tags())

    def _collect(self) -> Iterator[Metric]:
        models = self.models()
        yield Family(declared.REQUEST_DURATION, histograms=self._durations(models), scale=_NS_PER_S)
        phases = (
            ((*model.labels, phase), series)
            for model in models
            for phase, series in zip(PHASES, model.phases, strict=True)
        )
        yield Family(declared.PHASE_DURATION, histograms=phases, scale=_NS_PER_S)
        rows = ((model.labels, model.batch_rows) for model in models)
        yield Family(declared.BATCH_ROWS, histograms=rows)
        saturations = ((model.labels, model.saturation()) for model in models)
        yield Family(declared.SATURATION, {labels: value for labels, value in saturations if value is not None})
        yield from _batching([(model.labels, model.batching.read()) for model in models])
        yield from _response_cache(models, self.read_cache())
        yield from _sequences(models)
        staging = [(model.labels, model.staging.read()) for model in models]
        yield Family(declared.STAGED_ELEMENTS, {labels: count.staged for labels, count in staging})
        yield Family(declared.PADDED_ELEMENTS, {labels: count.padded for labels, count in staging})
        yield _by_last_label(declared.RECORDED_REQUESTS, ((model.labels, model.recorded.read()) for model in models))
        yield from _rollouts(self.read_rollouts())
        rejected = (((model,), by_reason.copy()) for model, by_reason in list(self._rejected.items()))
        yield _by_last_label(declared.REJECTED, rejected)
        yield Family(declared.UNAUTHORIZED, self._unauthorized.copy())
        yield Family(declared.LOADS, self._loads.copy())
        yield Family(declared.OVERDUE_BATCHES, self._overdue_batches.copy())
        loading: dict[Labels, float] = {model.labels: model.load_ns / _NS_PER_S for model in models if model.load_ns}
        yield Family(declared.LOAD_DURATION, loading)
        yield _by_last_label(declared.MODEL_MEMORY, ((model.labels, model.memory()) for model in models))
        yield from _residency(self.residency, self.memory_budget_bytes, self.gpu_memory_budget_bytes)
        states: dict[Labels, float] = {
            (*model.labels, state): int(state == model.state)
            for model in models
            if model.state
            for state in MODEL_STATES
        }
        yield Family(declared.MODEL_STATE, states)
        runs = ((model.labels, model.device_runs.read()) for model in models if model.device_runs.was_connected)
        yield from _devices(self.read_devices(), runs)
        yield from _event_loop(self.read_loop(), self.read_polls())
        if self.read_stores is not None:
            yield from _stores(self.read_stores())
        yield Family(declared.GRPC_STREAMS, {(): self.read_streams()})
        yield Family(declared.HTTP_CUT_ANSWERS, self._http_cut_answers.copy())
        yield Family(declared.GRPC_CUT_ANSWERS, self._grpc_cut_answers.copy())
        yield Family(declared.GRPC_CONNECTION_ERRORS, self._grpc_connection_errors.copy())
        yield Family(declared.IDLE_EVICTIONS, self._idle_evictions.copy())
        if self._certificate_expires_s is not None:
            yield Family(declared.CERTIFICATE_EXPIRATION, {(): self._certificate_expires_s})
            yield Family(declared.CERTIFICATE_RELOADS, dict(self._certificate_reloads))
        tracing = self.tracing
        yield Family(declared.EXPORTED_SPANS, {(): 0 if tracing is None else tracing.exported_spans})
        yield Family(declared.DROPPED_SPANS, {(): 0 if tracing is None else tracing.dropped_spans})
        yield Family(declared.BUILD_INFO, {(__version__, platform.python_version(), self._onnxruntime_version): 1})

    def _durations(self, models: Iterable[ModelMetrics]) -> Iterator[tuple[tuple[str, ...], HistogramSeries]]:
        for model in models:
            for protocol, series in list(model.answered.items()):
                yield (*model.labels, protocol, "ok"), series
            for (protocol, kind), series in list(model.failed.items()):
                yield (*model.labels, protocol, kind.value), series
        for (protocol, kind), series in list(self._unknown.items()):
            yield ("", "", protocol, kind.value), series


def unread_metrics() -> Metrics:
    """Metrics that nothing exports, for loads outside a server."""
    return Metrics(CollectorRegistry())


def _batching(known: Sequence[tuple[Labels, BatchingNumbers]]) -> Iterator[Metric]:
    yield Family(declared.QUEUE_ROWS, {labels: numbers.queue_rows for labels, numbers in known})
    yield _by_last_label(declared.BATCHING_DECISIONS, ((labels, numbers.decisions) for labels, numbers in known))
    yield _by_last_label(declared.CHECKED_REQUESTS, ((labels, numbers.row_checks) for labels, numbers in known))
    latency = {(*labels, str(rows)): s for labels, numbers in known for rows, s in numbers.latency_s.items()}
    yield Family(declared.BATCH_LATENCY, latency)
    yield Family(declared.BATCH_LATENCY_ERROR, {labels: numbers.latency_error_s for labels, numbers in known})


def _response_cache(models: Iterable[ModelMetrics], cache: CacheReading) -> Iterator[Family]:
    known = [(model.labels, model.cache) for model in models if model.cache is not None]
    results = ((labels, {"hit": counts.hits, "miss": counts.misses}) for labels, counts in known)
    yield _by_last_label(declared.CACHE_REQUESTS, results)
    yield Family(declared.CACHE_SAVED, {labels: counts.saved_ns / _NS_PER_S for labels, counts in known})
    yield Family(declared.CACHE_BYTES, {(): cache.nbytes})
    yield Family(declared.CACHE_EVICTIONS, {(): cache.evictions})


def _stores(reading: StoresReading) -> Iterator[Family]:
    stores = reading.stores
    yield Family(declared.STORE_UP, {(store.repository,): int(store.is_up) for store in stores})
    yield Family(declared.STORE_FETCHED_BYTES, {(store.repository,): store.fetched_bytes for store in stores})
    failures = (((one.repository,), {"list": one.failed_lists, "model": one.failed_models}) for one in stores)
    yield _by_last_label(declared.STORE_FAILURES, failures)
    yield Family(declared.STORE_CACHE_BYTES, {(): reading.cache_bytes})


def _sequences(models: Iterable[ModelMetrics]) -> Iterator[Family]:
    known = [(model.labels, model.sequences.read()) for model in models if model.sequences.was_connected]
    states = ((labels, {"active": of.active, "waiting": of.waiting}) for labels, of in known)
    yield _by_last_label(declared.SEQUENCES, states)
    yield _by_last_label(declared.SEQUENCES_ENDED, ((labels, of.ended) for labels, of in known))
    yield Family(declared.SEQUENCE_STATE_BYTES, {labels: of.state_bytes for labels, of in known})


def _devices(devices: Sequence[DeviceReading], runs: Iterable[tuple[Labels, DeviceRuns]]) -> Iterator[Family]:
    """The families of devices, and of ``runs`` by model and version."""
    yield _by_last_label(declared.DEVICE_MEMORY, (((one.name,), one.memory) for one in devices))
    ledger = (((one.name, owner), account) for one in devices for owner, account in one.ledger.items())
    yield _by_last_label(declared.DEVICE_LEDGER, ledger)
    pinned = (((one.name, owner), account) for one in devices for owner, account in one.pinned.items())
    yield _by_last_label(declared.DEVICE_PINNED, pinned)
    utilization: dict[Labels, float] = {(one.name,): one.utilization for one in devices if one.utilization is not None}
    yield Family(declared.DEVICE_UTILIZATION, utilization)
    known = list(runs)
    yield _by_last_label(declared.DEVICE_BATCHES, ((labels, of.batches) for labels, of in known))
    yield _by_last_label(declared.DEVICE_CAPTURES, ((labels, of.captures) for labels, of in known))
    yield _by_last_label(declared.DEVICE_COPIED, ((labels, of.copied_bytes) for labels, of in known))
    yield _by_last_label(declared.DEVICE_TIMED_COPY, ((labels, of.timed_copy_s) for labels, of in known))
    yield _by_last_label(declared.DEVICE_TIMED_COPY_BYTES, ((labels, of.timed_copy_bytes) for labels, of in known))


def _rollouts(known: Sequence[RolloutReading]) -> Iterator[Family]:
    yield Family(declared.ROLLOUT, {(one.model, one.candidate, one.mode): 1 for one in known})
    yield _by_last_label(declared.ROLLOUT_REQUESTS, (((one.model, one.candidate), one.outcomes) for one in known))
    yield _by_last_label(declared.ROLLOUT_ERROR, (((one.model, one.candidate), one.worst) for one in known))
    times: dict[Labels, float] = {
        (one.model, one.candidate, side): s for one in known for side, s in one.p99_s.items() if s is not None
    }
    yield Family(declared.ROLLOUT_P99, times)


def _residency(counts: ResidencyCounts, budget_bytes: int | None, gpu_budget_bytes: int | None) -> Iterator[Family]:
    yield Family(declared.MEMORY_BUDGET, {} if budget_bytes is None else {(): budget_bytes})
    yield Family(declared.GPU_MEMORY_BUDGET, {} if gpu_budget_bytes is None else {(): gpu_budget_bytes})
    yield Family(declared.EVICTIONS, {(model,): count for model, count in list(counts.evictions.items())})
    yield Family(declared.LOADS_REFUSED, {(reason,): count for reason, count in list(counts.refusals.items())})
    yield Family(declared.DEMANDS, dict(list(counts.requests.items())))
    yield Family(declared.DEMAND_WAIT, {(): counts.waited_ns / _NS_PER_S})


def _by_last_label(declaration: Declaration, known: Iterable[tuple[Labels, Mapping[str, float]]]) -> Family:
    """A family whose series ``known`` holds by their values of the last label, after those of all other labels."""
    return Family(declaration, {(*labels, name): value for labels, values in known for name, value in values.items()})


def _event_loop(loop: LoopReading, polls: PollReading) -> Iterator[Family]:
    yield Family(declared.LOOP_CPU_SECONDS, {(): loop.cpu_ns / _NS_PER_S})
    yield Family(declared.LOOP_STALLS, {(): loop.stalls})
    yield Family(declared.LOOP_STALL_SECONDS, {(): loop.stalled_ns / _NS_PER_S})
    yield Family(declared.BUSY_POLL_SECONDS, {(): polls.polled_ns / _NS_PER_S})
    yield Family(declared.BUSY_POLLS, {("hit",): polls.hits, ("miss",): polls.misses})
