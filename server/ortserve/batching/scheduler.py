"""Choose the requests of the next batch: parts of failed batches first, then the shape class that is due first."""

from collections import deque
from collections.abc import Iterable

from ortserve.batching.eviction import AT_COST_OF_OTHERS, Evictions
from ortserve.batching.failures import RequestGroup, separate
from ortserve.batching.planner import BatchPolicy, Take, WaitUntil, may_wait, plan_batch
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.statistics import Decisions
from ortserve.errors import ServeError


class Scheduler:
    """The requests that wait for one batcher, in its queue or to run again; true while there are any.

    Loop thread only.
    """

    def __init__(self, queue: RequestQueue, evictions: Evictions, decisions: Decisions) -> None:
        """All three are the batcher's own."""
        self._queue = queue
        self._evictions = evictions
        self._decisions = decisions
        self._again: deque[RequestGroup] = deque()

    def __bool__(self) -> bool:
        return self._queue.rows > 0 or bool(self._again)

    def run_again(self, groups: Iterable[RequestGroup]) -> None:
        """Schedule groups before everything that is queued."""
        self._again.extend(groups)

    def next_group(self, policy: BatchPolicy, now_ns: int) -> RequestGroup | WaitUntil | None:
        """Dequeue the requests to run now that an instance is free, and evict those that are too late.

        Returns:
            None if nothing is queued, and a time if all that is queued had better wait until then.
        """
        while self._again:
            group = self._evictions.evict_from_search(self._again.popleft(), now_ns)
            if policy.lone_rows is not None and len(group.requests) > 1:
                self._again.extendleft(reversed(separate(group)))
            elif group.requests:
                return group
        earliest: WaitUntil | None = None
        for shape_class in self._queue.waiting():
            self._evictions.evict_unfit(shape_class, policy, now_ns)
            if not shape_class.requests:
                continue
            if not shape_class.accepts_one_row and not shape_class.runs_alone:
                (first,) = self._queue.take(shape_class, 1)
                return RequestGroup(shape_class, (first,), first.rows, tries_one_row=True)
            plan = self._plan(shape_class, policy, now_ns)
            if isinstance(plan, Take):
                evicted = self._queue.take(shape_class, plan.evicted) if plan.evicted else ()
                group = RequestGroup(shape_class, self._queue.take(shape_class, plan.count), plan.rows)
                # Only now: the callback of a failed request may enqueue or cancel others.
                for request in evicted:
                    self._evictions.fail_late(request, AT_COST_OF_OTHERS)
                return group
            if earliest is None or plan.due_ns < earliest.due_ns:
                earliest = plan
        return earliest

    def fail_all(self, error: ServeError) -> None:
        """Fail everything that waits."""
        self._evictions.fail_all(error)
        while self._again:
            for request in self._again.popleft().requests:
                request.fail(error)

    def _plan(self, shape_class: ShapeClass, policy: BatchPolicy, now_ns: int) -> Take | WaitUntil:
        plan = plan_batch(shape_class.requests, policy, shape_class.batch_latency, now_ns)
        if isinstance(plan, WaitUntil):
            self._decisions.delayed += 1
            return plan
        if policy.closed_loop_wait and shape_class.closed_loop.is_pending(now_ns):
            return self._wait_for_closed_loop(shape_class, plan, policy, now_ns)
        return plan

    def _wait_for_closed_loop(
        self, shape_class: ShapeClass, plan: Take, policy: BatchPolicy, now_ns: int
    ) -> Take | WaitUntil:
        """Delay a batch for a moment if the class's callers usually send their next request that soon."""
        latency, closed_loop, max_rows = shape_class.batch_latency, shape_class.closed_loop, policy.max_rows
        line = latency.line(max_rows)
        if line is None:
            return plan
        if plan.count == len(shape_class.requests):  # otherwise the batch is full
            until_ns = closed_loop.wait_until(plan.rows, max_rows, line, now_ns)
            batch_ns = policy.batch_ns(plan.rows, latency)
            if (
                until_ns is not None
                and until_ns > now_ns
                and may_wait(shape_class.requests, plan.count, batch_ns, until_ns)
            ):
                self._decisions.closed_loop_waits += closed_loop.begin_wait(plan.rows, now_ns)
                return WaitUntil(until_ns)
        closed_loop.end_wait(plan.rows, line, now_ns)
        return plan
