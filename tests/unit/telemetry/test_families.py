"""Metric families as prometheus_client reads them, and their text."""

import math
import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ortserve.core.batch import BatchResult
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import Declaration
from ortserve.telemetry.families import Family, TextFormat, prometheus_type, spell_number
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import BatchingNumbers
from ortserve.telemetry.series import HistogramSeries, ModelMetrics
from ortserve.telemetry.statistics import TritonMetrics

SIZES = Declaration("sizes_rows", "histogram", ("model",), "Sizes.", (1.0, 4.0))


def test_empty_histogram_is_omitted() -> None:
    counted, idle = HistogramSeries([1, 4]), HistogramSeries([1, 4])
    for value in (1, 3, 4, 5):
        counted.observe(value)

    family = Family(SIZES, histograms=[(("a",), counted), (("b",), idle)])

    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("sizes_rows_bucket", {"model": "a", "le": "1.0"}, 1),
        ("sizes_rows_bucket", {"model": "a", "le": "4.0"}, 3),
        ("sizes_rows_bucket", {"model": "a", "le": "+Inf"}, 4),
        ("sizes_rows_count", {"model": "a"}, 4),
        ("sizes_rows_sum", {"model": "a"}, 13),
    ]


def test_family_holds_the_counts_of_its_construction() -> None:
    series = HistogramSeries([1, 4])
    series.observe(1)
    family = Family(SIZES, histograms=[(("a",), series)])
    series.observe(2)
    assert [sample.value for sample in family.samples] == [1, 1, 1, 1, 1]


def test_tags_are_labels_of_all_series_of_a_model_and_change_with_its_load() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    TritonMetrics(registry, metrics)
    text = TextFormat(registry)
    timing = Timing(1)
    timing.done_ns = 2
    for name, tags in (("a", (("_team", 'v"1'),)), ("b", ())):
        series = ModelMetrics(name, "1")
        series.tags = tags
        series.observe_success("http", timing, 1)
        metrics.expose(series)
        metrics.rejected(name, "overloaded")
        metrics.loaded(name, is_ok=True)

    def labels_of(model: str) -> list[str | None]:
        families = list(text_string_to_metric_families(text.write().decode()))
        samples = [sample for family in families for sample in family.samples if sample.labels.get("model") == model]
        assert len({sample.name for sample in samples}) > 20
        return [sample.labels.get("_team") for sample in samples]

    assert set(labels_of("a")) == {'v"1'}
    assert set(labels_of("b")) == {None}
    assert (
        registry.get_sample_value(
            "ortserve_rejected_requests_total", {"model": "a", "reason": "overloaded", "_team": 'v"1'}
        )
        == 1
    )
    for value in ("2", "a\0b"):
        metrics.models()[0].tags = (("_team", value),)
        assert set(labels_of("a")) == {value}


def test_counter_without_a_total_suffix_has_type_unknown() -> None:
    assert prometheus_type(Declaration("nv_inference_count", "counter", (), "Rows.")) == "unknown"
    assert prometheus_type(Declaration("runs_total", "counter", (), "Runs.")) == "counter"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.25, "0.25"), (1e-9, "1e-09"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_numbers_are_formatted_as_go_parses_them(value: float, text: str) -> None:
    assert spell_number(value) == text


TIMING = Timing(1_000_000, 1_100_000, 1_300_000, 1_600_000, 2_000_000, 2_500_000)
MODELS = 200


class World:
    """A registry with all metrics that a server exposes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        TritonMetrics(self.registry, self.metrics)
        self.text_format = TextFormat(self.registry)

    def model(self, name: str) -> ModelMetrics:
        model = self.metrics.model(name, "1")
        model.set_state("ready")
        model.load_ns = 1_500_000_000
        decisions = {f"decision_{number}": number for number in range(11)}
        latency_s = {2**power: 0.001 for power in range(7)}
        model.batching.connect(lambda: BatchingNumbers(1, decisions, latency_s, 0.001, 1))
        model.saturation = lambda: 0.5
        return model

    def read(self) -> str:
        return self.text_format.write().decode()


def contents(text: str) -> dict[str, object]:
    """The type, help and samples of each family in any order, without those of the process, which change constantly."""
    return {
        family.name: (
            family.type,
            family.documentation,
            sorted((sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples),
        )
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }


def written_by_library(registry: CollectorRegistry) -> str:
    """The library knows no counters without the suffix ``_total``, as Triton has them."""
    return generate_latest(registry).decode().replace(" untyped\n", " counter\n")


def use(model: ModelMetrics) -> None:
    model.observe_success("http", TIMING, 3)
    model.observe_failure("grpc", ErrorKind.DEADLINE, 7)
    model.observe_batch(3, 1_000, BatchResult((), 3_000, 8_000, 5_000), 9_000)


def test_text_equals_that_of_the_librarys_writer_before_and_after_changes() -> None:
    world = World()
    models = [world.model(name) for name in ("a", "b", 'quoted "name" \\ and\nlines')]
    for used in ([], models[:2], models[:1], models[2:]):
        for model in used:
            use(model)
        assert contents(world.read()) == contents(written_by_library(world.registry))
    world.metrics.forget("a", "1")
    assert contents(world.read()) == contents(written_by_library(world.registry))
    assert 'model="a"' not in world.read()


def test_process_metrics_are_included() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    assert "\nprocess_resident_memory_bytes " in TextFormat(registry).write().decode()


def test_removed_series_leave_no_samples() -> None:
    world = World()
    use(world.model("a"))
    world.read()
    world.metrics.forget("a", "1")
    world.read()
    assert not [key for key in world.text_format._heads if "a" in key[1]]
    assert not world.text_format._histograms


@pytest.mark.parametrize(("is_used", "max_lines"), [(False, 50), (True, 250)])
def test_scrape_of_many_models_is_bounded_in_time_and_size(is_used: bool, max_lines: int) -> None:
    world = World()
    models = [world.model(f"model-{number}") for number in range(MODELS)]
    if is_used:
        for model in models:
            use(model)
    world.read()

    own_s = min(spent_s(world.read) for _ in range(3))
    library_s = spent_s(lambda: generate_latest(world.registry))

    assert world.read().count("\n") < max_lines * MODELS
    # The ratio is 0.1 for used models (``loadtests/metrics_cost.py``), on fast and on slow machines.
    assert own_s < 0.5 * library_s


def spent_s(work: Callable[[], object]) -> float:
    """Processor time of this thread in seconds."""
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s
