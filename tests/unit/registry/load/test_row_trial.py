"""Dependences that a trial of rows finds; the models are functions of the batch."""

from collections.abc import Callable

import numpy as np
import pytest

from fakes.clock import FakeClock
from ortserve.core.batch import Batch, BatchDone, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, OutOfMemoryError, ServeError
from ortserve.registry.load.batch_sizes import RunBounds, WorkerRuns
from ortserve.registry.load.inputs import InputGenerator, Sample
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.row_trial import RowTrial, TrialOutcome

Compute = Callable[[np.ndarray], np.ndarray]


class Computing:
    """Answers in the calling thread with a function of all rows; each run takes some time."""

    is_running = False

    def __init__(self, compute: Compute, clock: FakeClock, run_ns: int) -> None:
        self.compute = compute
        self.clock = clock
        self.run_ns = run_ns
        self.rows: list[int] = []

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError("a trial belongs to the worker")

    def start(self, batch: Batch, done: BatchDone) -> None:
        self.rows.append(batch.rows)
        self.clock.advance(self.run_ns)
        try:
            outputs = (self.compute(np.concatenate(batch.parts[0])),)
        except ServeError as error:
            done(error)
            return
        done(BatchResult(outputs, 0, 0, 1))

    def terminate(self, batch: Batch) -> None:
        raise AssertionError("its runs end by themselves")

    def abandon(self) -> None:
        raise AssertionError("its runs end by themselves")


def attempt(
    compute: Compute,
    datatype: DataType = DataType.FP32,
    *,
    samples: tuple[np.ndarray, ...] = (),
    most_rows: int = 64,
    run_ns: int = 1000,
    budget_ns: int = 10**9,
) -> tuple[TrialOutcome, Computing]:
    clock = FakeClock()
    runner = Computing(compute, clock, run_ns)
    spec = TensorSpec("x", datatype, (-1, 4))
    signature = ModelSignature((spec,), (TensorSpec("y", DataType.FP32, (-1, 4)),))
    trial = RowTrial(
        WorkerRuns(runner, RunBounds(Progress(clock))),
        InputGenerator(signature, None),
        [Sample(str(number), (rows,), len(rows), 1) for number, rows in enumerate(samples)],
        max_rows=most_rows,
        row_ns=run_ns,
        is_coarse=False,
        stop_ns=clock() + budget_ns,
        ends_ns=clock() + 4 * budget_ns,
    )
    return trial.run(), runner


def scaled_as_one(x: np.ndarray) -> np.ndarray:
    """Quantizes all rows with one scale in 255 steps."""
    step = max(1.0, float(x.max()) / 255)
    return (np.round(x / step) * step).astype(np.float32)


def test_independent_rows_pass_the_trial_and_its_extent_is_reported() -> None:
    found, runner = attempt(lambda x: x * np.float32(2))
    assert (found.problem, found.drift) == ("", 0.0)
    assert found.extent == "4 sets of inputs, of up to 64 rows"
    assert max(runner.rows) == 64


def test_scale_over_all_rows_is_detected_by_large_numbers() -> None:
    found, _ = attempt(scaled_as_one, DataType.INT64)
    assert found.problem == "output 'y' of a row depends on the rows beside it"


def test_dependence_in_large_batches_only_is_found() -> None:
    found, _ = attempt(lambda x: x + np.float32(len(x) > 40))
    assert found.problem == "output 'y' of a row depends on the rows beside it"
    assert found.drift == pytest.approx(1.0)
    found, _ = attempt(lambda x: x + np.float32(len(x) > 40), most_rows=32)
    assert not found.problem, "so many never run together"


def test_dependence_on_the_row_position_is_detected() -> None:
    place = np.zeros((64, 1), np.float32)
    place[5] = 1
    found, _ = attempt(lambda x: x + place[: len(x)], most_rows=11)
    assert found.problem


def test_rejected_numbers_do_not_end_the_trial() -> None:
    def table(x: np.ndarray) -> np.ndarray:
        if x.max() >= 10:
            raise ServeError(ErrorKind.INTERNAL, "indices element out of data bounds")
        return x.astype(np.float32)

    found, _ = attempt(table, DataType.INT64)
    assert (found.problem, found.extent) == ("", "2 sets of inputs, of up to 64 rows")


def test_configured_samples_are_tried_first() -> None:
    def special(x: np.ndarray) -> np.ndarray:
        """Mixes rows if one of them begins with 7777."""
        return x + x.sum() if (x[:, 0] == 7777).any() else x

    assert not attempt(special)[0].problem
    rows = np.zeros((2, 4), np.float32)
    rows[1, 0] = 7777
    found, runner = attempt(special, samples=(rows[:1], rows[1:]))
    assert found.problem
    assert runner.rows[0] == 2


def test_large_sets_are_skipped_when_time_is_short() -> None:
    found, runner = attempt(lambda x: x, run_ns=10**8, budget_ns=10**9)
    assert not found.problem
    assert max(runner.rows) == 3
    assert found.extent == "1 set of inputs, of up to 3 rows"


def test_little_memory_shrinks_the_sets_and_none_is_an_error() -> None:
    def fits(most: int) -> Compute:
        def compute(x: np.ndarray) -> np.ndarray:
            if len(x) > most:
                raise OutOfMemoryError("too little")
            return x

        return compute

    assert attempt(fits(2))[0].extent == "1 set of inputs, of up to 2 rows"
    with pytest.raises(OutOfMemoryError):
        attempt(fits(1))


def test_without_time_for_a_trial_rows_run_alone() -> None:
    found, runner = attempt(lambda x: x, run_ns=10**10, budget_ns=10**9)
    assert found.problem == "rows could not be tried together in the time for warm-up"
    assert not runner.rows
