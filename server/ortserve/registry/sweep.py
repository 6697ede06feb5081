"""Which batch sizes warm-up measures, and which of them are worth having: pure decisions."""

from collections.abc import Sequence
from typing import Final

from ortserve.registry.size_timer import SizeLatency

MAX_SWEPT_ROWS: Final = 64
_WORTHWHILE: Final = 0.95
"""A size is worth having while its time a row is below this share of that of the best smaller size."""
_TRIED_IN_VAIN: Final = 2
"""Sizes in a row that gain nothing and end the sweep: an operator may have a slow way for one size alone."""


def next_rows(sizes: Sequence[SizeLatency], limit: int, *, is_set: bool) -> int:
    """The size to measure after ``sizes``, which ascend; 0 where there is none.

    Args:
        sizes: Measured so far, at least one.
        limit: The most rows.
        is_set: Whether the limit is measured whatever it gains.
    """
    last = sizes[-1].rows
    if last >= limit or (not is_set and _in_vain(sizes) >= _TRIED_IN_VAIN):
        return 0
    return min(2 * last, limit)


def row_ns_to_beat(sizes: Sequence[SizeLatency]) -> float:
    """The time a row below which a further size is worth having."""
    return _WORTHWHILE * _best(sizes).ns_per_row


def worthwhile_rows(sizes: Sequence[SizeLatency], limit: int, *, is_cut: bool) -> int:
    """The most rows of a batch that are worth having.

    Args:
        sizes: Measured, at least one; they ascend.
        limit: The most rows.
        is_cut: Whether the sweep ended for want of time. Then a line through the last two sizes says what larger ones
            would gain, as long as the last one gained.
    """
    rows = _best(sizes).rows
    if not is_cut or len(sizes) < 2 or _in_vain(sizes):
        return rows
    before, last = sizes[-2:]
    row_ns = max(0.0, (last.least_ns - before.least_ns) / (last.rows - before.rows))
    fixed_ns = max(0.0, last.least_ns - row_ns * last.rows)
    while 2 * rows <= limit and fixed_ns / (2 * rows) + row_ns < _WORTHWHILE * (fixed_ns / rows + row_ns):
        rows *= 2
    return rows


def _in_vain(sizes: Sequence[SizeLatency]) -> int:
    """How many sizes were measured since the best."""
    return len(sizes) - 1 - sizes.index(_best(sizes))


def _best(sizes: Sequence[SizeLatency]) -> SizeLatency:
    """The last size that is worth having; ``sizes`` ascend."""
    best = sizes[0]
    for size in sizes[1:]:
        if size.ns_per_row < _WORTHWHILE * best.ns_per_row:
            best = size
    return best
