"""Results of warm-up, with runs of known duration in virtual time, and with real models."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.clock import FakeClock
from fakes.runner import NeverOverdue
from models import builders, interfaces
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult, Runner
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS, RunBounds, SizeLatency, WorkerRuns
from ortserve.registry.load.device_batches import time_on_buffers
from ortserve.registry.load.inputs import LARGER_FREE_DIMS, InputGenerator, Sample
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.provider_settings import find_rejected_rows, run_until_accepted
from ortserve.registry.load.warmup import WarmUpPlan, WarmUpResult, run_samples, warm_up

MS = 1_000_000
X, Y = TensorSpec("x", DataType.FP32, (-1, 4)), TensorSpec("y", DataType.FP32, (-1, 4))
BATCHED = ModelSignature((X,), (Y,))
ONE_ROW = ModelSignature((TensorSpec("x", DataType.FP32, (1, 4)),), (Y,), "reason")


class TimedRunner(NeverOverdue):
    """Doubles its rows, in a time that is a function of their number."""

    def __init__(self, clock: FakeClock, latency_ns: Callable[[int], int], error: ServeError | None = None) -> None:
        self.clock = clock
        self.latency_ns = latency_ns
        self.error = error
        self.ran: list[int] = []

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError("warm-up belongs to the worker")

    def start(self, batch: Batch, done: BatchDone) -> None:
        self.ran.append(batch.rows)
        began_ns = self.clock()
        self.clock.advance(self.latency_ns(batch.rows))
        if self.error is not None:
            done(self.error)
            return
        (parts,) = batch.parts
        assert len(np.concatenate(parts)) == batch.rows
        done(BatchResult((np.concatenate(parts) * 2,), began_ns, self.clock(), self.clock() - began_ns))


class ComputingRunner(NeverOverdue):
    """Answers a batch at once with the result of a function."""

    def __init__(self, compute: Callable[[Batch], Arrays]) -> None:
        self.compute = compute

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError("warm-up belongs to the worker")

    def start(self, batch: Batch, done: BatchDone) -> None:
        try:
            outputs = self.compute(batch)
        except ServeError as error:
            done(error)
        else:
            done(BatchResult(outputs, 0, 0, 1))


def worker_of(runner: Runner, clock: Clock | None = None) -> WorkerRuns:
    return WorkerRuns(runner, RunBounds(Progress(clock or FakeClock())))


def run_plan(runner: Runner, signature: ModelSignature, *, clock: Clock, **plan: Any) -> WarmUpResult:
    return warm_up(worker_of(runner, clock), InputGenerator(signature, None), WarmUpPlan(**plan))


def sweep(
    latency_ns: Callable[[int], int],
    *,
    budget_s: float = 60,
    max_rows: int | None = None,
    signature: ModelSignature = BATCHED,
    rows_depend: str | None = "",
) -> WarmUpResult:
    clock = FakeClock()
    return run_plan(
        TimedRunner(clock, latency_ns),
        signature,
        budget_s=budget_s,
        max_rows=max_rows,
        clock=clock,
        rows_depend=rows_depend,
    )


def sizes(found: WarmUpResult) -> list[int]:
    return [size.rows for size in found.latencies]


def test_sizes_double_while_a_row_gets_cheaper() -> None:
    found = sweep(lambda rows: 10 * MS + rows)
    assert sizes(found) == [1, 2, 4, 8, 16, 32, 64]
    assert found.max_rows == MAX_SWEPT_ROWS
    assert [size.run_ns for size in found.latencies] == [10 * MS + rows for rows in sizes(found)]


def test_sweep_ends_with_the_second_size_that_gains_less_than_a_twentieth() -> None:
    found = sweep(lambda rows: MS * rows)
    assert (sizes(found), found.max_rows) == ([1, 2, 4], 1)
    # 20 rows' worth of overhead: a row costs 21, 11, 6, 3.5, 2.25, 1.625, 1.3125
    assert sweep(lambda rows: (20 + rows) * MS).max_rows == 64
    # 0.12 of a row's worth: 1.12, 1.06 (-5.4 %), 1.03 and 1.015 (-2.8 % and -4.2 % of that)
    found = sweep(lambda rows: int((0.12 + rows) * MS))
    assert sizes(found) == [1, 2, 4, 8]
    assert found.max_rows == 2


def test_one_slow_measurement_does_not_end_the_sweep() -> None:
    assert sweep(lambda rows: (10 + rows + 20 * (rows == 2)) * MS).max_rows == 64


def test_other_work_on_the_machine_decides_no_batch_size() -> None:
    """Three runs of four take five times as long, as on a machine with busy processors."""
    runs = count()
    found = sweep(lambda rows: (10 + rows) * MS * (1 if next(runs) % 4 == 0 else 5))
    assert found.max_rows == 64


@pytest.mark.parametrize(("max_rows", "swept"), [(1, [1]), (5, [1, 2, 4, 5]), (128, [1, 2, 4, 8, 16, 32, 64, 128])])
def test_configured_maximum_is_kept_without_gain(max_rows: int, swept: list[int]) -> None:
    found = sweep(lambda rows: MS * rows * rows, max_rows=max_rows)
    assert found.max_rows == max_rows
    assert sizes(found) == swept


def test_budget_ends_the_sweep() -> None:
    # Six runs of one row, three rows together, each alone and zeros; then runs of two rows while time is left.
    found, took_ns = sweep_timed(lambda rows: 10 * MS * rows, budget_s=0.23, rows_depend=None)
    assert sizes(found) == [1, 2]
    assert 210 * MS < took_ns <= 230 * MS
    assert not found.rejection


def sweep_timed(
    latency_ns: Callable[[int], int],
    *,
    budget_s: float,
    rows_depend: str | None = "",
    effort_s: float | None = None,
    max_rows: int | None = None,
) -> tuple[WarmUpResult, int]:
    """The results of warm-up, and its duration."""
    clock = FakeClock()
    began_ns = clock()
    runner = TimedRunner(clock, latency_ns)
    found = run_plan(
        runner,
        BATCHED,
        budget_s=budget_s,
        max_rows=max_rows,
        clock=clock,
        rows_depend=rows_depend,
        effort_s=effort_s,
    )
    assert found.spent_ns == clock() - began_ns
    return found, clock() - began_ns


@pytest.mark.parametrize("rows_depend", ["", None], ids=["proven", "tried"])
@pytest.mark.parametrize("budget_s", [0.1, 0.5, 1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("max_rows", [None, 64])
def test_budget_covers_warm_up_except_the_first_run(
    rows_depend: str | None, budget_s: float, max_rows: int | None
) -> None:
    seen: set[int] = set()

    def latency_ns(rows: int) -> int:
        """400 ms per row, and twice as much in the first run of a size."""
        is_first = rows not in seen
        seen.add(rows)
        return 400 * MS * rows * (1 + is_first)

    found, took_ns = sweep_timed(latency_ns, budget_s=budget_s, rows_depend=rows_depend, max_rows=max_rows)
    assert took_ns <= max(budget_s * 1e9, 800 * MS)
    assert sizes(found)[0] == 1


def test_rows_without_time_for_a_trial_run_alone() -> None:
    found, _ = sweep_timed(lambda rows: 400 * MS * rows, budget_s=2, rows_depend=None)
    assert found.rows_depend == "rows could not be tried together in the time for warm-up"
    assert (sizes(found), found.max_rows) == ([1], 1)


def test_model_without_gain_is_measured_no_longer_than_its_opening() -> None:
    found, took_ns = sweep_timed(lambda rows: 10 * MS * rows, budget_s=5, effort_s=0.1)
    assert (sizes(found), found.max_rows, took_ns) == ([1, 2], 1, (30 + 100) * MS)


def test_two_rows_of_a_slow_model_are_measured_beyond_the_time_of_its_opening() -> None:
    found, took_ns = sweep_timed(lambda rows: 500 * MS * rows, budget_s=5, effort_s=0.05)
    assert (sizes(found), found.max_rows, took_ns) == ([1, 2], 1, (2 + 2 * 2) * 500 * MS)
    found, _ = sweep_timed(lambda rows: (500 + rows) * MS, budget_s=5, effort_s=0.05)
    assert (sizes(found)[:2], found.max_rows) == ([1, 2], MAX_SWEPT_ROWS)


def test_gain_of_larger_sizes_is_computed_if_measuring_takes_too_long() -> None:
    found, _ = sweep_timed(lambda rows: (40 + rows) * MS, budget_s=5, effort_s=0.14)
    assert (sizes(found), found.max_rows) == ([1, 2, 4], MAX_SWEPT_ROWS)
    # 4 rows of 6.5 ms, 8 of 5.25 ms, 16 of 4.6 ms, 32 of 4.3 ms (-7 %), 64 of 4.15 ms (-3 %)
    found, _ = sweep_timed(lambda rows: (10 + 4 * rows) * MS, budget_s=5, effort_s=0.1)
    assert (sizes(found), found.max_rows) == ([1, 2, 4], 32)


def test_configured_maximum_is_measured_without_an_effort_limit() -> None:
    found, _ = sweep_timed(lambda rows: 10 * MS * rows, budget_s=60, effort_s=0.05, max_rows=16)
    assert (sizes(found), found.max_rows) == ([1, 2, 4, 8, 16], 16)


def test_clearly_better_size_is_not_measured_again() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS)
    run_plan(runner, BATCHED, budget_s=60, clock=clock, rows_depend="")
    assert runner.ran == [1] * 6 + [rows for size in (2, 4, 8, 16, 32, 64) for rows in (size, size)]


@pytest.mark.parametrize(("budget_s", "timed"), [(0.001, [1]), (1, [1, 4]), (60, [1, 4, 16])])
def test_buffered_sizes_are_timed_within_the_budget(budget_s: float, timed: list[int]) -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: 50 * MS * rows)
    inputs = InputGenerator(BATCHED, None)
    found = time_on_buffers(worker_of(runner, clock), inputs, (1, 4, 16), WarmUpResult(16), budget_s)
    assert sizes(found) == timed


@pytest.mark.parametrize(
    ("latency_ns", "most", "given_back"), [(lambda rows: MS * rows, 1, [1]), (lambda rows: MS, 64, [])]
)
def test_memory_of_unused_sizes_is_released(latency_ns: Callable[[int], int], most: int, given_back: list[int]) -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, latency_ns)
    ran: list[int] = []

    def give_back_memory(batch: Batch) -> None:
        ran.append(batch.rows)
        runner.ran.clear()

    found = run_plan(runner, BATCHED, budget_s=60, clock=clock, rows_depend="", give_back_memory=give_back_memory)
    assert (found.max_rows, ran) == (most, given_back)
    if given_back:
        assert runner.ran == [most]  # allocates again the memory that serving needs


def test_temporary_session_runs_one_row() -> None:
    clock = FakeClock()
    for is_kept, most in ((False, 1), (True, 64)):
        runner = TimedRunner(clock, lambda rows: MS)

        def keeps_session(one_row: SizeLatency, is_kept: bool = is_kept) -> bool:
            return is_kept

        found = run_plan(runner, BATCHED, budget_s=60, clock=clock, keeps_session=keeps_session)
        assert (found.max_rows, max(runner.ran)) == (most, most)


@pytest.mark.parametrize(
    ("run_us", "runs", "least_us"),
    [
        ([30_000, 2400, 1500, 2100, 1700, 1200, 1300, 1600, 900], 9, 900),
        ([30_000, 40_000, 1200, 40_000, 600], 5, 600),
        ([1300, 2500], 21, 1300),
        ([2000, 2100], 6, 2000),
        ([4100, 9000], 4, 4100),
        ([30_000, 700, 2000], 4, 700),
    ],
    ids=["busy", "interrupted", "always busy", "quiet", "long", "short at once"],
)
def test_one_row_runs_until_other_work_leaves_no_doubt_whether_runs_are_short(
    run_us: list[int], runs: int, least_us: int
) -> None:
    clock = FakeClock()
    times = cycle(run_us)
    runner = TimedRunner(clock, lambda rows: next(times) * 1000)
    seen: list[int] = []

    def keeps_session(one_row: SizeLatency) -> bool:
        seen.append(one_row.least_run_ns)
        return False

    run_plan(runner, BATCHED, budget_s=60, clock=clock, short_ns=1_000_000, keeps_session=keeps_session)
    assert (len(runner.ran), seen) == (runs, [least_us * 1000])


@pytest.mark.parametrize(("max_rows", "kept"), [(None, MAX_SWEPT_ROWS), (7, 7)])
def test_zero_budget_runs_no_batch(max_rows: int | None, kept: int) -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS)
    assert run_plan(runner, BATCHED, budget_s=0, max_rows=max_rows, clock=clock) == WarmUpResult(kept)
    assert runner.ran == []


def test_model_without_a_batch_axis_runs_requests_alone() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS)
    found = run_plan(runner, ONE_ROW, budget_s=60, clock=clock)
    assert sizes(found) == [1]
    assert set(runner.ran) == {1}
    assert not found.rows_depend


def test_rejected_synthetic_inputs_leave_the_other_results_unknown() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS, ServeError(ErrorKind.INTERNAL, "no such index"))
    assert run_plan(runner, BATCHED, budget_s=60, max_rows=9, clock=clock) == WarmUpResult(9, rejection="no such index")


def sweep_cramped(most_rows: int, *, max_rows: int | None = None, buckets: tuple[int, ...] = ()) -> WarmUpResult:
    """Sweep with a runner that lacks memory above a number of rows; rows are cheaper in larger batches."""

    def compute(batch: Batch) -> Arrays:
        if batch.bucket > most_rows:
            raise OutOfMemoryError(f"no memory for {batch.bucket} rows")
        return (np.concatenate(batch.parts[0]),)

    runner = ComputingRunner(compute)
    return run_plan(runner, BATCHED, budget_s=60, max_rows=max_rows, clock=FakeClock(), buckets=buckets)


@pytest.mark.parametrize(
    ("most_rows", "swept", "refused_size"),
    [(2, [1, 2], 4), (3, [1, 2], 4), (10, [1, 2, 4, 8], 16), (63, [1, 2, 4, 8, 16, 32], 64)],
)
def test_sweep_ends_below_the_size_without_memory_and_keeps_its_measurements(
    most_rows: int, swept: list[int], refused_size: int
) -> None:
    found = sweep_cramped(most_rows, max_rows=64)
    assert (sizes(found), found.max_rows) == (swept, swept[-1])
    assert (found.rejection, found.rows_depend) == ("", "")
    assert found.no_memory == f"no memory for {refused_size} rows"


def test_sizes_with_enough_memory_report_no_limit() -> None:
    assert sweep_cramped(64, max_rows=64).no_memory == ""


def test_batch_size_is_learned_from_sizes_that_fit() -> None:
    clock = FakeClock()

    def latency_ns(rows: int) -> int:
        return (10 * MS + rows) if rows <= 4 else 100 * MS

    class Cramped(TimedRunner):
        def start(self, batch: Batch, done: BatchDone) -> None:
            self.error = OutOfMemoryError("no memory") if batch.rows > 8 else None
            super().start(batch, done)

    found = run_plan(Cramped(clock, latency_ns), BATCHED, budget_s=60, clock=clock)
    assert (sizes(found), found.max_rows, found.no_memory) == ([1, 2, 4, 8], 4, "no memory")


def test_requests_run_alone_if_two_rows_do_not_fit() -> None:
    found = sweep_cramped(1)
    assert (sizes(found), found.max_rows, found.no_memory) == ([1], 1, "no memory for 2 rows")
    assert found.rows_depend == (
        "rows could not be tried together, because there is too little memory for two: no memory for 2 rows"
    )


def test_model_is_not_served_if_one_row_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match=r"^no memory for 1 rows$"):
        sweep_cramped(0)
    runner = TimedRunner(FakeClock(), lambda rows: MS, OutOfMemoryError("no memory"))
    with pytest.raises(OutOfMemoryError, match=r"^no memory$"):
        run_plan(runner, ONE_ROW, budget_s=60, clock=runner.clock)


@pytest.mark.parametrize(
    ("most_rows", "max_rows", "buckets", "swept", "expected"),
    [
        (10, 32, (8, 32), [1, 2, 4, 8], 8),
        (20, 32, (8, 32), [1, 2, 4, 8, 16], 8),  # 9 rows or more would be padded to 32
        (31, 32, (32, 8), [1, 2, 4, 8, 16], 8),
        (7, 24, (6, 24), [1, 2, 4, 6], 6),
        (7, 24, (5, 6, 7, 24), [1, 2, 4, 7], 7),
        (6, 24, (5, 6, 7, 24), [1, 2, 4, 6], 6),
        (5, 24, (5, 6, 7, 24), [1, 2, 4, 5], 5),
        (4, 5, (2, 8), [1, 2, 4], 2),  # 3 rows or more would be padded to 8
        (8, 5, (2, 8), [1, 2, 4, 8], 5),
    ],
)
def test_batches_are_bounded_by_the_largest_bucket_that_fits(
    most_rows: int, max_rows: int, buckets: tuple[int, ...], swept: list[int], expected: int
) -> None:
    found = sweep_cramped(most_rows, max_rows=max_rows, buckets=buckets)
    assert (sizes(found), found.max_rows) == (swept, expected)
    assert bool(found.no_memory) == (most_rows < max(buckets))


@pytest.mark.parametrize("most_rows", [1, 2, 7])
def test_error_names_buckets_that_do_not_fit(most_rows: int) -> None:
    error = r"^buckets: expected one of at most \d rows, for which there is memory, got 8, 32: no memory for \d rows$"
    with pytest.raises(OutOfMemoryError, match=error):
        sweep_cramped(most_rows, max_rows=32, buckets=(32, 8))


@pytest.mark.parametrize("fails_from", [1, 2, 4, 5])
def test_rejection_states_whether_a_run_succeeded_before(fails_from: int) -> None:
    """One row, three rows together, each of them alone, three zeros, then sizes from two rows on."""

    def compute(batch: Batch) -> Arrays:
        if batch.rows >= fails_from:
            raise ServeError(ErrorKind.INTERNAL, "no")
        return (np.concatenate(batch.parts[0]),)

    found = run_plan(ComputingRunner(compute), BATCHED, budget_s=60, max_rows=8, clock=FakeClock())
    assert found == WarmUpResult(8, rejection="no", has_run=fails_from > 1)


FREE = ModelSignature((TensorSpec("x", DataType.FP32, (-1, -1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),))


def refused_by(signature: ModelSignature, compute: Callable[[Batch], Arrays]) -> list[tuple[int, ...]]:
    """Fails the first inputs. Returns their shapes."""
    rows = find_rejected_rows(worker_of(ComputingRunner(compute)), InputGenerator(signature, None))
    return [arrays[0].shape for arrays in rows]


def fail_with(error: ServeError) -> Callable[[Batch], Arrays]:
    def compute(batch: Batch) -> Arrays:
        raise error

    return compute


def test_rejected_rows_are_generated_in_every_way() -> None:
    no = ServeError(ErrorKind.INTERNAL, "no")
    assert refused_by(ONE_ROW, fail_with(no)) == refused_by(BATCHED, fail_with(no)) == [(1, 4)]
    assert refused_by(OPTIONAL, fail_with(no)) == [(1, 4)] * 2  # without and with the optional input
    assert refused_by(FREE, fail_with(no)) == [(1, 8), *((1, dim) for dim in LARGER_FREE_DIMS)]
    assert refused_by(FREE, fail_with(OutOfMemoryError("no memory"))) == []
    with pytest.raises(DeviceLostError):
        refused_by(FREE, fail_with(DeviceLostError("lost")))


def test_instance_that_accepts_one_form_has_no_rejection() -> None:
    def compute(batch: Batch) -> Arrays:
        ((x,),) = batch.parts
        if x.shape[1] < 32:
            raise ServeError(ErrorKind.INTERNAL, "too small")
        return (x,)

    assert refused_by(FREE, compute) == []
    rows = [(np.zeros((1, dim), np.float32),) for dim in (8, 32)]
    assert run_until_accepted(worker_of(ComputingRunner(compute)), rows) == (True, rows[:1])
    assert run_until_accepted(worker_of(ComputingRunner(compute)), rows[:1]) == (False, rows[:1])
    with pytest.raises(DeviceLostError):
        run_until_accepted(worker_of(ComputingRunner(fail_with(DeviceLostError("lost")))), rows)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Callable[..., WarmUpResult]]:
    """Warms up a real model."""
    instances: list[Instance] = []

    def warm_model(build: Callable[[Path], Path], rows_depend: str | None = None) -> WarmUpResult:
        session = open_session(build(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1))
        signature = read_signature(session)
        instances.append(Instance(session, signature, name="m", intra_op_threads=1, clock=time.monotonic_ns))
        clock = time.monotonic_ns
        return run_plan(instances[-1], signature, budget_s=0.2, max_rows=4, clock=clock, rows_depend=rows_depend)

    yield warm_model
    for instance in instances:
        instance.close()


def test_dependent_rows_are_detected(warm: Callable[..., WarmUpResult]) -> None:
    found = warm(builders.row_mixer)
    assert found.rows_depend == "output 'y' of a row depends on the rows beside it"
    assert sizes(found) == [1]


@pytest.mark.parametrize("build", [builders.mlp, builders.poison, builders.variable_length, builders.unnamed_dims])
def test_independent_rows_are_batched(warm: Callable[..., WarmUpResult], build: Callable[[Path], Path]) -> None:
    found = warm(build)
    assert not found.rows_depend
    assert not found.rejection
    assert found.latencies[0].rows == 1
    assert all(0 < size.run_ns <= size.round_trip_ns for size in found.latencies)


def test_rows_without_elements_are_warmed(warm: Callable[[Callable[[Path], Path]], WarmUpResult]) -> None:
    found = warm(lambda path: builders.identity(path, DataType.FP32, ("batch", 0)))
    assert found.latencies
    assert not found.rows_depend


def test_model_that_rejects_synthetic_inputs_is_not_warmed(warm: Callable[..., WarmUpResult]) -> None:
    found = warm(builders.refuses_synthetic)
    assert "indices element out of data bounds" in found.rejection
    assert found == WarmUpResult(4, rejection=found.rejection)


@pytest.mark.parametrize(
    ("build", "free_dim"),
    [
        (partial(builders.pools_images, least=4), 8),
        (partial(builders.pools_images, least=32), 32),
        (partial(builders.pools_images, least=100), 224),
        (partial(builders.crops_images, top=4), 8),
        (partial(builders.crops_images, top=16), 32),
        (partial(builders.crops_images, top=300), 8),
    ],
)
def test_model_that_rejects_small_images_is_warmed_with_larger_ones(
    warm: Callable[..., WarmUpResult], build: Callable[[Path], Path], free_dim: int
) -> None:
    found = warm(build, rows_depend="")
    assert (found.rejection, found.rows_depend) == ("", "")
    assert found.inputs is not None
    assert found.inputs.free_dim == free_dim
    assert found.latencies


@pytest.mark.parametrize(("free", "largest"), [(2, 224 * 224), (3, 32**3), (4, 32**4), (5, 8**5)])
def test_larger_inputs_are_generated_up_to_a_bound(free: int, largest: int) -> None:
    made: list[int] = []

    def refuse(batch: Batch) -> Arrays:
        made.append(max(part.size for parts in batch.parts for part in parts) // batch.rows)
        raise ServeError(ErrorKind.INTERNAL, "no")

    x = TensorSpec("x", DataType.FP32, (-1,) * (1 + free))
    found = run_plan(ComputingRunner(refuse), ModelSignature((x,), (Y,)), budget_s=60, max_rows=9, clock=FakeClock())
    assert found.rejection == "no"
    assert max(made) == largest


def test_model_that_rejects_all_sizes_reports_the_error_of_the_smallest(
    warm: Callable[..., WarmUpResult],
) -> None:
    found = warm(partial(builders.pools_images, least=500))
    assert found.rejection
    assert found == WarmUpResult(4, rejection=found.rejection)


def test_data_dependent_row_counts_are_detected(
    warm: Callable[..., WarmUpResult],
) -> None:
    assert warm(interfaces.positive).rows_depend.startswith("output 'y' has shape [")

    def compute_batch(batch: Batch) -> Arrays:
        (parts,) = batch.parts
        rows = np.concatenate(parts)
        return (rows[(rows != 0).any(axis=1)],)

    runner = ComputingRunner(compute_batch)
    found = run_plan(runner, BATCHED, budget_s=60, clock=FakeClock())
    assert found.rows_depend == "output 'y' has shape [0, 4] for 3 rows"


def test_model_that_rejects_zeros_is_batched_by_the_other_inputs() -> None:
    def compute_batch(batch: Batch) -> Arrays:
        ((rows,),) = batch.parts
        if not rows.any():
            raise ServeError(ErrorKind.INTERNAL, "division by zero")
        return (1 / rows,)

    found = run_plan(ComputingRunner(compute_batch), BATCHED, budget_s=60, max_rows=4, clock=FakeClock())
    assert (found.rows_depend, found.rejection) == ("", "")


def test_rows_are_tried_with_and_without_optional_inputs(
    warm: Callable[..., WarmUpResult],
) -> None:
    for build in (interfaces.optional_bias, partial(interfaces.default_scale, shape=("batch", 1))):
        found = warm(build)
        assert found.inputs is not None
        assert not found.inputs.includes_optional
        assert not found.rows_depend
        assert sizes(found)[0] == 1


OPTIONAL = ModelSignature((X, TensorSpec("b", DataType.FP32, (-1, 4), is_optional=True)), (Y,))


def with_optional(mix: Callable[[np.ndarray, np.ndarray | None], np.ndarray]) -> WarmUpResult:
    def compute_batch(batch: Batch) -> Arrays:
        (x,), (b,) = batch.parts
        return (mix(x, None if is_absent(b) else b),)

    return run_plan(ComputingRunner(compute_batch), OPTIONAL, budget_s=60, max_rows=4, clock=FakeClock())


def test_dependence_through_an_optional_input_is_detected() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        mixed: np.ndarray = x if b is None else x + b.mean(axis=0)
        return mixed

    found = with_optional(mix)
    assert found.rows_depend == "output 'y' of a row depends on the rows beside it"


def test_untried_optional_input_prevents_batching() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        if b is not None:
            raise ServeError(ErrorKind.INTERNAL, "no such index")
        return x

    found = with_optional(mix)
    assert found.rows_depend == (
        "rows could not be tried with the optional inputs, because the model rejects synthetic ones: no such index"
    )
    assert not found.rejection


def test_required_optional_inputs_are_generated() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        if b is None:
            raise ServeError(ErrorKind.INTERNAL, "there is none")
        both: np.ndarray = x + b
        return both

    found = with_optional(mix)
    assert found.inputs is not None
    assert found.inputs.includes_optional
    assert not found.rows_depend
    assert found.latencies


def test_device_lost_at_any_run_ends_the_warm_up() -> None:
    free, optional = (
        TensorSpec("x", DataType.FP32, (-1, -1)),
        TensorSpec("z", DataType.FP32, (-1, 4), is_optional=True),
    )
    signature = ModelSignature((free, optional), (TensorSpec("y", DataType.FP32, (-1, -1)),))

    def run_until(last: int) -> int:
        """The number of runs before the device was lost."""
        runs = 0

        def compute(batch: Batch) -> Arrays:
            nonlocal runs
            if runs == last:
                raise DeviceLostError("cuda:0 is lost")
            runs += 1
            return (np.concatenate(batch.parts[0]),)

        run_plan(ComputingRunner(compute), signature, budget_s=60, max_rows=2, clock=lambda: 0)
        return runs

    runs = run_until(-1)
    assert runs > 10
    for last in range(runs):
        with pytest.raises(DeviceLostError):
            run_until(last)


def test_device_lost_in_a_sample_is_not_a_bad_sample() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS, DeviceLostError("cuda:0 is lost"))
    with pytest.raises(DeviceLostError, match=r"^cuda:0 is lost$"):
        run_samples(worker_of(runner, clock), [Sample("s", (np.zeros((1, 4), np.float32),), 1, 1)])


def test_rows_that_are_configured_as_independent_are_batched_against_the_trial() -> None:
    def compute_batch(batch: Batch) -> Arrays:
        ((rows,),) = batch.parts
        return (rows - rows.mean(axis=0),)

    runner = ComputingRunner(compute_batch)
    found = run_plan(runner, BATCHED, budget_s=60, max_rows=4, clock=FakeClock(), always_batches=True)
    assert found.rows_depend == "output 'y' of a row depends on the rows beside it"
    assert (found.max_rows, sizes(found)) == (4, [1, 2, 4])
