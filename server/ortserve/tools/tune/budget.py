"""The time of a search, and what must be left of it for the end."""

from collections.abc import Callable
from typing import Final

_SAFETY: Final = 1.25
_SMOOTHING: Final = 0.3
CONFIRMING_PAIRS: Final = 6
"""At least, in two pairs of new processes."""
KEEPING_PAIRS: Final = 3
"""To see what one decision gains."""


class Budget:
    """Learns how long it takes to open a configuration and to measure a pair of rounds."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """``clock`` counts seconds; the budget begins now."""
        self._clock = clock
        self._began_s = clock()
        self._limit_s: Final = limit_s
        self._open_s = 3.0
        self._pair_s = 2.5

    @property
    def spent_s(self) -> float:
        """Since it began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Until its end; negative afterwards."""
        return self._limit_s - self.spent_s

    def opened(self, seconds: float) -> None:
        """A configuration was opened."""
        self._open_s += _SMOOTHING * (seconds - self._open_s)

    def measured(self, seconds: float, pairs: int) -> None:
        """Pairs of rounds were measured."""
        if pairs:
            self._pair_s += _SMOOTHING * (seconds / pairs - self._pair_s)

    def cost_s(self, processes: int, pairs: int) -> float:
        """What so many new processes and pairs take, with some reserve."""
        return _SAFETY * (processes * self._open_s + pairs * self._pair_s)

    def end_s(self, decisions: int) -> float:
        """What the end of a search takes, with a winner of so many decisions: confirmations, and each left out."""
        confirm = self.cost_s(4, CONFIRMING_PAIRS)
        return confirm if decisions <= 1 else 2 * confirm + decisions * self.cost_s(1, KEEPING_PAIRS)

    def pairs_within(self, processes: int, least: int, most: int, share: float = 0.5) -> int:
        """An even number of pairs for a share of the time that is left."""
        pairs = (share * self.left_s - self.cost_s(processes, 0)) / self.cost_s(0, 1)
        return int(max(least, min(most, pairs)) // 2 * 2)
