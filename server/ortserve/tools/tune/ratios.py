"""Decisions about noisy figures: ratios of two configurations from pairs of measurements in turn. Pure."""

import math
from collections.abc import Sequence
from typing import Final

from ortserve.tools.bench.statistics import Estimate

_T: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5th percentile of Student's distribution for 1 to 15 degrees of freedom."""
_Z: Final = 1.645
"""Of the normal distribution, the 95th percentile: chances of a search are weighed one-sidedly."""

LEAST_GAIN: Final = 0.02
"""Smaller gains are not worth a key in a file: placement in memory changes from process to process by as much."""
LEAST_SPREAD: Final = 0.01
"""Of the logarithm of a pair's ratio: a few quiet pairs must not make the search believe that there is no noise."""
MOST_FLOOR: Final = 0.25
"""If the interval of a configuration against itself reaches farther than this, the machine is too noisy."""


def estimate_ratio(logs: Sequence[float]) -> Estimate:
    """The mean ratio and its 95 % interval, from logarithms of the ratio of each pair; at least one."""
    mean, spread = _moments(logs)
    if len(logs) < 2:
        return Estimate(math.exp(mean))
    degrees = len(logs) - 1
    reach = (_T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees) * spread / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def _moments(logs: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = sum(logs) / len(logs)
    return mean, math.sqrt(sum((log - mean) ** 2 for log in logs) / max(1, len(logs) - 1))


class Noise:
    """How much the logarithms of pairs vary: learned from all comparisons of a search."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._degrees = 0

    def learn(self, logs: Sequence[float]) -> None:
        """Add the pairs of one comparison."""
        if len(logs) > 1:
            self._squares += (len(logs) - 1) * _moments(logs)[1] ** 2
            self._degrees += len(logs) - 1

    @property
    def spread(self) -> float:
        """Standard deviation of one pair; before anything is learned, that of a busy machine."""
        return max(LEAST_SPREAD, math.sqrt(self._squares / self._degrees) if self._degrees else 0.2)

    def bounds(self, logs: Sequence[float]) -> tuple[float, float]:
        """Between which logarithms the ratio of a comparison is, with 95 % confidence to each side."""
        reach = _Z * self.spread / math.sqrt(len(logs))
        mean = sum(logs) / len(logs)
        return mean - reach, mean + reach


def is_hopeless(logs: Sequence[float], noise: Noise) -> bool:
    """Whether a trial can end early, because it is no gain even if it was unlucky so far."""
    return noise.bounds(logs)[1] < math.log1p(LEAST_GAIN)


def is_confirmed(ratio: Estimate) -> bool:
    """Whether a ratio of fresh pairs is a gain beyond the noise."""
    return ratio.value >= 1 + LEAST_GAIN and ratio.low is not None and ratio.low > 1


def is_worth_keeping(logs: Sequence[float], noise: Noise) -> bool:
    """Whether a configuration with a change is better than without it, more likely than not by more than the noise."""
    mean = sum(logs) / len(logs)
    return mean > math.log1p(LEAST_GAIN / 2) and mean > noise.spread / math.sqrt(len(logs))


def is_too_noisy(floor: Estimate) -> bool:
    """Whether the interval of a configuration against itself is too wide to decide anything but large gains."""
    return floor.low is None or floor.high is None or math.log(floor.high / floor.low) / 2 > math.log1p(MOST_FLOOR)
