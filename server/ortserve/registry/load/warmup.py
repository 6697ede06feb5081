"""Warm-up runs a new instance until it is warm. It measures latencies, finds the batch size and tries rows together."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ortserve.core.batch import Batch
from ortserve.errors import OutOfMemoryError, ServeError, invalid_input
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.batch_sizes import (
    ENDS_LOAD,
    MAX_SWEPT_ROWS,
    SizeLatency,
    SizeTimer,
    WorkerRuns,
    as_batch,
    generate_batch,
    next_rows,
    row_ns_to_beat,
    warming_step,
    worthwhile_rows,
)
from ortserve.registry.load.inputs import FREE_DIM, InputGenerator, Sample
from ortserve.registry.load.row_axes import Grounds
from ortserve.registry.load.row_trial import RowTrial, TrialOutcome
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_TRIAL_SHARE: Final = 0.5
"""Share of the time for warm-up that a trial of rows may take."""
_MIN_EFFORT_RUNS: Final = 5
"""Two rows are measured for as long as this number of runs of one row: two runs if batches gain nothing. Without a
second size the gain of batches is unknown, and the slowest models, which gain most, would run one request at a time."""


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """The results of warm-up.

    Attributes:
        max_rows: The largest batch worth having.
        latencies: Latencies of the batch sizes that ran, ascending from 1 row.
        rows_depend: How rows depend on each other, by the model's graph or a trial; empty if neither shows it.
        drift: Largest difference of a float between rows alone and the same rows among others, in the trial.
        tried: The extent of the trial in words; empty without a trial.
        rejection: The error with which the model rejected synthetic inputs; empty if it accepted them. If set, most
            other results are unknown.
        has_run: Whether any synthetic input ran, even if another one was rejected.
        no_memory: The error of a size for which memory was too small; empty if there was none. If set, ``max_rows`` is
            at most the largest size that ran, and one of the buckets if buckets are configured.
        inputs: Generates inputs that the model accepts; None if nothing ran.
        spent_ns: Duration of warm-up.
    """

    max_rows: int
    latencies: tuple[SizeLatency, ...] = ()
    rows_depend: str = ""
    drift: float = 0.0
    tried: str = ""
    rejection: str = ""
    has_run: bool = False
    no_memory: str = ""
    inputs: InputGenerator | None = None
    spent_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """The measurements and trials of the warm-up of one instance.

    Attributes:
        budget_s: A run begins only if it is predicted to end within this time; 0 runs nothing.
        max_rows: Configured maximum of a batch; None to find one.
        buckets: Batches are padded to these sizes; the largest is at least ``max_rows``. If memory is short, batches
            have no more rows than the largest bucket that fits.
        effort_s: Time limit for measuring larger sizes if ``max_rows`` is None; two rows are measured beyond it. The
            gain of sizes that are not measured is extrapolated from the measured ones. None for no limit.
        rows_depend: How rows depend on each other, empty if they do not. If None, a trial runs rows alone and together.
        always_batches: Whether batches are measured even if rows depend on each other.
        samples: Configured requests, which the trial runs first.
        is_coarse: The argument of ``core.tensor.agree``.
        short_ns: One row runs again while it is in doubt whether it takes less than this; 0 if that does not matter.
        keeps_session: Called with the latency of one row. If it returns False, warm-up ends, because another session
            will replace this one.
        give_back_memory: Runs a batch and frees memory that larger batches took. Called with one row if a batch of
            warm-up was larger than ``WarmUpResult.max_rows``.
    """

    budget_s: float
    max_rows: int | None = None
    buckets: Sequence[int] = ()
    effort_s: float | None = None
    rows_depend: str | None = None
    always_batches: bool = False
    samples: Sequence[Sample] = ()
    is_coarse: bool = False
    short_ns: int = 0
    keeps_session: Callable[[SizeLatency], bool] = lambda one_row: True
    give_back_memory: Callable[[Batch], None] | None = None


def warm_up(worker: WorkerRuns, inputs: InputGenerator, plan: WarmUpPlan) -> WarmUpResult:
    """Run synthetic inputs on the worker of an instance. Called on the thread of the load.

    One row runs first. Then batch sizes double until two sizes in a row have not reduced the time per row by 5 %, up to
    64 rows. If ``max_rows`` is set, they double up to it even without gain. A size for which memory is too small ends
    the sweep unless a smaller bucket may fit, and batches stay below it.

    Raises:
        DeviceLostError: The device is lost, so that nothing can run any more.
        RunTimeoutError: A run exceeded its time limit.
        OutOfMemoryError: There is too little memory for one row, or for each of the buckets.
    """
    unknown = WarmUpResult(plan.max_rows or MAX_SWEPT_ROWS)
    if plan.budget_s == 0:
        return unknown
    clock, is_batched = worker.clock, inputs.signature.is_batched
    began_ns = clock()
    stop_ns = began_ns + int(plan.budget_s * 1e9)
    try:
        inputs = _choose_inputs(worker, inputs, stop_ns)
        timer = SizeTimer(worker, inputs, stop_ns, min_warm_runs=1 if plan.is_coarse else 0)
        one_row = timer.time_size(1, short_ns=plan.short_ns)
        if not plan.keeps_session(one_row):
            return WarmUpResult(1, (one_row,), has_run=True, inputs=inputs, spent_ns=clock() - began_ns)
        trial = TrialOutcome(plan.rows_depend or "")
        if plan.rows_depend is None and is_batched:
            trial = _try_rows(timer, one_row, plan)
        swept = _Sweep((one_row,), plan.max_rows or 1, trial.no_memory)
        if is_batched and (plan.always_batches or not trial.problem):
            if plan.effort_s is not None and plan.max_rows is None:
                timer.limit_effort(max(int(plan.effort_s * 1e9), _MIN_EFFORT_RUNS * one_row.least_ns))
            swept = _sweep(timer, one_row, plan)
        best_rows = swept.best_rows
        if swept.no_memory:
            best_rows = min(best_rows, _largest_that_fits(swept.sizes[-1].rows, plan.buckets, swept.no_memory))
        if plan.give_back_memory is not None and worker.max_rows > best_rows:
            plan.give_back_memory(generate_batch(inputs, 1, 0))
            if timer.can_begin(best_rows, one_row):
                worker.run(generate_batch(inputs, best_rows, 0))
        return WarmUpResult(
            best_rows,
            swept.sizes,
            trial.problem,
            trial.drift,
            trial.extent,
            has_run=True,
            no_memory=swept.no_memory,
            inputs=inputs,
            spent_ns=clock() - began_ns,
        )
    except (*ENDS_LOAD, OutOfMemoryError):
        raise
    except ServeError as error:
        return replace(unknown, rejection=error.message, has_run=worker.has_run, spent_ns=clock() - began_ns)


def why_alone(model: AnalysedModel, found: WarmUpResult) -> str:
    """Why each request of a batched model must run alone; empty if requests share batches.

    Logs a warning if only warm-up could have shown that they may, or if the configuration overrules its result.
    """
    rows = model.rows
    if rows.grounds is Grounds.TRIED and not found.rows_depend and not found.latencies:
        cause = "the model rejects synthetic inputs" if found.rejection else "the model was not warmed up"
        because = f"{rows.doubt}; rows could not be tried, as {cause}; 'batched: true' says that they are independent"
        log_event(logger, logging.WARNING, "requests run one at a time", model=model.name, reason=because)
        return because
    if rows.grounds is Grounds.CONFIGURED and (against := (rows.is_mixed and rows.doubt) or found.rows_depend):
        event = "rows run together because the configuration says so"
        log_event(logger, logging.WARNING, event, model=model.name, reason=against)
        return ""
    return found.rows_depend


def _choose_inputs(worker: WorkerRuns, inputs: InputGenerator, stop_ns: int) -> InputGenerator:
    """Choose the first variant that the model accepts, and for which no output is empty.

    Returns:
        That variant. If none is found before ``stop_ns``, the first variant that the model accepts, or ``inputs``.
    """
    accepted: InputGenerator | None = None
    variants = inputs.variants()
    if len(variants) == 1:
        return inputs
    for variant in variants:
        if worker.clock() >= stop_ns:
            break
        worker.progress.begin("warming up: looking for inputs that the model accepts")
        try:
            outputs = worker.run(generate_batch(variant, 1, 0)).outputs
        except ENDS_LOAD:
            raise
        except ServeError:
            continue
        if all(output.size for output in outputs):
            return variant
        accepted = accepted or variant
    return accepted or inputs


def _try_rows(timer: SizeTimer, one_row: SizeLatency, plan: WarmUpPlan) -> TrialOutcome:
    """Run rows alone and together, sets of wider ranges for at most ``_TRIAL_SHARE`` of the time."""
    worker = timer.worker
    worker.progress.begin("warming up: rows alone and together")
    trial = RowTrial(
        worker,
        timer.inputs,
        plan.samples,
        max_rows=plan.max_rows or MAX_SWEPT_ROWS,
        row_ns=one_row.least_ns,
        is_coarse=plan.is_coarse,
        stop_ns=min(timer.stop_ns, worker.clock() + int(plan.budget_s * 1e9 * _TRIAL_SHARE)),
        ends_ns=timer.stop_ns,
    )
    try:
        return trial.run()
    except OutOfMemoryError as error:
        problem = f"rows could not be tried together, because there is too little memory for two: {error.message}"
        return TrialOutcome(problem, no_memory=error.message)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Latencies by ascending size, rows of the largest size that is worth having, and ``WarmUpResult.no_memory``."""

    sizes: tuple[SizeLatency, ...]
    best_rows: int
    no_memory: str = ""


def _sweep(timer: SizeTimer, one_row: SizeLatency, plan: WarmUpPlan) -> _Sweep:
    """Measure larger sizes while they are worthwhile, or all up to ``max_rows`` if it is set."""
    is_set, buckets = plan.max_rows is not None, plan.buckets
    limit = plan.max_rows or MAX_SWEPT_ROWS
    limit = min((bucket for bucket in buckets if bucket >= limit), default=limit)
    if timer.inputs.free_dim != FREE_DIM:
        limit = min(limit, timer.inputs.max_rows)
    sizes, no_memory = [one_row], ""
    while (rows := next_rows(sizes, limit, is_set=is_set)) and timer.can_begin(rows, sizes[-1]):
        try:
            sizes.append(timer.time_size(rows, math.inf if is_set else row_ns_to_beat(sizes)))
        except OutOfMemoryError as error:
            no_memory = error.message
            fitted = sizes[-1].rows
            limit = max((bucket for bucket in buckets if fitted < bucket < rows), default=fitted)
    best_rows = plan.max_rows or worthwhile_rows(sizes, limit, is_cut=timer.is_cut and not no_memory)
    return _Sweep(tuple(sizes), best_rows, no_memory)


def _largest_that_fits(rows: int, buckets: Sequence[int], no_memory: str) -> int:
    """The maximum number of rows of a batch, if memory suffices for ``rows`` and batches are padded to ``buckets``.

    Raises:
        OutOfMemoryError: All buckets are larger than ``rows``.
    """
    fitting = [bucket for bucket in buckets if bucket <= rows] if buckets else [rows]
    if not fitting:
        raise OutOfMemoryError(
            f"buckets: expected one of at most {rows} rows, for which there is memory, "
            f"got {', '.join(map(str, sorted(buckets)))}: {no_memory}"
        )
    return max(fitting)


def run_once(worker: WorkerRuns, inputs: InputGenerator, rows: int) -> None:
    """Run one batch of ``rows`` rows, so that the instance allocates its memory. For instances after the first.

    Raises:
        ServeError: internal, if the model rejects synthetic inputs.
    """
    worker.progress.begin(warming_step(rows))
    worker.run(generate_batch(inputs, rows, 0))


def run_samples(worker: WorkerRuns, samples: Sequence[Sample]) -> None:
    """Run the configured samples on the worker of the instance.

    Raises:
        ServeError: invalid_input, naming the sample that failed and the reason; not_ready, if the device is lost.
        RunTimeoutError: A run exceeded its time limit.
    """
    for sample in samples:
        worker.progress.begin(f"warming up: sample '{sample.name}'")
        batch = as_batch(sample.inputs, sample.rows)
        try:
            for _ in range(sample.count):
                worker.run(batch)
        except ENDS_LOAD:
            raise
        except ServeError as error:
            raise invalid_input(f"warm-up sample '{sample.name}': {error.message}") from None
