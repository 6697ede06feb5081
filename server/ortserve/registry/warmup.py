"""Running a fresh instance until it is warm, and learning its latency, batch size and batchability on the way."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.errors import DeviceLostError, OutOfMemoryError, RunTimeoutError, ServeError, invalid_input
from ortserve.registry.make_up import USUAL_BOUNDS, MakeUp, RunBounds, WorkerRuns, as_batch
from ortserve.registry.progress import Progress
from ortserve.registry.row_trial import RowTrial, TrialOutcome
from ortserve.registry.samples import Sample
from ortserve.registry.synthetic import FREE_DIM

MAX_SWEPT_ROWS: Final = 64
_RUNS: Final = 5
_WORTHWHILE: Final = 0.95
"""A bucket is worth having while its time a row is below this share of the bucket's before it."""
_TRIED_IN_VAIN: Final = 2
"""Sizes in a row that were not: one may have been timed while something else ran on the machine."""
_TRIAL_SHARE: Final = 0.5
"""Of the time for warm-up that a trial of the rows may take."""


@dataclass(frozen=True, slots=True)
class SizeLatency:
    """Medians for one batch size: of the run alone, and of the whole way to the worker and back.

    ``least_ns`` is the shortest of these ways.
    """

    rows: int
    run_ns: int
    round_trip_ns: int
    least_ns: int

    @property
    def ns_per_row(self) -> float:
        """At its best: what else ran on the machine meanwhile says nothing of what batching is worth."""
        # The way to the worker is part of what the rows of a batch share.
        return self.least_ns / self.rows


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warm-up found.

    Attributes:
        max_rows: The largest batch worth making.
        latencies: For each batch size that was run, 1 row first.
        rows_depend: How rows depend on each other, by the model's graph or a trial; empty where none of them shows it.
        drift: Largest difference of a float between rows alone and the same rows among others, in that trial.
        tried: In words, what was tried; empty where nothing was.
        refused: What the model said to made-up inputs, empty where it took them; then nothing else is known.
        has_run: Whether any made-up input ran, and be it before another one was refused.
        no_memory: What a size that found too little memory said, empty where all did; ``max_rows`` is then no more than
            the largest that found some, and one of the buckets where there are any.
        make_up: What makes inputs that the model takes; None where nothing ran.
    """

    max_rows: int
    latencies: tuple[SizeLatency, ...] = ()
    rows_depend: str = ""
    drift: float = 0.0
    tried: str = ""
    refused: str = ""
    has_run: bool = False
    no_memory: str = ""
    make_up: MakeUp | None = None


def warm_up(
    runner: Runner,
    signature: ModelSignature,
    *,
    budget_s: float,
    max_rows: int | None,
    clock: Clock,
    buckets: Sequence[int] = (),
    padding: Padding | None = None,
    progress: Progress | None = None,
    is_coarse: bool = False,
    rows_depend: str | None = None,
    samples: Sequence[Sample] = (),
    bounds: RunBounds = USUAL_BOUNDS,
) -> WarmUp:
    """Run the instance on made-up inputs, on its own worker, from the loader's thread.

    Batch sizes double from 1 until two in a row have not made the time a row fall by 5 %, up to 64 rows, or up to
    ``max_rows`` whatever it gains, and as long as ``budget_s`` lasts; the size being run when it ends is finished. A
    budget of 0 runs nothing. Inputs are as long as ``padding``, which is the runner's, makes them. Optional inputs are
    left out, unless the model refuses that; free dimensions are larger where it refuses small ones. ``is_coarse`` is as
    in ``core.closeness``. ``rows_depend`` is how rows of a batched model depend on each other, empty where they do not;
    where it is None, rows are run alone and together, those of ``samples`` first.

    A size that finds too little memory ends the sweep, and batches stay below it. They are padded to ``buckets``, where
    there are any, of which the largest is at least ``max_rows``: then they have no more rows than the largest bucket
    that finds memory, so that those above it are padded to by none.

    Raises:
        DeviceLostError: Whatever the model takes, it cannot be run.
        RunTimeoutError: A run took longer than ``bounds`` say.
        OutOfMemoryError: Not even one row finds memory, or none of the buckets does.
    """
    unknown = WarmUp(max_rows or MAX_SWEPT_ROWS)
    if budget_s == 0:
        return unknown
    stop_ns = clock() + int(budget_s * 1e9)
    progress = progress or Progress(clock)
    worker = WorkerRuns(runner, bounds)
    try:
        make_up = _choose(worker, MakeUp(signature, padding), progress)
        trial: RowTrial | TrialOutcome = TrialOutcome(rows_depend or "")
        if rows_depend is None and signature.is_batched:
            trial = RowTrial(
                worker,
                make_up,
                samples,
                most_rows=max_rows or MAX_SWEPT_ROWS,
                is_coarse=is_coarse,
                stop_ns=clock() + int(budget_s * 1e9 * _TRIAL_SHARE),
                clock=clock,
            )
        return _measure(
            worker, make_up, max_rows, buckets, stop_ns, clock, progress, trial or TrialOutcome(rows_depend or "")
        )
    except (DeviceLostError, OutOfMemoryError, RunTimeoutError):
        raise
    except ServeError as error:
        return replace(unknown, refused=error.message, has_run=worker.has_run)


def _choose(worker: WorkerRuns, make_up: MakeUp, progress: Progress) -> MakeUp:
    """The first of the ways to make inputs up that the model takes, and has an answer for: of no elements is none."""
    taken: MakeUp | None = None
    ways = make_up.ways()
    for way in ways if len(ways) > 1 else ():
        progress.begin("warming up: looking for inputs that the model takes")
        try:
            outputs = worker.run(as_batch(way(1, 0), 1)).outputs
        except (DeviceLostError, RunTimeoutError):
            raise
        except ServeError:
            continue
        if all(output.size for output in outputs):
            return way
        taken = taken or way
    return taken or make_up


def _measure(
    worker: WorkerRuns,
    make_up: MakeUp,
    max_rows: int | None,
    buckets: Sequence[int],
    stop_ns: int,
    clock: Clock,
    progress: Progress,
    trial: RowTrial | TrialOutcome,
) -> WarmUp:
    """Raises ServeError: internal, when the model refuses such inputs, or finds no memory, as ``warm_up`` says."""
    signature = make_up.signature
    no_memory = ""
    if isinstance(trial, TrialOutcome):
        outcome = trial
    else:
        progress.begin("warming up: rows alone and together")
        try:
            outcome = trial.run()
        except OutOfMemoryError as error:
            no_memory = error.message
            outcome = TrialOutcome(f"rows could not be tried together, as not even two find memory: {no_memory}")
    time_size = partial(_time_runs, worker, make_up, stop_ns=stop_ns, clock=clock, progress=progress)
    sizes = [time_size(1)]
    if signature.is_batched and not outcome.problem:
        limit = max_rows or MAX_SWEPT_ROWS
        limit = min((bucket for bucket in buckets if bucket >= limit), default=limit)
        if make_up.free_dim != FREE_DIM:
            limit = min(limit, make_up.most_rows)
        while sizes[-1].rows < limit and clock() < stop_ns and (max_rows or _in_vain(sizes) < _TRIED_IN_VAIN):
            rows = min(2 * sizes[-1].rows, limit)
            try:
                sizes.append(time_size(rows))
            except OutOfMemoryError as error:
                no_memory = error.message
                fitted = sizes[-1].rows
                limit = max((bucket for bucket in buckets if fitted < bucket < rows), default=fitted)
    most_rows = max_rows or _best(sizes).rows
    if no_memory:
        most_rows = min(most_rows, _largest_that_fits(sizes[-1].rows, buckets, no_memory))
    return WarmUp(
        most_rows,
        tuple(sizes),
        outcome.problem,
        outcome.drift,
        outcome.extent,
        has_run=True,
        no_memory=no_memory,
        make_up=make_up,
    )


def _best(sizes: Sequence[SizeLatency]) -> SizeLatency:
    """The last size that was worth having, as ``_WORTHWHILE`` says; ``sizes`` ascend."""
    best = sizes[0]
    for size in sizes[1:]:
        if size.ns_per_row < _WORTHWHILE * best.ns_per_row:
            best = size
    return best


def _in_vain(sizes: Sequence[SizeLatency]) -> int:
    """How many sizes there were since then."""
    return len(sizes) - 1 - sizes.index(_best(sizes))


def _largest_that_fits(rows: int, buckets: Sequence[int], no_memory: str) -> int:
    """The most rows of batches that are padded to ``buckets``, if there are any, where ``rows`` find memory.

    Raises:
        OutOfMemoryError: None of the buckets does.
    """
    fitting = [bucket for bucket in buckets if bucket <= rows] if buckets else [rows]
    if not fitting:
        raise OutOfMemoryError(
            f"buckets: expected one of at most {rows} rows, for which there is memory, "
            f"got {', '.join(map(str, sorted(buckets)))}: {no_memory}"
        )
    return max(fitting)


def time_sizes(
    runner: Runner,
    signature: ModelSignature,
    sizes: Sequence[int],
    *,
    budget_s: float,
    clock: Clock,
    progress: Progress,
    padding: Padding | None = None,
    bounds: RunBounds = USUAL_BOUNDS,
) -> tuple[SizeLatency, ...]:
    """Time batches of these sizes, once an instance runs them in another way than when it was warmed up.

    Raises:
        ServeError: internal, when a run fails.
    """
    stop_ns = clock() + int(budget_s * 1e9)
    worker, make_up = WorkerRuns(runner, bounds), MakeUp(signature, padding)
    return tuple(_time_runs(worker, make_up, rows, stop_ns, clock, progress) for rows in sorted(sizes))


def run_once(
    runner: Runner, make_up: MakeUp, rows: int, *, progress: Progress, bounds: RunBounds = USUAL_BOUNDS
) -> None:
    """Have an instance allocate what a batch of ``rows`` rows takes; for those beside the one that was measured.

    Raises:
        ServeError: internal, when the model refuses made-up inputs.
    """
    progress.begin(_batches(rows))
    WorkerRuns(runner, bounds).run(as_batch(make_up(rows, 0), rows))


def run_samples(
    runner: Runner, samples: Sequence[Sample], progress: Progress, bounds: RunBounds = USUAL_BOUNDS
) -> None:
    """Run what the model's configuration asks for, on the instance's own worker.

    Raises:
        ServeError: invalid_input, naming the sample that failed, and why; not_ready, where the device is lost.
        RunTimeoutError: A run took longer than ``bounds`` say.
    """
    worker = WorkerRuns(runner, bounds)
    for sample in samples:
        progress.begin(f"warming up: sample '{sample.name}'")
        batch = as_batch(sample.inputs, sample.rows)
        try:
            for _ in range(sample.count):
                worker.run(batch)
        except (DeviceLostError, RunTimeoutError):
            raise
        except ServeError as error:
            raise invalid_input(f"warm-up sample '{sample.name}': {error.message}") from None


def _batches(rows: int) -> str:
    return f"warming up: batches of {rows} rows"


def _time_runs(
    worker: WorkerRuns, make_up: MakeUp, rows: int, stop_ns: int, clock: Clock, progress: Progress
) -> SizeLatency:
    """Time a few runs of one size; the first, in which memory is allocated, does not count."""
    progress.begin(_batches(rows))
    batch = as_batch(make_up(rows, rows), rows)
    worker.run(batch)
    runs: list[int] = []
    round_trips: list[int] = []
    while len(runs) < _RUNS and (not runs or clock() < stop_ns):
        began_ns = clock()
        runs.append(worker.run(batch).run_ns)
        round_trips.append(clock() - began_ns)
    return SizeLatency(rows, int(statistics.median(runs)), int(statistics.median(round_trips)), min(round_trips))
