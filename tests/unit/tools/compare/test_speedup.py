import pytest

from ortserve.tools.compare.command import missed_speedup
from ortserve.tools.speed import Speed
from ortserve.tools.statistics import Estimate


@pytest.mark.parametrize(
    ("ratio", "least", "missed"),
    [
        (Estimate(1.5, 1.4, 1.6), 1.2, False),
        (Estimate(1.1, 1.05, 1.15), 1.2, True),
        (Estimate(1.3, 0.9, 1.7), 1.2, True),  # within the noise
        (Estimate(1.3), 1.2, True),  # without an interval
        (Estimate(0.97, 0.9, 1.05), 1.0, False),  # no measurable loss
        (Estimate(0.97, 0.95, 0.99), 1.0, True),
        (Estimate(0.97, 0.95, 0.99), 0.9, False),
        (Estimate(0.5), 1.0, True),
    ],
)
def test_a_speed_up_counts_beyond_the_noise(ratio: Estimate, least: float, *, missed: bool) -> None:
    assert bool(missed_speedup(Speed(1.0, 1.0, 10, ratio, 0, 0.0), least)) == missed


def test_noise_is_named() -> None:
    (text,) = missed_speedup(Speed(1.0, 1.0, 10, Estimate(1.3, 0.9, 1.7), 0, 0.0), 1.2)
    assert text.startswith(
        "expected a speed-up of at least 1.20, got: 1.30 times as fast, no difference beyond the noise"
    )
