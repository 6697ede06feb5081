"""Chooses the requests of the next batch, and those that can no longer be answered in time.

Pure functions of the queued requests, the policy, the latency model and the time. ``scheduler`` acts on the results.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from ortserve.batching.large_requests import MAX_TEXT_UNITS
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.core.inflight import InflightRequest

TIMEOUT_PASSED: Final = "its timeout passed in the queue"
DEADLINE_PASSED: Final = "its deadline came too close while it was queued"
"""At most the time that is reserved for encoding and writing the answer is left."""
OUT_OF_REACH: Final = "its deadline can no longer be met, after waiting in the queue"
AT_COST_OF_OTHERS: Final = f"{OUT_OF_REACH}, except at the cost of other requests"
PASSED_IN_SEARCH: Final = "its deadline came too close while its batch ran again"


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Limits of batches, as configured or as found in warm-up.

    Attributes:
        max_rows: Maximum rows of a batch.
        queue_delay_ns: How long a batch with fewer rows waits for more, counted from the arrival of its oldest request.
        preferred_rows: A batch of one of these sizes starts without the delay. Empty: only a full batch does.
        buckets: Ascending sizes that batches are padded to, the last at least ``max_rows``. Empty: no padding.
        closed_loop_wait: Whether a batch is delayed for a moment if callers usually send their next request soon after
            an answer.
        lone_rows: Maximum rows of a batch if each holds a single request; None if requests share batches. If set,
            ``max_rows`` is 1, so that no request waits for others to join it, and queued work is counted row by row.
        has_long_pieces: Whether a piece of a large request may have more rows than a batch, until memory is too small
            or rows turn out to depend on each other.
        keeps_places: Whether answers may depend on the places of rows in a run. Then requests with more rows than a
            batch, or with much text, run undivided.
    """

    max_rows: int
    queue_delay_ns: int = 0
    preferred_rows: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    closed_loop_wait: bool = False
    lone_rows: int | None = None
    has_long_pieces: bool = False
    keeps_places: bool = False

    @property
    def request_rows(self) -> int:
        """Maximum rows of one request in one run."""
        return self.max_rows if self.lone_rows is None else self.lone_rows

    def bucket_for(self, rows: int) -> int:
        """The size that a batch of ``rows`` rows is padded to; ``rows`` beyond the largest bucket."""
        index = bisect_left(self.buckets, rows)
        return self.buckets[index] if index < len(self.buckets) else rows

    def batch_ns(self, rows: int, latency: LatencyModel) -> float:
        """The predicted time of a batch of ``rows`` rows, padded to its bucket; 0 if it is unknown."""
        return latency.predict_ns(self.bucket_for(rows) if self.buckets else rows) or 0.0


def lower_cap(policy: BatchPolicy, failed_rows: int) -> BatchPolicy:
    """The policy after a batch that was padded to ``failed_rows`` rows ran out of memory.

    Batches have at most half as many rows, and smaller buckets if there are any. A second failure of the same size
    changes nothing, and the limit stays at least the smallest bucket, or one row.
    """
    rows = max(1, min(policy.request_rows, failed_rows // 2))
    buckets = policy.buckets
    if buckets:
        buckets = tuple(bucket for bucket in buckets if bucket < failed_rows) or buckets[:1]
        rows = min(rows, buckets[-1])
    if policy.lone_rows is not None:
        return replace(policy, lone_rows=rows, buckets=buckets)
    return replace(policy, max_rows=rows, buckets=buckets, has_long_pieces=False)


def run_requests_alone(policy: BatchPolicy) -> BatchPolicy:
    """The policy of a model whose requests must not share batches; the rows of one request still run together."""
    if policy.lone_rows is not None:
        return policy
    return replace(
        policy,
        max_rows=1,
        queue_delay_ns=0,
        preferred_rows=(),
        closed_loop_wait=False,
        lone_rows=policy.max_rows,
        has_long_pieces=False,
    )


@dataclass(slots=True, init=False)
class RunNow:
    """Evict the first ``evicted`` requests, and run the next ``count``, which have ``rows`` rows in total, now.

    The evicted requests could finish in time only in a batch so small that others would be late.
    """

    count: Final[int]
    rows: Final[int]
    evicted: Final[int]

    def __init__(self, count: int, rows: int, evicted: int = 0) -> None:
        self.count = count
        self.rows = rows
        self.evicted = evicted


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Start no batch before ``due_ns`` (monotonic) unless more requests arrive."""

    due_ns: int


def plan_batch(
    waiting: Sequence[InflightRequest], policy: BatchPolicy, latency: LatencyModel, now_ns: int
) -> RunNow | WaitUntil:
    """Plan the next batch now that an instance is free: all queued requests that fit, at once unless a delay is set.

    If a deadline would be missed, the batch is reduced to the largest one that meets all its deadlines. If such a small
    batch would make more requests late than it saves, the first requests are evicted instead (``_without_tightest``).
    A configured delay is skipped or ends early if it would make a request late.

    Args:
        waiting: Requests of one shape class in queue order, at least one. A request runs alone if it has more text than
            a run may have, or more rows than ``max_rows``, which may have been lowered after it was queued.
        policy: See ``BatchPolicy``.
        latency: Predicts the batches of this class.
        now_ns: Monotonic time.
    """
    count = rows = texts = 0
    is_full = False
    finish_by_ns: int | None = None  # the earliest deadline
    for request in waiting:
        texts += request.text_units
        if count and (rows + request.rows > policy.max_rows or texts > MAX_TEXT_UNITS):
            is_full = True
            break
        count += 1
        rows += request.rows
        by_ns = request.finish_by_ns
        if by_ns is not None and (finish_by_ns is None or by_ns < finish_by_ns):
            finish_by_ns = by_ns
    if finish_by_ns is not None and now_ns + policy.batch_ns(rows, latency) > finish_by_ns:
        in_time = _plan_in_time(waiting, count, _Forecast(policy, latency, now_ns))
        if in_time is not None:
            if in_time.evicted:
                return in_time
            count, rows = in_time.count, in_time.rows
            is_full = True
    if policy.queue_delay_ns and not is_full and rows < policy.max_rows:
        preferred = _largest_preferred(waiting, count, policy.preferred_rows)
        if preferred is not None:
            return preferred
        due_ns = min(request.timing.queued_ns for request in islice(waiting, count)) + policy.queue_delay_ns
        if now_ns < due_ns and may_wait(waiting, count, policy.batch_ns(rows, latency), due_ns):
            return WaitUntil(due_ns)
    return _fit_bucket(waiting, count, rows, policy, latency) if policy.buckets else RunNow(count, rows)


@dataclass(slots=True, init=False)
class _Forecast:
    """Predicts how long batches take that begin now or later, and whether they meet the deadlines of their requests."""

    policy: Final[BatchPolicy]
    latency: Final[LatencyModel]
    now_ns: Final[int]

    def __init__(self, policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> None:
        self.policy = policy
        self.latency = latency
        self.now_ns = now_ns

    def batch_ns(self, rows: int) -> float:
        return self.policy.batch_ns(rows, self.latency)

    def is_in_time(self, requests: Sequence[InflightRequest], after_ns: float = 0.0) -> bool:
        """Whether a batch of all these requests that begins in ``after_ns`` meets every deadline."""
        begin_ns = self.now_ns + after_ns
        finish_ns = begin_ns + self.batch_ns(_rows(requests)) if requests else begin_ns
        return all(request.finish_by_ns is None or finish_ns <= request.finish_by_ns for request in requests)


def _plan_in_time(waiting: Sequence[InflightRequest], count: int, forecast: _Forecast) -> RunNow | None:
    """Plan a batch of the first ``count`` requests that meets all its deadlines, or evict some; None without one."""
    small = _most_in_time(waiting, count, forecast)
    if small is None or forecast.latency.observations < MIN_OBSERVATIONS:
        return small
    return _without_tightest(waiting, small, forecast) or small


def _most_in_time(waiting: Sequence[InflightRequest], count: int, forecast: _Forecast) -> RunNow | None:
    """The longest prefix of the first ``count`` requests that meets all its deadlines as a batch; None without one."""
    best: RunNow | None = None
    rows = 0
    finish_by_ns: float = math.inf
    for taken, request in enumerate(islice(waiting, count), 1):
        rows += request.rows
        if request.finish_by_ns is not None:
            finish_by_ns = min(finish_by_ns, request.finish_by_ns)
        if forecast.now_ns + forecast.batch_ns(rows) <= finish_by_ns:
            best = RunNow(taken, rows)
    return best


def _without_tightest(waiting: Sequence[InflightRequest], small: RunNow, forecast: _Forecast) -> RunNow | None:
    """Plan a batch without the first requests, whose deadlines only a batch as small as ``small`` meets.

    Under load, small batches cost throughput: the requests behind them become late and need small batches in turn,
    until almost no request is answered in time. So a request is evicted if all of these hold:

    - the small batch would make the next one late;
    - a batch without this request, and without those before it, is in time;
    - that batch is worth its longer time: full batches compute fewer rows in the additional time than it adds.

    Returns:
        None to run ``small``.
    """
    max_rows = forecast.policy.max_rows
    level = waiting[0].level  # no request is evicted for one of a lower priority
    requests = [request for request in islice(waiting, 2 * max_rows) if request.level == level]
    small_ns = forecast.batch_ns(small.rows)
    if forecast.is_in_time(_fill(requests[small.count :], max_rows), after_ns=small_ns):
        return None
    for evicted, late in enumerate(requests[: small.count], 1):
        if late.finish_by_ns is None or late.timing.queued_ns >= forecast.now_ns:
            return None  # the wait in the queue is not what makes it late
        batch = _fill(requests[evicted:], max_rows)
        if batch and forecast.is_in_time(batch):
            rows = _rows(batch)
            longer_ns = forecast.batch_ns(rows) - small_ns
            row_ns = forecast.batch_ns(max_rows) / max_rows
            if (rows - small.rows) * row_ns <= longer_ns:
                return None
            fitted = _fit_bucket(batch, len(batch), rows, forecast.policy, forecast.latency)
            return RunNow(fitted.count, fitted.rows, evicted)
    return None


def _fill(requests: Sequence[InflightRequest], max_rows: int) -> Sequence[InflightRequest]:
    """As many of the first requests as fit into a batch."""
    rows = texts = 0
    for count, request in enumerate(requests):
        rows += request.rows
        texts += request.text_units
        if rows > max_rows or (count and texts > MAX_TEXT_UNITS):
            return requests[:count]
    return requests


def _rows(requests: Sequence[InflightRequest]) -> int:
    return sum([request.rows for request in requests])


def may_wait(waiting: Sequence[InflightRequest], count: int, batch_ns: float, until_ns: int) -> bool:
    """Whether a batch of the first ``count`` requests that takes ``batch_ns`` stays in time if it waits."""
    # A wait until just before a deadline is not tried, because a timer may fire a millisecond late.
    return all(
        (request.start_by_ns is None or until_ns < request.start_by_ns)
        and (request.finish_by_ns is None or until_ns + batch_ns < request.finish_by_ns)
        for request in islice(waiting, count)
    )


def _largest_preferred(waiting: Sequence[InflightRequest], count: int, sizes: Sequence[int]) -> RunNow | None:
    """The longest prefix of the first ``count`` requests whose rows add up to one of ``sizes``; None without one."""
    best: RunNow | None = None
    rows = 0
    for taken in range(count):
        rows += waiting[taken].rows
        if rows in sizes:
            best = RunNow(taken + 1, rows)
    return best


def _fit_bucket(
    waiting: Sequence[InflightRequest], count: int, rows: int, policy: BatchPolicy, latency: LatencyModel
) -> RunNow:
    """Pad up to the next bucket, or run fewer requests in the bucket below, whichever takes less time per row."""
    up = policy.bucket_for(rows)
    if up == rows or up == policy.buckets[0]:
        return RunNow(count, rows)
    below = policy.buckets[bisect_left(policy.buckets, up) - 1]
    fewer, fewer_rows = count, rows
    while fewer > 1 and fewer_rows > below:
        fewer -= 1
        fewer_rows -= waiting[fewer].rows
    down = policy.bucket_for(fewer_rows)
    down_ns, up_ns = latency.predict_ns(down), latency.predict_ns(up)
    if down < up and down_ns is not None and up_ns is not None and down_ns / fewer_rows < up_ns / rows:
        return RunNow(fewer, fewer_rows)
    return RunNow(count, rows)


@dataclass(frozen=True, slots=True)
class Eviction:
    """A request to evict, and the reason for its caller."""

    request: InflightRequest
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """The expired requests of a shape class, and when the next one expires; infinite if none will."""

    evictions: Sequence[Eviction]
    next_ns: float


def find_unfit(
    requests: Iterable[InflightRequest], policy: BatchPolicy, latency: LatencyModel, now_ns: int
) -> list[Eviction]:
    """Find the requests at the front of a queue that are too late to run.

    Args:
        requests: Requests of one shape class in queue order. The search ends once the others fill a batch.
        policy: Defines the size of a full batch.
        latency: Predicts the batches of this class.
        now_ns: Monotonic time.
    """
    evictions: list[Eviction] = []
    rows = 0
    for request in requests:
        if request.finish_by_ns is not None or request.start_by_ns is not None:
            reason, by_ns = _why_expired(request, now_ns), request.finish_by_ns
            if reason is None and by_ns is not None and latency.observations >= MIN_OBSERVATIONS:
                least_ns = policy.batch_ns(request.rows, latency)
                # Only if the wait made it late. An idle server admits a request even if its predicted time exceeds the
                # deadline. Such a request must run, or a wrong prediction would never be corrected.
                if by_ns - now_ns < least_ns <= by_ns - request.timing.queued_ns:
                    reason = OUT_OF_REACH
            if reason is not None:
                evictions.append(Eviction(request, reason))
                continue
        rows += request.rows
        if rows >= policy.max_rows:
            break
    return evictions


def find_expired(requests: Iterable[InflightRequest], now_ns: int) -> Sweep:
    """Find the requests at any position whose deadline or timeout has passed, and when the next one expires."""
    evictions: list[Eviction] = []
    next_ns = math.inf
    for request in requests:
        by_ns = request.expires_ns
        if by_ns is None:
            continue
        reason = _why_expired(request, now_ns)
        if reason is not None:
            evictions.append(Eviction(request, reason))
        elif by_ns < next_ns:
            next_ns = float(by_ns)
    return Sweep(evictions, next_ns)


def find_late_in_search(requests: Iterable[InflightRequest], now_ns: int) -> list[InflightRequest]:
    """Find the requests of a failed batch that are late by now. They have run, so queue timeouts no longer apply."""
    return [
        request
        for request in requests
        if request.finish_by_ns is not None and request.finish_by_ns < now_ns and not request.is_settled
    ]


def _why_expired(request: InflightRequest, now_ns: int) -> str | None:
    """Why a request may no longer wait in the queue; None if it may."""
    if request.start_by_ns is not None and request.start_by_ns < now_ns:
        return TIMEOUT_PASSED
    if request.finish_by_ns is not None and request.finish_by_ns < now_ns:
        return DEADLINE_PASSED
    return None
