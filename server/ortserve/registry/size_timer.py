"""Timing batches of one size after the other on an instance, within the time that warm-up has."""

import math
import statistics
from dataclasses import dataclass
from typing import Final

from ortserve.clock import Clock
from ortserve.registry.make_up import MakeUp, WorkerRuns, as_batch
from ortserve.registry.progress import Progress

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
