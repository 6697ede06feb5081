"""Choosing who rides next: parts of failed batches first, then the class whose head is due first."""

from collections import deque
from collections.abc import Iterable

from ortserve.batching.exits import Exits
from ortserve.batching.isolation import Group, separate
from ortserve.batching.latency import known_ns
from ortserve.batching.learned import Decisions
from ortserve.batching.planner import BatchPolicy, Take, WaitUntil, may_wait, plan_batch
from ortserve.batching.queue import RiderQueue, ShapeClass
from ortserve.batching.riders import settle
from ortserve.errors import ServeError


class Boarding:
    """Those who wait for one batcher, in its queue or to run again; true while there are any. Loop thread only."""

    def __init__(self, queue: RiderQueue, exits: Exits, decisions: Decisions) -> None:
        """All three are the batcher's own."""
        self._queue = queue
        self._exits = exits
        self._decisions = decisions
        self._again: deque[Group] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue or self._again)

    def run_again(self, groups: Iterable[Group]) -> None:
        """Have these ride before everybody who is still in the queue."""
        self._again.extend(groups)

    def next_group(self, policy: BatchPolicy, now_ns: int) -> Group | WaitUntil | None:
        """Take those who ride now that an instance is free, and see off who is too late for it.

        Returns:
            None if nobody waits, and until when all who do had better wait otherwise.
        """
        while self._again:
            group = self._exits.leave_search(self._again.popleft(), now_ns)
            if policy.lone_rows is not None and len(group.riders) > 1:
                self._again.extendleft(reversed(separate(group)))
            elif group.riders:
                return group
        earliest: WaitUntil | None = None
        for shape_class in self._queue.waiting():
            self._exits.turn_away(shape_class, policy, now_ns)
            if not shape_class.riders:
                continue
            if not shape_class.takes_one_row and not shape_class.runs_alone:
                (first,) = self._queue.take(shape_class, 1)
                return Group(shape_class, (first,), first.rows, tries_one_row=True)
            plan = self._plan(shape_class, policy, now_ns)
            if isinstance(plan, Take):
                if plan.given_up:
                    self._exits.give_up(shape_class, plan.given_up)
                return Group(shape_class, self._queue.take(shape_class, plan.count), plan.rows)
            if earliest is None or plan.due_ns < earliest.due_ns:
                earliest = plan
        return earliest

    def refuse_all(self, error: ServeError) -> None:
        """Nobody who waits will ever ride."""
        self._exits.refuse_all(error)
        while self._again:
            for rider in self._again.popleft().riders:
                settle(rider.promise, error=error)

    def _plan(self, shape_class: ShapeClass, policy: BatchPolicy, now_ns: int) -> Take | WaitUntil:
        plan = plan_batch(shape_class.riders, policy, shape_class.batch_latency, now_ns)
        if isinstance(plan, WaitUntil):
            self._decisions.delayed += 1
            return plan
        return self._wait_for_echo(shape_class, plan, policy, now_ns) if policy.waits_for_echo else plan

    def _wait_for_echo(self, shape_class: ShapeClass, plan: Take, policy: BatchPolicy, now_ns: int) -> Take | WaitUntil:
        """Put a batch off for a moment, where its class's callers usually come back that soon."""
        latency, echo, max_rows = shape_class.batch_latency, shape_class.echo, policy.max_rows
        if not echo.is_pending(now_ns):
            return plan
        line = latency.line(max_rows)
        if line is None:
            return plan
        if plan.count == len(shape_class.riders):  # else it is full
            until_ns = echo.wait_until(plan.rows, max_rows, line, now_ns)
            if until_ns is not None and until_ns > now_ns:
                batch_ns = known_ns(latency.predict_ns(policy.bucket_for(plan.rows)))
                if may_wait(shape_class.riders, plan.count, batch_ns, until_ns):
                    self._decisions.echo_waits += echo.begin_wait(plan.rows, now_ns)
                    return WaitUntil(until_ns)
        echo.end_wait(plan.rows, line, now_ns)
        return plan
