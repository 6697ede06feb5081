"""The time budget of a search, with the time that it reserves for the end."""

from collections.abc import Callable
from typing import Final

_SAFETY: Final = 1.15
_SMOOTHING: Final = 0.3
_MAX_LATER: Final = 0.25
"""Largest share of the time limit that is reserved for other versions."""
CONFIRMING_PAIRS: Final = 6
"""Minimum number of pairs of a confirmation with two processes of each configuration. Memory layout differs between
processes."""
MIN_PAIRS: Final = 4
"""The same minimum with one process of each configuration."""
MAX_PAIRS: Final = 12
"""Maximum number of pairs of a confirmation."""
KEEPING_PAIRS: Final = 4
"""Pairs for which time is reserved, for each decision to leave out and for each other version."""


class Budget:
    """Learns how long it takes to open a configuration and to measure a pair of rounds.

    The estimates rise at once and fall slowly, because other work on the machine usually lasts.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """``clock`` counts seconds; the budget begins now."""
        self._clock = clock
        self._began_s = clock()
        self._limit_s: Final = limit_s
        self._open_s = 3.0
        self._pair_s = 2.5
        self.later = 0
        """Versions to measure after the end of the search, for which time is reserved."""

    @property
    def spent_s(self) -> float:
        """Time since the beginning."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Time until the limit, without the time that is reserved for other versions. Negative after that."""
        later_s = self.cost_s(1 + self.later, self.later * KEEPING_PAIRS) if self.later else 0.0
        return self._limit_s - self.spent_s - min(later_s, _MAX_LATER * self._limit_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left for another pair."""
        return self.left_s < self._pair_s

    def is_mostly_spent(self, share: float) -> bool:
        """Whether this share of the time limit is over."""
        return self.spent_s > share * self._limit_s

    def opened(self, seconds: float) -> None:
        """A configuration was opened."""
        self._open_s = max(seconds, self._open_s + _SMOOTHING * (seconds - self._open_s))

    def measured(self, seconds: float) -> None:
        """A pair of rounds was measured."""
        self._pair_s = max(seconds, self._pair_s + _SMOOTHING * (seconds - self._pair_s))

    def cost_s(self, processes: int, pairs: int) -> float:
        """Time for a number of new processes and pairs, with some reserve."""
        return _SAFETY * (processes * self._open_s + pairs * self._pair_s)

    def end_s(self, decisions: int) -> float:
        """Time for the end of a search: the confirmation of the winner, and comparisons without each of its decisions.

        At most 40 % of the time limit. In a short search, the end has fewer processes and pairs.
        """
        leave_out = self.cost_s(1 + decisions, decisions * KEEPING_PAIRS) if decisions > 1 else 0.0
        return min(leave_out + self.cost_s(4, CONFIRMING_PAIRS), 0.4 * self._limit_s)

    def confirmation(self, wanted: int) -> tuple[int, int]:
        """Plan a confirmation: the number of new processes of each configuration, and of pairs with each process.

        The pairs get three quarters of the time that is left. The rest is for the search of constant rates.
        """
        processes = 2 if self.left_s >= self.cost_s(4, CONFIRMING_PAIRS) else 1
        pairs = (0.75 * self.left_s - self.cost_s(2 * processes, 0)) / self.cost_s(0, processes)
        least = -(-CONFIRMING_PAIRS // processes) if processes > 1 else MIN_PAIRS
        return processes, int(max(least, min(min(wanted, MAX_PAIRS) // processes, pairs)))
