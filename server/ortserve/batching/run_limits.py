"""Time limits of runs on worker threads, watched by one timer for all runs of a batcher.

A run that never ends would occupy its instance and its threads, and never answer its requests. A run over its limit is
terminated; if it has not ended a grace time later, its instance is abandoned. A run whose requests were all cancelled
is terminated earlier.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ortserve.batching.groups import RequestGroup, fail_group
from ortserve.batching.instances import Instances
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.shared_threads import Share
from ortserve.batching.statistics import Decisions
from ortserve.batching.timers import LoopTimer
from ortserve.clock import Clock
from ortserve.core.batch import Batch, Runner
from ortserve.core.inflight import CANCELLED, InflightRequest
from ortserve.errors import RunTimeoutError
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_NS_PER_S: Final = 1_000_000_000
MIN_LIMIT_NS: Final = 60 * _NS_PER_S
"""Minimum time limit of runs with a predicted time. Most runs end in a thousandth of it."""
UNKNOWN_LIMIT_NS: Final = 600 * _NS_PER_S
"""Time limit of runs without a prediction, such as the first of a shape."""
_MULTIPLE: Final = 20
"""Time limit as a multiple of the predicted time: far more than other work on the machine explains."""
MIN_LATE_RUN_NS: Final = 1 * _NS_PER_S
"""Minimum time of a run before it is terminated because all its deadlines have passed or all its requests were
cancelled. Most runs end by then, and the latency model learns their times."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Time limits of the runs of one model.

    Attributes:
        timeout_ns: The configured limit; None to derive it from the predicted time.
        grace_ns: An instance is abandoned if a terminated run has not ended after this time.
    """

    timeout_ns: int | None = None
    grace_ns: int = 5 * _NS_PER_S

    def limit_ns(self, predicted_ns: float) -> float:
        """The time limit of a run. ``predicted_ns`` is 0 if its time is unknown."""
        if self.timeout_ns is not None:
            return float(self.timeout_ns)
        return max(MIN_LIMIT_NS, _MULTIPLE * predicted_ns) if predicted_ns else float(UNKNOWN_LIMIT_NS)


def latest_deadline_ns(group: RequestGroup) -> float:
    """When the last deadline of a group passes; infinite if a request has none. Cancelled requests do not count."""
    latest_ns = 0
    for request in group.requests:
        if request.state == CANCELLED:
            continue
        if request.finish_by_ns is None:
            return math.inf
        latest_ns = max(latest_ns, request.finish_by_ns)
    return float(latest_ns)


class Run:
    """A run on a worker. It is terminated at ``due_ns``, or abandoned if it already ``is_overdue``."""

    __slots__ = (
        "batch",
        "begins_ns",
        "due_ns",
        "group",
        "is_overdue",
        "limit_ns",
        "predicted_ns",
        "runner",
        "taken_ns",
    )

    def __init__(
        self,
        runner: Runner,
        group: RequestGroup,
        batch: Batch,
        predicted_ns: float,
        taken_ns: int,
        begins_ns: float,
        limit_ns: float,
    ) -> None:
        self.runner = runner
        self.group = group
        self.batch = batch
        self.predicted_ns = predicted_ns
        self.taken_ns = taken_ns
        self.begins_ns = begins_ns
        self.limit_ns = limit_ns
        self.due_ns = 0.0
        self.is_overdue = False
        self.begin(begins_ns)

    def begin(self, begins_ns: float) -> None:
        """Set when the run begins, its limit, and the limit that the deadlines of its requests set."""
        self.begins_ns = begins_ns
        self.due_ns = begins_ns + self.limit_ns
        self.end_by(latest_deadline_ns(self.group))

    def end_by(self, time_ns: float) -> None:
        """Terminate the run at ``time_ns``, if that is earlier, but not before ``MIN_LATE_RUN_NS``."""
        self.due_ns = min(self.due_ns, max(time_ns, self.begins_ns + MIN_LATE_RUN_NS))


@dataclass(frozen=True, slots=True)
class RunEvents:
    """Callbacks for runs over their limits and lost devices, called on the loop.

    Attributes:
        on_timeout: Called for each run that is terminated.
        on_abandoned: Called for each instance that is abandoned because its run does not end, with the instance, the
            reason, and whether it was the last instance of the model.
        on_lost: Called with the reason when the devices of all instances are lost and all requests have failed.
    """

    on_timeout: Callable[[], object]
    on_abandoned: Callable[[Runner, str, bool], object]
    on_lost: Callable[[str], object]


NO_CALLBACKS: Final = RunEvents(lambda: None, lambda runner, reason, is_last: None, lambda reason: None)
"""Callbacks without effect."""


class RunWatch:
    """Terminates runs of one batcher over their limits, and abandons instances whose runs do not end.

    Loop thread only.
    """

    def __init__(
        self,
        name: str,
        limits: RunLimits,
        instances: Instances,
        share: Share,
        scheduler: Scheduler,
        decisions: Decisions,
        events: RunEvents,
        fail_all: Callable[[str], object],
        wake: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        """Watch no run yet.

        Args:
            name: Name of the model, for errors and the log.
            limits: Time limits of its runs.
            instances: The batcher's own, as are ``share``, ``scheduler`` and ``decisions``.
            share: Releases the threads of abandoned runs.
            scheduler: Schedules groups again that waited behind an abandoned run.
            decisions: Counts terminated and abandoned runs.
            events: Called when runs exceed their limits.
            fail_all: Called with the reason when no instance is left.
            wake: Called when requests may run on another instance.
            loop: The event loop of the calling thread.
            clock: Monotonic nanoseconds.
        """
        self._name = name
        self._limits = limits
        self._instances = instances
        self._share = share
        self._scheduler = scheduler
        self._decisions = decisions
        self._events = events
        self._fail_all = fail_all
        self._wake = wake
        self._clock = clock
        self._timer = LoopTimer(loop, self._check)
        self._fires_ns = math.inf
        """When the timer fires (monotonic); infinite if it is not set."""
        self._runs: dict[RequestGroup, Run] = {}

    def begin(
        self,
        runner: Runner,
        group: RequestGroup,
        batch: Batch,
        predicted_ns: float,
        begins_ns: float,
        taken_ns: int,
    ) -> None:
        """Watch a run that was chosen at ``taken_ns`` and begins at ``begins_ns``, after the previous run there."""
        run = Run(runner, group, batch, predicted_ns, taken_ns, begins_ns, self._limits.limit_ns(predicted_ns))
        self._runs[group] = run
        if run.due_ns < self._fires_ns:
            self._set(run.due_ns, taken_ns)

    def on_cancelled(self, request: InflightRequest) -> None:
        """Terminate the run of a cancelled request at the last deadline of the others, not early if one has none."""
        for run in self._runs.values():
            if request in run.group.requests and not run.is_overdue:
                run.end_by(latest_deadline_ns(run.group))
                if run.due_ns < self._fires_ns:
                    self._set(run.due_ns, self._clock())
                return

    def end(self, group: RequestGroup, runner: Runner) -> Run | None:
        """Stop watching a run that has ended. Returns None if it was abandoned before."""
        run = self._runs.get(group)
        if run is None or run.runner is not runner:  # it runs on another instance
            return None
        del self._runs[group]
        following = self._first_of(runner)
        if following is not None:
            now_ns = self._clock()
            begins_ns = max(following.begins_ns, float(now_ns))
            if following.is_overdue:
                has_callers = any(request.state != CANCELLED for request in following.group.requests)
                following.due_ns = begins_ns + self._limits.grace_ns + (0 if has_callers else following.limit_ns)
            else:
                following.begin(begins_ns)
            if following.due_ns < self._fires_ns:
                self._set(following.due_ns, now_ns)
        return run

    def _first_of(self, runner: Runner) -> Run | None:
        """The run of an instance that began first; the other one waits behind it."""
        for run in self._runs.values():
            if run.runner is runner:
                return run
        return None

    def close(self) -> None:
        """Stop the timer."""
        self._timer.close()

    def _check(self) -> None:
        """Terminate the runs that are due, and abandon those that did not end when they were terminated."""
        self._fires_ns = math.inf
        now_ns = self._clock()
        for run in list(self._runs.values()):
            if run.due_ns > now_ns or run.group not in self._runs:  # abandoned together with a run before it
                continue
            late_ns = latest_deadline_ns(run.group)
            waits = self._first_of(run.runner) is not run
            if run.is_overdue:
                if waits:
                    run.due_ns = math.inf  # it cannot end before the run before it, which may take its own limit
                else:
                    self._abandon(run, now_ns)
            elif late_ns > now_ns and waits:
                run.due_ns = late_ns  # its own limit counts from the end of the run before it
            else:
                run.is_overdue = True
                run.due_ns = float(now_ns + self._limits.grace_ns)
                cancelled = [request.rows for request in run.group.requests if request.state == CANCELLED]
                self._decisions.wasted_rows += sum(cancelled)
                if len(cancelled) == len(run.group.requests):
                    self._terminate_cancelled(run, now_ns)
                else:
                    self._terminate(run, now_ns)
        due_ns = min([run.due_ns for run in self._runs.values()], default=math.inf)
        if due_ns < math.inf:
            self._set(due_ns, now_ns)

    def _terminate(self, run: Run, now_ns: int) -> None:
        """Fail the requests of a run over its limit, and terminate it."""
        elapsed_ns = now_ns - run.taken_ns
        is_limit = elapsed_ns >= run.limit_ns
        why = f"its limit is {run.limit_ns / 1e9:g} s" if is_limit else "all its deadlines have passed"
        message = f"a run of model '{self._name}' was terminated after {elapsed_ns / 1e9:.1f} s: {why}"
        self._decisions.run_timeouts += 1
        self._events.on_timeout()
        log_event(logger, logging.WARNING, "run is over its time limit", model=self._name, reason=message)
        fail_group(run.group, run.taken_ns, RunTimeoutError(message))
        run.runner.terminate(run.batch)

    def _terminate_cancelled(self, run: Run, now_ns: int) -> None:
        """Terminate a run for which no request waits. Its instance is not abandoned before the limit of the run.

        The model is not at fault, so no metric counts it as overdue.
        """
        run.due_ns = max(run.due_ns, run.begins_ns + run.limit_ns + self._limits.grace_ns)
        elapsed_s = (now_ns - run.taken_ns) / 1e9
        reason = f"all its requests were cancelled; it took {elapsed_s:.1f} s"
        log_event(logger, logging.INFO, "run is terminated", model=self._name, reason=reason)
        run.runner.terminate(run.batch)

    def _abandon(self, run: Run, now_ns: int) -> None:
        """Abandon an instance whose run does not end. A group that waited behind that run is scheduled again."""
        reason = f"a run has not ended for {(now_ns - run.taken_ns) / 1e9:.1f} s, although it was terminated"
        runner = run.runner
        runner.abandon()
        self._instances.abandon(runner)
        for other in [other for other in self._runs.values() if other.runner is runner]:
            self._runs.pop(other.group)
            self._share.end()
            if other.is_overdue:
                self._decisions.abandoned += 1
            else:
                self._scheduler.run_again([other.group])
        is_last = not self._instances.count
        if is_last:
            self._fail_all(reason)
        self._events.on_abandoned(runner, reason, is_last)
        self._wake()

    def _set(self, due_ns: float, now_ns: int) -> None:
        self._fires_ns = due_ns
        self._timer.set(math.ceil(due_ns), now_ns)
