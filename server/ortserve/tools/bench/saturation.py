"""The search for the highest rate that a target sustains. Pure: decides the next rate from those that were tried."""

from collections.abc import Mapping
from typing import Final

from ortserve.tools.bench.result import Point

_BRACKET: Final = 1.06
"""The search ends when the lowest rate that is too high is at most so much above the highest sustained one."""
_MOST_TRIES: Final = 14


def first_rate(throughput: float) -> float:
    """From the answers per second of a short closed loop, whose callers wait for each other."""
    return max(1.0, throughput * 0.3)


def next_rate(tries: Mapping[float, bool]) -> float | None:
    """The rate to try next, from the rates and whether they were sustained; None when the bracket is narrow enough.

    Doubles until a rate is too high, then halves the bracket, in logarithms.
    """
    if len(tries) >= _MOST_TRIES:
        return None
    low, high = bracket(tries)
    if low is None:
        return high / 2 if high is not None and high >= 1 else None
    if high is None:
        return low * 2
    return None if high <= low * _BRACKET else (low * high) ** 0.5


def bracket(tries: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """The highest sustained rate below the lowest that is too high, and that one."""
    high = min((rate for rate, is_sustained in tries.items() if not is_sustained), default=None)
    good = (rate for rate, is_sustained in tries.items() if is_sustained and (high is None or rate < high))
    return max(good, default=None), high


def is_sustained(point: Point, percent: float, slo_ms: float | None) -> bool:
    """Whether nothing piled up, nothing failed, and the asked percentile is within the bound, if there is one."""
    asked = point.percentile(percent)
    within = slo_ms is None or (asked is not None and asked.ms <= slo_ms)
    return not point.is_overloaded and point.failed <= 0.001 * point.requests and point.answers > 0 and within
