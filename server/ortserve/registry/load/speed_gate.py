"""The speed gate decides whether batches take much longer on a candidate than on the version that serves.

Runs of both alternate, so that other work on the machine affects both, and the shortest run of each counts. On a busy
machine the first runs of the serving version may all have been interrupted, so that a slow candidate looks as fast: few
rounds suffice only if they agree on its shortest run. A round counts only if both ran: a serving version that is
overloaded rejects many runs, and few of them say little. The caller supplies the functions that time a run.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.registry.load.batch_sizes import SizeLatency

TimeRun: TypeAlias = Callable[[int], Awaitable[int]]
"""Times one run with the given number of rows, in ns. The serving version's returns 0 for one that cannot be compared,
mostly because it rejected the request. Raises ServeError."""

MAX_ROUNDS: Final = 32
"""Maximum rounds of one size."""
MIN_ROUNDS: Final = 3
"""Minimum rounds of one size. With fewer it is not compared."""
CERTAIN_RUNS: Final = 5
"""A size passes as soon as its shortest runs are within the bound and this many runs of the serving version are about
as short as its shortest one."""
_ALIKE: Final = 1.1
"""Runs up to this multiple of the shortest one are about as short. Times of interrupted runs differ by more."""
MAX_REJECTED: Final = 32
"""Maximum number of attempts of one size that give no time of the serving version."""
IGNORED_NS: Final = 100_000
"""Smaller differences do not count as a slowdown, because the wakeup of a thread may cause them."""
_BUDGET_NS: Final = 10_000_000_000
"""Time limit for all sizes together. Each size has ``MIN_ROUNDS``, or as many attempts, in any case."""


def common_sizes(one: Sequence[SizeLatency], other: Sequence[SizeLatency]) -> list[int]:
    """Sizes to compare: the smallest, the middle and the largest that warm-up measured for both versions. Pure."""
    sizes = sorted({size.rows for size in one} & {size.rows for size in other})
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}) if sizes else []


def is_slower(candidate_ns: int, serving_ns: int, max_slowdown: float) -> bool:
    """Whether the shortest runs show a slowdown beyond the bound. Pure."""
    return candidate_ns > serving_ns * max_slowdown and candidate_ns - serving_ns > IGNORED_NS


def is_certain(times_ns: Sequence[int]) -> bool:
    """Whether enough runs are about as short as the shortest one, which was then not interrupted. Pure."""
    return sum(one <= min(times_ns) * _ALIKE for one in times_ns) >= CERTAIN_RUNS


async def find_slowdown(
    sizes: Sequence[int], candidate: TimeRun, serving: TimeRun, max_slowdown: float, clock: Clock
) -> str | None:
    """Compare a candidate with the version that serves, size by size.

    Returns:
        The size and both times if the candidate is slower than allowed after all rounds; empty otherwise. None if a
        size could not be compared, and no other one shows a slowdown.

    Raises:
        ServeError: A run failed.
    """
    stop_ns = clock() + _BUDGET_NS
    is_whole = True
    for rows in sizes:
        own: list[int] = []
        others: list[int] = []
        rejected = 0
        while len(own) < MAX_ROUNDS and rejected < MAX_REJECTED:
            if len(own) + rejected >= MIN_ROUNDS and clock() >= stop_ns:
                break
            other_ns = await serving(rows)
            if not other_ns:
                rejected += 1
                continue
            others.append(other_ns)
            own.append(await candidate(rows))
            if is_certain(others) and not is_slower(min(own), min(others), max_slowdown):
                break
        if len(own) < MIN_ROUNDS:
            is_whole = False
        elif is_slower(own_ns := min(own), other_ns := min(others), max_slowdown):
            return (
                f"a batch of {rows} rows takes {own_ns / 1e6:.3f} ms, {own_ns / other_ns:.2f} times the "
                f"{other_ns / 1e6:.3f} ms of the serving version; expected at most {max_slowdown:g} times"
            )
    return "" if is_whole else None
