"""Runs models in this process, alternately without and with profiling, and alternately with each model."""

import random
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ortserve.engine.placement import count_operators, profiler_events
from ortserve.engine.profiler_cost import CallOverhead
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.reading import read_model
from ortserve.tools.console import ShowProgress
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.opening import OpenModel, naming_failures, saving_graph
from ortserve.tools.profile.runs import Runs, RunTime
from ortserve.tools.profile.trace import read_trace
from ortserve.tools.speed import Timed

WARM_UP: Final = 3
"""Unmeasured runs at the beginning. The first runs of a session allocate memory."""
MAX_EVENTS: Final = 200_000
"""Limit of the events of a profile. The profiler keeps 2.4 KB per event, and drops events after the millionth."""
_MIN_RUNS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(Timed):
    """A model, the parameters to open it, and the label that reports show."""

    label: str


def measure(variants: Sequence[Variant], folder: Path, given: Namespace, step: ShowProgress) -> list[Runs]:
    """Open each variant twice, without and with profiling, and run all of them in turn.

    Args:
        variants: The models to measure.
        folder: Receives the optimized graphs and the traces: ``0.json`` of the first variant, ``1.json`` of the second.
        given: The arguments of the command.
        step: Receives the number of the current run.

    Raises:
        ServeError: A model cannot be opened or run, or one run has more events than the profiler keeps.
    """
    arms = []
    for number, variant in enumerate(variants):
        step(0, f"opening {variant.label}")
        arms.append(_Arm(variant, folder / f"{number}.json", given.rows, given.inputs))
    most = min(arm.max_runs(given.runs) for arm in arms)
    order = random.Random(0)  # noqa: S311 - a fixed order could favour an arm
    until = time.monotonic() + given.seconds
    for number in range(WARM_UP + most):
        if number >= WARM_UP + _MIN_RUNS and time.monotonic() > until:
            for arm in arms:
                arm.runs.notes.append(f"only {number - WARM_UP} of {given.runs} runs fit into {given.seconds:g} s")
            break
        step(number, f"run {number + 1} of {WARM_UP + most}")
        for arm in order.sample(arms, len(arms)):
            with naming_failures(arm.path):
                arm.run(number, profiled_first=bool(order.getrandbits(1)))
    return [arm.finish() for arm in arms]


class _Arm:
    """A variant, with one session without profiling and one with it."""

    def __init__(self, variant: Variant, trace: Path, rows: int, inputs: Path | None) -> None:
        self._variant, self._trace = variant, trace
        self.path: Final = variant.subject.path
        # The session without profiling must not write its configured optimized model, which a server may read.
        plain = self._plain = self._open(None, {"optimized_model_file": None})
        self._inputs, self._has_samples = choose_inputs(plain, inputs), inputs is not None
        self._rows = rows if plain.signature.is_batched else 1
        self.runs = Runs(
            label=variant.label,
            provider=plain.choice.name,
            threads=plain.threads,
            settings={name: str(value) for name, value in variant.settings.items()},
            inputs=self._inputs.origin,
            rows=self._rows,
            source=plain.graph.graph,
        )
        self._graph_file = trace.with_suffix(".onnx")
        if rows > 1 and not plain.signature.is_batched:
            because = plain.signature.unbatched_because
            self.runs.notes.append(f"runs have one row, because the model is not batched: {because}")
        entries = variant.settings.get("entries", variant.subject.options.session.entries)
        self._profiled = self._open(trace, saving_graph(plain.graph, entries, self._graph_file))
        self._overhead = CallOverhead(plain.threads, trace.with_name(f"{trace.name}-overhead"))
        self._runners = [(plain.runner(), self.runs.plain), (self._profiled.runner(), self.runs.profiled)]

    def _open(self, profile_prefix: Path | None, settings: Mapping[str, Any]) -> OpenModel:
        return replace(self._variant, settings={**self._variant.settings, **settings}).open(profile_prefix)

    def max_runs(self, asked: int) -> int:
        """The number of runs that the profiler can record, at most ``asked``."""
        events = profiler_events(count_operators(self._plain.session))
        if events is None:
            first = self._open(self._trace.with_name(f"{self._trace.name}-first"), {"optimized_model_file": None})
            first.runner().run(first.for_model(self._inputs.take(self._rows, 0)))
            with Path(first.session.end_profiling()).open("rb") as lines:
                events = sum(1 for _ in lines)
        if events > MAX_EVENTS:
            raise invalid_input(
                f"{self.path}: expected at most {MAX_EVENTS:,} events of ONNX Runtime's profiler in "
                f"a run, got {events:,}"
            )
        most = max(1, MAX_EVENTS // events - WARM_UP)
        if most < asked:
            self.runs.notes.append(f"{most} of {asked} runs were made: a run has {events:,} events of the profiler")
        return min(asked, most)

    def run(self, number: int, *, profiled_first: bool) -> None:
        """Make one run with each session. The first ``WARM_UP`` ones are not recorded."""
        # All runs get the same synthetic inputs, so they can be compared. Samples of a file are used in turn.
        arrays = self._plain.for_model(self._inputs.take(self._rows, number if self._has_samples else 0))
        for runner, times in self._runners[:: -1 if profiled_first else 1]:
            began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            runner.run(arrays)
            cpu_ns, elapsed_ns = time.thread_time_ns() - began_cpu_ns, time.perf_counter_ns() - began_ns
            if number >= WARM_UP:
                times.append(RunTime(elapsed_ns, cpu_ns))
        self._overhead.sample()

    def finish(self) -> Runs:
        """End profiling and read the trace."""
        runs = self.runs
        runs.call_overhead_us = self._overhead.finish()
        file = Path(self._profiled.session.end_profiling()).replace(self._trace)
        with file.open("rb") as lines:
            runs.trace = read_trace(lines)
        del runs.trace.runs[:WARM_UP]
        complete = len(runs.trace.runs)
        if not complete:
            raise ServeError(ErrorKind.INTERNAL, f"{runs.label}: no run is complete in the profiler's trace")
        if complete < len(runs.plain):  # samples differ in how often their loops repeat
            runs.notes.append(
                f"the profiler recorded only {complete} of {len(runs.plain)} runs; with fewer --runs, all are recorded"
            )
            del runs.plain[complete:], runs.profiled[complete:]
        optimized = read_model(self._graph_file)
        runs.optimized = optimized.graph if optimized.is_readable else None
        return runs
