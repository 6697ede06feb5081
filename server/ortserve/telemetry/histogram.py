"""Counting what is observed, as each request does several times."""

from bisect import bisect_left
from collections.abc import Sequence


class HistogramSeries:
    """Counts of one label set. ``bounds`` and observed values are integers of the same unit: nanoseconds or rows."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        # The first bound that is not less: Prometheus' buckets include their upper bound.
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def observe_each(series: Sequence[HistogramSeries], values: Sequence[int]) -> None:
    """Observe one value in each series, in a single call: requests pass here once per phase."""
    for one, value in zip(series, values, strict=True):
        one.counts[bisect_left(one.bounds, value)] += 1
        one.total += value
