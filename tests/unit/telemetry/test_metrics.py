"""Metrics as Prometheus reads them."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ortserve.core.batch import BatchResult
from ortserve.core.padding import StagedElements
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import DECLARATIONS, MODEL_STATES
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import (
    BatchingNumbers,
    CacheCounts,
    DeviceReading,
    DeviceRuns,
    RolloutReading,
    SequenceReading,
    StoreReading,
    StoresReading,
)

# Phases of 0.1 ms, 0.2 ms, 0.3 ms, 0.4 ms and 0.5 ms.
TIMING = Timing(1_000_000, 1_100_000, 1_300_000, 1_600_000, 2_000_000, 2_500_000)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry, onnxruntime_version="1.2.3")


def test_answered_request_counts_its_duration_and_each_phase(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.model("m", "1").observe_success("rest", TIMING, 1)

    labels = {"model": "m", "version": "1", "protocol": "rest", "outcome": "ok"}
    assert registry.get_sample_value("ortserve_request_duration_seconds_sum", labels) == 0.0015
    assert registry.get_sample_value("ortserve_request_duration_seconds_count", labels) == 1
    sums = {
        phase: registry.get_sample_value(
            "ortserve_request_phase_duration_seconds_sum", {"model": "m", "version": "1", "phase": phase}
        )
        for phase in PHASES
    }
    assert sums == {"decode": 0.0001, "queue": 0.0002, "stage": 0.0003, "compute": 0.0004, "encode": 0.0005}


def test_buckets_are_cumulative_and_include_their_upper_bound(metrics: Metrics, registry: CollectorRegistry) -> None:
    for rows in (1, 2, 3, 4, 5000):
        metrics.model("m", "1").observe_batch(rows, 1_000, BatchResult((), 3_000, 8_000, 5_000), 9_000)

    counts = {
        bound: registry.get_sample_value("ortserve_batch_rows_bucket", {"model": "m", "version": "1", "le": bound})
        for bound in ("1.0", "2.0", "4.0", "1024.0", "+Inf")
    }
    assert counts == {"1.0": 1, "2.0": 2, "4.0": 4, "1024.0": 4, "+Inf": 5}


def test_failed_request_counts_its_duration_by_kind_and_no_phases(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    metrics.model("m", "1").observe_failure("grpc", ErrorKind.DEADLINE, 2_000_000_000)

    labels = {"model": "m", "version": "1", "protocol": "grpc", "outcome": "deadline"}
    assert registry.get_sample_value("ortserve_request_duration_seconds_sum", labels) == 2
    phase = {"model": "m", "version": "1", "phase": "compute"}
    assert registry.get_sample_value("ortserve_request_phase_duration_seconds_count", phase) is None


def test_open_streams_are_read_at_each_scrape(metrics: Metrics, registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("ortserve_grpc_streams") == 0
    counts = iter((3, 2))
    metrics.read_streams = lambda: next(counts)
    assert [registry.get_sample_value("ortserve_grpc_streams") for _ in range(2)] == [3, 2]


def test_unknown_names_never_become_labels(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.model("m", "1")
    for name in ("made-up", "m", "another"):
        metrics.rejected(name, ErrorKind.OVERLOADED)
    metrics.observe_unknown("rest", ErrorKind.NOT_FOUND, 1_000)

    def refused(model: str) -> float | None:
        return registry.get_sample_value("ortserve_rejected_requests_total", {"model": model, "reason": "overloaded"})

    assert (refused(""), refused("m"), refused("made-up")) == (2, 1, None)
    unknown = {"model": "", "version": "", "protocol": "rest", "outcome": "not_found"}
    assert registry.get_sample_value("ortserve_request_duration_seconds_count", unknown) == 1


def test_queue_rows_are_read_at_each_scrape(metrics: Metrics, registry: CollectorRegistry) -> None:
    waiting = [7, 8]
    metrics.model("m", "1").batching.connect(lambda: BatchingNumbers(waiting.pop(0)))

    labels = {"model": "m", "version": "1"}
    assert registry.get_sample_value("ortserve_queue_rows", labels) == 7
    assert registry.get_sample_value("ortserve_queue_rows", labels) == 8


def test_learned_times_and_decisions_of_a_batcher_are_shown_in_seconds(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    numbers = BatchingNumbers(3, {"batches": 7, "left": 0}, {1: 0.002, 8: 0.004}, 0.001)
    metrics.model("m", "1").batching.connect(lambda: numbers)
    labels = {"model": "m", "version": "1"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, labels | more)

    assert value("ortserve_batching_decisions_total", decision="batches") == 7
    assert value("ortserve_batching_decisions_total", decision="left") == 0
    assert value("ortserve_batch_latency_seconds", rows="1") == 0.002
    assert value("ortserve_batch_latency_seconds", rows="8") == 0.004
    assert value("ortserve_batch_latency_error_seconds") == 0.001


def test_saturation_is_read_at_each_scrape_and_omitted_while_unknown(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    labels = {"model": "m", "version": "1"}
    known = [None, 0.5, 1.5]
    metrics.model("m", "1").saturation = lambda: known.pop(0)
    assert [registry.get_sample_value("ortserve_saturation", labels) for _ in range(3)] == [None, 0.5, 1.5]


def test_padding_is_read_at_each_scrape(metrics: Metrics, registry: CollectorRegistry) -> None:
    labels = {"model": "m", "version": "1"}
    model = metrics.model("m", "1")
    assert registry.get_sample_value("ortserve_staged_elements_total", labels) == 0
    counts: list[StagedElements] = []
    model.staging.connect(lambda: counts[-1])
    for staged, padded in ((64, 5), (128, 9)):
        counts.append(StagedElements(staged, padded))
        assert registry.get_sample_value("ortserve_staged_elements_total", labels) == staged
        assert registry.get_sample_value("ortserve_padded_elements_total", labels) == padded


def test_exactly_one_state_of_a_version_is_1(metrics: Metrics, registry: CollectorRegistry) -> None:
    model = metrics.model("m", "1")
    model.set_state("loading")
    model.set_state("ready")

    states = {
        state: registry.get_sample_value("ortserve_model_state", {"model": "m", "version": "1", "state": state})
        for state in MODEL_STATES
    }
    assert states == dict.fromkeys(MODEL_STATES, 0) | {"ready": 1}
    with pytest.raises(ValueError, match=r"expected one of loading, .* got 'asleep'"):
        model.set_state("asleep")


def test_series_of_a_version_are_stable_until_removed(metrics: Metrics, registry: CollectorRegistry) -> None:
    old, new = metrics.model("m", "1"), metrics.model("m", "2")
    assert metrics.model("m", "1") is old
    for model in (old, new):
        model.set_state("ready")
        model.observe_success("rest", TIMING, 1)
    metrics.rejected("m", "overloaded")
    metrics.loaded("m", is_ok=True)
    metrics.batch_overdue("m")
    metrics.residency.evictions["m"] = 1

    metrics.forget("m", "1")
    text = generate_latest(registry).decode()
    assert 'model="m"' in text
    assert 'version="1"' not in text
    assert 'ortserve_rejected_requests_total{model="m"' in text

    metrics.forget("m", "2")
    metrics.forget("m", "never-loaded")
    assert 'model="m"' not in generate_latest(registry).decode()
    assert metrics.model("m", "1") is not old


def test_output_is_the_text_format_with_every_declared_metric(metrics: Metrics, registry: CollectorRegistry) -> None:
    model = metrics.model('quoted "name"\n', "1")
    model.set_state("ready")
    model.observe_success("rest", TIMING, 1)
    model.observe_batch(1, 1_000, BatchResult((), 3_000, 8_000, 5_000), 9_000)
    numbers = BatchingNumbers(3, {"batches": 7}, {1: 0.002, 8: 0.004}, 0.001, 2, {"agreed": 5})
    model.batching.connect(lambda: numbers)
    model.saturation = lambda: 0.5
    model.cache = CacheCounts(hits=3, misses=1)
    model.recorded.connect(lambda: {"recorded": 6})
    model.sequences.connect(lambda: SequenceReading(3, 2, 64, {"expired": 1}))
    rollout = RolloutReading("m", "2", "shadow", {"agreed": 1}, {"max": 0.1}, {"stable": 0.1, "candidate": None})
    metrics.read_rollouts = lambda: [rollout]
    metrics.rejected("", "overloaded")
    metrics.unauthorized("infer", ErrorKind.FORBIDDEN)
    metrics.grpc_cut_answer("disconnected")
    metrics.http_cut_answer("too_slow")
    metrics.grpc_connection_error("enhance_your_calm")
    metrics.evicted_idle("http_connection")
    metrics.loaded("m", is_ok=True)
    metrics.certificate_serves(1.5e9)
    metrics.batch_overdue(model.name)
    model.load_ns = 1
    by_direction = {"in": 1, "out": 2}
    model.device_runs.connect(lambda: DeviceRuns({"bound": 1}, {"failed": 1}, by_direction, by_direction, by_direction))
    model.memory = lambda: {"sessions": 7, "runs": 1}
    metrics.memory_budget_bytes = 8
    metrics.gpu_memory_budget_bytes = 8
    metrics.residency.evictions["m"] += 1
    metrics.residency.refusals["stay"] += 1
    metrics.residency.requests["m", "loaded"] += 1
    account = {"m/1": {"buffers": 1}}
    metrics.read_devices = lambda: [DeviceReading("cuda:0", {"free": 1}, account, 0.5, account)]
    metrics.read_stores = lambda: StoresReading([StoreReading("s3://bucket", True, 10, 1, 2)], 10)

    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}

    for declared in DECLARATIONS:
        family = families[declared.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (declared.type, declared.help)
        assert family.samples
        assert all(set(sample.labels) - {"le"} == set(declared.labels) for sample in family.samples)
    assert families["ortserve_build_info"].samples[0].labels["onnxruntime"] == "1.2.3"


def test_registry_rejects_the_metrics_of_a_second_server(metrics: Metrics, registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Metrics(registry)
