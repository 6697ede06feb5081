"""Where the time of profiled runs goes: the balance of operators, profiler, rest and interruptions. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median
from typing import Final, TypeAlias

from ortserve.tools.profile.result import Balance
from ortserve.tools.profile.trace import Run, Trace

CLOSED_WITHIN: Final = 0.05
LEAST_MS: Final = 5.0
"""Shorter runs consist of operators that the profiler, with its clock of 1 µs, cannot measure."""
_FAST_PART: Final = 4
_BUSY_SHARE: Final = 0.1

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions of runs that do the same work, such as those on the same sample; each run is in one group."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """How long a run took, and how much of it the calling thread was on a processor."""

    wall_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs without and with profiling.

    Attributes:
        plain: Without.
        profiled: With, of the same inputs.
        trace: Of the runs with profiling.
        groups: Positions of runs that do the same work.
        is_single_threaded: Whether the calling thread does all the work.
    """

    plain: Sequence[RunTime]
    profiled: Sequence[RunTime]
    trace: Trace
    groups: Groups
    is_single_threaded: bool = False

    @property
    def on_one_thread(self) -> bool:
        """Whether the calling thread did all the work, as the others of the pool had none or do not exist."""
        last = self.trace.runs[-1]
        return self.is_single_threaded or not (last.is_parallel or any(last.blocks.values()) or not last.blocks)


def typical(values: Mapping[int, float], groups: Groups) -> float:
    """The mean over all runs, with the mean of the middle half of its group for each: interruptions drop out of it."""
    count = sum(len(group) for group in groups)
    return sum(len(group) * _middle_mean([values.get(run, 0.0) for run in group]) for group in groups) / count


def _middle_mean(values: list[float]) -> float:
    values.sort()
    cut = len(values) // 4 if len(values) > 3 else (len(values) - 1) // 2
    return fmean(values[cut : len(values) - cut])


def balance_of(runs: Runs, operators_ms: float, gaps_ms: float) -> Balance:
    """Where the time of the profiled runs goes.

    Args:
        runs: The runs.
        operators_ms: The sum of the typical self times of all nodes.
        gaps_ms: The sum of the typical gaps before them; 0 in parallel mode, where there are none.
    """
    groups = runs.groups
    plain = typical({run: time.wall_ns / 1e6 for run, time in enumerate(runs.plain)}, groups)
    profiled = typical({run: time.wall_ns / 1e6 for run, time in enumerate(runs.profiled)}, groups)
    around = {
        run: time.wall_ns / 1e6 - (busy_us(traced) + (traced.gaps_us if gaps_ms else 0)) / 1e3
        for run, (time, traced) in enumerate(zip(runs.profiled, runs.trace.runs, strict=True))
    }
    outside_ms = gaps_ms + typical(around, groups)
    profiler, low, high = _added_ms(runs)
    rest, undisturbed = outside_ms - profiler, operators_ms + outside_ms
    error, interrupted = (high - low) / 2 / undisturbed, profiled - undisturbed
    is_closed: bool | None = None
    if undisturbed - profiler >= LEAST_MS and error <= CLOSED_WITHIN:
        is_closed = abs(rest) <= CLOSED_WITHIN * undisturbed
        if not is_closed and interrupted > _BUSY_SHARE * profiled:
            is_closed = None
    return Balance(
        runs=len(runs.profiled),
        plain_ms=plain,
        profiled_ms=profiled,
        operators_ms=operators_ms,
        profiler_ms=profiler,
        rest_ms=rest,
        interrupted_ms=interrupted,
        profiler_share=profiler / undisturbed,
        profiler_event_us=profiler * 1e3 / max(1.0, fmean(len(run.calls) + 2 for run in runs.trace.runs)),
        rest_share=rest / undisturbed,
        rest_error=error,
        is_closed=is_closed,
    )


def _added_ms(runs: Runs) -> tuple[float, float, float]:
    """What profiling adds to a run: the median of pairs of runs, and its 95 % interval.

    If one thread does all the work, its time on the processor is compared, as other work on the machine disturbs it
    least: on two processors with eight busy processes, medians of 50 pairs varied by 0.2 ms, those of the time by 1.5.
    """
    pairs = zip(runs.plain, runs.profiled, strict=True)
    if runs.on_one_thread:
        added = sorted(profiled.cpu_ns - plain.cpu_ns for plain, profiled in pairs)
    else:
        added = sorted(profiled.wall_ns - plain.wall_ns for plain, profiled in pairs)
    low, high = median_interval(len(added))
    return median(added) / 1e6, added[low] / 1e6, added[high] / 1e6


def median_interval(count: int) -> tuple[int, int]:
    """The ranks in sorted values between which the median lies with 95 %, by the binomial distribution."""
    reach = 0.98 * sqrt(count)
    return max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))


def busy_us(run: Run) -> int:
    """The time in which any operator ran."""
    if not run.is_parallel:
        return run.operators_us
    busy = until = 0
    for call in sorted(run.calls, key=lambda call: call.start_us):
        end = call.start_us + call.total_us
        busy += max(0, end - max(call.start_us, until))
        until = max(until, end)
    return busy


def doubts_of(balance: Balance) -> list[str]:
    doubts = []
    if balance.interrupted_ms > _BUSY_SHARE * balance.profiled_ms:
        share = 100 * balance.interrupted_ms / balance.profiled_ms
        doubts.append(f"the machine was busy: {share:.0f} % of the time of the runs went to interruptions")
    if balance.rest_error > CLOSED_WITHIN and balance.operators_ms >= LEAST_MS:
        doubts.append("what the profiler adds varied too much to tell: repeat with more --runs, or with --threads 1")
    return doubts


def middle_run(runs: Runs) -> Run:
    """A quiet run with profiling, for a view of it: at the end of the fastest quarter."""
    return sorted(runs.trace.runs, key=lambda run: run.total_us)[len(runs.trace.runs) // _FAST_PART]
