"""Tries whether rows are independent, for a model whose graph does not show it: compares rows alone and together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import TOLERANCES, agree, as_float64
from ortserve.errors import OutOfMemoryError, ServeError
from ortserve.registry.load.batch_sizes import ENDS_LOAD, WorkerRuns, as_batch
from ortserve.registry.load.inputs import USUAL, ZEROS, InputGenerator, Sample, Spread

MIN_ROWS: Final = 3
"""Number of rows of the first set of inputs. Each of its rows also runs alone."""
_SET_RUNS: Final = 4 * MIN_ROWS
"""Predicted duration of the first set, in runs of one row: the rows run together, for the first time, each alone, and
as zeros."""
_SHORT_SET_NS: Final = 20_000_000
"""A shorter set is tried even if a busy machine has used up the time for warm-up, because the result decides whether
rows run together for as long as the model is loaded."""
_COMPARED: Final = 3
"""Number of rows of a larger set that also run alone."""
WIDER: Final = (Spread(8, 10.0), Spread(256, 0.1), Spread(2**15, 100.0))
"""Further ranges: a scale computed over the whole batch shows neither with integers below 2 nor with small floats."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of a trial of rows.

    Attributes:
        problem: How rows depend on each other; empty if no dependence was seen.
        drift: Largest difference of a float between rows alone and the same rows among others, also one beyond the
            tolerances.
        extent: The extent of the trial, in words.
        no_memory: The error if memory was too small for two rows; empty otherwise.
    """

    problem: str
    drift: float = 0.0
    extent: str = ""
    no_memory: str = ""


@dataclass(slots=True)
class RowTrial:
    """Runs one trial on the worker of an instance. For the thread of the load.

    Attributes:
        worker: Runs the batches.
        inputs: Generates inputs that the model accepts.
        samples: Configured requests, which are tried first.
        max_rows: Rows of the largest set, if there is time: the number that will run together.
        row_ns: Duration of a run of one row. The trial updates it.
        is_coarse: The argument of ``core.tensor.agree``.
        stop_ns: Sets of wider ranges must be predicted to end before this time (monotonic).
        ends_ns: Sets that decide whether rows run together must be predicted to end before this time (monotonic).
    """

    worker: WorkerRuns
    inputs: InputGenerator
    samples: Sequence[Sample]
    max_rows: int
    row_ns: int
    is_coarse: bool
    stop_ns: int
    ends_ns: int
    _drift: float = 0.0
    _sets: int = 0
    _rows: int = 0

    @property
    def _signature(self) -> ModelSignature:
        return self.inputs.signature

    def run(self) -> TrialOutcome:
        """Run the trial, unless there is no time even for the first set of inputs.

        Raises:
            OutOfMemoryError: There is too little memory for two rows.
            ServeError: internal, if the model rejects synthetic inputs.
        """
        if not self._has_time_for_a_set():
            return TrialOutcome("rows could not be tried together in the time for warm-up")
        problem = self._try_samples() or self._try_usual()
        if not problem and self._signature.has_optional_inputs and not self.inputs.includes_optional:
            problem = self._try_optional()
        if not problem:
            problem = self._try_wider()
        if problem:
            return TrialOutcome(problem, self._drift)
        sets = "1 set" if self._sets == 1 else f"{self._sets} sets"
        return TrialOutcome("", self._drift, f"{sets} of inputs, of up to {self._rows} rows")

    def _try_samples(self) -> str:
        """Try the rows of samples that have the same shapes."""
        for inputs in _joined(self.samples):
            rows = len(inputs[0])
            if rows > 1 and (problem := self._compare(inputs, rows)):
                return problem
        return ""

    def _try_usual(self) -> str:
        rows = MIN_ROWS
        try:
            problem = self._compare(self.inputs.generate(rows, 0, USUAL), rows)
        except OutOfMemoryError:
            rows = 2
            problem = self._compare(self.inputs.generate(rows, 0, USUAL), rows)
        if problem:
            return problem
        # If the data decide the number of rows of an output, random inputs may give the right number by chance.
        try:
            zeros = self._run(self.inputs.generate(rows, 0, ZEROS), rows)
        except _RejectedError:  # Some models reject zeros.
            return ""
        return why_no_rows(self._signature, zeros, rows)

    def _has_time_for_a_set(self) -> bool:
        set_ns = _SET_RUNS * self.row_ns
        return set_ns <= _SHORT_SET_NS or self.worker.clock() + set_ns <= self.ends_ns

    def _try_optional(self) -> str:
        if not self._has_time_for_a_set():
            return "rows could not be tried with the optional inputs in the time for warm-up"
        inputs = replace(self.inputs, includes_optional=True)
        try:
            return self._compare(inputs.generate(MIN_ROWS, 0, USUAL), MIN_ROWS)
        except _RejectedError as error:
            return (
                f"rows could not be tried with the optional inputs, because the model rejects synthetic ones: {error}"
            )

    def _try_wider(self) -> str:
        """Try larger numbers in larger batches, if the model accepts them, and the same rows beside other rows."""
        for seed, spread in enumerate(WIDER, 1):
            rows = self._affordable_rows()
            if not rows:
                break
            try:
                problem = self._compare(
                    self.inputs.generate(rows, seed, spread),
                    rows,
                    among=self.inputs.generate(rows, -seed % 2**32, spread),
                )
            except (OutOfMemoryError, _RejectedError):  # For example indices beyond the rows of a table.
                continue
            if problem:
                return problem
        return ""

    def _affordable_rows(self) -> int:
        """Rows of a set for which there is time, with two batches and some rows alone. 0 if time is too short."""
        left_ns = self.stop_ns - self.worker.clock()
        rows = min(max(self.max_rows, MIN_ROWS), self.inputs.max_rows, left_ns // max(1, 3 * self.row_ns) - _COMPARED)
        return rows if rows >= MIN_ROWS else 0

    def _compare(self, inputs: Arrays, rows: int, among: Arrays = ()) -> str:
        """Run all rows together, some of them alone, and these at other places ``among`` other rows."""
        together = self._run(inputs, rows)
        if problem := why_no_rows(self._signature, together, rows):
            return problem
        chosen = sorted({0, rows // 2, rows - 1})
        alone = []
        for row in chosen:
            began_ns = self.worker.clock()
            alone.append(self._run(tuple(array[row : row + 1] for array in inputs), 1))
            self.row_ns = max(1, self.worker.clock() - began_ns)
        problem = self._judge(together, chosen, alone)
        if among and not problem:
            places = [*chosen[1:], chosen[0]]
            mixed = [array.copy() for array in among]
            for index, (spec, own) in enumerate(zip(self._signature.inputs, inputs, strict=True)):
                if spec.batch_axis is None:  # the input is the same for all rows
                    mixed[index] = own
                else:
                    mixed[index][places] = own[chosen]
            problem = self._judge(self._run(tuple(mixed), rows), places, alone)
        self._sets += 1
        self._rows = max(self._rows, rows)
        return problem

    def _judge(self, together: Arrays, places: Sequence[int], alone: Sequence[Arrays]) -> str:
        picked = tuple(output[places] for output in together)
        self._drift = max(self._drift, row_drift(self._signature, picked, alone))
        return why_rows_depend(self._signature, picked, alone, is_coarse=self.is_coarse)

    def _run(self, inputs: Arrays, rows: int) -> Arrays:
        try:
            return self.worker.run(as_batch(inputs, rows)).outputs
        except (*ENDS_LOAD, OutOfMemoryError):
            raise
        except ServeError as error:
            raise _RejectedError(error.kind, error.message) from None


class _RejectedError(ServeError):
    """The model rejects synthetic inputs."""


def _joined(samples: Sequence[Sample]) -> Iterator[Arrays]:
    """Concatenate the rows of samples that have the same shapes."""
    by_shape: dict[object, list[Arrays]] = {}
    for sample in samples:
        key = tuple((array.dtype, array.shape[1:]) for array in sample.inputs)
        by_shape.setdefault(key, []).append(sample.inputs)
    for group in by_shape.values():
        yield tuple(np.concatenate(arrays) for arrays in zip(*group, strict=True))


def why_rows_depend(
    signature: ModelSignature, together: Arrays, alone: Sequence[Arrays], *, is_coarse: bool = False
) -> str:
    """Compare rows that ran ``together`` in one run with the same rows each run ``alone``, all on axis 0.

    ``is_coarse`` is the argument of ``core.tensor.agree``.

    Returns:
        How the outputs show that rows depend on each other; empty if they show no dependence.
    """
    rows = len(alone)
    if problem := why_no_rows(signature, together, rows):
        return problem
    for index, spec in enumerate(signature.outputs):
        output = together[index]
        for row, outputs in enumerate(alone):
            if outputs[index].shape != (1, *output.shape[1:]):
                return f"the shape of output '{spec.name}' for a row depends on the rows beside it"
            if not agree(output[row], outputs[index][0], spec.datatype, is_coarse=is_coarse):
                return f"output '{spec.name}' of a row depends on the rows beside it"
    return ""


def why_no_rows(signature: ModelSignature, outputs: Arrays, rows: int) -> str:
    """Describe an output whose number of rows is not ``rows``; empty if all outputs have ``rows`` rows."""
    for spec, output in zip(signature.outputs, outputs, strict=True):
        if output.ndim == 0 or len(output) != rows:
            return f"output '{spec.name}' has shape {list(output.shape)} for {rows} rows"
    return ""


def row_drift(signature: ModelSignature, together: Arrays, alone: Sequence[Arrays]) -> float:
    """The largest difference of a finite float between rows that ran together and the same rows each run alone.

    Outputs of a row alone that have another shape are left out.
    """
    drift = 0.0
    for index, (spec, output) in enumerate(zip(signature.outputs, together, strict=True)):
        is_comparable = all(outputs[index].shape == (1, *output.shape[1:]) for outputs in alone)
        if spec.datatype not in TOLERANCES or not output.size or not is_comparable:
            continue
        solo = np.concatenate([outputs[index] for outputs in alone])
        with np.errstate(invalid="ignore"):  # Differences of two infinities are left out.
            difference = np.abs(as_float64(output, spec.datatype) - as_float64(solo, spec.datatype))
        drift = max(drift, float(np.nanmax(difference, initial=0.0, where=np.isfinite(difference))))
    return drift
