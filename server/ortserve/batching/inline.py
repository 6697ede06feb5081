"""Which runs are short enough for the event loop itself.

A thread hop costs more than a very short run, and everything that became readable in one loop turn can ride in one
batch without it. The price is that the loop stands still meanwhile, so both a run and a turn are bounded.
"""

import asyncio
from typing import Final

from ortserve.core.activity import LoopActivity

MAX_RUN_NS: Final = 200_000
MAX_TURN_NS: Final = 500_000.0


class InlineBudget:
    """Time that runs may take of one loop turn, shared by all models of the loop. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, activity: LoopActivity | None = None) -> None:
        """``activity`` is where runs on the loop show themselves; None where nothing watches the loop."""
        self._loop = loop
        self.activity: Final = activity or LoopActivity()
        self._left_ns = MAX_TURN_NS

    def take(self, predicted_ns: float | None) -> bool:
        """Whether a run predicted to take so long may run on the loop in this turn."""
        if predicted_ns is None or not predicted_ns <= MAX_RUN_NS or predicted_ns > self._left_ns:
            return False
        if self._left_ns == MAX_TURN_NS:
            self._loop.call_soon(self._next_turn)
        self._left_ns -= predicted_ns
        return True

    def _next_turn(self) -> None:
        self._left_ns = MAX_TURN_NS
