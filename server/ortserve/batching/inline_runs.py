"""Decides which runs are short enough for the event loop.

A switch between threads takes longer than a very short run, and a run on the loop batches all requests that became
readable in the same turn. But it blocks the loop. So the predicted time of each run, and of all runs in one turn, is
limited. Predictions depend on the number of rows only, so only models whose run time that number bounds may use the
loop (``engine/bounded_time``).
"""

import asyncio
import logging
from typing import Final

from ortserve.batching.latency import LatencyModel
from ortserve.clock import Clock
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import NOTHING, RUN, LoopActivity

logger: Final = logging.getLogger(__name__)

MAX_RUN_NS: Final = 200_000
"""Maximum predicted time of a run on the loop."""
MAX_TURN_NS: Final = 500_000.0
"""Maximum predicted time of all runs in one turn of the loop."""
MAX_OVERRUN_NS: Final = 2_000_000
"""A run on the loop that takes longer bars its model from the loop: either predictions do not hold for the model, or
something interrupted the run."""
TRIAL_RUNS: Final = 1000
"""Number of consecutive short runs on a worker after which a barred model may use the loop again. So at most one run in
a thousand exceeds the limit, and the 99th percentile does not change. The number doubles with each further bar,
unless more runs than the last bar took went well on the loop before: a model whose runs are slow at times is barred
ever longer, and interruptions days apart do not add up."""


class InlineBudget:
    """The time that runs of all models together may take in one turn of the event loop. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, activity: LoopActivity | None = None) -> None:
        """``activity`` shows the watchdog which run the loop executes; None without a watchdog."""
        self._loop = loop
        self.activity: Final = activity or LoopActivity()
        self._left_ns = MAX_TURN_NS

    def take(self, predicted_ns: float | None) -> bool:
        """Reserve time for a run of the predicted time. Returns False if the turn has too little left."""
        if predicted_ns is None or predicted_ns > min(MAX_RUN_NS, self._left_ns):
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
        """Allow short runs on the loop, unless ``barred_because`` is set.

        Args:
            budget: Shared by all models of the loop.
            name: Name and version of the model, such as ``digits/1``, for the log.
            barred_because: Why no run may use the loop; empty if runs may.
            cpu_clock: CPU time of the calling thread in nanoseconds, if a run does all its work on that thread;
                otherwise None. Elapsed time also includes other processes and threads.
        """
        self._budget = budget
        self._name = name
        self._cpu_clock = cpu_clock
        self._began_cpu_ns = 0
        self._trials = 0  # the number that the last bar took
        self._trials_left = 0
        self._runs = 0  # on the loop since that bar
        self.barred_because = barred_because
        """Why no run uses the loop; empty while runs may."""

    def begin(self, run_latency: LatencyModel, rows: int) -> float | None:
        """Begin a run of ``rows`` rows. Returns its predicted time; None if it may not use the loop in this turn."""
        predicted_ns = None if self.barred_because else run_latency.predict_ns(rows)
        if not self._budget.take(predicted_ns):
            return None
        activity = self._budget.activity
        activity.model = self._name
        activity.step = RUN
        if self._cpu_clock is not None:
            self._began_cpu_ns = self._cpu_clock()
        return predicted_ns

    def end(self, elapsed_ns: int) -> bool:
        """End a run. Returns whether it exceeded the limit, which bars the model from the loop.

        The host of a virtual machine may interrupt a run at any time, and not every machine excludes the interruption
        from the CPU time of the run. So the bar ends after enough short runs on a worker (``observe_on_worker``).
        """
        self._budget.activity.step = NOTHING
        self._runs += 1
        if elapsed_ns <= MAX_OVERRUN_NS:
            return False
        taken_ns = elapsed_ns
        if self._cpu_clock is not None:
            taken_ns = min(elapsed_ns, self._cpu_clock() - self._began_cpu_ns)
        if taken_ns <= MAX_OVERRUN_NS:
            return False
        self._trials = 2 * self._trials if self._runs <= self._trials else TRIAL_RUNS
        self._trials_left = self._trials
        self._runs = 0
        self.barred_because = (
            f"a run took {taken_ns / 1e6:.1f} ms of the event loop, over the limit of {MAX_OVERRUN_NS / 1e6:.0f} ms; "
            f"{self._trials_left:,} short runs in a row on a worker lift this"
        )
        model, _, version = self._name.rpartition("/")
        event = "model is barred from the event loop"
        log_event(logger, logging.WARNING, event, model=model, version=version, reason=self.barred_because)
        return True

    def observe_on_worker(self, run_latency: LatencyModel, rows: int, elapsed_ns: float) -> None:
        """Count a run of ``rows`` rows on a worker towards the end of the bar, if such runs could use the loop."""
        if not self._trials_left:
            return
        predicted_ns = run_latency.predict_ns(rows)
        if predicted_ns is None or predicted_ns > MAX_RUN_NS:
            return
        if elapsed_ns > MAX_OVERRUN_NS:
            self._trials_left = self._trials
            return
        self._trials_left -= 1
        if not self._trials_left:
            self.barred_because = ""
            model, _, version = self._name.rpartition("/")
            log_event(logger, logging.INFO, "model may use the event loop again", model=model, version=version)
