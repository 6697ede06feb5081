"""Corrects the maximum number of rows of a batch while serving: compares full batches with larger and smaller ones.

Warm-up finds the maximum in a few runs of synthetic inputs, perhaps beside other work. If it finds no gain where there
is one, a model would serve one row at a time for as long as it is loaded.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ortserve.batching.groups import RequestGroup
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import ShapeClass

_TRIALS: Final = 8
"""Number of batches of another size that decide about it, by the median, so that interrupted ones do not matter."""
_FIRST_INTERVAL: Final = 4
_MAX_INTERVAL: Final = 4096
"""Numbers of full batches between two batches of another size. The interval doubles with each decision against it."""
_WORTHWHILE: Final = 0.95
"""A size is worth having if its time per row is below this share of that of half the size."""
_LONG_NS: Final = 10_000_000
"""Smaller batches are tried only if full ones take longer, and so delay requests that arrive meanwhile."""


class _Trials:
    """Batches of one other size, compared with full batches."""

    __slots__ = ("_full", "_interval", "_ratios")

    def __init__(self) -> None:
        self._interval = _FIRST_INTERVAL
        self._full = 0
        self._ratios: list[float] = []

    @property
    def is_due(self) -> bool:
        return self._full >= self._interval

    def count_full(self) -> None:
        self._full += 1

    def add(self, ratio: float) -> float | None:
        """Add the time per row of a batch, divided by that of a full one. Returns the median of enough of them."""
        self._full = 0
        self._ratios.append(ratio)
        if len(self._ratios) < _TRIALS:
            return None
        median = statistics.median(self._ratios)
        self._ratios = []
        self._interval = min(2 * self._interval, _MAX_INTERVAL)
        return median


class RowLimit:
    """Compares each batch of another size with the full batch of the same shape class that ran before it.

    Other work on the machine affects both. Loop thread only.
    """

    def __init__(self, most_rows: int, on_change: Callable[[int], object]) -> None:
        """The maximum never exceeds ``most_rows``. ``on_change`` is called with each new one."""
        self._most_rows = most_rows
        self._on_change = on_change
        self._last: ShapeClass | None = None
        """The class of the last batch if it was full; otherwise None."""
        self._last_ns = 0
        self._last_row_ns = 0.0
        self._larger = _Trials()
        self._smaller = _Trials()

    def next_policy(self, policy: BatchPolicy, queued_rows: int) -> BatchPolicy:
        """The policy of the next batch: at times with twice or half of the maximum, if enough rows are queued."""
        max_rows = policy.max_rows
        if self._last is None or queued_rows < max_rows:
            return policy
        if 2 * max_rows <= min(queued_rows, self._most_rows) and self._larger.is_due:
            return replace(policy, max_rows=2 * max_rows)
        if max_rows > 1 and self._last_ns >= _LONG_NS and self._smaller.is_due:
            return replace(policy, max_rows=max_rows // 2)
        return policy

    def learn(self, group: RequestGroup, ns: int, policy: BatchPolicy) -> BatchPolicy:
        """Learn from a batch that took ``ns``. Returns the policy from now on."""
        max_rows, rows = policy.max_rows, group.rows
        last, self._last = self._last, None
        if group.is_check or group.tries_one_row or group.shape_class.runs_alone:
            return policy
        row_ns = ns / rows
        if max_rows < 2 * rows <= 2 * max_rows:
            self._last, self._last_ns, self._last_row_ns = group.shape_class, ns, row_ns
            self._larger.count_full()
            self._smaller.count_full()
            return policy
        if last is not group.shape_class or not max_rows < 4 * rows <= 8 * max_rows or not self._last_row_ns:
            return policy
        ratio = row_ns / self._last_row_ns
        if rows > max_rows:
            median = self._larger.add(ratio)
            is_better, better_rows = median is not None and median < _WORTHWHILE, 2 * max_rows
        else:
            median = self._smaller.add(ratio)
            is_better, better_rows = median is not None and median <= 1, max_rows // 2
        if not is_better:
            return policy
        self._larger, self._smaller = _Trials(), _Trials()
        self._on_change(better_rows)
        return replace(policy, max_rows=better_rows)
