"""Load reports, with clocks that the tests set."""

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.service.load_meter import LoadMeter
from ortserve.telemetry.metrics import Metrics

SECOND_NS = 1_000_000_000
TIMING = Timing(1, 2, 3, 4, 5, 6)


@dataclass
class Stage:
    """A server with four processors, a model with requests and one without."""

    now_ns: int = 0
    process_ns: int = 0
    loop_ns: int = 0
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))

    def __post_init__(self) -> None:
        self.model = self.metrics.model("m", "1")
        self.metrics.model("idle", "1").saturation = lambda: 9.0
        self.meter = LoadMeter(
            self.metrics,
            processors=4,
            clock=lambda: self.now_ns,
            process_clock=lambda: self.process_ns,
            loop_clock=lambda: self.loop_ns,
        )

    def pass_time(self, seconds: float, *, process: float = 0.0, loop: float = 0.0, answered: int = 0) -> None:
        """Advance the clocks, with some processor time and answered requests."""
        self.now_ns += round(seconds * SECOND_NS)
        self.process_ns += round(seconds * process * SECOND_NS)
        self.loop_ns += round(seconds * loop * SECOND_NS)
        for _ in range(answered):
            self.model.observe_success("http", TIMING, 1)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_first_report_is_the_mean_since_the_start(stage: Stage) -> None:
    stage.pass_time(2, process=3, loop=0.5, answered=10)
    stage.model.observe_failure("grpc", ErrorKind.OVERLOADED, 1)
    stage.model.observe_failure("grpc", ErrorKind.INVALID_INPUT, 1)
    stage.metrics.observe_unknown("http", ErrorKind.NOT_READY, 1)
    report = stage.meter.report()
    assert report.cpu_utilization == pytest.approx(0.75)
    assert report.application_utilization == pytest.approx(0.5)
    assert report.rps_fractional == pytest.approx(13 / 2)
    assert report.eps == pytest.approx(2 / 2)


def test_utilization_is_the_maximum_of_the_models_and_the_loop(stage: Stage) -> None:
    stage.model.saturation = lambda: 1.25
    stage.pass_time(1, loop=0.5, answered=1)
    assert stage.meter.report().application_utilization == pytest.approx(1.25)
    assert stage.meter.report().named_metrics == {"saturation": 1.25, "event_loop_utilization": pytest.approx(0.5)}
    stage.model.saturation = lambda: None  # unknown
    stage.pass_time(1, loop=0.5)
    assert stage.meter.report().application_utilization == pytest.approx(0.5)


def test_saturation_of_models_that_share_a_device_is_added_up(stage: Stage) -> None:
    other = stage.metrics.model("other", "1")
    other.saturation = lambda: 0.5
    stage.model.saturation = lambda: 0.25
    other.observe_success("http", TIMING, 1)
    stage.pass_time(1, answered=1)
    assert stage.meter.report().named_metrics["saturation"] == pytest.approx(0.75)


def test_a_report_is_the_same_until_it_is_half_a_second_old(stage: Stage) -> None:
    stage.pass_time(1, loop=1.0)
    first = stage.meter.report()
    stage.pass_time(0.4)
    assert stage.meter.report() is first
    stage.pass_time(0.1)
    assert stage.meter.report() is not first


def test_old_load_is_forgotten_within_seconds(stage: Stage) -> None:
    stage.pass_time(1, loop=1.0, answered=100)
    before = stage.meter.report()
    for _ in range(20):
        stage.pass_time(1)
        after = stage.meter.report()
    assert before.application_utilization == pytest.approx(1)
    assert after.application_utilization < 0.05
    assert after.rps_fractional < 5


def test_rates_are_not_negative_after_an_unload(stage: Stage) -> None:
    stage.pass_time(1, answered=100)
    stage.meter.report()
    stage.metrics.forget("m", "1")
    stage.pass_time(100)
    assert 0 <= stage.meter.report().rps_fractional < 1
