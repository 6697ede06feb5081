"""Eviction from the queue: requests that can no longer be answered in time, and requests that were cancelled.

``find_*`` decide, as pure functions of the queued requests, the latency model and the time. ``Evictions`` removes the
requests that they find from the queue, fails and counts them. A cancelled request leaves the queue at once.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.batching.failures import RequestGroup
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.statistics import Decisions
from ortserve.batching.timers import LoopTimer
from ortserve.clock import Clock
from ortserve.core.inflight import InflightRequest
from ortserve.errors import ErrorKind, ServeError

TIMEOUT_PASSED: Final = "its timeout passed in the queue"
DEADLINE_PASSED: Final = "its deadline came too near for an answer in the queue"
"""The time that is left is what encoding and writing the answer takes, or nothing."""
OUT_OF_REACH: Final = "its deadline can no longer be met, after a wait in the queue"
AT_COST_OF_OTHERS: Final = f"{OUT_OF_REACH}, but at the cost of others"
PASSED_IN_SEARCH: Final = "its deadline came too near for an answer while its batch ran again"

_MIN_SWEEP_INTERVAL_NS: Final = 1_000_000
"""Between two sweeps of the queue. The timers of the event loop have whole milliseconds."""
_SWEEP_INTERVAL_PER_REQUEST_NS: Final = 1_000
"""Much longer than a sweep takes for a request, so that sweeps take a small share of the event loop's time."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A request that does not run, and the reason for its caller."""

    request: InflightRequest
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """The requests of a shape class whose time has passed, and when the next one's will."""

    evictions: Sequence[Eviction]
    next_ns: float


def find_unfit(
    requests: Iterable[InflightRequest], policy: BatchPolicy, latency: LatencyModel, now_ns: int
) -> list[Eviction]:
    """Find the requests that could be in the next batch and must not be.

    Args:
        requests: Of one shape class in queue order. The search ends with the requests of a full batch.
        policy: Gives the size of a full batch.
        latency: Of batches of this class.
        now_ns: Monotonic.
    """
    evictions: list[Eviction] = []
    rows = 0
    for request in requests:
        if request.finish_by_ns is not None or request.start_by_ns is not None:
            reason = _passed(request, now_ns) or _out_of_reach(request, policy, latency, now_ns)
            if reason is not None:
                evictions.append(Eviction(request, reason))
                continue
        rows += request.rows
        if rows >= policy.max_rows:
            break
    return evictions


def find_expired(requests: Iterable[InflightRequest], now_ns: int) -> Sweep:
    """Find the requests whose deadline or timeout has passed, at any position, and when the next one's will."""
    evictions: list[Eviction] = []
    next_ns = math.inf
    for request in requests:
        by_ns = request.expires_ns
        if by_ns is None:
            continue
        reason = _passed(request, now_ns)
        if reason is not None:
            evictions.append(Eviction(request, reason))
        elif by_ns < next_ns:
            next_ns = float(by_ns)
    return Sweep(evictions, next_ns)


def find_late_in_search(requests: Iterable[InflightRequest], now_ns: int) -> list[InflightRequest]:
    """Find the requests of a failed batch that are late by now. Their runs have begun, so only deadlines count."""
    return [
        request
        for request in requests
        if request.finish_by_ns is not None and request.finish_by_ns < now_ns and not request.is_settled
    ]


def _passed(request: InflightRequest, now_ns: int) -> str | None:
    if request.start_by_ns is not None and request.start_by_ns < now_ns:
        return TIMEOUT_PASSED
    if request.finish_by_ns is not None and request.finish_by_ns < now_ns:
        return DEADLINE_PASSED
    return None


def _out_of_reach(request: InflightRequest, policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> str | None:
    by_ns = request.finish_by_ns
    if by_ns is None or latency.observations < MIN_OBSERVATIONS:
        return None
    least_ns = policy.batch_ns(request.rows, latency)
    # Only if the wait made it late. An idle server admits a request even if the prediction is too long for it; such a
    # request must run, or a wrong prediction would never be corrected.
    return OUT_OF_REACH if by_ns - now_ns < least_ns <= by_ns - request.timing.queued_ns else None


class Evictions:
    """Evicts requests from the queue of one batcher. Loop thread only.

    One timer serves the whole queue. It is set for the first request that may expire and stays set when that request
    leaves in time, as nearly all do: then it fires in vain, and the sweep finds the next time. So a request with a
    deadline costs nothing, and a deadline that passes deep in the queue is answered when it passes.
    """

    def __init__(
        self, queue: RequestQueue, decisions: Decisions, loop: asyncio.AbstractEventLoop, clock: Clock
    ) -> None:
        """``queue`` and ``decisions`` are the batcher's own."""
        self._queue = queue
        self._decisions = decisions
        self._clock = clock
        self._timer = LoopTimer(loop, self._sweep)
        self._fires_ns = math.inf
        self._no_sweep_before_ns = 0.0

    def watch(self, request: InflightRequest, now_ns: int) -> None:
        """Evict a queued request when it expires."""
        expires_ns = request.expires_ns
        if expires_ns is not None:
            self._fire_after(expires_ns, now_ns)

    def on_cancelled(self, request: InflightRequest) -> None:
        """Remove a cancelled request, which may have left the queue already."""
        if self._queue.remove_one(request):
            self._decisions.left += 1

    def evict_unfit(self, shape_class: ShapeClass, policy: BatchPolicy, now_ns: int) -> None:
        """Evict requests of the next batch that can no longer finish in time."""
        unfit = find_unfit(shape_class.requests, policy, shape_class.batch_latency, now_ns)
        if unfit:
            self._evict(shape_class, unfit)

    def fail_late(self, request: InflightRequest, reason: str) -> None:
        """Fail a request that is not queued any more because it is late. Its callback may enqueue or cancel others."""
        error = ServeError(ErrorKind.DEADLINE, f"Request timeout expired: {reason}")
        self._decisions.dropped_late += request.fail(error)

    def evict_from_search(self, group: RequestGroup, now_ns: int) -> RequestGroup:
        """The part of a group that runs again: without cancelled requests and without those that are late by now."""
        for request in find_late_in_search(group.requests, now_ns):
            request.timing.taken_ns = now_ns  # a run was started, so metrics do not count a rejection
            self.fail_late(request, PASSED_IN_SEARCH)
        requests = [request for request in group.requests if not request.is_settled]
        if len(requests) == len(group.requests):
            return group
        return RequestGroup(group.shape_class, requests, sum([request.rows for request in requests]), group.search)

    def fail_all(self, error: ServeError) -> None:
        """Fail every queued request."""
        for shape_class in self._queue.waiting():
            for request in self._queue.take(shape_class, len(shape_class.requests)):
                request.fail(error)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.close()

    def _sweep(self) -> None:
        now_ns = self._clock()
        self._fires_ns = math.inf
        looked_at = 0
        next_ns = math.inf
        for shape_class in self._queue.waiting():
            looked_at += len(shape_class.requests)
            found = find_expired(shape_class.requests, now_ns)
            if found.evictions:
                self._evict(shape_class, found.evictions)
            next_ns = min(next_ns, found.next_ns)
        interval_ns = max(_MIN_SWEEP_INTERVAL_NS, looked_at * _SWEEP_INTERVAL_PER_REQUEST_NS)
        self._no_sweep_before_ns = float(now_ns + interval_ns)
        self._fire_after(next_ns, now_ns)

    def _fire_after(self, by_ns: float, now_ns: int) -> None:
        fires_ns = max(by_ns + 1, self._no_sweep_before_ns)
        if fires_ns < self._fires_ns:
            self._fires_ns = fires_ns
            self._timer.set(int(fires_ns), now_ns)

    def _evict(self, shape_class: ShapeClass, evictions: Sequence[Eviction]) -> None:
        self._queue.remove(shape_class, [eviction.request for eviction in evictions])
        for eviction in evictions:
            self.fail_late(eviction.request, eviction.reason)
