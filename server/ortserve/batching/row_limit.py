"""Corrects the maximum number of rows of a batch while serving: compares full batches with larger and smaller ones.

Warm-up finds the maximum in a few runs of synthetic inputs, perhaps beside other work. If it finds no gain where there
is one, a model would serve one row at a time for as long as it is loaded.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from ortserve.batching.groups import RequestGroup
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue, ShapeClass

_MIN_TRIALS: Final = 8
_MAX_TRIALS: Final = 64
"""Numbers of batches of another size that decide about it, by how many of them were better, so that interrupted ones do
not matter. More than the minimum run while chance could explain the result."""
_CLEARLY: Final = 2.0
"""Standard deviations of the number of better batches if chance alone decided, beyond which a result is clear."""
_FIRST_INTERVAL: Final = 4
_MAX_INTERVAL: Final = 4096
"""Numbers of full batches between two batches of another size. The interval doubles with each decision against it."""
_WORTHWHILE: Final = 0.95
"""A size is worth having if its time per row is below this share of that of half the size."""
_LONG_NS: Final = 10_000_000
"""Smaller batches are tried only if full ones take longer, and so delay requests that arrive meanwhile."""
_RECENT: Final = 16
_COMPARED: Final = 5
"""A batch of another size is compared with the median of so many full batches of its shape class, among the last
``_RECENT``."""
_LOST: Final = 64
"""Number of batches after which one of another size counts as failed if its result is not known."""


class _Full(NamedTuple):
    """A full batch that ran."""

    shape_class: ShapeClass
    row_ns: float


class _Size:
    """The batches of twice or half the maximum, compared with full batches."""

    __slots__ = ("_better", "_full", "_interval", "_trials")

    def __init__(self) -> None:
        self._interval = _FIRST_INTERVAL
        self._full = 0
        self._trials = 0
        self._better = 0

    @property
    def is_due(self) -> bool:
        return self._full >= self._interval

    def count_full(self) -> None:
        self._full += 1

    def begin(self) -> None:
        self._full = 0

    def add(self, *, is_better: bool) -> bool | None:
        """Add a batch. Returns whether most batches were better, once that is clear or enough of them ran."""
        self._trials += 1
        self._better += is_better
        lead = 2 * self._better - self._trials
        if self._trials < _MIN_TRIALS or (self._trials < _MAX_TRIALS and lead**2 < _CLEARLY**2 * self._trials):
            return None
        return lead > 0

    def decide(self, *, is_rarer: bool) -> None:
        """Forget the batches, and possibly double the interval."""
        self._trials = self._better = 0
        if is_rarer:
            self._interval = min(2 * self._interval, _MAX_INTERVAL)


class RowLimit:
    """Compares batches of another size with full batches of the same shape class that ran shortly before.

    Other work on the machine affects both. One batch at a time has another size. Loop thread only.
    """

    def __init__(self, most_rows: int, on_change: Callable[[int], object]) -> None:
        """The maximum never exceeds ``most_rows``. ``on_change`` is called with each new one."""
        self._most_rows = most_rows
        self._on_change = on_change
        self._recent: deque[_Full] = deque(maxlen=_RECENT)
        self._larger = _Size()
        self._smaller = _Size()
        self._trial: RequestGroup | None = None
        """The batch of another size that runs; otherwise None."""
        self._tried = self._larger
        """The size of that batch, or of the last one while none runs."""
        self._since_trial = 0
        """Number of batches that ended since it began."""

    def next_policy(self, queue: RequestQueue, policy: BatchPolicy, now_ns: int) -> BatchPolicy:
        """The policy of the next batch: at times with twice or half of the maximum, if enough rows are queued.

        Another policy than ``policy`` is for one batch, which is reported to ``begin``.
        """
        max_rows = policy.max_rows
        if self._trial is not None or not self._recent or queue.rows < max_rows:
            return policy
        if 2 * max_rows <= min(queue.rows, self._most_rows) and self._larger.is_due:
            rows, self._tried = 2 * max_rows, self._larger
        elif max_rows > 1 and self._smaller.is_due and self._are_long(max_rows):
            rows, self._tried = max_rows // 2, self._smaller
        else:
            return policy
        self._tried.begin()
        return replace(policy, max_rows=rows) if _has_time(queue, rows, now_ns) else policy

    def begin(self, group: RequestGroup) -> None:
        """Note that a batch of another size runs. A part of a failed batch has no size of its own."""
        if group.search is None:
            self._trial, self._since_trial = group, 0

    def learn(self, group: RequestGroup, ns: int, policy: BatchPolicy) -> BatchPolicy:
        """Learn from a batch that took ``ns``. Returns the policy from now on."""
        max_rows, rows = policy.max_rows, group.rows
        if self._trial is not None:
            if group is self._trial:
                self._trial = None
                return self._judge(self._ratio(group, ns, max_rows), policy)
            self._since_trial += 1
            if self._since_trial == _LOST:  # Its run failed or was terminated.
                self._trial = None
                return self._judge(math.inf, policy)
        if rows <= max_rows < 2 * rows and not (group.is_check or group.tries_one_row or group.shape_class.runs_alone):
            self._recent.append(_Full(group.shape_class, ns / rows))
            self._larger.count_full()
            self._smaller.count_full()
        return policy

    def _ratio(self, group: RequestGroup, ns: int, max_rows: int) -> float | None:
        """The time per row of a batch, divided by that of a full one. None if they cannot be compared."""
        rows = group.rows
        if self._tried is self._larger:
            is_of_size = max_rows < rows <= 2 * max_rows
        else:
            is_of_size = rows <= max_rows // 2 < 2 * rows
        if not is_of_size or group.tries_one_row or group.shape_class.runs_alone:
            return None
        full_ns = [full.row_ns for full in reversed(self._recent) if full.shape_class is group.shape_class]
        row_ns = statistics.median(full_ns[:_COMPARED]) if full_ns else 0.0
        return ns / rows / row_ns if row_ns else None

    def _are_long(self, max_rows: int) -> bool:
        """Whether full batches take long. Not by the last one: it is compared with the trial, and may be an outlier."""
        latency = self._recent[-1].shape_class.batch_latency
        return (latency.predict_ns(max_rows) or 0.0) >= _LONG_NS

    def _judge(self, ratio: float | None, policy: BatchPolicy) -> BatchPolicy:
        """Add a ratio, and decide once that is possible. Returns the policy from now on."""
        if ratio is None:
            return policy
        tried = self._tried
        is_larger = tried is self._larger
        is_better = tried.add(is_better=ratio < _WORTHWHILE if is_larger else ratio <= 1)
        if is_better is None:
            return policy
        tried.decide(is_rarer=not is_better)
        if not is_better:
            return policy
        # The way back is tried more rarely with each change, because between two nearly equal sizes noise decides.
        (self._smaller if is_larger else self._larger).decide(is_rarer=True)
        self._recent.clear()
        max_rows = 2 * policy.max_rows if is_larger else policy.max_rows // 2
        self._on_change(max_rows)
        return replace(policy, max_rows=max_rows)


def _has_time(queue: RequestQueue, rows: int, now_ns: int) -> bool:
    """Whether all requests that are queued keep their deadlines if the next two batches have this many rows."""
    for shape_class in queue.waiting:
        if not shape_class.has_limits:
            continue
        expiries = [request.expires_ns for request in shape_class.requests]
        first_ns = min((expiry for expiry in expiries if expiry is not None), default=None)
        if first_ns is not None and first_ns < now_ns + 2 * (shape_class.batch_latency.predict_ns(rows) or math.inf):
            return False
    return True
