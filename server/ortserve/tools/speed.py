"""How fast models run, compared in turns.

Each model has a process of its own, because several spinning sessions in one process disturb each other.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import psutil

from ortserve.errors import invalid_input
from ortserve.tools.apart import ObjectApart
from ortserve.tools.bench.statistics import Estimate, estimate_percentile
from ortserve.tools.console import progress
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.subject import Subject

Feeds = Mapping[str, np.ndarray]
"""Inputs of one run by name, with their rows on axis 0."""

_BLOCK_S: Final = 0.05
"""Of runs without a change of the model: long against a change of processes, short against changes of the machine."""
_MOST_RUNS: Final = 2000
_LEAST_ROUNDS: Final = 8
"""The median of fewer than six ratios has no 95 % interval."""
_MOST_ROUNDS: Final = 400
_LIMIT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A model and how to open it; the parameters of ``open_model``."""

    subject: Subject
    provider: str | None = None
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> OpenModel:
        """Open it in this process.

        Raises:
            ServeError: As ``open_model``.
        """
        return open_model(self.subject, provider=self.provider, threads=self.threads, settings=dict(self.settings))


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a model runs.

    Attributes:
        median_ms: Time of a run, the median of blocks of runs.
        cpu_ms: Processor time of a run, all threads together.
        runs: That were measured.
        ratio: Time of the first model divided by that of this one, from pairs of blocks: 2 is twice as fast. An
            interval that contains 1 is no difference that could be measured.
        rss_nbytes: Memory that the process took to open the model and to run it.
        opening_s: How long ONNX Runtime took to open it.
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


def compare_speed(models: Sequence[Timed], feeds: Sequence[Feeds], *, seconds: float = 4.0) -> tuple[Speed, ...]:
    """Measure models in turns: A B, B A, A B, and so on, in short blocks of runs.

    Args:
        models: The first is what the others are compared with.
        feeds: Inputs of runs, used in turn; the models may order them in different ways.
        seconds: For all runs together; slow models get a few blocks in any case.

    Raises:
        ServeError: invalid_input: a model cannot be opened or run, or its process ended.
    """
    with ExitStack() as stack, progress("measuring speed", seconds) as step:
        runners: list[ObjectApart[_Runner]] = []
        for model in models:
            step(0, f"opening {model.subject.path.name} in another process")
            runners.append(stack.enter_context(ObjectApart(_LIMIT_S, _Runner, model, feeds)))
        runs = [runner.call(_Runner.runs_of, _BLOCK_S) for runner in runners]
        order = list(range(len(models)))
        blocks: list[list[_Block]] = [[] for _ in models]
        began = time.monotonic()
        while (rounds := len(blocks[0])) < _LEAST_ROUNDS or (
            rounds < _MOST_ROUNDS and time.monotonic() - began < seconds
        ):
            for number in order:
                blocks[number].append(runners[number].call(_Runner.run, runs[number]))
            order.reverse()
            step(time.monotonic() - began, "measuring speed")
        memory = [runner.call(_Runner.memory) for runner in runners]
    return tuple(
        _speed(blocks[0], own, is_first=not number, rss_nbytes=nbytes, opening_s=opening_s)
        for number, (own, (nbytes, opening_s)) in enumerate(zip(blocks, memory, strict=True))
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Runs one after the other: their number, and time and processor time of one."""

    runs: int
    wall_s: float
    cpu_s: float


def _speed(
    first: Sequence[_Block], own: Sequence[_Block], *, is_first: bool, rss_nbytes: int, opening_s: float
) -> Speed:
    ratios = np.array([a.wall_s / b.wall_s for a, b in zip(first, own, strict=True)])
    return Speed(
        median_ms=float(np.median([block.wall_s for block in own])) * 1e3,
        cpu_ms=float(np.median([block.cpu_s for block in own])) * 1e3,
        runs=sum(block.runs for block in own),
        ratio=Estimate(1.0, 1.0, 1.0) if is_first else estimate_percentile(ratios, 0.5),
        rss_nbytes=rss_nbytes,
        opening_s=opening_s,
    )


class _Runner:
    """An open model in its process."""

    def __init__(self, model: Timed, feeds: Sequence[Feeds]) -> None:
        self._process: Final = psutil.Process()
        self._before: Final = self._process.memory_info().rss
        opened = model.open()
        # Opening freed memory, which would hide the growth of the first runs; only glibc has this function.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self._opening_s: Final = opened.opening_s
        self._run: Final = opened.runner().run
        if missing := {spec.name for spec in opened.signature.inputs} - {*feeds[0]}:
            raise invalid_input(f"{model.subject.path.name}: no input is given for {', '.join(sorted(missing))}")
        self._inputs: Final = [opened.for_model([one[spec.name] for spec in opened.signature.inputs]) for one in feeds]
        self._number = 0
        for inputs in self._inputs:  # also the plans of memory, which ONNX Runtime makes for each shape
            self._run(inputs)

    def runs_of(self, block_s: float) -> int:
        """How many runs take about this time."""
        block = self.run(2 * len(self._inputs))
        return max(1, min(_MOST_RUNS, round(block_s / block.wall_s)))

    def run(self, count: int) -> _Block:
        """Run so often, after a first run that wakes the threads and fills the caches if it is a short one."""
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
        """The memory that this process has taken since before it opened the model, and the time of opening."""
        return max(0, self._process.memory_info().rss - self._before), self._opening_s
