"""Decisions from noisy pairs of measurements."""

import numpy as np
import pytest

from ortserve.tools.statistics import Estimate, estimate_ratio
from ortserve.tools.tune.ratios import Noise, is_confirmed, is_hopeless, is_too_noisy


@pytest.mark.parametrize("count", [2, 4, 6, 12, 20])
def test_intervals_hold_the_ratio_in_95_percent(count: int) -> None:
    random = np.random.default_rng(count)
    hits = 0
    for _ in range(2000):
        ratio = estimate_ratio(list(random.normal(np.log(1.3), 0.1, count)))
        assert ratio.low is not None
        assert ratio.high is not None
        hits += ratio.low <= 1.3 <= ratio.high
    assert 0.935 <= hits / 2000 <= 0.965


def test_only_gains_beyond_the_noise_and_of_some_size_are_confirmed() -> None:
    assert is_confirmed(Estimate(1.1, 1.01, 1.2))
    assert not is_confirmed(Estimate(1.1, 0.99, 1.2))
    assert not is_confirmed(Estimate(1.01, 1.005, 1.015))
    assert not is_confirmed(Estimate(1.5))


def test_noise_decides_when_a_trial_is_hopeless() -> None:
    quiet, busy = Noise(), Noise()
    quiet.learn([0.0, 0.01, -0.01])
    busy.learn([0.0, 0.4, -0.4])
    assert is_hopeless([-0.05], quiet)
    assert not is_hopeless([-0.05], busy)
    assert is_hopeless([-0.6], busy)
    assert is_confirmed(quiet.estimate([0.05, 0.05]))
    assert not is_confirmed(busy.estimate([0.05, 0.05]))
    assert is_too_noisy(busy)
    assert not is_too_noisy(quiet)
