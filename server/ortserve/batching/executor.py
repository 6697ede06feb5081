"""Chooses where a run executes: on which instance, and on its worker thread or on the event loop.

A switch between threads takes longer than a very short run, and a run on the loop batches all requests that became
readable in the same turn. But it blocks the loop. So the predicted time of each run, and of all runs in one turn, is
limited. Predictions depend on the number of rows only, so only models whose run time that number bounds may use the
loop (``engine/bounded_time``).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from ortserve.batching.latency import LatencyModel
from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import NOTHING, RUN, LoopActivity

logger: Final = logging.getLogger(__name__)

MAX_RUN_NS: Final = 200_000
MAX_TURN_NS: Final = 500_000.0
MAX_OVERRUN_NS: Final = 2_000_000
"""A run on the loop that takes longer bars its model from the loop: either predictions do not hold for the model, or
something interrupted the run."""
TRIAL_RUNS: Final = 1000
"""Number of consecutive short runs on a worker after which a barred model may use the loop again; it doubles with each
further bar. So at most one run in a thousand exceeds the limit, and the 99th percentile does not change."""

_STAGING_GAIN: Final = 0.1
_LEND_MARGIN_NS: Final = 100_000
"""Additional lead time of a second batch beyond its predicted staging time: about the delay of timers and threads."""


class Instances:
    """Lends each instance to one run at a time, or to two if it stages one while it computes the other.

    The second run is chosen late, so that its rows are staged just before the predicted end of the first. Loop thread
    only.
    """

    def __init__(self, runners: Sequence[Runner], depth: int = 1) -> None:
        """Take over ``runners``, at least one, each of which takes ``depth`` batches at a time."""
        self.count = len(runners)
        self.free = list(runners)
        """Instances that may be lent now; the last one is lent next."""
        self.lends_ahead: Final = depth > 1
        self._depth = depth
        self._busy_until_ns: dict[Runner, float] = {}
        self._in_flight: dict[Runner, deque[float]] = {}
        """Predicted times of the runs of each instance, in order, if instances take several."""
        self._ended_ns: dict[Runner, int] = {}
        self._lost: set[Runner] = set()
        self._staging_ns = 0.0

    @property
    def are_busy(self) -> bool:
        """Whether any instance runs."""
        return bool(self._busy_until_ns)

    def lend_next(self, predicted_ns: float, now_ns: int) -> float:
        """Lend the last free instance to a run. ``predicted_ns`` is 0 if its time is unknown.

        Returns:
            When the run begins: now, or at the predicted end of the run before it.
        """
        runner = self.free.pop()
        begins_ns = float(now_ns)
        if self.lends_ahead:
            self._in_flight.setdefault(runner, deque()).append(predicted_ns)
            begins_ns = max(begins_ns, self._busy_until_ns.get(runner, 0.0))
        self._busy_until_ns[runner] = begins_ns + predicted_ns
        return begins_ns

    def give_back(self, runner: Runner, taken_ns: int, now_ns: int) -> int:
        """End the run that was chosen at ``taken_ns``. Returns when it began: then, or when the run before it ended."""
        if not self.lends_ahead:
            del self._busy_until_ns[runner]
            if runner not in self._lost:
                self.free.append(runner)
            return taken_ns
        began_ns = max(taken_ns, self._ended_ns.get(runner, 0))
        self._ended_ns[runner] = now_ns
        in_flight = self._in_flight[runner]
        in_flight.popleft()  # the wrong one for some microseconds, if a plain run overtook the copies of a bound one
        if in_flight:
            self._busy_until_ns[runner] = now_ns + in_flight[0]
            return began_ns  # not free yet: ``free_ahead`` frees it shortly before the end of its other run
        del self._busy_until_ns[runner]
        if runner not in self.free and runner not in self._lost:
            self.free.append(runner)
        return began_ns

    def observe_staging(self, staging_ns: int) -> None:
        """Learn the staging time of a batch: from the time it is chosen until its rows are staged."""
        self._staging_ns += _STAGING_GAIN * (staging_ns - self._staging_ns)

    def ahead_due_ns(self) -> int | None:
        """When the first instance may take a second batch, while no instance is free; None if no instance may."""
        dues = [self._busy_until_ns[runner] for runner in self._can_take_second()]
        return int(min(dues) - 1.5 * self._staging_ns - _LEND_MARGIN_NS) if dues else None

    def free_ahead(self) -> None:
        """Free the instance of ``ahead_due_ns`` for a second batch."""
        self.free.append(min(self._can_take_second(), key=self._busy_until_ns.__getitem__))

    def retire(self, runner: Runner) -> None:
        """Stop lending an instance, because its device is lost."""
        if runner not in self._lost:
            self._lost.add(runner)
            self.count -= 1
        if runner in self.free:
            self.free.remove(runner)

    def abandon(self, runner: Runner) -> None:
        """Stop lending an instance, and stop waiting for it, because its run does not end."""
        self.retire(runner)
        self._busy_until_ns.pop(runner, None)
        self._in_flight.pop(runner, None)

    def busy_ns(self, now_ns: int) -> float:
        """The predicted time until an instance is idle; 0 only if one is.

        A run that exceeds its prediction may end at any moment, but does not count as an idle instance.
        """
        if self.free and (not self.lends_ahead or any(not self._in_flight.get(runner) for runner in self.free)):
            return 0.0
        return max(1.0, min(self._busy_until_ns.values(), default=now_ns) - now_ns)

    def _can_take_second(self) -> list[Runner]:
        return [
            runner
            for runner, in_flight in self._in_flight.items()
            if 0 < len(in_flight) < self._depth and runner not in self.free and runner not in self._lost
        ]


class InlineBudget:
    """The time that runs of all models together may take in one turn of the event loop. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, activity: LoopActivity | None = None) -> None:
        """``activity`` shows the watchdog which run the loop executes; None without a watchdog."""
        self._loop = loop
        self.activity: Final = activity or LoopActivity()
        self._left_ns = MAX_TURN_NS

    def take(self, predicted_ns: float | None) -> bool:
        """Reserve time for a run of the predicted time. Returns False if the turn has too little left."""
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
        """Allow short runs on the loop, unless ``barred_because`` is set.

        Args:
            budget: Shared by all models of the loop.
            name: Name of the model, for the log.
            barred_because: Why no run may use the loop; empty if runs may.
            cpu_clock: CPU time of the calling thread in nanoseconds, if a run does all its work on that thread;
                otherwise None. Elapsed time also includes other processes and threads.
        """
        self._budget = budget
        self._name = name
        self._cpu_clock = cpu_clock
        self._began_cpu_ns = 0
        self._overruns = 0
        self._trials_left = 0
        self.barred_because = barred_because
        """Why no run uses the loop; empty while runs may."""

    def begin(self, run_latency: LatencyModel, rows: int) -> bool:
        """Begin a run of ``rows`` rows. Returns False if it may not use the loop in this turn."""
        if self.barred_because or not self._budget.take(run_latency.predict_ns(rows)):
            return False
        activity = self._budget.activity
        activity.model = self._name
        activity.step = RUN
        if self._cpu_clock is not None:
            self._began_cpu_ns = self._cpu_clock()
        return True

    def end(self, elapsed_ns: int) -> bool:
        """End a run. Returns whether it exceeded the limit, which bars the model from the loop.

        The host of a virtual machine may interrupt a run at any time, and not every machine excludes the interruption
        from the CPU time of the run. So the bar ends after enough short runs on a worker (``observe_on_worker``).
        """
        self._budget.activity.step = NOTHING
        if elapsed_ns <= MAX_OVERRUN_NS:
            return False
        taken_ns = elapsed_ns
        if self._cpu_clock is not None:
            taken_ns = min(elapsed_ns, self._cpu_clock() - self._began_cpu_ns)
        if taken_ns <= MAX_OVERRUN_NS:
            return False
        self._trials_left = TRIAL_RUNS << self._overruns
        self._overruns += 1
        self.barred_because = (
            f"a run took {taken_ns / 1e6:.1f} ms of the event loop, over the limit of {MAX_OVERRUN_NS / 1e6:.0f} ms; "
            f"{self._trials_left:,} short runs in a row on a worker lift this"
        )
        log_event(
            logger, logging.WARNING, "model is barred from the event loop", model=self._name, reason=self.barred_because
        )
        return True

    def observe_on_worker(self, run_latency: LatencyModel, rows: int, elapsed_ns: float) -> None:
        """Count a run of ``rows`` rows on a worker towards the end of the bar, if such runs could use the loop."""
        if not self._trials_left:
            return
        predicted_ns = run_latency.predict_ns(rows)
        if predicted_ns is None or predicted_ns > MAX_RUN_NS:
            return
        if elapsed_ns > MAX_OVERRUN_NS:
            self._trials_left = TRIAL_RUNS << (self._overruns - 1)
            return
        self._trials_left -= 1
        if not self._trials_left:
            self.barred_because = ""
            log_event(logger, logging.INFO, "model may use the event loop again", model=self._name)
