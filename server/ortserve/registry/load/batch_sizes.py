"""Batch sizes in warm-up: runs batches on an instance's worker, times them, and finds the sizes worth having."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from ortserve.core.batch import Arrays, Batch, BatchResult, Runner
from ortserve.errors import DeviceLostError, RunTimeoutError
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.progress import LoadCancelledError, Progress

MAX_SWEPT_ROWS: Final = 64
"""The largest size that is measured unless the configuration asks for more."""

_MAX_RUNS: Final = 5
"""Maximum number of runs of one size, after its first run."""
_FIRST_RUNS: Final = 3
_MAX_DOUBTFUL_RUNS: Final = 20
"""Maximum number of runs if the times so far do not show whether a run takes less than ``short_ns``, by which a load
chooses the number of threads."""
_INTERRUPTED: Final = 50
"""The first runs do not show it if the shortest is below this multiple of ``short_ns``: other work may have interrupted
each of them."""
_DOUBTFUL: Final = 4
"""The same multiple for later runs: beside other work they find cold caches."""
_VARIED: Final = 1.2
"""If the longest run is at most this multiple of the shortest one, no other work interfered, and the times show it."""
_ENOUGH_NS: Final = 20_000_000
"""Total time of runs after which a size needs no more runs: a few long runs are as exact as five short ones."""
_MAX_HOP_NS: Final = 1_000_000
"""Maximum time of a round trip to the worker, without the run. A longer time means that other work interfered."""
_MAX_FIRST: Final = 2
"""Limits the prediction of the first run of a larger size, as a multiple of the shortest run. The first run of one row
may include work that is done once for all sizes."""
_CLEARLY: Final = 0.85
"""If the time per row is below this share of the time to beat, further runs would not change the verdict."""
_WORTHWHILE: Final = 0.95
"""A size is worth having if its time per row is below this share of that of the best smaller size."""
_MAX_FUTILE: Final = 2
"""Consecutive sizes without gain that end the sweep. One is not enough: an operator may be slow at a single size."""


ENDS_LOAD: Final = (DeviceLostError, LoadCancelledError, RunTimeoutError)
"""Errors of runs after which a load must not try anything else."""


@dataclass(frozen=True, slots=True)
class RunBounds:
    """Limits of each run of a load.

    Attributes:
        progress: The load. Its cancellation terminates a run.
        timeout_s: Maximum duration.
        grace_s: Time in which a run must end after it was terminated.
    """

    progress: Progress
    timeout_s: float = 600.0
    grace_s: float = 5.0


class WorkerRuns:
    """Runs batches on the worker of an instance, and waits for each. For the thread of the load."""

    def __init__(self, runner: Runner, bounds: RunBounds) -> None:
        """``runner`` is abandoned if a run does not end."""
        self._runner = runner
        self._bounds = bounds
        self.progress: Final = bounds.progress
        self.clock: Final = bounds.progress.clock
        self.has_run = False
        """Whether any batch ran."""
        self.max_rows = 0
        """Rows of the largest batch that ran."""

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch.

        Raises:
            RunTimeoutError: The run exceeded its time limit.
            LoadCancelledError: The load was cancelled before the run ended.
            Exception: The error of the run.
        """
        # A queue of C costs less than an event, which is a lock and a condition in Python.
        outcomes: SimpleQueue[BatchResult | Exception | None] = SimpleQueue()
        self._runner.start(batch, outcomes.put)
        bounds = self._bounds
        with self.progress.interruptible(partial(outcomes.put, None)):
            outcome = _next_within(outcomes, bounds.timeout_s)
        if outcome is None:
            self._runner.terminate(batch)
            if _next_within(outcomes, bounds.grace_s) is None:
                self._runner.abandon()
            self.progress.check()
            raise RunTimeoutError(
                f"a run in warm-up was terminated after warmup_run_timeout_s {bounds.timeout_s:g} s, with a batch of "
                f"{batch.rows} rows"
            )
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # The traceback refers to this frame and to those of the run, and so to the session. The session must be
                # freed without the garbage collector: the device may not have room for the next session beside it.
                del outcome
        self.has_run = True
        self.max_rows = max(self.max_rows, batch.rows)
        return outcome


def _next_within(
    outcomes: SimpleQueue[BatchResult | Exception | None], timeout_s: float
) -> BatchResult | Exception | None:
    """The outcome of a run; None if the load was cancelled, or if the run has not ended in time."""
    try:
        return outcomes.get(timeout=timeout_s)
    except Empty:
        return None


def as_batch(inputs: Arrays, rows: int) -> Batch:
    """Create a batch of one request, without padding."""
    return Batch(tuple((array,) for array in inputs), rows, rows)


def generate_batch(inputs: InputGenerator, rows: int, seed: int) -> Batch:
    """Create a batch of synthetic rows: one request with all rows or, for a ragged model, one request per row."""
    arrays = inputs.generate(rows, seed)
    if inputs.signature.ragged is None:
        return as_batch(arrays, rows)
    return Batch(tuple(tuple(array[row : row + 1] for row in range(rows)) for array in arrays), rows, rows)


@dataclass(frozen=True, slots=True)
class SizeLatency:
    """Times of one batch size.

    Attributes:
        rows: Number of rows of the batch.
        run_ns: Median duration of the run alone.
        round_trip_ns: Median duration of the run including the round trip to the worker.
        least_ns: The shortest run plus the shortest known round trip to the worker.
        least_run_ns: The shortest run.
        first_ns: Duration of the first round trip, which allocates memory.
    """

    rows: int
    run_ns: int
    round_trip_ns: int
    least_ns: int
    least_run_ns: int
    first_ns: int = 0

    @property
    def ns_per_row(self) -> float:
        """The shortest time per row. Longer times show other work on the machine, not the value of batching."""
        # The round trip to the worker counts, because the rows of a batch share it.
        return self.least_ns / self.rows


@dataclass(slots=True)
class SizeTimer:
    """Times batch sizes on the worker of an instance. For the thread of the load.

    Attributes:
        worker: Runs the batches.
        inputs: Generates inputs that the model accepts.
        stop_ns: When warm-up must end (monotonic).
        min_warm_runs: Minimum number of runs of a size after its first run. It is 1 if the first run may choose
            algorithms or build an engine, because its time then says nothing about later runs; otherwise 0.
        is_cut: Whether a size was skipped for lack of time.
    """

    worker: WorkerRuns
    inputs: InputGenerator
    stop_ns: int
    min_warm_runs: int
    is_cut: bool = False
    _hop_ns: int = _MAX_HOP_NS

    def limit_effort(self, effort_ns: int) -> None:
        """Also end all following measurements within ``effort_ns`` from now."""
        self.stop_ns = min(self.stop_ns, self.worker.clock() + effort_ns)

    def can_begin(self, rows: int, last: SizeLatency) -> bool:
        """Whether a size is predicted to end in time, from the time per row of the ``last`` measured one."""
        first_ns = min(last.first_ns, _MAX_FIRST * last.least_ns)
        runs_ns = (first_ns + self.min_warm_runs * last.least_ns) * rows // last.rows
        is_in_time = self.worker.clock() + runs_ns <= self.stop_ns
        self.is_cut = self.is_cut or not is_in_time
        return is_in_time

    def time_size(self, rows: int, row_ns_to_beat: float = math.inf, *, short_ns: int = 0) -> SizeLatency:
        """Time a few runs of one size.

        The first run allocates memory and counts only if there is no time for another one.

        Args:
            rows: Number of rows of the batch.
            row_ns_to_beat: The size is worth having if its time per row is below this. Runs repeat within the limits
                until that is so, because other work on the machine only makes runs longer.
            short_ns: Runs also repeat while their times vary and leave in doubt whether the shortest is below this.

        Raises:
            ServeError: The error of ``WorkerRuns.run``.
        """
        clock = self.worker.clock
        self.worker.progress.begin(warming_step(rows))
        batch = generate_batch(self.inputs, rows, rows)
        runs: list[int] = []
        round_trips: list[int] = []
        while not runs or self._wants_another(rows, runs, round_trips, row_ns_to_beat, short_ns):
            began_ns = clock()
            runs.append(self.worker.run(batch).run_ns)
            round_trips.append(clock() - began_ns)
            self._hop_ns = min(self._hop_ns, max(0, round_trips[-1] - runs[-1]))
        warm = slice(1 if len(runs) > 1 else 0, None)
        return SizeLatency(
            rows,
            int(statistics.median(runs[warm])),
            int(statistics.median(round_trips[warm])),
            min(runs) + self._hop_ns,
            min(runs),
            round_trips[0],
        )

    def _wants_another(
        self, rows: int, runs: list[int], round_trips: list[int], row_ns_to_beat: float, short_ns: int
    ) -> bool:
        warm_runs = len(runs) - 1
        if warm_runs < self.min_warm_runs:
            return True
        if self.worker.clock() + min(runs) > self.stop_ns:
            return False
        if _may_be_short(runs, short_ns):
            return warm_runs < _MAX_DOUBTFUL_RUNS
        if warm_runs >= _MAX_RUNS:
            return False
        row_ns = (min(runs) + self._hop_ns) / rows
        if row_ns >= row_ns_to_beat or not warm_runs:
            return True
        is_clear = row_ns < _CLEARLY * row_ns_to_beat < math.inf
        return not is_clear and sum(round_trips[1:]) < _ENOUGH_NS


def _may_be_short(runs: Sequence[int], short_ns: int) -> bool:
    """Whether a run may take less than ``short_ns`` although none of these did."""
    least_ns = min(runs)
    if least_ns < short_ns:
        return False
    if len(runs) <= _FIRST_RUNS:
        return least_ns < _INTERRUPTED * short_ns
    return least_ns < _DOUBTFUL * short_ns and max(runs[1:]) > _VARIED * least_ns


def warming_step(rows: int) -> str:
    """The name of the step that runs batches of this size."""
    return f"warming up: batches of {rows} rows"


def next_rows(sizes: Sequence[SizeLatency], limit: int, *, is_set: bool) -> int:
    """The size to measure next; 0 to measure no further size.

    Args:
        sizes: Latencies measured so far, ascending by size, at least one.
        limit: Maximum number of rows.
        is_set: Whether sizes up to the limit are measured even without gain.
    """
    last = sizes[-1].rows
    if last >= limit or (not is_set and _futile(sizes) >= _MAX_FUTILE):
        return 0
    return min(2 * last, limit)


def row_ns_to_beat(sizes: Sequence[SizeLatency]) -> float:
    """The time per row below which a further size is worth having."""
    return _WORTHWHILE * _best(sizes).ns_per_row


def worthwhile_rows(sizes: Sequence[SizeLatency], limit: int, *, is_cut: bool) -> int:
    """The largest batch size that is worth having.

    Args:
        sizes: Measured latencies, ascending by size, at least one.
        limit: Maximum number of rows.
        is_cut: Whether the sweep ended for lack of time. Then a line through the last two sizes predicts the gain of
            larger ones, provided that the last size gained.
    """
    rows = _best(sizes).rows
    if not is_cut or len(sizes) < 2 or _futile(sizes):
        return rows
    before, last = sizes[-2:]
    row_ns = max(0.0, (last.least_ns - before.least_ns) / (last.rows - before.rows))
    fixed_ns = max(0.0, last.least_ns - row_ns * last.rows)
    while 2 * rows <= limit and fixed_ns / (2 * rows) + row_ns < _WORTHWHILE * (fixed_ns / rows + row_ns):
        rows *= 2
    return rows


def _futile(sizes: Sequence[SizeLatency]) -> int:
    """The number of sizes that were measured after the best one."""
    return len(sizes) - 1 - sizes.index(_best(sizes))


def _best(sizes: Sequence[SizeLatency]) -> SizeLatency:
    """The largest size that is worth having; ``sizes`` ascend."""
    best = sizes[0]
    for size in sizes[1:]:
        if size.ns_per_row < _WORTHWHILE * best.ns_per_row:
            best = size
    return best
