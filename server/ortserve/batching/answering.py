"""The last stretch of a request's way: from its outputs being there to its answer being written.

The batcher does not do that work, but deadlines are for answers. What it takes is measured on the loop, of a batch now
and then, and taken off the time that a request has.
"""

from typing import Final

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 2
"""About 1.6 standard deviations, where times are distributed normally: all but one of twenty are shorter."""
_EVERY_NS: Final = 2_000_000
"""Batches are looked at that far apart: a look takes the loop a turn of its own."""

_MOST: Final = 10
"""What was seen counts as no more than so many times the mean: one long pause must not turn the next hundred away."""


class AnswerTime:
    """How long the answers of a batch take to be encoded and written: a mean, and how far from it they usually are.

    Both are exponentially weighted, as TCP estimates round trips (RFC 6298, section 2). Loop thread only.
    """

    __slots__ = ("_deviation_ns", "_due_ns", "_mean_ns")

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._deviation_ns = 0.0
        self._due_ns = 0

    @property
    def high_ns(self) -> float:
        """Nearly all batches are answered in so many nanoseconds; 0 before the first."""
        return self._mean_ns + _DEVIATIONS * self._deviation_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether the answers of a batch are to be measured whose outputs are there now."""
        return now_ns >= self._due_ns

    def observe(self, computed_ns: int, now_ns: int) -> None:
        """Learn from a batch: when its outputs came to the loop, and that all its answers are written now."""
        self._due_ns = now_ns + _EVERY_NS
        ns = now_ns - computed_ns
        if not self._mean_ns:
            self._mean_ns = float(ns)
            return
        off_ns = min(ns, _MOST * self._mean_ns) - self._mean_ns
        self._mean_ns += _MEAN_GAIN * off_ns
        self._deviation_ns += _DEVIATION_GAIN * (abs(off_ns) - self._deviation_ns)

    def share_ns(self, left_ns: int) -> int:
        """How much of the time until a deadline is for the answer.

        At least half of it stays for the queue and the run: a measure gone wrong costs some, and never refuses
        everybody.
        """
        return int(min(self.high_ns, max(0, left_ns) / 2))
