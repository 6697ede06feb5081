"""Percentiles and rates with confidence intervals, also for correlated samples. Pure.

Latencies are not normally distributed, and near saturation successive latencies are correlated. The ends of an interval
of a percentile are therefore order statistics, which are valid for any distribution. The interval is widened if the
means of successive blocks vary more than those of independent samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

import numpy as np

_T: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5th percentile of Student's distribution for 1 to 15 degrees of freedom."""
_Z: Final = 1.96
_BLOCKS: Final = (10, 20)
"""Numbers of blocks of successive samples whose means are compared."""


def student(degrees: int) -> float:
    """The 97.5th percentile of Student's distribution. Beyond the table, the error is at most 0.01."""
    return _T[degrees - 1] if degrees <= len(_T) else _Z + 2.4 / degrees


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % confidence interval.

    Attributes:
        value: The estimate itself.
        low: Lower end of the interval; null if there are too few samples for an interval.
        high: Upper end of the interval.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """As a ratio with its interval: ``1.32 (1.21 to 1.44)``."""
        interval = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f}{interval}"

    @property
    def is_significant(self) -> bool:
        """Whether a ratio differs from 1 beyond the noise."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def relative(self) -> float:
        """Half the interval as a share of the value; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


def least_samples(share: float) -> int:
    """The number of samples that a 95 % interval of a percentile needs: 368 for p99."""
    return math.ceil(math.log(0.025) / math.log(max(share, 1 - share)))


def estimate_percentile(values: np.ndarray, share: float) -> Estimate:
    """Estimate a percentile of samples that are in the order of time. ``share`` is 0.99 for p99.

    Raises:
        ValueError: There are no samples.
    """
    count = len(values)
    if not count:
        raise ValueError("no samples")
    ordered = np.sort(values)
    rank = math.ceil(count * share - 1e-6)  # the product of floats may lie just above the rank
    value = float(ordered[min(count, max(1, rank)) - 1])
    reach = _spread(values > value, share) * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - reach), math.ceil(count * share + reach) + 1
    if count < least_samples(share) or low < 1 or high > count:
        return Estimate(value)
    return Estimate(value, float(ordered[low - 1]), float(ordered[high - 1]))


def _spread(is_above: np.ndarray, share: float) -> float:
    """Half the width of the interval, in standard errors of independent samples."""
    widest = _Z
    for blocks in _BLOCKS:
        size = len(is_above) // blocks
        if size < 10:
            continue
        means = is_above[: size * blocks].reshape(blocks, size).mean(axis=1)
        ratio = float(means.var(ddof=1)) * size / (share * (1 - share))
        if ratio > 1:
            widest = max(widest, student(blocks - 1) * math.sqrt(ratio))
    return widest


def estimate_rate(times_s: np.ndarray, seconds: float) -> Estimate:
    """Events per second from time 0 to ``seconds``. The interval comes from the counts in 20 equal parts."""
    blocks = _BLOCKS[-1]
    counts, _ = np.histogram(times_s, blocks, (0, seconds))
    rate = float(counts.sum()) / seconds
    if counts.sum() < blocks:
        return Estimate(rate)
    reach = student(blocks - 1) * float(counts.std(ddof=1)) * math.sqrt(blocks) / seconds
    return Estimate(rate, max(0.0, rate - reach), rate + reach)


def estimate_ratio(logs: Sequence[float]) -> Estimate:
    """The geometric mean of ratios and its 95 % interval, from the logarithms of at least one ratio."""
    mean = fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(mean))
    reach = student(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def compare(first: Estimate, second: Estimate) -> Estimate:
    """The second of two independent estimates of positive values, divided by the first.

    The ratio has an interval if both have one. It is NaN if the first value is 0.
    """
    if first.value <= 0:
        return Estimate(math.nan)
    ratio = second.value / first.value
    if not (first.low and first.high and second.low and second.high):
        return Estimate(ratio)
    # The squared errors of the logarithms add up. At the lower end, the second is too high and the first too low.
    down = math.hypot(math.log(second.value / second.low), math.log(first.high / first.value))
    up = math.hypot(math.log(second.high / second.value), math.log(first.value / first.low))
    return Estimate(ratio, ratio * math.exp(-down), ratio * math.exp(up))


def next_check(count: int) -> int:
    """The number of samples at which to look again. Frequent looks would find narrow intervals by chance."""
    return math.ceil(count * 1.5)


def histogram(values: np.ndarray, bins: int = 60) -> tuple[list[float], list[int]]:
    """The edges of bins, which grow by a constant factor, and their counts; both are empty without samples."""
    values = values[values > 0]
    if not len(values):
        return [], []
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, max(high, low * 1.01), bins + 1)
    edges[0], edges[-1] = low, max(high, edges[-1])
    counts, _ = np.histogram(values, edges)
    return edges.tolist(), counts.tolist()
