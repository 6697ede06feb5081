"""Triton's statistics and metric names, from the counts of the metrics."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ortserve.core.batch import BatchResult
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.machine import MACHINE_DECLARATIONS, CpuReading, GpuReading
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import BatchingNumbers, CacheCounts, CacheReading
from ortserve.telemetry.series import ModelMetrics
from ortserve.telemetry.statistics import (
    FAILURE_REASONS,
    REASONS,
    TRITON_DECLARATIONS,
    BatchSizeStatistics,
    Duration,
    InferStatistics,
    TritonMetrics,
    read_statistics,
)

# Phases of 1, 2, 3, 4 and 5 ns.
TIMING = Timing(1_000, 1_001, 1_003, 1_006, 1_010, 1_015)


@pytest.fixture
def model() -> ModelMetrics:
    return Metrics(CollectorRegistry()).model("m", "3")


def test_statistics_start_at_zero(model: ModelMetrics) -> None:
    nothing = Duration(0, 0)
    numbers = read_statistics(model)
    assert (numbers.name, numbers.version, numbers.last_done_ns) == ("m", "3", 0)
    assert (numbers.inference_count, numbers.execution_count, numbers.batches) == (0, 0, ())
    assert numbers.inference == InferStatistics(nothing, nothing, nothing, nothing, nothing, nothing)
    assert numbers.failures == dict.fromkeys(REASONS, 0)


def test_requests_count_their_rows_and_parts_and_a_batch_counts_once(model: ModelMetrics) -> None:
    model.observe_success("http", TIMING, 2)
    model.observe_success("grpc", TIMING, 3)
    model.observe_batch(5, 1_003, BatchResult((), 1_006, 1_010, 4), 1_012)
    model.observe_batch(1, 2_000, BatchResult((), 2_001, 2_003, 2), 2_006)
    model.observe_batch(5, 3_000, BatchResult((), 3_001, 3_003, 2), 3_006)

    numbers = read_statistics(model)

    assert (numbers.last_done_ns, numbers.inference_count, numbers.execution_count) == (1_015, 5, 3)
    assert numbers.inference == InferStatistics(
        success=Duration(2, 30),
        fail=Duration(0, 0),
        queue=Duration(2, 4),
        compute_input=Duration(2, 6),
        compute_infer=Duration(2, 8),
        compute_output=Duration(2, 10),
    )
    assert numbers.batches == (
        BatchSizeStatistics(1, Duration(1, 1), Duration(1, 2), Duration(1, 3)),
        BatchSizeStatistics(5, Duration(2, 4), Duration(2, 6), Duration(2, 5)),
    )


def test_failures_exclude_client_errors(model: ModelMetrics) -> None:
    for kind in ErrorKind:
        for protocol in ("http", "grpc"):
            model.observe_failure(protocol, kind, 10)

    numbers = read_statistics(model)

    assert set(ErrorKind) - FAILURE_REASONS.keys() == {
        ErrorKind.INVALID_INPUT,
        ErrorKind.UNAUTHENTICATED,
        ErrorKind.FORBIDDEN,
        ErrorKind.ALREADY_EXISTS,
        ErrorKind.NOT_FOUND,
        ErrorKind.TOO_LARGE,
        ErrorKind.UNSUPPORTED,
        ErrorKind.HEADERS_TOO_LARGE,
        ErrorKind.TOO_SLOW,
    }
    assert numbers.failures == {"REJECTED": 6, "CANCELED": 2, "BACKEND": 4, "OTHER": 2}
    assert numbers.inference.fail == Duration(14, 140)


LABELS = {"model": "m", "version": "1"}
# Phases of 1, 2, 3, 4 and 5 µs.
UNEVEN_TIMING = Timing(1_000, 2_000, 4_000, 7_000, 11_000, 16_000)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    TritonMetrics(registry, metrics)
    model = metrics.model("m", "1")
    model.load_ns = 1_500_000_000
    model.cache = CacheCounts(hits=0, misses=2, miss_ns=6_000)
    metrics.read_cache = lambda: CacheReading(2, 25, 100, 3, hits=4, misses=5, lookup_ns=7_000, store_ns=8_000)
    model.observe_success("http", UNEVEN_TIMING, 2)
    model.observe_success("http", UNEVEN_TIMING, 5)
    model.observe_batch(7, 0, BatchResult((), 1, 2, 1), 3)
    model.observe_failure("grpc", ErrorKind.DEADLINE, 1)
    model.observe_failure("grpc", ErrorKind.INVALID_INPUT, 1)
    model.batching.connect(lambda: BatchingNumbers(queue_rows=9, queue_requests=4))
    return registry


def test_answers_from_the_cache_count_as_neither_inferences_nor_computed_requests(model: ModelMetrics) -> None:
    model.cache = CacheCounts(hits=1, hit_ns=5, misses=1, miss_ns=7)
    model.observe_success("http", TIMING, 3)
    model.observe_success("http", replace(TIMING, is_cached=True), 2)

    numbers = read_statistics(model)

    assert numbers.inference_count == 3
    parts = numbers.inference
    assert (parts.success.count, parts.queue.count, parts.compute_infer.count) == (2, 2, 1)
    assert (parts.cache_hit, parts.cache_miss) == (Duration(1, 5), Duration(1, 7))


def test_statistics_have_the_protocol_names(registry: CollectorRegistry) -> None:
    expected = {
        "nv_inference_request_success": 2,
        "nv_inference_count": 7,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 30,
        "nv_inference_queue_duration_us": 4,
        "nv_inference_compute_input_duration_us": 6,
        "nv_inference_compute_infer_duration_us": 8,
        "nv_inference_compute_output_duration_us": 10,
        "nv_inference_pending_request_count": 4,
        "nv_cache_num_hits_per_model": 0,
        "nv_cache_num_misses_per_model": 2,
        "nv_cache_hit_duration_per_model": 0,
        "nv_cache_miss_duration_per_model": 6,
        "nv_model_load_duration_secs": 1.5,
    }
    whole_server = {
        "nv_cache_num_entries": 2,
        "nv_cache_num_lookups": 9,
        "nv_cache_num_hits": 4,
        "nv_cache_num_misses": 5,
        "nv_cache_num_evictions": 3,
        "nv_cache_lookup_duration": 7,
        "nv_cache_insertion_duration": 8,
        "nv_cache_util": 0.25,
    }
    assert {name: registry.get_sample_value(name) for name in whole_server} == whole_server
    assert {name: registry.get_sample_value(name, LABELS) for name in expected} == expected
    reasons = {"REJECTED": 1, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    for reason, count in reasons.items():
        assert registry.get_sample_value("nv_inference_request_failure", {**LABELS, "reason": reason}) == count
    others = {"nv_inference_request_failure", *(known.name for known in MACHINE_DECLARATIONS)}
    assert expected.keys() | whole_server.keys() | others == {known.name for known in TRITON_DECLARATIONS}


def test_gpus_and_processors_have_tritons_names_and_unknown_values_no_series() -> None:
    registry = CollectorRegistry()
    gpus = [GpuReading("GPU-a", 0.25, 400, 300, 51.5, 700.0, 2.5), GpuReading("GPU-b", power_watts=20.0)]
    cpu = [CpuReading(0.5, 2000, 1500)]
    TritonMetrics(registry, Metrics(CollectorRegistry()), read_gpus=lambda: gpus, read_cpu=lambda: cpu[-1])

    def samples(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith(("nv_gpu", "nv_cpu", "nv_energy"))}

    assert samples(generate_latest(registry).decode()) == {
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.25',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 400.0',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 300.0',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 51.5',
        'nv_gpu_power_usage{gpu_uuid="GPU-b"} 20.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-a"} 700.0',
        'nv_energy_consumption{gpu_uuid="GPU-a"} 2.5',
        "nv_cpu_utilization 0.5",
        "nv_cpu_memory_total_bytes 2000.0",
        "nv_cpu_memory_used_bytes 1500.0",
    }
    gpus.clear()
    cpu.append(CpuReading())
    assert samples(generate_latest(registry).decode()) == set()


def test_counters_have_no_suffix_in_the_text(registry: CollectorRegistry) -> None:
    text = generate_latest(registry).decode()
    assert '\nnv_inference_count{model="m",version="1"} 7.0\n' in text
    names = [line.split("{")[0] for line in text.splitlines() if line.startswith("nv_")]
    assert not [name for name in names if name.endswith(("_total", "_created"))]


def test_metrics_of_two_servers_are_rejected(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        TritonMetrics(registry, Metrics(CollectorRegistry()))
