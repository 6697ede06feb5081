"""Percentiles, intervals and comparisons, against distributions with known results."""

import math

import numpy as np
import pytest

from ortserve.tools.statistics import (
    Estimate,
    compare,
    estimate_percentile,
    estimate_rate,
    histogram,
    least_samples,
)

TRIALS = 300
Z = {0.5: 0.0, 0.9: 1.2816, 0.99: 2.3263}


def correlated(random: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Lognormal latencies whose logarithms are an autoregressive process."""
    steps = random.normal(size=count + 200) * math.sqrt(1 - correlation**2)
    values = np.empty_like(steps)
    last = 0.0
    for index, step in enumerate(steps):
        last = correlation * last + step
        values[index] = last
    return np.exp(0.5 * values[200:])


def queue(random: np.random.Generator, count: int, load: float) -> np.ndarray:
    """Times in a queue of one worker with random arrivals and services of mean 1 (Lindley's recursion)."""
    services = random.exponential(1, count + 2000)
    gaps = random.exponential(1 / load, count + 2000)
    steps = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    return np.asarray((steps - np.minimum.accumulate(steps) + services)[2000:])


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_interval_of_independent_samples_covers_the_truth_and_is_narrow(share: float) -> None:
    random = np.random.default_rng(1)
    truth = math.exp(0.5 * Z[share])

    found = [estimate_percentile(np.exp(0.5 * random.normal(size=2000)), share) for _ in range(TRIALS)]

    covered = np.mean([one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None])
    assert 0.93 <= covered <= 1
    assert np.median([one.relative for one in found]) < {0.5: 0.04, 0.9: 0.06, 0.99: 0.16}[share]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_interval_of_correlated_samples_covers_the_truth(share: float) -> None:
    random = np.random.default_rng(2)
    truth = math.exp(0.5 * Z[share])

    found = [estimate_percentile(correlated(random, 5000, 0.9), share) for _ in range(100)]
    naive = 1.96 * math.sqrt(5000 * share * (1 - share))

    covered = np.mean([one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None])
    assert covered >= 0.9
    # The interval for independent samples misses often, so the check above is meaningful.
    missed = 0
    for _ in range(100):
        ordered = np.sort(correlated(random, 5000, 0.9))
        missed += not ordered[int(5000 * share - naive)] <= truth <= ordered[int(5000 * share + naive)]
    assert missed > 20


def test_interval_holds_for_a_queue_near_saturation() -> None:
    random = np.random.default_rng(3)
    truth = -math.log(1 - 0.95) / (1 - 0.8)

    found = [estimate_percentile(queue(random, 50_000, 0.8), 0.95) for _ in range(100)]

    covered = [one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None]
    assert len(covered) >= 95
    assert np.mean(covered) >= 0.9


def test_too_few_samples_have_no_interval() -> None:
    assert (least_samples(0.99), least_samples(0.999), least_samples(0.5)) == (368, 3688, 6)
    values = np.arange(1, 368, dtype=float)

    found = estimate_percentile(values, 0.99)

    assert (found.value, found.low, found.high, found.relative) == (364.0, None, None, math.inf)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (0.999, 100.0), (0.001, 1.0)])
def test_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert estimate_percentile(np.random.default_rng(0).permutation(np.arange(1.0, 101.0)), share).value == value


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        estimate_percentile(np.empty(0), 0.5)


def test_interval_of_a_rate_covers_it() -> None:
    random = np.random.default_rng(4)
    found = [estimate_rate(np.cumsum(random.exponential(1 / 100, 2000)), 10) for _ in range(TRIALS)]

    covered = np.mean([one.low <= 100 <= one.high for one in found if one.low is not None and one.high is not None])
    assert 0.91 <= covered <= 0.99


def test_comparison_separates_noise_from_differences() -> None:
    random = np.random.default_rng(7)

    def p90(factor: float) -> Estimate:
        return estimate_percentile(factor * np.exp(0.5 * random.normal(size=2000)), 0.9)

    same = [compare(p90(1), p90(1)).is_significant for _ in range(200)]
    other = [compare(p90(1), p90(1.2)) for _ in range(50)]

    assert np.mean(same) < 0.08
    assert all(one.is_significant for one in other)
    assert np.mean([one.low <= 1.2 <= one.high for one in other if one.low and one.high]) > 0.9


def test_comparison_without_intervals_decides_nothing() -> None:
    found = compare(Estimate(1.0), Estimate(100.0, 99.0, 101.0))

    assert (found.value, found.is_significant) == (100.0, False)
    assert math.isnan(compare(Estimate(0.0), Estimate(1.0)).value)


def test_histogram_counts_every_sample() -> None:
    values = np.random.default_rng(8).exponential(1, 1000)

    edges, counts = histogram(values)

    assert sum(counts) == 1000
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    assert histogram(np.empty(0)) == ([], [])
    assert sum(histogram(np.array([2.0, 2.0]))[1]) == 2
