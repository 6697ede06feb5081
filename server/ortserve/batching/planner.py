"""The decision who rides now: pure functions of who waits, the policy, what was learned and the time."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel, known_ns
from ortserve.batching.riders import Rider
from ortserve.batching.text_weight import MAX_TEXT_UNITS


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """What a user set, or what warm-up found.

    Attributes:
        max_rows: Most rows of a batch.
        queue_delay_ns: How long a batch short of what it may hold waits for more, from when its oldest was queued.
        preferred_rows: A batch of one of these sizes leaves without the delay. Empty: only ``max_rows`` does.
        waits_for_echo: Whether a batch is put off for a moment where callers who were just answered soon come back.
        buckets: Ascending sizes that batches are padded to, the last at least ``max_rows``. Empty: no padding.
        lone_rows: Most rows of a batch that holds a single request, where no batch holds several; None where batches
            may. ``max_rows`` is 1 then: no request waits for another to join it, and queued work is counted by the row.
    """

    max_rows: int
    queue_delay_ns: int = 0
    preferred_rows: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    waits_for_echo: bool = False
    lone_rows: int | None = None

    @property
    def request_rows(self) -> int:
        """Most rows of one request that run together."""
        return self.max_rows if self.lone_rows is None else self.lone_rows

    def bucket_for(self, rows: int) -> int:
        """The size that a batch of ``rows`` rows is padded to; its own beyond the largest bucket."""
        index = bisect_left(self.buckets, rows)
        return self.buckets[index] if index < len(self.buckets) else rows


def lower_cap(policy: BatchPolicy, failed_rows: int) -> BatchPolicy:
    """The policy once a batch that was padded to ``failed_rows`` rows found too little memory.

    Half as many rows at most, in smaller buckets where there are any. The same for a second failure of that size, and
    never less than the smallest bucket, or a row.
    """
    rows = max(1, min(policy.request_rows, failed_rows // 2))
    buckets = policy.buckets
    if buckets:
        buckets = tuple(bucket for bucket in buckets if bucket < failed_rows) or buckets[:1]
        rows = min(rows, buckets[-1])
    if policy.lone_rows is not None:
        return replace(policy, lone_rows=rows, buckets=buckets)
    return replace(policy, max_rows=rows, buckets=buckets)


def run_requests_alone(policy: BatchPolicy) -> BatchPolicy:
    """The policy of a model whose requests must not share batches: as many rows of one request run together as did."""
    if policy.lone_rows is not None:
        return policy
    return replace(
        policy, max_rows=1, queue_delay_ns=0, preferred_rows=(), waits_for_echo=False, lone_rows=policy.max_rows
    )


@dataclass(slots=True, init=False)
class Take:
    """Run ``count`` riders now, who together have ``rows`` rows: the first, after those who are given up.

    The first ``given_up`` riders cannot be answered in time but by a batch so small that others would be late for it.
    """

    count: Final[int]
    rows: Final[int]
    given_up: Final[int]

    def __init__(self, count: int, rows: int, given_up: int = 0) -> None:
        self.count = count
        self.rows = rows
        self.given_up = given_up


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nobody rides before ``due_ns`` (monotonic) unless more arrive."""

    due_ns: int


def plan_batch(waiting: Sequence[Rider], policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> Take | WaitUntil:
    """Say who rides now that an instance is free: whoever waits, as many as fit, at once unless a delay is set.

    A batch is kept so small that all its deadlines are met, where that is known to help, unless more would be late for
    it than are saved. A set delay does not hold back whom it would make late.

    Args:
        waiting: Riders of one shape class in the order of going, at least one. Those with more rows than ``max_rows``,
            who came before that was lowered, or more text than a run may take, ride alone.
        policy: See there.
        latency: Of batches of this class.
        now_ns: Monotonic time.
    """
    count = rows = texts = 0
    is_full = has_deadline = False
    for rider in waiting:
        texts += rider.text_units
        if count and (rows + rider.rows > policy.max_rows or texts > MAX_TEXT_UNITS):
            is_full = True
            break
        count += 1
        rows += rider.rows
        if rider.finish_by_ns is not None:
            has_deadline = True
    if has_deadline:
        forecast = _Forecast(policy, latency, now_ns)
        small = _most_in_time(waiting, count, forecast)
        if small is not None and small.count < count:
            if latency.observations >= MIN_OBSERVATIONS:
                without = _without_tightest(waiting, small, forecast)
                if without is not None:
                    return without
            count, rows = small.count, small.rows
            is_full = True
    if policy.queue_delay_ns and not is_full and rows < policy.max_rows:
        preferred = _largest_preferred(waiting, count, policy.preferred_rows)
        if preferred is not None:
            return preferred
        due_ns = min(rider.timing.queued_ns for rider in islice(waiting, count)) + policy.queue_delay_ns
        if now_ns < due_ns and may_wait(waiting, count, known_ns(latency.predict_ns(policy.bucket_for(rows))), due_ns):
            return WaitUntil(due_ns)
    return _fit_bucket(waiting, count, rows, policy, latency)


@dataclass(slots=True, init=False)
class _Forecast:
    """How long batches would take, and whether their riders would be in time, seen from now."""

    policy: Final[BatchPolicy]
    latency: Final[LatencyModel]
    now_ns: Final[int]

    def __init__(self, policy: BatchPolicy, latency: LatencyModel, now_ns: int) -> None:
        self.policy = policy
        self.latency = latency
        self.now_ns = now_ns

    def batch_ns(self, rows: int) -> float:
        return known_ns(self.latency.predict_ns(self.policy.bucket_for(rows)))

    def is_in_time(self, riders: Sequence[Rider], after_ns: float = 0.0) -> bool:
        """Whether a batch of them all that begins in ``after_ns`` is late for none; there may be none."""
        begin_ns = self.now_ns + after_ns
        finish_ns = begin_ns + self.batch_ns(_rows(riders)) if riders else begin_ns
        return all(rider.finish_by_ns is None or finish_ns <= rider.finish_by_ns for rider in riders)


def _most_in_time(waiting: Sequence[Rider], count: int, forecast: _Forecast) -> Take | None:
    """The most of the first ``count`` riders that together finish before all their deadlines; None if not even one."""
    best: Take | None = None
    rows = 0
    finish_by_ns: float = math.inf
    for taken, rider in enumerate(islice(waiting, count), 1):
        rows += rider.rows
        if rider.finish_by_ns is not None:
            finish_by_ns = min(finish_by_ns, rider.finish_by_ns)
        if forecast.now_ns + forecast.batch_ns(rows) <= finish_by_ns:
            best = Take(taken, rows)
    return best


def _without_tightest(waiting: Sequence[Rider], small: Take, forecast: _Forecast) -> Take | None:
    """A batch without the first riders, whose deadlines ask for one as ``small`` as that; None to do as they ask.

    Small batches are costly while many wait: whoever comes after them is late as well, asks for a small batch in turn,
    and so on until nearly nobody is answered. So somebody is given up where, all at once,

    - the small batch would make the next one late;
    - a batch without him, and without those before him, is in time;
    - that batch answers more: more rows than the small one, by more than full batches answer in the time that it takes
      longer.
    """
    max_rows = forecast.policy.max_rows
    level = waiting[0].level  # nobody is given up for those of a lower one
    riders = [rider for rider in islice(waiting, 2 * max_rows) if rider.level == level]
    small_ns = forecast.batch_ns(small.rows)
    if forecast.is_in_time(_fill(riders[small.count :], max_rows), after_ns=small_ns):
        return None
    for given_up, late in enumerate(riders[: small.count], 1):
        if late.finish_by_ns is None or late.timing.queued_ns >= forecast.now_ns:
            return None  # it would not be the wait that made it late
        batch = _fill(riders[given_up:], max_rows)
        if batch and forecast.is_in_time(batch):
            rows = _rows(batch)
            longer_ns = forecast.batch_ns(rows) - small_ns
            row_ns = forecast.batch_ns(max_rows) / max_rows
            if (rows - small.rows) * row_ns <= longer_ns:
                return None
            fitted = _fit_bucket(batch, len(batch), rows, forecast.policy, forecast.latency)
            return Take(fitted.count, fitted.rows, given_up)
    return None


def _fill(riders: Sequence[Rider], max_rows: int) -> Sequence[Rider]:
    """The first of them, as many as fit into a batch."""
    rows = texts = 0
    for count, rider in enumerate(riders):
        rows += rider.rows
        texts += rider.text_units
        if rows > max_rows or (count and texts > MAX_TEXT_UNITS):
            return riders[:count]
    return riders


def _rows(riders: Sequence[Rider]) -> int:
    return sum([rider.rows for rider in riders])


def may_wait(waiting: Sequence[Rider], count: int, batch_ns: float, until_ns: int) -> bool:
    """Whether a batch of the first ``count`` riders that takes ``batch_ns`` is late for none of them if it waits."""
    # No shorter wait in between: a timer may ring a millisecond after it was set for.
    return all(
        (rider.start_by_ns is None or until_ns < rider.start_by_ns)
        and (rider.finish_by_ns is None or until_ns + batch_ns < rider.finish_by_ns)
        for rider in islice(waiting, count)
    )


def _largest_preferred(waiting: Sequence[Rider], count: int, sizes: Sequence[int]) -> Take | None:
    """The most first riders whose rows make exactly one of ``sizes``."""
    best: Take | None = None
    rows = 0
    for taken in range(count):
        rows += waiting[taken].rows
        if rows in sizes:
            best = Take(taken + 1, rows)
    return best


def _fit_bucket(waiting: Sequence[Rider], count: int, rows: int, policy: BatchPolicy, latency: LatencyModel) -> Take:
    """Pad up to the next bucket, or run fewer in the bucket below now, whichever costs less a row."""
    up = policy.bucket_for(rows)
    if up == rows or up == policy.buckets[0]:
        return Take(count, rows)
    below = policy.buckets[bisect_left(policy.buckets, up) - 1]
    fewer, fewer_rows = count, rows
    while fewer > 1 and fewer_rows > below:
        fewer -= 1
        fewer_rows -= waiting[fewer].rows
    down = policy.bucket_for(fewer_rows)
    down_ns, up_ns = latency.predict_ns(down), latency.predict_ns(up)
    if down < up and down_ns is not None and up_ns is not None and down_ns / fewer_rows < up_ns / rows:
        return Take(fewer, fewer_rows)
    return Take(count, rows)
