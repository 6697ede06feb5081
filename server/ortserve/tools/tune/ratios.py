"""Decisions about noisy figures: ratios of two configurations from pairs of alternate measurements. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Final

from ortserve.tools.statistics import Estimate

_Z: Final = 1.96
"""The 97.5th percentile of the normal distribution."""
_Z_PRUNING: Final = 1.0
"""Standard errors for the early end of a trial, where time is worth more than certainty. A gain of 5 % is missed once
in eight times if pairs vary by 7 %."""

_LOOK_AFTER: Final = 4
"""Minimum number of pairs that can show that a decision is worth keeping."""
MIN_GAIN: Final = 0.02
"""Smaller gains are not worth a key in a file. Memory layout alone makes processes differ by as much."""
MIN_SPREAD: Final = 0.01
"""Minimum standard deviation of the logarithm of a pair's ratio: a few quiet pairs do not prove absence of noise."""
MAX_SPREAD: Final = 0.2
"""Standard deviation above which a machine is too noisy: six pairs prove only gains of more than about 20 %."""


class Noise:
    """The variation of the logarithms of pairs, learned from all comparisons of a search."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._degrees = 0

    def learn(self, logs: Sequence[float]) -> None:
        """Add the pairs of one comparison."""
        if len(logs) > 1:
            self._squares += (len(logs) - 1) * variance(logs)
            self._degrees += len(logs) - 1

    @property
    def spread(self) -> float:
        """Standard deviation of one pair. Until comparisons were learned, the one of a busy machine."""
        return max(MIN_SPREAD, math.sqrt(self._squares / self._degrees) if self._degrees else 0.2)

    def estimate(self, logs: Sequence[float]) -> Estimate:
        """The ratio of a comparison of few pairs, with a 95 % interval from the noise of all pairs."""
        low, high = self._around(logs, _Z)
        return Estimate(math.exp((low + high) / 2), math.exp(low), math.exp(high))

    def pairs_for(self, gain: float) -> int:
        """The number of pairs that can prove a gain of this size."""
        return math.ceil((2 * self.spread / gain) ** 2)

    def best_case(self, logs: Sequence[float]) -> float:
        """Upper bound of the logarithm of the ratio, in case that the pairs so far were unlucky."""
        return self._around(logs, _Z_PRUNING)[1]

    def _around(self, logs: Sequence[float], z: float) -> tuple[float, float]:
        reach = z * self.spread / math.sqrt(len(logs))
        return fmean(logs) - reach, fmean(logs) + reach


def is_hopeless(logs: Sequence[float], noise: Noise) -> bool:
    """Whether a trial can end early, because it is no gain even in the best case."""
    return noise.best_case(logs) < math.log1p(MIN_GAIN)


def is_confirmed(ratio: Estimate) -> bool:
    """Whether a ratio is a gain beyond the noise, and large enough to be worth a key."""
    return ratio.value >= 1 + MIN_GAIN and ratio.low is not None and ratio.low > 1


def is_decided(logs: Sequence[float], noise: Noise) -> bool:
    """Whether the pairs show that a decision is worth keeping, or that it is not.

    The first is only asked from ``_LOOK_AFTER`` pairs on. Asked after each pair, chance would keep too many decisions.
    """
    if len(logs) >= _LOOK_AFTER:
        return is_confirmed(noise.estimate(logs))
    return len(logs) > 1 and is_hopeless(logs, noise)


def is_too_noisy(noise: Noise) -> bool:
    """Whether pairs vary so much that a confirmation can only prove large gains."""
    return noise.spread > MAX_SPREAD
