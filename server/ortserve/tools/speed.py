"""Compares the speed of models, which run alternately.

Each model has processes of its own, because several spinning sessions in one process disturb each other.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from ortserve.core.signature import ModelSignature
from ortserve.engine.child_process import ObjectInChild
from ortserve.engine.process_memory import give_back_freed
from ortserve.errors import invalid_input
from ortserve.tools.console import progress
from ortserve.tools.ensemble import Opened, open_ensemble
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.report import number_text
from ortserve.tools.statistics import Estimate, estimate_ratio
from ortserve.tools.subject import Subject

Feeds = Mapping[str, np.ndarray]
"""The inputs of one run by name. Axis 0 holds the rows."""

_BLOCK_S: Final = 0.05
"""Duration of a block, the runs of one model before the next model's turn. Switching between processes takes far less
time, and the speed of the machine changes more slowly."""
_MAX_RUNS: Final = 2000
"""Limit of the runs in a block."""
_MIN_ROUNDS: Final = 2
"""Blocks of each model that one process measures at least, whatever the time limit. In two, each model comes first."""
_MAX_ROUNDS: Final = 400
_WARM_S: Final = 1.0
"""Time limit of the warm-up runs in a process, if its share of the measurement is not shorter. The first of them is
always made."""
_PROCESSES: Final = 5
"""Processes that measure each model. Two processes with one model differ in memory layout, and so in speed: by up to
8 % if a run takes 17 µs."""
_LIMIT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A model and the parameters of ``open_model`` for it."""

    subject: Subject
    provider: str | None = None
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def at(self, path: Path) -> "Timed":
        """The same parameters for another file of the model."""
        return replace(self, subject=replace(self.subject, path=path))

    def open(self, profile_prefix: Path | None = None) -> OpenModel:
        """Open it in this process. Raises ServeError as ``open_model``."""
        return open_model(
            self.subject,
            provider=self.provider,
            threads=self.threads,
            settings=self.settings,
            profile_prefix=profile_prefix,
        )

    def open_with_members(self) -> Opened:
        """As ``open``, also for an ensemble."""
        if self.subject.options.ensemble is None:
            return self.open()
        return open_ensemble(self.subject, lambda member: replace(self, subject=member).open())


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a model.

    Attributes:
        median_ms: Time of a run. Of the first model, it is the median over the blocks of runs; of others, this median
            divided by their ratio, so that it belongs to the same state of the machine.
        cpu_ms: Processor time of a run, all threads together.
        runs: The number of measured runs.
        ratio: Time of the first model divided by the time of this one: 2 means twice as fast. If the interval contains
            1, no difference was measured. Each pair of processes gives the median ratio of its pairs of blocks; the
            value and the interval are those of the mean over the pairs of processes.
        rss_nbytes: Memory that a process took to open and run the model.
        opening_s: Time that ONNX Runtime took to open it.
    """

    median_ms: float
    cpu_ms: float
    runs: int
    ratio: Estimate
    rss_nbytes: int
    opening_s: float

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the first model, beyond the noise."""
        return self.ratio.low is not None and self.ratio.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the first model, beyond the noise."""
        return self.ratio.high is not None and self.ratio.high < 1


def speed_text(speed: Speed) -> str:
    """The ratio of a speed in words: ``1.42 times as fast (1.38 to 1.47)``."""
    ratio = speed.ratio
    if ratio.low is None or ratio.high is None:
        return f"{number_text(ratio.value)} times as fast (too few runs for an interval)"
    interval = f"{number_text(ratio.low)} to {number_text(ratio.high)}"
    if ratio.low <= 1 <= ratio.high:
        return f"{number_text(ratio.value)} times as fast, no difference beyond the noise ({interval})"
    return f"{number_text(ratio.value)} times as fast ({interval})"


def compare_speed(models: Sequence[Timed], feeds: Sequence[Feeds], *, seconds: float) -> tuple[Speed, ...]:
    """Measure models alternately (A B, B A, A B, …), in short blocks of runs and in several processes per model.

    Args:
        models: The first one is the reference for the ratios of the others.
        feeds: The inputs of runs, used in turn. Models may declare these inputs in different orders.
        seconds: Time for all blocks together. Slow models exceed it, as each process measures at least two blocks. The
            starts of the processes come in addition.

    Raises:
        ServeError: invalid_input: a model cannot be opened or run, or its process ended.
    """
    rounds: list[list[_Trial]] = []
    with progress("measuring speed", _PROCESSES) as step:
        for number in range(_PROCESSES):
            rounds.append(_measure_turns(models, feeds, seconds / _PROCESSES))
            step(number + 1, "measuring speed")
    first = [turn[0] for turn in rounds]
    return tuple(_speed(first, own) for own in zip(*rounds, strict=True))


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive runs of a model: their number, the time of a run, and its processor time."""

    runs: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Trial:
    """The measurements of a model by one process."""

    blocks: list[_Block]
    rss_nbytes: int
    opening_s: float

    def ratio(self, first: "_Trial") -> float:
        """Time of the first model divided by the time of this one: the median over pairs of blocks."""
        return float(np.median([one.wall_s / own.wall_s for one, own in zip(first.blocks, self.blocks, strict=True)]))


def _measure_turns(models: Sequence[Timed], feeds: Sequence[Feeds], seconds: float) -> list[_Trial]:
    with ExitStack() as stack:
        # The processes start together, which takes a second, and then open their models in turn. The threads stay until
        # the end, because a process ends with the thread that started it.
        threads = stack.enter_context(ThreadPoolExecutor(len(models)))
        starts = [threads.submit(ObjectInChild, _LIMIT_S, _Runner, model, feeds) for model in models]
        runners = [stack.enter_context(start.result()) for start in starts]
        signature: ModelSignature | None = None
        for runner in runners:
            signature = runner.call(_Runner.open, min(_WARM_S, seconds), signature)
        runs = [runner.call(_Runner.runs_of, _BLOCK_S) for runner in runners]
        order = list(range(len(models)))
        blocks: list[list[_Block]] = [[] for _ in models]
        deadline = time.monotonic() + seconds
        while len(blocks[0]) < _MIN_ROUNDS or (len(blocks[0]) < _MAX_ROUNDS and time.monotonic() < deadline):
            for number in order:
                blocks[number].append(runners[number].call(_Runner.run, runs[number]))
            order.reverse()
        memory = [runner.call(_Runner.memory) for runner in runners]
    return [_Trial(own, *measured) for own, measured in zip(blocks, memory, strict=True)]


def _speed(first: Sequence[_Trial], own: Sequence[_Trial]) -> Speed:
    blocks = [block for trial in own for block in trial.blocks]
    ratio = estimate_ratio([math.log(trial.ratio(reference)) for reference, trial in zip(first, own, strict=True)])
    return Speed(
        median_ms=float(np.median([block.wall_s for trial in first for block in trial.blocks])) * 1e3 / ratio.value,
        cpu_ms=float(np.median([block.cpu_s for block in blocks])) * 1e3,
        runs=sum(block.runs for block in blocks),
        ratio=ratio,
        rss_nbytes=max(trial.rss_nbytes for trial in own),
        opening_s=min(trial.opening_s for trial in own),
    )


class _Runner:
    """Opens a model in its own process and runs it there."""

    def __init__(self, model: Timed, feeds: Sequence[Feeds]) -> None:
        self._model: Final = model
        self._feeds: Final = feeds
        self._process: Final = psutil.Process()
        self._number = 0

    def open(self, warm_s: float, reference: ModelSignature | None) -> ModelSignature:
        """Open the model and warm it up, for ``warm_s`` at most.

        Args:
            warm_s: Time limit of the warm-up.
            reference: The signature of the first model; None in the first model itself.

        Returns:
            The signature of the first model.
        """
        self._before = self._process.memory_info().rss
        opened = self._model.open_with_members()
        if reference is not None:
            opened = opened.with_rows_of(reference)
        give_back_freed()  # otherwise the first runs reuse memory that opening freed, and do not show in the growth
        self._opening_s, self._run = opened.opening_s, opened.runner().run
        names = [spec.name for spec in opened.signature.inputs]
        if missing := {*names} - {*self._feeds[0]}:
            raise invalid_input(f"{self._model.subject.path.name}: no input is given for {', '.join(sorted(missing))}")
        self._inputs = [opened.for_model([one[name] for name in names]) for one in self._feeds]
        deadline = time.monotonic() + warm_s
        for inputs in self._inputs:  # ONNX Runtime plans memory for each shape of inputs
            self._run(inputs)
            if time.monotonic() > deadline:
                break
        return reference or opened.signature

    def runs_of(self, block_s: float) -> int:
        """The number of runs that take about this time."""
        run_s = self.run(1).wall_s
        if run_s < block_s / 8:
            run_s = self.run(8).wall_s
        return max(1, min(_MAX_RUNS, round(block_s / run_s)))

    def run(self, count: int) -> _Block:
        """Make ``count`` runs. If there are several, an unmeasured run before them wakes threads and fills caches."""
        if count > 1:
            self._run(self._inputs[self._number % len(self._inputs)])
        cpu_s, times = time.process_time(), [time.perf_counter()]
        for _ in range(count):
            self._run(self._inputs[self._number % len(self._inputs)])
            self._number += 1
            times.append(time.perf_counter())
        wall_s = float(np.median(np.diff(times)))
        return _Block(count, wall_s, (time.process_time() - cpu_s) / count)

    def memory(self) -> tuple[int, float]:
        """The growth of this process since before it opened the model, in bytes, and the seconds that opening took."""
        return max(0, self._process.memory_info().rss - self._before), self._opening_s
