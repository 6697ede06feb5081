"""Chooses which waiting requests of one batcher run next, and evicts late and cancelled ones.

The pure functions of ``planner`` make the decisions.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ortserve.batching.closed_loop import ClosedLoopWait
from ortserve.batching.groups import RequestGroup, separate
from ortserve.batching.planner import (
    AT_COST_OF_OTHERS,
    PASSED_IN_SEARCH,
    BatchPolicy,
    Eviction,
    RunNow,
    WaitUntil,
    find_expired,
    find_late_in_search,
    find_unfit,
    may_wait,
    plan_batch,
)
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.statistics import Decisions
from ortserve.batching.timers import LoopTimer
from ortserve.clock import Clock
from ortserve.core.inflight import InflightRequest, settle_in_turns
from ortserve.errors import ErrorKind, ServeError

_MIN_SWEEP_INTERVAL_NS: Final = 1_000_000
"""Minimum time between two sweeps of the queue. Timers of the event loop have a resolution of a millisecond."""
_SWEEP_INTERVAL_PER_REQUEST_NS: Final = 1_000
"""Minimum time between two sweeps, per queued request. A sweep takes far less, so it uses little of the loop's time."""


class Scheduler:
    """The waiting requests of one batcher, queued or to run again after a failed batch; true while there are any.

    One timer serves the whole queue. It is set for the earliest time at which a request expires, and stays set when
    that request is dequeued in time, as nearly all are: the next sweep then finds nothing and sets it again. So
    deadlines cost almost nothing, and a request expires in time at any position in the queue. Loop thread only.
    """

    def __init__(
        self,
        queue: RequestQueue,
        decisions: Decisions,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_emptied: Callable[[], None],
    ) -> None:
        """Begin without requests.

        Args:
            queue: The batcher's own, as is ``decisions``.
            decisions: Counts requests that are evicted or cancelled.
            loop: The event loop of the calling thread.
            clock: Monotonic nanoseconds.
            on_emptied: Called when evicted requests have failed and no other waits.
        """
        self._queue = queue
        self._decisions = decisions
        self._clock = clock
        self._on_emptied = on_emptied
        self._failing = 0
        """The number of ``_fail_in_turns`` that have not ended."""
        self._again: deque[RequestGroup] = deque()
        self._is_repeated = False
        """Whether the last group of ``next_group`` had begun to run before."""
        self._timer = LoopTimer(loop, self._sweep)
        self._fires_ns = math.inf
        """When the timer fires (monotonic); infinite if it is not set."""
        self._no_sweep_before_ns = 0.0

    def __bool__(self) -> bool:
        return self._queue.rows > 0 or bool(self._again)

    @property
    def is_failing(self) -> bool:
        """Whether removed requests have not all failed yet."""
        return self._failing > 0

    def run_again(self, groups: Iterable[RequestGroup]) -> None:
        """Schedule groups before all queued requests."""
        self._again.extend(groups)

    def predict_ns(self, max_rows: int) -> float | None:
        """Predicted time of the run that is due first, of at most ``max_rows`` rows; None if unknown or without one."""
        if self._again:
            group = self._again[0]
            return group.shape_class.run_latency.predict_ns(group.rows)
        if not self._queue.waiting:
            return None
        first = self._queue.waiting[0]
        return first.run_latency.predict_ns(min(first.rows, max_rows))

    def put_back(self, group: RequestGroup) -> None:
        """Undo ``next_group`` for the group that it returned last and that cannot run yet."""
        if self._is_repeated:
            self._again.appendleft(group)
        else:  # without the requests that a callback of a late one has cancelled
            self._queue.put_back(group.shape_class, [request for request in group.requests if not request.is_settled])

    def next_group(self, policy: BatchPolicy, now_ns: int) -> RequestGroup | WaitUntil | None:
        """Dequeue the requests to run now that an instance is free, and evict those that are too late.

        Parts of failed batches run first, then the shape class that is due first.

        Returns:
            None if no request waits; a ``WaitUntil`` with the earliest time if every batch is delayed.
        """
        self._is_repeated = True
        while self._again:
            group = self._evict_from_search(self._again.popleft(), now_ns)
            if policy.lone_rows is not None and len(group.requests) > 1:
                self._again.extendleft(reversed(separate(group)))
            elif group.requests:
                return group
        self._is_repeated = False
        earliest: WaitUntil | None = None
        for shape_class in self._queue.waiting.copy():
            if shape_class.has_limits:
                unfit = find_unfit(shape_class.requests, policy, shape_class.batch_latency, now_ns)
                if unfit:
                    self._evict(shape_class, unfit)
            if not shape_class.requests:  # evicted, or cancelled by the callback of an evicted one
                continue
            if not shape_class.accepts_one_row and not shape_class.runs_alone:
                (first,) = self._queue.take(shape_class, 1)
                return RequestGroup(shape_class, (first,), first.rows, tries_one_row=True)
            plan = plan_batch(shape_class.requests, policy, shape_class.batch_latency, now_ns)
            closed_loop = shape_class.closed_loop
            if isinstance(plan, WaitUntil):
                self._decisions.delayed += 1
            elif closed_loop is not None and policy.closed_loop_wait and closed_loop.is_pending(now_ns):
                plan = self._wait_for_closed_loop(shape_class, closed_loop, plan, policy, now_ns)
            if isinstance(plan, RunNow):
                evicted = self._queue.take(shape_class, plan.evicted) if plan.evicted else ()
                group = RequestGroup(shape_class, self._queue.take(shape_class, plan.count), plan.rows)
                # Last, because the callback of a failed request may enqueue or cancel others.
                for request in evicted:
                    self._fail_late(request, AT_COST_OF_OTHERS)
                return group
            if earliest is None or plan.due_ns < earliest.due_ns:
                earliest = plan
        return earliest

    def sweep_after(self, by_ns: float, now_ns: int) -> None:
        """Sweep the queue just after ``by_ns``, unless the timer fires earlier or a sweep may not follow so soon."""
        fires_ns = max(by_ns + 1, self._no_sweep_before_ns)
        if fires_ns < self._fires_ns:
            self._fires_ns = fires_ns
            self._timer.set(int(fires_ns), now_ns)

    def on_cancelled(self, request: InflightRequest) -> bool:
        """Remove a cancelled request from the queue. Returns False if it is no longer there."""
        was_queued = self._queue.remove_one(request)
        self._decisions.left += was_queued
        return was_queued

    def fail_all(self, error: ServeError) -> None:
        """Fail all waiting requests, many of them over several turns of the loop."""
        requests: list[InflightRequest] = []
        for shape_class in self._queue.waiting.copy():
            requests += self._queue.take(shape_class, len(shape_class.requests))
        while self._again:
            requests += self._again.popleft().requests
        self._fail_in_turns(requests, lambda request: request.fail(error))

    def close(self) -> None:
        """Stop the timer."""
        self._timer.close()

    def _wait_for_closed_loop(
        self, shape_class: ShapeClass, closed_loop: ClosedLoopWait, plan: RunNow, policy: BatchPolicy, now_ns: int
    ) -> RunNow | WaitUntil:
        """Delay a batch briefly if callers of this class usually send their next requests soon after an answer."""
        latency, max_rows = shape_class.batch_latency, policy.max_rows
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

    def _evict_from_search(self, group: RequestGroup, now_ns: int) -> RequestGroup:
        """Fail the late requests of a group that runs again. Returns the group without these and cancelled ones."""
        for request in find_late_in_search(group.requests, now_ns):
            request.timing.taken_ns = now_ns  # a run was started, so metrics do not count a rejection
            self._fail_late(request, PASSED_IN_SEARCH)
        requests = [request for request in group.requests if not request.is_settled]
        if len(requests) == len(group.requests):
            return group
        return RequestGroup(group.shape_class, requests, sum([request.rows for request in requests]), group.search)

    def _sweep(self) -> None:
        """Evict all expired requests, and set the timer for the next one."""
        now_ns = self._clock()
        self._fires_ns = math.inf
        looked_at = 0
        next_ns = math.inf
        for shape_class in self._queue.waiting.copy():
            looked_at += len(shape_class.requests)
            found = find_expired(shape_class.requests, now_ns)
            if found.evictions:
                self._evict(shape_class, found.evictions)
            next_ns = min(next_ns, found.next_ns)
        interval_ns = max(_MIN_SWEEP_INTERVAL_NS, looked_at * _SWEEP_INTERVAL_PER_REQUEST_NS)
        self._no_sweep_before_ns = float(now_ns + interval_ns)
        self.sweep_after(next_ns, now_ns)

    def _evict(self, shape_class: ShapeClass, evictions: Sequence[Eviction]) -> None:
        """Remove late requests from the queue, and fail them."""
        requests = [eviction.request for eviction in evictions]
        self._queue.remove(shape_class, requests)
        reasons = {eviction.request: eviction.reason for eviction in evictions}
        self._fail_in_turns(requests, lambda request: self._fail_late(request, reasons[request]))

    def _fail_in_turns(self, requests: Sequence[InflightRequest], fail: Callable[[InflightRequest], object]) -> None:
        """Call ``fail`` with removed requests, many of them over several turns of the loop."""
        self._failing += 1
        settle_in_turns(requests, fail, self._on_all_failed)

    def _on_all_failed(self) -> None:
        self._failing -= 1
        if not self:
            self._on_emptied()

    def _fail_late(self, request: InflightRequest, reason: str) -> None:
        """Fail a late request that was removed from the queue. Its callback may enqueue or cancel others."""
        error = ServeError(ErrorKind.DEADLINE, f"Request timeout expired: {reason}")
        self._decisions.dropped_late += request.fail(error)
