"""Triton's names for what ``telemetry.metrics`` counts, so that its dashboards and alerts go on working.

``telemetry.machine`` has those of GPUs and processors, which perf_analyzer reads, too.

Its counters have no ``_total`` at the end, which prometheus_client gives every counter; they are exposed as untyped.
Prometheus keeps types for documentation only, so that ``rate()`` works on them as on any counter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ortserve.telemetry.families import Declaration, Family
from ortserve.telemetry.machine import MACHINE_DECLARATIONS, CpuReading, GpuReading, machine_families
from ortserve.telemetry.metrics import Metrics, ModelMetrics
from ortserve.telemetry.statistics import VersionStatistics, read_statistics

_VERSION: Final = ("model", "version")

Samples: TypeAlias = Mapping[tuple[str, ...], float]
"""Values by those of the labels behind model and version."""


@dataclass(frozen=True, slots=True)
class TritonMetric:
    """A metric's declaration and where its values come from."""

    declaration: Declaration
    read: Callable[[ModelMetrics, VersionStatistics], Samples]


def _counter(
    name: str,
    help_text: str,
    read: Callable[[VersionStatistics], float],
) -> TritonMetric:
    return TritonMetric(Declaration(name, "counter", _VERSION, help_text), lambda _, statistics: {(): read(statistics)})


def _failures(_: ModelMetrics, statistics: VersionStatistics) -> Samples:
    return {(reason,): count for reason, count in statistics.failures.items()}


TRITON_METRICS: Final = (
    _counter(
        "nv_inference_request_success", "Requests that were answered.", lambda known: known.inference.success.count
    ),
    TritonMetric(
        Declaration(
            "nv_inference_request_failure",
            "counter",
            (*_VERSION, "reason"),
            "Requests that failed: REJECTED (refused for want of room or time), CANCELED, BACKEND (failed in a run) or "
            "OTHER. Malformed ones are not counted.",
        ),
        _failures,
    ),
    _counter("nv_inference_count", "Rows of answered requests.", lambda known: known.inference_count),
    _counter("nv_inference_exec_count", "Batches that ran.", lambda known: known.execution_count),
    _counter(
        "nv_inference_request_duration_us",
        "Microseconds of answered requests, from complete body to answer.",
        lambda known: known.inference.success.ns // 1000,
    ),
    _counter(
        "nv_inference_queue_duration_us",
        "Of these, spent in the queue.",
        lambda known: known.inference.queue.ns // 1000,
    ),
    _counter(
        "nv_inference_compute_input_duration_us",
        "Of these, spent gathering inputs; each request of a batch is charged the batch's whole time.",
        lambda known: known.inference.compute_input.ns // 1000,
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "Of these, spent computing; each request of a batch is charged the batch's whole time.",
        lambda known: known.inference.compute_infer.ns // 1000,
    ),
    _counter(
        "nv_inference_compute_output_duration_us",
        "Of these, spent on answers after computing.",
        lambda known: known.inference.compute_output.ns // 1000,
    ),
    TritonMetric(
        Declaration("nv_inference_pending_request_count", "gauge", _VERSION, "Requests that wait for a free instance."),
        lambda model, _: {(): model.batching().queue_requests},
    ),
    TritonMetric(
        Declaration(
            "nv_model_load_duration_secs", "gauge", _VERSION, "Time that loading took, of a version that serves."
        ),
        lambda model, _: {(): model.load_ns / 1e9} if model.load_ns else {},
    ),
)

TRITON_DECLARATIONS: Final = (*(metric.declaration for metric in TRITON_METRICS), *MACHINE_DECLARATIONS)


class TritonMetrics(Collector):
    """Exposes the numbers of ``metrics`` under Triton's names. Counting costs nothing more, a scrape does."""

    def __init__(
        self,
        registry: CollectorRegistry,
        metrics: Metrics,
        *,
        read_gpus: Callable[[], Sequence[GpuReading]] = tuple,
        read_cpu: Callable[[], CpuReading] = CpuReading,
    ) -> None:
        """``read_gpus`` and ``read_cpu`` are asked at each scrape, on the scraping thread."""
        self._metrics = metrics
        self._read_gpus = read_gpus
        self._read_cpu = read_cpu
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return [Family(declaration) for declaration in TRITON_DECLARATIONS]

    def collect(self) -> Iterator[Metric]:
        """The families as they stand. Called by the registry on the scraping thread."""
        known = [(model, read_statistics(model)) for model in self._metrics.models()]
        for metric in TRITON_METRICS:
            values = {
                (model.name, model.version, *more): value
                for model, statistics in known
                for more, value in metric.read(model, statistics).items()
            }
            yield Family(metric.declaration, values)
        yield from machine_families(self._read_gpus(), self._read_cpu())
