"""The speed gate decides whether batches take much longer on a candidate than on the version that serves.

Runs of both alternate, so that other work on the machine affects both, and the shortest run of each counts. The caller
supplies the functions that time a run.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.registry.load.batch_sizes import SizeLatency

TimeRun: TypeAlias = Callable[[int], Awaitable[int]]
"""Times one run with the given number of rows, in ns. Returns 0 if the run cannot be compared. Raises ServeError."""

MAX_ROUNDS: Final = 16
"""Maximum rounds of one size. It passes after ``MIN_ROUNDS`` as soon as its shortest runs are within the bound."""
MIN_ROUNDS: Final = 3
IGNORED_NS: Final = 100_000
"""Smaller differences do not count as a slowdown, because the wakeup of a thread may cause them."""
_BUDGET_NS: Final = 10_000_000_000
"""Time limit for all sizes together. Each size has ``MIN_ROUNDS`` in any case."""


def common_sizes(one: Sequence[SizeLatency], other: Sequence[SizeLatency]) -> list[int]:
    """Sizes to compare: the smallest, the middle and the largest that warm-up measured for both versions. Pure."""
    sizes = sorted({size.rows for size in one} & {size.rows for size in other})
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}) if sizes else []


def is_slower(candidate_ns: int, serving_ns: int, max_slowdown: float) -> bool:
    """Whether the shortest runs show a slowdown beyond the bound. Pure."""
    return candidate_ns > serving_ns * max_slowdown and candidate_ns - serving_ns > IGNORED_NS


async def find_slowdown(
    sizes: Sequence[int], candidate: TimeRun, serving: TimeRun, max_slowdown: float, clock: Clock
) -> str | None:
    """Compare a candidate with the version that serves, size by size.

    Returns:
        The size and both times if the candidate is slower than allowed after all rounds; empty otherwise. None if no
        size could be compared.

    Raises:
        ServeError: A run failed.
    """
    stop_ns = clock() + _BUDGET_NS
    has_compared = False
    for rows in sizes:
        times: tuple[list[int], list[int]] = ([], [])
        for number in range(MAX_ROUNDS):
            if number >= MIN_ROUNDS and clock() >= stop_ns:
                break
            for found, time_run in zip(times, (candidate, serving), strict=True):
                if taken_ns := await time_run(rows):
                    found.append(taken_ns)
            is_late = number + 1 >= MIN_ROUNDS
            if is_late and all(times) and not is_slower(min(times[0]), min(times[1]), max_slowdown):
                break
        has_compared = has_compared or all(times)
        if all(times) and is_slower(min(times[0]), min(times[1]), max_slowdown):
            own_ns, other_ns = min(times[0]), min(times[1])
            return (
                f"a batch of {rows} rows takes {own_ns / 1e6:.3f} ms, {own_ns / other_ns:.2f} times the "
                f"{other_ns / 1e6:.3f} ms of the serving version; expected at most {max_slowdown:g} times"
            )
    return "" if has_compared else None
