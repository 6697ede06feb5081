"""Times of many requests in little memory: counts by size, each class 9 % longer than the one before."""

import math
from typing import Final

_CLASSES_PER_OCTAVE: Final = 8
_CLASSES: Final = 35 * _CLASSES_PER_OCTAVE
"""Up to 2^35 ns, half a minute; longer times count as that."""


class Latencies:
    """Times in nanoseconds, and their percentiles with an error of at most 9 %."""

    def __init__(self) -> None:
        self._counts = [0] * _CLASSES
        self.count = 0

    def add(self, ns: int) -> None:
        self._counts[min(_CLASSES - 1, int(math.log2(max(1, ns)) * _CLASSES_PER_OCTAVE))] += 1
        self.count += 1

    def percentile_s(self, percent: float) -> float | None:
        """The time within which ``percent`` of the requests ended, in seconds; None without any."""
        left = math.ceil(self.count * percent / 100)
        if not left:
            return None
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return float(2.0 ** ((number + 1) / _CLASSES_PER_OCTAVE) / 1e9)
        raise AssertionError
