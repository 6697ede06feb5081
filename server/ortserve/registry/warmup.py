"""Running a fresh instance until it is warm, and learning its latency, batch size and batchability on the way."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ortserve.clock import Clock
from ortserve.core.batch import Batch, Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.errors import DeviceLostError, OutOfMemoryError, RunTimeoutError, ServeError, invalid_input
from ortserve.registry.make_up import USUAL_BOUNDS, MakeUp, RunBounds, WorkerRuns, as_batch
from ortserve.registry.progress import Progress
from ortserve.registry.row_trial import RowTrial, TrialOutcome
from ortserve.registry.samples import Sample
from ortserve.registry.size_timer import SizeLatency, SizeTimer, warming_batches
from ortserve.registry.sweep import MAX_SWEPT_ROWS, next_rows, row_ns_to_beat, worthwhile_rows
from ortserve.registry.synthetic import FREE_DIM

_TRIAL_SHARE: Final = 0.5
"""Of the time for warm-up that a trial of the rows may take."""


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
        spent_ns: How long warm-up took.
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
    spent_ns: int = field(default=0, compare=False)


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
    is_believed: bool = False,
    samples: Sequence[Sample] = (),
    bounds: RunBounds = USUAL_BOUNDS,
    effort_s: float | None = None,
    give_back_memory: Callable[[Batch], None] | None = None,
    keeps_session: Callable[[SizeLatency], bool] = lambda one_row: True,
) -> WarmUp:
    """Run the instance on made-up inputs, on its own worker, from the loader's thread.

    One row runs first. Then batch sizes double until two in a row have not made the time a row fall by 5 %, up to 64
    rows, or up to ``max_rows`` whatever it gains. A run is begun only if it is predicted to end within ``budget_s``. A
    budget of 0 runs nothing. Inputs are as long as ``padding``, which is the runner's, makes them. Optional inputs are
    left out, unless the model refuses that; free dimensions are larger where it refuses small ones. ``is_coarse`` is as
    in ``core.tensor``. ``rows_depend`` is how rows of a batched model depend on each other, empty where they do not;
    where it is None, rows are run alone and together, those of ``samples`` first. ``is_believed`` says that batches are
    made whatever that shows.

    A size that finds too little memory ends the sweep, and batches stay below it. They are padded to ``buckets``, where
    there are any, of which the largest is at least ``max_rows``: then they have no more rows than the largest bucket
    that finds memory, so that those above it are padded to by none.

    Where no ``max_rows`` asks for them, larger sizes are measured for no longer than ``effort_s``; what they would gain
    beyond is computed from the sizes that were measured. None sets no such limit. Warm-up ends after one row where
    ``keeps_session`` says by its time that another session will be warmed up instead. ``give_back_memory`` runs a
    batch, and frees what larger ones took: it is called, with one row, where a batch of warm-up had more rows than are
    worth having.

    Raises:
        DeviceLostError: Whatever the model takes, it cannot be run.
        RunTimeoutError: A run took longer than ``bounds`` say.
        OutOfMemoryError: Not even one row finds memory, or none of the buckets does.
    """
    unknown = WarmUp(max_rows or MAX_SWEPT_ROWS)
    if budget_s == 0:
        return unknown
    began_ns = clock()
    stop_ns = began_ns + int(budget_s * 1e9)
    progress = progress or Progress(clock)
    worker = WorkerRuns(runner, bounds)
    try:
        make_up = _choose(worker, MakeUp(signature, padding), progress, stop_ns, clock)
        timer = SizeTimer(worker, make_up, stop_ns=stop_ns, clock=clock, progress=progress, needs_second=is_coarse)
        one_row = timer.time_size(1)
        if not keeps_session(one_row):
            return WarmUp(1, (one_row,), has_run=True, make_up=make_up, spent_ns=clock() - began_ns)
        outcome, no_memory = TrialOutcome(rows_depend or ""), ""
        if rows_depend is None and signature.is_batched:
            progress.begin("warming up: rows alone and together")
            trial = RowTrial(
                worker,
                make_up,
                samples,
                most_rows=max_rows or MAX_SWEPT_ROWS,
                row_ns=one_row.least_ns,
                is_coarse=is_coarse,
                stop_ns=min(stop_ns, clock() + int(budget_s * 1e9 * _TRIAL_SHARE)),
                ends_ns=stop_ns,
                clock=clock,
            )
            try:
                outcome = trial.run()
            except OutOfMemoryError as error:
                no_memory = error.message
                problem = f"rows could not be tried together, as not even two find memory: {no_memory}"
                outcome = TrialOutcome(problem)
        sizes = [one_row]
        most_rows = max_rows or 1
        if signature.is_batched and (is_believed or not outcome.problem):
            if effort_s is not None and max_rows is None:
                timer.limit_effort(int(effort_s * 1e9))
            limit = max_rows or MAX_SWEPT_ROWS
            limit = min((bucket for bucket in buckets if bucket >= limit), default=limit)
            if make_up.free_dim != FREE_DIM:
                limit = min(limit, make_up.most_rows)
            no_memory = _sweep(timer, sizes, limit, buckets, is_set=max_rows is not None)
            most_rows = max_rows or worthwhile_rows(sizes, limit, is_cut=timer.is_cut and not no_memory)
        if no_memory:
            most_rows = min(most_rows, _largest_that_fits(sizes[-1].rows, buckets, no_memory))
        if give_back_memory is not None and worker.most_rows > most_rows:
            give_back_memory(as_batch(make_up(1, 0), 1))
            if timer.can_begin(most_rows, one_row):
                worker.run(as_batch(make_up(most_rows, 0), most_rows))
        return WarmUp(
            most_rows,
            tuple(sizes),
            outcome.problem,
            outcome.drift,
            outcome.extent,
            has_run=True,
            no_memory=no_memory,
            make_up=make_up,
            spent_ns=clock() - began_ns,
        )
    except (DeviceLostError, OutOfMemoryError, RunTimeoutError):
        raise
    except ServeError as error:
        return replace(unknown, refused=error.message, has_run=worker.has_run, spent_ns=clock() - began_ns)


def _choose(worker: WorkerRuns, make_up: MakeUp, progress: Progress, stop_ns: int, clock: Clock) -> MakeUp:
    """The first of the ways to make inputs up that the model takes, and has an answer for: of no elements is none.

    Returns:
        The first way that the model takes, or ``make_up``, where none of them has such an answer before ``stop_ns``.
    """
    taken: MakeUp | None = None
    ways = make_up.ways()
    for way in ways if len(ways) > 1 else ():
        if clock() >= stop_ns:
            break
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


def _sweep(timer: SizeTimer, sizes: list[SizeLatency], limit: int, buckets: Sequence[int], *, is_set: bool) -> str:
    """Measure larger sizes as long as they are worth it, and add them to ``sizes``.

    Returns:
        What a size that found no memory said; empty where all did.
    """
    no_memory = ""
    while (rows := next_rows(sizes, limit, is_set=is_set)) and timer.can_begin(rows, sizes[-1]):
        try:
            sizes.append(timer.time_size(rows, math.inf if is_set else row_ns_to_beat(sizes)))
        except OutOfMemoryError as error:
            no_memory = error.message
            fitted = sizes[-1].rows
            limit = max((bucket for bucket in buckets if fitted < bucket < rows), default=fitted)
    return no_memory


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

    Returns:
        The smallest, and those that are predicted to end within the budget; they ascend.

    Raises:
        ServeError: internal, when a run fails.
    """
    worker, make_up = WorkerRuns(runner, bounds), MakeUp(signature, padding)
    stop_ns = clock() + int(budget_s * 1e9)
    timer = SizeTimer(worker, make_up, stop_ns=stop_ns, clock=clock, progress=progress, needs_second=True)
    timed: list[SizeLatency] = []
    for rows in sorted(sizes):
        if timed and not timer.can_begin(rows, timed[-1]):
            break
        timed.append(timer.time_size(rows))
    return tuple(timed)


def run_once(
    runner: Runner, make_up: MakeUp, rows: int, *, progress: Progress, bounds: RunBounds = USUAL_BOUNDS
) -> None:
    """Have an instance allocate what a batch of ``rows`` rows takes; for those beside the one that was measured.

    Raises:
        ServeError: internal, when the model refuses made-up inputs.
    """
    progress.begin(warming_batches(rows))
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
