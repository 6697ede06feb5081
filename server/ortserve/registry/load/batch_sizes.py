"""Timing batches of one size after the other on an instance, within the time that warm-up has."""

import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult, Runner
from ortserve.errors import RunTimeoutError
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.inputs import (
    MakeUp,
)


@dataclass(frozen=True, slots=True)
class RunBounds:
    """How long one run in warm-up may take, and how long it may go on once it was asked to end, in seconds."""

    timeout_s: float = 600.0
    grace_s: float = 5.0


USUAL_BOUNDS: Final = RunBounds()


class WorkerRuns:
    """Has an instance's own worker run batches, and waits for each."""

    def __init__(self, runner: Runner, bounds: RunBounds) -> None:
        """``runner`` is abandoned where a run of it does not end."""
        self._runner = runner
        self._bounds = bounds
        self.has_run = False
        """Whether any of them ran."""
        self.most_rows = 0
        """Of the largest batch that ran."""

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch.

        Raises:
            RunTimeoutError: It took too long.
            Exception: What the run raised.
        """
        finished = threading.Event()
        outcomes: list[BatchResult | Exception] = []

        def done(outcome: BatchResult | Exception) -> None:
            outcomes.append(outcome)
            finished.set()

        self._runner.start(batch, done)
        bounds = self._bounds
        if not finished.wait(bounds.timeout_s):
            self._runner.terminate()
            if not finished.wait(bounds.grace_s):
                self._runner.abandon()
            raise RunTimeoutError(
                f"a run in warm-up was ended after warmup_run_timeout_s {bounds.timeout_s:g} s, "
                f"with a batch of {batch.rows} rows"
            )
        outcome = outcomes.pop()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # Its traceback has this frame and those of the run, with the session, for which its device may have no
                # room beside the next: it must not wait for the garbage collector.
                del outcome
        self.has_run = True
        self.most_rows = max(self.most_rows, batch.rows)
        return outcome


def as_batch(inputs: Arrays, rows: int) -> Batch:
    """One request, alone in a batch without padding."""
    return Batch(tuple((array,) for array in inputs), rows, rows)


_MOST_RUNS: Final = 5
"""Of one size, after its first run."""
_ENOUGH_NS: Final = 20_000_000
"""Together, of the runs of a size after its first: longer runs show in a few what short ones need five for."""
_MOST_HOP_NS: Final = 1_000_000
"""Of the way to the worker and back, without the run: what takes longer is something else that runs meanwhile."""
_MOST_FIRST: Final = 2
"""How many times as long as the shortest run the first one of a larger size may be predicted to take. What it takes for
a first row may be once for all sizes."""
_CLEARLY: Final = 0.85
"""A size whose time a row is below this share of what makes it worth having is so whatever further runs would show."""


@dataclass(frozen=True, slots=True)
class SizeLatency:
    """Medians for one batch size: of the run alone, and of the whole way to the worker and back.

    ``first_ns`` is the first way, in which memory is allocated, and ``least_ns`` the shortest.
    """

    rows: int
    run_ns: int
    round_trip_ns: int
    least_ns: int
    first_ns: int = 0

    @property
    def ns_per_row(self) -> float:
        """At its best: what else ran on the machine meanwhile says nothing of what batching is worth."""
        # The way to the worker is part of what the rows of a batch share.
        return self.least_ns / self.rows


class SizeTimer:
    """Times sizes on an instance's own worker, from the loader's thread."""

    def __init__(
        self,
        worker: WorkerRuns,
        make_up: MakeUp,
        *,
        stop_ns: int,
        clock: Clock,
        progress: Progress,
        needs_second: bool,
    ) -> None:
        """Run nothing yet.

        Args:
            worker: Runs the batches.
            make_up: Makes inputs that the model takes.
            stop_ns: When warm-up is to be over (monotonic).
            clock: Monotonic nanoseconds.
            progress: Told of each size.
            needs_second: Whether the first run of a size says nothing of later ones, as it may choose algorithms or
                build an engine: then there is always a second one.
        """
        self._worker = worker
        self._make_up = make_up
        self._stop_ns = stop_ns
        self._clock = clock
        self._progress = progress
        self._least_runs = 1 if needs_second else 0
        self._hop_ns = _MOST_HOP_NS
        self.is_cut = False
        """Whether a size was not begun for want of time."""

    def limit_effort(self, effort_ns: int) -> None:
        """Have all that follows end within ``effort_ns``, too."""
        self._stop_ns = min(self._stop_ns, self._clock() + effort_ns)

    def can_begin(self, rows: int, last: SizeLatency) -> bool:
        """Whether a size is predicted to end in time, by the time a row of the ``last`` one."""
        first_ns = min(last.first_ns, _MOST_FIRST * last.least_ns)
        runs_ns = (first_ns + self._least_runs * last.least_ns) * rows // last.rows
        is_in_time = self._clock() + runs_ns <= self._stop_ns
        self.is_cut = self.is_cut or not is_in_time
        return is_in_time

    def time_size(self, rows: int, row_ns_to_beat: float = math.inf) -> SizeLatency:
        """Time a few runs of one size.

        The first, in which memory is allocated, counts only where there is no time for another one.

        Args:
            rows: Of a batch.
            row_ns_to_beat: The size is worth having while its time a row is below this. Its runs are repeated, as far
                as there is time, until that is so: what else runs on the machine makes runs longer, and never shorter.

        Raises:
            ServeError: As ``WorkerRuns.run``.
        """
        self._progress.begin(warming_batches(rows))
        batch = as_batch(self._make_up(rows, rows), rows)
        runs: list[int] = []
        round_trips: list[int] = []
        while not runs or self._wants_another(rows, runs, round_trips, row_ns_to_beat):
            began_ns = self._clock()
            runs.append(self._worker.run(batch).run_ns)
            round_trips.append(self._clock() - began_ns)
            self._hop_ns = min(self._hop_ns, max(0, round_trips[-1] - runs[-1]))
        warm = slice(1 if len(runs) > 1 else 0, None)
        return SizeLatency(
            rows,
            int(statistics.median(runs[warm])),
            int(statistics.median(round_trips[warm])),
            min(runs) + self._hop_ns,
            round_trips[0],
        )

    def _wants_another(self, rows: int, runs: list[int], round_trips: list[int], row_ns_to_beat: float) -> bool:
        warm_runs = len(runs) - 1
        if warm_runs < self._least_runs:
            return True
        if warm_runs == _MOST_RUNS or self._clock() + min(runs) > self._stop_ns:
            return False
        row_ns = (min(runs) + self._hop_ns) / rows
        if row_ns >= row_ns_to_beat or not warm_runs:
            return True
        is_clear = row_ns < _CLEARLY * row_ns_to_beat < math.inf
        return not is_clear and sum(round_trips[1:]) < _ENOUGH_NS


def warming_batches(rows: int) -> str:
    """The step in which batches of so many rows run."""
    return f"warming up: batches of {rows} rows"


MAX_SWEPT_ROWS: Final = 64
_WORTHWHILE: Final = 0.95
"""A size is worth having while its time a row is below this share of that of the best smaller size."""
_TRIED_IN_VAIN: Final = 2
"""Sizes in a row that gain nothing and end the sweep: an operator may have a slow way for one size alone."""


def next_rows(sizes: Sequence[SizeLatency], limit: int, *, is_set: bool) -> int:
    """The size to measure after ``sizes``, which ascend; 0 where there is none.

    Args:
        sizes: Measured so far, at least one.
        limit: The most rows.
        is_set: Whether the limit is measured whatever it gains.
    """
    last = sizes[-1].rows
    if last >= limit or (not is_set and _in_vain(sizes) >= _TRIED_IN_VAIN):
        return 0
    return min(2 * last, limit)


def row_ns_to_beat(sizes: Sequence[SizeLatency]) -> float:
    """The time a row below which a further size is worth having."""
    return _WORTHWHILE * _best(sizes).ns_per_row


def worthwhile_rows(sizes: Sequence[SizeLatency], limit: int, *, is_cut: bool) -> int:
    """The most rows of a batch that are worth having.

    Args:
        sizes: Measured, at least one; they ascend.
        limit: The most rows.
        is_cut: Whether the sweep ended for want of time. Then a line through the last two sizes says what larger ones
            would gain, as long as the last one gained.
    """
    rows = _best(sizes).rows
    if not is_cut or len(sizes) < 2 or _in_vain(sizes):
        return rows
    before, last = sizes[-2:]
    row_ns = max(0.0, (last.least_ns - before.least_ns) / (last.rows - before.rows))
    fixed_ns = max(0.0, last.least_ns - row_ns * last.rows)
    while 2 * rows <= limit and fixed_ns / (2 * rows) + row_ns < _WORTHWHILE * (fixed_ns / rows + row_ns):
        rows *= 2
    return rows


def _in_vain(sizes: Sequence[SizeLatency]) -> int:
    """How many sizes were measured since the best."""
    return len(sizes) - 1 - sizes.index(_best(sizes))


def _best(sizes: Sequence[SizeLatency]) -> SizeLatency:
    """The last size that is worth having; ``sizes`` ascend."""
    best = sizes[0]
    for size in sizes[1:]:
        if size.ns_per_row < _WORTHWHILE * best.ns_per_row:
            best = size
    return best
