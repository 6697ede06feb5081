"""Which runs are short enough for the event loop itself.

A thread hop costs more than a very short run, and everything that became readable in one loop turn can ride in one
batch without it. The price is that the loop stands still meanwhile, so both a run and a turn are bounded: by what is
predicted, which rests on the number of rows, for models whose runs that number bounds (``engine/bounded_time``).
"""

import asyncio
import logging
from typing import Final

from ortserve.clock import Clock
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import NOTHING, RUN, LoopActivity

logger: Final = logging.getLogger(__name__)

MAX_RUN_NS: Final = 200_000
MAX_TURN_NS: Final = 500_000.0
MAX_OVERRUN_NS: Final = 2_000_000
"""A run on the loop that takes longer shows that predictions do not hold for the model."""


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


class InlineRuns:
    """The runs of one model version on the event loop. Loop thread only."""

    def __init__(
        self, budget: InlineBudget, name: str = "", *, barred_because: str = "", cpu_clock: Clock | None = None
    ) -> None:
        """Bar the model from the loop where there is a reason to.

        Args:
            budget: Shared by all models of the loop.
            name: Of the model, for the log.
            barred_because: Why no run may happen on the loop; empty where runs may.
            cpu_clock: CPU time of the calling thread in nanoseconds, where all work of a run happens on that thread;
                else None. An elapsed time also counts what other processes and threads did meanwhile.
        """
        self._budget = budget
        self._name = name
        self._cpu_clock = cpu_clock
        self.barred_because = barred_because
        """Why no run happens on the loop; empty while runs may. Never empty again once it is not."""

    def take(self, predicted_ns: float | None) -> bool:
        """Whether a run predicted to take so long may run on the loop in this turn."""
        return not self.barred_because and self._budget.take(predicted_ns)

    def begin(self) -> int:
        """A run begins. Returns the CPU time before it, for ``end``."""
        activity = self._budget.activity
        activity.model = self._name
        activity.step = RUN
        return 0 if self._cpu_clock is None else self._cpu_clock()

    def end(self, began_cpu_ns: int, elapsed_ns: int) -> bool:
        """Note a run that took so long on the loop. Returns whether it bars all others of the model."""
        self._budget.activity.step = NOTHING
        if elapsed_ns <= MAX_OVERRUN_NS:
            return False
        taken_ns = elapsed_ns
        if self._cpu_clock is not None:
            taken_ns = min(elapsed_ns, self._cpu_clock() - began_cpu_ns)
        if taken_ns <= MAX_OVERRUN_NS:
            return False
        self.barred_because = (
            f"a run took {taken_ns / 1e6:.1f} ms of the event loop, over the limit of {MAX_OVERRUN_NS / 1e6:.0f} ms"
        )
        log_event(
            logger, logging.WARNING, "model is barred from the event loop", model=self._name, reason=self.barred_because
        )
        return True
