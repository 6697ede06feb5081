"""Runs of a model without and with profiling, and the balance of their times. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from ortserve.engine.provider_options import CPU
from ortserve.model_file.graph import Graph
from ortserve.tools.profile.result import Balance
from ortserve.tools.profile.trace import Run, Trace
from ortserve.tools.statistics import estimate_percentile, least_samples

CLOSED_WITHIN: Final = 0.05
"""Limit of the share of ``rest_ms`` in a closed balance."""
MIN_MS: Final = 5.0
"""Shorter runs have operators that are too short for the profiler's clock of 1 µs."""
MIN_PAIRS: Final = least_samples(0.5)
"""Fewer pairs of runs do not have a 95 % interval, so they allow no verdict."""
_CLOCK_ERROR_MS: Final = 0.0005
"""The profiler's clock counts whole microseconds. Calls of one duration all lose the same part of one."""
_BUSY_SHARE: Final = 0.1
"""A larger share of interruptions means a busy machine."""

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions of runs. The runs of a group do the same work, and each run is in one group."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of a run, and the processor time of the calling thread in it."""

    wall_ns: int
    cpu_ns: int


@dataclass(slots=True)
class Runs:
    """Pairs of runs without and with profiling. ``result.Profile`` describes the other fields.

    Attributes:
        plain: Times of the runs without profiling.
        profiled: Times of the runs with profiling, on the same inputs.
        trace: The trace of the runs with profiling.
        call_overhead_us: The profiler's own part of the recorded time of each call.
        source: The graph of the file; None if unknown.
        optimized: The graph that ran; None if unknown.
    """

    label: str
    provider: str
    threads: int
    settings: Mapping[str, str]
    inputs: str
    rows: float
    plain: list[RunTime] = field(default_factory=list)
    profiled: list[RunTime] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    call_overhead_us: float = 0.0
    source: Graph | None = None
    optimized: Graph | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def groups(self) -> Groups:
        """Groups of runs that called the same nodes with the same shapes, inner graphs included."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for position, run in enumerate(self.trace.runs):
            groups.setdefault(tuple(sorted(call.node for call in run.calls)), []).append(position)
        return list(groups.values())

    @property
    def is_parallel(self) -> bool:
        """Whether nodes ran concurrently on several threads, so that their times overlap."""
        return any(run.is_parallel for run in self.trace.runs)

    @property
    def on_one_thread(self) -> bool:
        """Whether the calling thread did all the work, so that its processor time is that of the run."""
        blocks = self.trace.runs[-1].blocks
        pool_is_idle = not any(blocks.values()) if blocks else self.threads == 1
        return pool_is_idle and not self.is_parallel and all(node.provider == CPU for node in self.trace.nodes)

    @property
    def quiet_run(self) -> Run:
        """The run for the flame view: the slowest one of the fastest quarter."""
        return sorted(self.trace.runs, key=lambda run: run.total_us)[len(self.trace.runs) // 4]


def times_ns(times: Sequence[RunTime], *, on_processor: bool) -> np.ndarray:
    return np.array([time.cpu_ns if on_processor else time.wall_ns for time in times], np.float64)


def typical(values: np.ndarray, groups: Groups) -> np.ndarray:
    """The mean over the runs (last axis), in which the mean of the middle half of its group replaces each value.

    This leaves out runs that were interrupted.
    """
    total: np.ndarray = np.zeros(values.shape[:-1])
    for group in groups:
        count = len(group)
        cut = count // 4 if count > 3 else (count - 1) // 2
        total = total + count * np.sort(values[..., group], axis=-1)[..., cut : count - cut].mean(axis=-1)
    return np.asarray(total / values.shape[-1])


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval; of fewer than ``MIN_PAIRS`` values the least and the largest."""
    found = estimate_percentile(values, 0.5)
    if found.low is None or found.high is None:
        return float(np.median(values)), float(values.min()), float(values.max())
    return float(np.median(values)), found.low, found.high


def balance_of(runs: Runs, self_us: np.ndarray, gap_us: np.ndarray) -> Balance:
    """The balance from self times, without the profiler's part, and gaps. Both have the shape (nodes, runs).

    If one thread does all the work, the cost of profiling is a difference of processor times, which other work on the
    machine disturbs less: on two processors with eight busy processes, medians of 50 pairs varied by 0.2 ms, those of
    elapsed times by 1.5 ms.
    """
    groups, on_processor = runs.groups, runs.on_one_thread
    if runs.is_parallel:  # nodes overlap, so self times do not add up, and there are no gaps
        self_us = np.array([[_busy_us(run) for run in runs.trace.runs]], np.float64)
        gap_us = np.zeros_like(self_us)
    plain_ms = float(typical(times_ns(runs.plain, on_processor=False), groups)) / 1e6
    walls_ms = times_ns(runs.profiled, on_processor=False) / 1e6
    profiled_ms = float(typical(walls_ms, groups))
    operators_ms, gaps_ms = (float(typical(times_us, groups).clip(0).sum()) / 1e3 for times_us in (self_us, gap_us))
    plain, profiled = (times_ns(times, on_processor=on_processor) for times in (runs.plain, runs.profiled))
    profiler_ms, low_ms, high_ms = median_interval((profiled - plain) / 1e6)
    outside_ms = gaps_ms + float(typical(walls_ms - (self_us + gap_us).sum(axis=0) / 1e3, groups))
    undisturbed_ms = operators_ms + outside_ms
    if on_processor:
        # Typical times of nodes and gaps leave out what the profiler does at a few of them in each run, such as
        # allocating memory. With thousands of nodes, this is a large part of its time.
        undisturbed_ms = max(undisturbed_ms, float(typical(profiled, groups)) / 1e6)
    rest_ms = undisturbed_ms - operators_ms - profiler_ms
    error, interrupted_ms = (high_ms - low_ms) / 2 / undisturbed_ms, profiled_ms - undisturbed_ms
    clock_error = _CLOCK_ERROR_MS * sum(len(run.calls) for run in runs.trace.runs) / len(runs.plain) / undisturbed_ms
    is_closed = None
    # Both times must be long: other work may make the profiled runs of a small model as long as those of a large one.
    is_long = min(plain_ms, undisturbed_ms - profiler_ms) >= MIN_MS
    if is_long and error <= CLOSED_WITHIN and len(runs.plain) >= MIN_PAIRS:
        excess = abs(rest_ms) / undisturbed_ms - CLOSED_WITHIN
        is_uncertain = excess <= clock_error or interrupted_ms > _BUSY_SHARE * profiled_ms
        is_closed = True if excess <= 0 else None if is_uncertain else False
    return Balance(
        runs=len(runs.profiled),
        plain_ms=plain_ms,
        profiled_ms=profiled_ms,
        operators_ms=operators_ms,
        profiler_ms=profiler_ms,
        rest_ms=rest_ms,
        interrupted_ms=interrupted_ms,
        gaps_ms=None if runs.is_parallel else gaps_ms,
        call_overhead_us=None if runs.is_parallel else runs.call_overhead_us,
        profiler_share=profiler_ms / undisturbed_ms,
        rest_share=rest_ms / undisturbed_ms,
        rest_error=error,
        clock_error=clock_error,
        is_closed=is_closed,
    )


def is_interrupted(balance: Balance) -> bool:
    """Whether other work on the machine took so much of the runs that the rest may belong to it."""
    return balance.interrupted_ms > _BUSY_SHARE * balance.profiled_ms


def doubts_of(balance: Balance) -> list[str]:
    """Notes about figures that other work on the machine makes uncertain."""
    doubts = []
    if is_interrupted(balance):
        share = 100 * balance.interrupted_ms / balance.profiled_ms
        doubts.append(f"the machine was busy: {share:.0f} % of the time of the runs went to interruptions")
    if balance.rest_error > CLOSED_WITHIN and balance.operators_ms >= MIN_MS:
        doubts.append("the time that the profiler adds varied too much: repeat with more --runs, or with --threads 1")
    return doubts


def _busy_us(run: Run) -> int:
    """The time in which at least one node ran."""
    busy = until = 0
    for call in sorted(run.calls, key=lambda call: call.start_us):
        end = call.start_us + call.total_us
        busy += max(0, end - max(call.start_us, until))
        until = max(until, end)
    return busy
