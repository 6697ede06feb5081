"""How long runs on workers may last, and what is overdue: by one timer for all runs of a batcher.

A run that never ends would hold its instance, its threads and its callers for ever. It is asked to end once it is over
its limit; an instance on which it has not ended a grace time later is given up.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ortserve.batching.alarm import LoopAlarm
from ortserve.batching.boarding import Boarding
from ortserve.batching.failing import fail
from ortserve.batching.instances import Instances
from ortserve.batching.isolation import Group
from ortserve.batching.latency import known_ns
from ortserve.batching.learned import Decisions
from ortserve.batching.shared_threads import Share
from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.errors import RunTimeoutError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_NS_PER_S: Final = 1_000_000_000
LEAST_LIMIT_NS: Final = 60 * _NS_PER_S
"""Of runs whose time is known. Most are over in a thousandth of it."""
UNKNOWN_LIMIT_NS: Final = 600 * _NS_PER_S
"""Of runs of which nothing is known, such as the first of a shape."""
_MULTIPLE: Final = 20
"""Of the predicted time: far beyond what other work on the machine explains."""
LEAST_LATE_RUN_NS: Final = 1 * _NS_PER_S
"""A run whose callers are all past their deadlines goes on for so long: most end soon, and teach the latency model."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How long runs of one model may last.

    Attributes:
        timeout_ns: As configured; None to derive it from the predicted time.
        grace_ns: In which a run that is asked to end does so, or its instance is given up.
    """

    timeout_ns: int | None = None
    grace_ns: int = 5 * _NS_PER_S

    def limit_ns(self, predicted_ns: float | None) -> float:
        """How long a run that is predicted to take so long may last."""
        if self.timeout_ns is not None:
            return float(self.timeout_ns)
        predicted = known_ns(predicted_ns)
        return max(LEAST_LIMIT_NS, _MULTIPLE * predicted) if predicted else float(UNKNOWN_LIMIT_NS)


def latest_deadline_ns(group: Group) -> float:
    """When the last deadline of a group passes; infinite where a rider has none."""
    return max([math.inf if rider.finish_by_ns is None else float(rider.finish_by_ns) for rider in group.riders])


class Run:
    """A run on a worker. ``due_ns`` is when to act on it: to end it, or, once it ``is_overdue``, to give it up."""

    __slots__ = ("due_ns", "group", "is_overdue", "limit_ns", "runner", "taken_ns")

    def __init__(self, runner: Runner, group: Group, taken_ns: int, limit_ns: float, due_ns: float) -> None:
        self.runner = runner
        self.group = group
        self.taken_ns = taken_ns
        self.limit_ns = limit_ns
        self.due_ns = due_ns
        self.is_overdue = False


@dataclass(frozen=True, slots=True)
class RunEvents:
    """What is called for runs over their limits, on the loop.

    Attributes:
        on_timeout: For each run that is asked to end.
        on_given_up: For each instance that is given up, as its run does not end, with the reason, and whether it is the
            last of the model, after which nothing is run any more.
    """

    on_timeout: Callable[[], object]
    on_given_up: Callable[[Runner, str, bool], object]


class RunWatch:
    """Watches over the runs of one batcher's workers, ends those over their limits, and gives up what does not end.

    Loop thread only.
    """

    def __init__(
        self,
        name: str,
        limits: RunLimits,
        instances: Instances,
        share: Share,
        boarding: Boarding,
        decisions: Decisions,
        events: RunEvents | None,
        refuse_all: Callable[[str], object],
        wake: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        """Watch no run yet.

        Args:
            name: Of the model, for errors and the log.
            limits: Of its runs.
            instances: The batcher's own, as are ``share``, ``boarding`` and ``decisions``.
            share: See there.
            boarding: See there.
            decisions: See there.
            events: See there; None for none.
            refuse_all: Called with the reason, once no instance is left.
            wake: Called once there may be something to run elsewhere.
            loop: Of the calling thread.
            clock: Monotonic nanoseconds.
        """
        self._name = name
        self._limits = limits
        self._instances = instances
        self._share = share
        self._boarding = boarding
        self._decisions = decisions
        self._events = events
        self._refuse_all = refuse_all
        self._wake = wake
        self._clock = clock
        self._alarm = LoopAlarm(loop, self._ring)
        self._rings_ns = math.inf
        self._runs: dict[Group, Run] = {}

    def begin(self, runner: Runner, group: Group, predicted_ns: float | None, begins_ns: float, taken_ns: int) -> None:
        """Watch a run that is chosen now and begins at ``begins_ns``, behind another one of its instance."""
        limit_ns = self._limits.limit_ns(predicted_ns)
        due_ns = begins_ns + limit_ns
        late_ns = latest_deadline_ns(group)
        if late_ns < due_ns:
            due_ns = min(due_ns, max(late_ns, begins_ns + LEAST_LATE_RUN_NS))
        self._runs[group] = Run(runner, group, taken_ns, limit_ns, due_ns)
        if due_ns < self._rings_ns:
            self._set(due_ns, taken_ns)

    def end(self, group: Group, runner: Runner) -> Run | None:
        """Forget a run that has ended; None where it was given up before."""
        run = self._runs.get(group)
        if run is None or run.runner is not runner:  # it runs elsewhere
            return None
        return self._runs.pop(group)

    def close(self) -> None:
        """Never act again."""
        self._alarm.close()

    def _ring(self) -> None:
        self._rings_ns = math.inf
        now_ns = self._clock()
        for run in list(self._runs.values()):
            if run.due_ns > now_ns or run.group not in self._runs:  # given up together with one before it
                continue
            if run.is_overdue:
                self._give_up(run, now_ns)
            else:
                run.is_overdue = True
                run.due_ns = float(now_ns + self._limits.grace_ns)
                self._end(run, now_ns)
        if self._runs:
            self._set(min([run.due_ns for run in self._runs.values()]), now_ns)

    def _end(self, run: Run, now_ns: int) -> None:
        """Answer the riders of a run over its limit, and have it end."""
        elapsed_ns = now_ns - run.taken_ns
        is_limit = elapsed_ns >= run.limit_ns
        why = f"its limit is {run.limit_ns / 1e9:g} s" if is_limit else "all its callers are past their deadlines"
        message = f"a run of model '{self._name}' was ended after {elapsed_ns / 1e9:.1f} s: {why}"
        self._decisions.run_timeouts += 1
        if self._events is not None:
            self._events.on_timeout()
        log_event(logger, logging.WARNING, "run is over its time limit", model=self._name, reason=message)
        fail(run.group, run.taken_ns, RunTimeoutError(message))
        run.runner.terminate()

    def _give_up(self, run: Run, now_ns: int) -> None:
        """Use an instance no more whose run does not end. What it was to run next is run elsewhere."""
        reason = f"a run has not ended for {(now_ns - run.taken_ns) / 1e9:.1f} s, although it was asked to"
        runner = run.runner
        runner.abandon()
        self._instances.give_up(runner)
        for other in [other for other in self._runs.values() if other.runner is runner]:
            self._runs.pop(other.group)
            self._share.end()
            if other.is_overdue:
                self._decisions.abandoned += 1
            else:
                self._boarding.run_again([other.group])
        is_last = not self._instances.count
        if is_last:
            self._refuse_all(reason)
        if self._events is not None:
            self._events.on_given_up(runner, reason, is_last)
        self._wake()

    def _set(self, due_ns: float, now_ns: int) -> None:
        self._rings_ns = due_ns
        self._alarm.set(math.ceil(due_ns), now_ns)
