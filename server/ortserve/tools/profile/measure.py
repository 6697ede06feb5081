"""Profiles of models in this process: runs without and with profiling, and those of all models, alternate."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ortserve.core.batch import Arrays
from ortserve.engine.instance import runs_on_its_thread
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.engine.placement import count_operators
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import Graph
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.tools.inputs import FileInputs, choose_inputs
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.profile.balance import RunTime
from ortserve.tools.profile.trace import Trace, read_trace
from ortserve.tools.subject import Subject

WARM_UP: Final = 3
"""Runs before the measured ones: the first of a session allocate memory."""
MOST_EVENTS: Final = 200_000
"""Events that a profile may have: the profiler keeps 2.4 KB for each, and drops those after the millionth."""
_LEAST_RUNS: Final = 5
_LARGE_WEIGHTS: Final = 1 << 30
"""Larger models inside one file are not written out with their optimized graph, as that contains the weights."""
_REPEATING: Final = frozenset(("Loop", "Scan"))


@dataclass(frozen=True, slots=True)
class Variant:
    """A model and how to open it; what ``tools.opening.open_model`` takes."""

    label: str
    subject: Subject
    provider: str | None = None
    threads: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measured:
    """The measurement of a variant.

    Attributes:
        model: Opened without profiling.
        rows: Of a run.
        inputs: Where they come from.
        samples: After how many runs the inputs repeat.
        plain: Times of each run without profiling.
        profiled: Times of the same runs with profiling.
        trace: Of the profiled runs, without warm-up.
        trace_file: Its file.
        optimized: The graph that ran; None if it is not known.
        notes: What limited the measurement.
    """

    variant: Variant
    model: OpenModel
    rows: int
    inputs: str
    samples: int
    trace_file: Path
    plain: list[RunTime] = field(default_factory=list)
    profiled: list[RunTime] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    optimized: Graph | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[range]:
        """Positions of the runs on each sample."""
        return [range(first, len(self.plain), self.samples) for first in range(min(self.samples, len(self.plain)))]

    @property
    def is_single_threaded(self) -> bool:
        """Whether the calling thread does all the work."""
        return runs_on_its_thread(self.model.session, self.model.threads)


def measure(
    variants: Sequence[Variant],
    folder: Path,
    *,
    runs: int,
    rows: int,
    seconds: float,
    inputs: Path | None,
    step: Callable[[float, str], None],
) -> list[Measured]:
    """Open each variant twice, without and with profiling, and run all of them in turn.

    Args:
        variants: What to measure.
        folder: For trace files and optimized graphs; exists.
        runs: Of each session.
        rows: Of each run, if the model is batched.
        seconds: Time limit of the runs.
        inputs: File of samples; None for synthetic inputs.
        step: Reports progress in runs.

    Raises:
        ServeError: A model cannot be opened or run, or one run has more events than the profiler keeps.
    """
    arms = []
    for number, variant in enumerate(variants):
        step(0, f"opening {variant.label}")
        arms.append(_Arm(variant, folder / f"model-{number}", rows, inputs))
    most = min(arm.most_runs(runs) for arm in arms)
    order = random.Random(0)  # noqa: S311 - so that no arm always runs right after another one
    until = time.monotonic() + seconds
    for number in range(WARM_UP + most):
        if number >= WARM_UP + _LEAST_RUNS and time.monotonic() > until:
            most = number - WARM_UP
            for arm in arms:
                arm.measured.notes.append(f"{most} of {runs} runs were made, as {seconds:g} s were over")
            break
        step(number, f"run {number + 1} of {WARM_UP + most}")
        for arm in order.sample(arms, len(arms)):
            arm.run(number, profiled_first=bool(order.getrandbits(1)))
    return [arm.finish() for arm in arms]


class _Arm:
    """One variant: a session without and one with profiling."""

    def __init__(self, variant: Variant, prefix: Path, rows: int, inputs: Path | None) -> None:
        self._prefix = prefix
        # The session without profiling must not write a file that its configuration names: a server may read it.
        self._plain = self._open(variant, None, {"optimized_model_file": None})
        chosen = choose_inputs(self._plain, inputs)
        self._inputs = chosen
        samples = 1
        if isinstance(chosen, FileInputs):
            samples = -(-chosen.samples // (rows if self._plain.signature.is_batched else 1))
        self.measured = Measured(
            variant,
            self._plain,
            rows if self._plain.signature.is_batched else 1,
            chosen.origin,
            samples,
            prefix,
        )
        self._graph_file: Path | None = prefix.with_suffix(".onnx")
        subject, graph = variant.subject, self._plain.graph
        if not graph.external_files and model_nbytes(subject.path, graph) > _LARGE_WEIGHTS:
            self._graph_file = None
            self.measured.notes.append("the optimized graph is not known, as the model is over 1 GiB")
        if rows > 1 and not self._plain.signature.is_batched:
            because = self._plain.signature.unbatched_because
            self.measured.notes.append(f"runs have one row, as the model is not batched: {because}")
        file = None if self._graph_file is None else str(self._graph_file.absolute())
        self._profiled = self._open(variant, prefix, {"optimized_model_file": file})
        self._run_plain, self._run_profiled = self._plain.runner(), self._profiled.runner()

    def _open(self, variant: Variant, prefix: Path | None, settings: dict[str, Any]) -> OpenModel:
        return open_model(
            variant.subject,
            provider=variant.provider,
            threads=variant.threads,
            settings=variant.settings | settings,
            profile_prefix=prefix,
        )

    def most_runs(self, asked: int) -> int:
        """How many runs the profiler can record, at most ``asked``."""
        placed = count_operators(self._plain.session)
        nodes = [(op, count) for kinds in placed.values() for op, count in kinds.items()]
        events = 3 + sum(count for _, count in nodes)
        if any(op in _REPEATING for op, _ in nodes):  # only a run shows how often
            events = self._count_events()
        if events > MOST_EVENTS:
            raise invalid_input(
                f"{self.measured.variant.subject.path}: expected at most {MOST_EVENTS:,} events of ONNX Runtime's "
                f"profiler in a run, got {events:,}"
            )
        most = max(1, MOST_EVENTS // events - WARM_UP)
        if most < asked:
            self.measured.notes.append(f"{most} of {asked} runs were made: a run has {events:,} events of the profiler")
        return min(asked, most)

    def _count_events(self) -> int:
        prefix = self._prefix.with_name(f"{self._prefix.name}-first")
        first = self._open(self.measured.variant, prefix, {"optimized_model_file": None})
        first.runner().run(first.for_model(self._take(0)))
        with Path(first.session.end_profiling()).open("rb") as lines:
            return sum(1 for _ in lines)

    def _take(self, number: int) -> Arrays:
        # Synthetic inputs are the same in all runs, so that runs can be compared.
        return self._inputs.take(self.measured.rows, number % self.measured.samples)

    def run(self, number: int, *, profiled_first: bool) -> None:
        """Make one run with each session. The first ``WARM_UP`` ones are not recorded."""
        arrays = self._plain.for_model(self._take(number))
        measured = self.measured
        pair = [(self._run_plain, measured.plain), (self._run_profiled, measured.profiled)]
        for runner, times in reversed(pair) if profiled_first else pair:
            began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                runner.run(arrays)
            except ORT_ERRORS as error:
                path = measured.variant.subject.path
                raise ServeError(ErrorKind.REJECTED_BY_MODEL, f"{path}: {without_paths(str(error))}") from None
            cpu_ns, elapsed_ns = time.thread_time_ns() - began_cpu_ns, time.perf_counter_ns() - began_ns
            if number >= WARM_UP:
                times.append(RunTime(elapsed_ns, cpu_ns))

    def finish(self) -> Measured:
        """End profiling and read what it wrote."""
        measured = self.measured
        measured.trace_file = Path(self._profiled.session.end_profiling())
        with measured.trace_file.open("rb") as lines:
            measured.trace = read_trace(lines)
        del measured.trace.runs[:WARM_UP]
        if measured.trace.dropped:
            measured.notes.append(f"the profiler dropped {measured.trace.dropped:,} events: fewer --runs are complete")
        complete = len(measured.trace.runs)
        if not complete:
            raise ServeError(
                ErrorKind.INTERNAL, f"{measured.variant.label}: no run is complete in the profiler's trace"
            )
        del measured.plain[complete:], measured.profiled[complete:]
        if self._graph_file is not None and self._graph_file.is_file():
            optimized = read_model(self._graph_file)
            measured.optimized = optimized.graph if optimized.is_readable else None
        return measured
