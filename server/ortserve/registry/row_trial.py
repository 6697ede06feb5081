"""A trial of a model whose graph does not tell whether rows are independent: rows run alone and together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.errors import DeviceLostError, OutOfMemoryError, RunTimeoutError, ServeError
from ortserve.registry.batchability import row_drift, why_no_rows, why_rows_depend
from ortserve.registry.make_up import MakeUp, WorkerRuns, as_batch
from ortserve.registry.samples import Sample
from ortserve.registry.synthetic import USUAL, ZEROS, Spread

LEAST_ROWS: Final = 3
"""Of the first set of inputs, each of which also runs alone."""
_SET_RUNS: Final = 4 * LEAST_ROWS
"""Runs of one row that take as long as the first set: together, for the first time, each alone, and zeros."""
_SHORT_SET_NS: Final = 20_000_000
"""A set that takes no longer is tried in any case: it decides whether rows run together for as long as the model is
loaded, and a busy machine may have used the time for warm-up up."""
_COMPARED: Final = 3
"""Rows of a larger set that also run alone."""
WIDER: Final = (Spread(8, 10.0), Spread(256, 0.1), Spread(2**15, 100.0))
"""Integers below 2 hide that a scale is taken of the whole batch; small floats hide it, too."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What a trial has shown.

    Attributes:
        problem: How rows depend on each other; empty where no dependence was seen.
        drift: Largest difference of a float between rows alone and the same rows among others.
        extent: In words, what was tried.
    """

    problem: str
    drift: float = 0.0
    extent: str = ""


class RowTrial:
    """One trial, on an instance's own worker, from the loader's thread."""

    def __init__(
        self,
        worker: WorkerRuns,
        make_up: MakeUp,
        samples: Sequence[Sample],
        *,
        most_rows: int,
        row_ns: int,
        is_coarse: bool,
        stop_ns: int,
        ends_ns: int,
        clock: Clock,
    ) -> None:
        """Prepare a trial.

        Args:
            worker: Runs the batches.
            make_up: Makes inputs that the model takes.
            samples: Configured requests, which are tried first.
            most_rows: As many rows as will run together, as far as the time suffices; at least ``LEAST_ROWS``.
            row_ns: How long a run of one row takes.
            is_coarse: As in ``core.tensor``.
            stop_ns: No further set of inputs is begun then (monotonic).
            ends_ns: A set that decides whether rows run together is not begun if it would last longer.
            clock: Monotonic nanoseconds.
        """
        self._worker = worker
        self._make_up = make_up
        self._signature = make_up.signature
        self._samples = samples
        self._most_rows = max(most_rows, LEAST_ROWS)
        self._is_coarse = is_coarse
        self._stop_ns = stop_ns
        self._ends_ns = ends_ns
        self._clock = clock
        self._drift = 0.0
        self._sets = 0
        self._rows = 0
        self._row_ns = row_ns

    def run(self) -> TrialOutcome:
        """Run it, unless not even the first set of inputs has time.

        Raises:
            OutOfMemoryError: Not even two rows find memory.
            ServeError: internal, when the model refuses made-up inputs.
        """
        if not self._has_time_for_a_set():
            return TrialOutcome("rows could not be tried together in the time for warm-up")
        problem = self._try_samples() or self._try_usual()
        if not problem and self._signature.has_optional_inputs and not self._make_up.brings_optional:
            problem = self._try_optional()
        if not problem:
            problem = self._try_wider()
        if problem:
            return TrialOutcome(problem)
        sets = "1 set" if self._sets == 1 else f"{self._sets} sets"
        return TrialOutcome("", self._drift, f"{sets} of inputs, of up to {self._rows} rows")

    def _try_samples(self) -> str:
        """Rows that were configured together, as far as they have one shape."""
        for inputs in _joined(self._samples):
            rows = len(inputs[0])
            if rows > 1 and (problem := self._compare(inputs, rows)):
                return problem
        return ""

    def _try_usual(self) -> str:
        try:
            problem = self._compare(self._make_up(LEAST_ROWS, 0, USUAL), LEAST_ROWS)
            rows = LEAST_ROWS
        except OutOfMemoryError:
            rows = 2
            problem = self._compare(self._make_up(rows, 0, USUAL), rows)
        if problem:
            return problem
        # Where data decides how many rows come out, drawn inputs may happen to give as many as went in.
        try:
            zeros = self._run(self._make_up(rows, 0, ZEROS), rows)
        except OutOfMemoryError:
            raise
        except _RefusedError:  # some models take no zeros
            return ""
        return why_no_rows(self._signature, zeros, rows)

    def _has_time_for_a_set(self) -> bool:
        set_ns = _SET_RUNS * self._row_ns
        return set_ns <= _SHORT_SET_NS or self._clock() + set_ns <= self._ends_ns

    def _try_optional(self) -> str:
        if not self._has_time_for_a_set():
            return "rows could not be tried with the optional inputs in the time for warm-up"
        make_up = replace(self._make_up, brings_optional=True)
        try:
            return self._compare(make_up(LEAST_ROWS, 0, USUAL), LEAST_ROWS)
        except _RefusedError as refusal:
            return (
                f"rows could not be tried with the optional inputs, of which the model refuses made-up ones: {refusal}"
            )

    def _try_wider(self) -> str:
        """Larger numbers in larger batches, as far as the model takes them, and the same rows beside others."""
        for seed, spread in enumerate(WIDER, 1):
            rows = self._affordable_rows()
            if not rows:
                break
            try:
                problem = self._compare(
                    self._make_up(rows, seed, spread), rows, among=self._make_up(rows, -seed % 2**32, spread)
                )
            except (OutOfMemoryError, _RefusedError):  # such as numbers beyond the rows of a table
                continue
            if problem:
                return problem
        return ""

    def _affordable_rows(self) -> int:
        """As many rows as two batches and some rows alone have time for; 0 where that is not worth while."""
        left_ns = self._stop_ns - self._clock()
        rows = min(self._most_rows, self._make_up.most_rows, left_ns // max(1, 3 * self._row_ns) - _COMPARED)
        return rows if rows >= LEAST_ROWS else 0

    def _compare(self, inputs: Arrays, rows: int, among: Arrays = ()) -> str:
        """Run some of the rows alone and all together, and the same rows again at other places ``among`` others."""
        together = self._run(inputs, rows)
        if problem := why_no_rows(self._signature, together, rows):
            return problem
        chosen = sorted({0, rows // 2, rows - 1})
        alone = []
        for row in chosen:
            began_ns = self._clock()
            alone.append(self._run(tuple(array[row : row + 1] for array in inputs), 1))
            self._row_ns = max(1, self._clock() - began_ns)
        problem = self._judge(together, chosen, alone)
        if among and not problem:
            places = [*chosen[1:], chosen[0]]
            mixed = [array.copy() for array in among]
            for index, (spec, own) in enumerate(zip(self._signature.inputs, inputs, strict=True)):
                if spec.batch_axis is None:  # the same for all rows, those alone among them
                    mixed[index] = own
                else:
                    mixed[index][places] = own[chosen]
            problem = self._judge(self._run(tuple(mixed), rows), places, alone)
        self._sets += 1
        self._rows = max(self._rows, rows)
        return problem

    def _judge(self, together: Arrays, places: Sequence[int], alone: Sequence[Arrays]) -> str:
        picked = tuple(output[places] for output in together)
        problem = why_rows_depend(self._signature, picked, alone, is_coarse=self._is_coarse)
        if not problem:
            self._drift = max(self._drift, row_drift(self._signature, picked, alone))
        return problem

    def _run(self, inputs: Arrays, rows: int) -> Arrays:
        try:
            return self._worker.run(as_batch(inputs, rows)).outputs
        except (DeviceLostError, OutOfMemoryError, RunTimeoutError):
            raise
        except ServeError as error:
            raise _RefusedError(error.kind, error.message) from None


class _RefusedError(ServeError):
    """The model refuses inputs."""


def _joined(samples: Sequence[Sample]) -> Iterator[Arrays]:
    """The rows of samples with the same shapes, one behind the other."""
    by_shape: dict[object, list[Arrays]] = {}
    for sample in samples:
        key = tuple((array.dtype, array.shape[1:]) for array in sample.inputs)
        by_shape.setdefault(key, []).append(sample.inputs)
    for group in by_shape.values():
        yield tuple(np.concatenate(arrays) for arrays in zip(*group, strict=True))
