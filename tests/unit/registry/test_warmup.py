"""What warm-up finds: with runs of a known length in virtual time, and with real models."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fakes.clock import FakeClock
from models import builders, interfaces
from ortserve.core.absent import is_absent
from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.providers import CPU, ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import DeviceLostError, ErrorKind, ServeError
from ortserve.registry.progress import Progress
from ortserve.registry.samples import Sample
from ortserve.registry.warmup import MAX_SWEPT_ROWS, WarmUp, run_samples, warm_up

MS = 1_000_000
X, Y = TensorSpec("x", DataType.FP32, (-1, 4)), TensorSpec("y", DataType.FP32, (-1, 4))
BATCHED = ModelSignature((X,), (Y,))
ONE_ROW = ModelSignature((TensorSpec("x", DataType.FP32, (1, 4)),), (Y,), "reason")


class TimedRunner:
    """Doubles its rows, in a time that is a function of how many there are."""

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


class ComputingRunner:
    """Answers with what a function makes of a batch, at once."""

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


def sweep(
    latency_ns: Callable[[int], int],
    *,
    budget_s: float = 60,
    max_rows: int | None = None,
    signature: ModelSignature = BATCHED,
) -> WarmUp:
    clock = FakeClock()
    return warm_up(TimedRunner(clock, latency_ns), signature, budget_s=budget_s, max_rows=max_rows, clock=clock)


def sizes(found: WarmUp) -> list[int]:
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


def test_one_size_that_was_timed_badly_does_not_end_the_sweep() -> None:
    assert sweep(lambda rows: (10 + rows + 20 * (rows == 2)) * MS).max_rows == 64


def test_what_else_runs_meanwhile_decides_no_batch_size() -> None:
    """Three runs of four take five times as long: so many are disturbed where processors are busy."""
    runs = count()
    found = sweep(lambda rows: (10 + rows) * MS * (1 if next(runs) % 4 == 0 else 5))
    assert found.max_rows == 64


@pytest.mark.parametrize(("max_rows", "swept"), [(1, [1]), (5, [1, 2, 4, 5]), (128, [1, 2, 4, 8, 16, 32, 64, 128])])
def test_maximum_that_was_set_is_kept_whatever_it_gains(max_rows: int, swept: list[int]) -> None:
    found = sweep(lambda rows: MS * rows * rows, max_rows=max_rows)
    assert found.max_rows == max_rows
    assert sizes(found) == swept


def test_budget_ends_the_sweep() -> None:
    # Five runs to try the rows, six of size 1, and of size 2 those until the time is over.
    found = sweep(lambda rows: 100 * MS, budget_s=1.35)
    assert sizes(found) == [1, 2]
    assert found.max_rows == 2
    assert not found.refused


def test_first_run_of_a_size_does_not_count() -> None:
    seen: set[int] = set()

    def latency_ns(rows: int) -> int:
        is_first = rows not in seen
        seen.add(rows)
        return 500 * MS if is_first else 10 * MS

    assert {size.run_ns for size in sweep(latency_ns, signature=ONE_ROW).latencies} == {10 * MS}


@pytest.mark.parametrize(("max_rows", "kept"), [(None, MAX_SWEPT_ROWS), (7, 7)])
def test_budget_of_nothing_runs_nothing(max_rows: int | None, kept: int) -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS)
    assert warm_up(runner, BATCHED, budget_s=0, max_rows=max_rows, clock=clock) == WarmUp(kept)
    assert runner.ran == []


def test_model_without_a_batch_axis_is_run_one_at_a_time() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS)
    found = warm_up(runner, ONE_ROW, budget_s=60, max_rows=None, clock=clock)
    assert sizes(found) == [1]
    assert set(runner.ran) == {1}
    assert not found.rows_depend


def test_refusal_is_told_and_leaves_the_rest_unknown() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS, ServeError(ErrorKind.INTERNAL, "no such index"))
    assert warm_up(runner, BATCHED, budget_s=60, max_rows=9, clock=clock) == WarmUp(9, refused="no such index")


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Callable[[Callable[[Path], Path]], WarmUp]]:
    """Warms a real model."""
    instances: list[Instance] = []

    def warm_model(build: Callable[[Path], Path]) -> WarmUp:
        session = open_session(build(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1))
        signature = read_signature(session)
        instances.append(Instance(session, signature, name="m", intra_op_threads=1, clock=time.monotonic_ns))
        return warm_up(instances[-1], signature, budget_s=0.2, max_rows=4, clock=time.monotonic_ns)

    yield warm_model
    for instance in instances:
        instance.close()


def test_rows_that_influence_each_other_are_found_out(warm: Callable[[Callable[[Path], Path]], WarmUp]) -> None:
    found = warm(builders.row_mixer)
    assert found.rows_depend == "output 'y' of a row depends on the rows beside it"
    assert sizes(found) == [1]


@pytest.mark.parametrize("build", [builders.mlp, builders.poison, builders.variable_length, builders.unnamed_dims])
def test_rows_that_do_not_are_batched(
    warm: Callable[[Callable[[Path], Path]], WarmUp], build: Callable[[Path], Path]
) -> None:
    found = warm(build)
    assert not found.rows_depend
    assert not found.refused
    assert found.latencies[0].rows == 1
    assert all(0 < size.run_ns <= size.round_trip_ns for size in found.latencies)


def test_model_that_refuses_made_up_inputs_is_not_warmed(warm: Callable[[Callable[[Path], Path]], WarmUp]) -> None:
    found = warm(builders.refuses_synthetic)
    assert "indices element out of data bounds" in found.refused
    assert found == WarmUp(4, refused=found.refused)


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
def test_model_that_has_no_answer_for_small_images_is_warmed_with_larger_ones(
    warm: Callable[[Callable[[Path], Path]], WarmUp], build: Callable[[Path], Path], free_dim: int
) -> None:
    found = warm(build)
    assert (found.refused, found.rows_depend, found.free_dim) == ("", "", free_dim)
    assert found.latencies


@pytest.mark.parametrize(("free", "largest"), [(2, 224 * 224), (3, 32**3), (4, 32**4), (5, 8**5)])
def test_larger_inputs_are_made_up_only_while_they_are_not_too_large(free: int, largest: int) -> None:
    made: list[int] = []

    def refuse(batch: Batch) -> Arrays:
        made.append(max(part.size for parts in batch.parts for part in parts) // batch.rows)
        raise ServeError(ErrorKind.INTERNAL, "no")

    x = TensorSpec("x", DataType.FP32, (-1,) * (1 + free))
    found = warm_up(ComputingRunner(refuse), ModelSignature((x,), (Y,)), budget_s=60, max_rows=9, clock=FakeClock())
    assert found.refused == "no"
    assert max(made) == largest


def test_model_that_refuses_all_sizes_tells_what_it_said_to_the_smallest(
    warm: Callable[[Callable[[Path], Path]], WarmUp],
) -> None:
    found = warm(partial(builders.pools_images, least=500))
    assert found.refused
    assert found == WarmUp(4, refused=found.refused)


def test_rows_that_data_decides_are_found_out_although_drawn_data_may_hide_it(
    warm: Callable[[Callable[[Path], Path]], WarmUp],
) -> None:
    assert warm(interfaces.positive).rows_depend.startswith("output 'y' has shape [")

    def compute_batch(batch: Batch) -> Arrays:
        (parts,) = batch.parts
        rows = np.concatenate(parts)
        return (rows[(rows != 0).any(axis=1)],)

    runner = ComputingRunner(compute_batch)
    found = warm_up(runner, BATCHED, budget_s=60, max_rows=None, clock=FakeClock())
    assert found.rows_depend == "output 'y' has shape [0, 4] for 3 rows"


def test_model_that_takes_no_zeros_is_batched_by_what_else_is_known() -> None:
    def compute_batch(batch: Batch) -> Arrays:
        ((rows,),) = batch.parts
        if not rows.any():
            raise ServeError(ErrorKind.INTERNAL, "division by zero")
        return (1 / rows,)

    found = warm_up(ComputingRunner(compute_batch), BATCHED, budget_s=60, max_rows=4, clock=FakeClock())
    assert (found.rows_depend, found.refused) == ("", "")


def test_optional_inputs_are_left_out_and_rows_tried_with_them_too(
    warm: Callable[[Callable[[Path], Path]], WarmUp],
) -> None:
    for build in (interfaces.optional_bias, partial(interfaces.default_scale, shape=("batch", 1))):
        found = warm(build)
        assert not found.brings_optional
        assert not found.rows_depend
        assert sizes(found)[0] == 1


OPTIONAL = ModelSignature((X, TensorSpec("b", DataType.FP32, (-1, 4), is_optional=True)), (Y,))


def with_optional(mix: Callable[[np.ndarray, np.ndarray | None], np.ndarray]) -> WarmUp:
    def compute_batch(batch: Batch) -> Arrays:
        (x,), (b,) = batch.parts
        return (mix(x, None if is_absent(b) else b),)

    return warm_up(ComputingRunner(compute_batch), OPTIONAL, budget_s=60, max_rows=4, clock=FakeClock())


def test_rows_that_depend_with_an_optional_input_only_are_found_out() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        mixed: np.ndarray = x if b is None else x + b.mean(axis=0)
        return mixed

    found = with_optional(mix)
    assert found.rows_depend == "output 'y' of a row depends on the rows beside it"


def test_optional_input_that_cannot_be_tried_keeps_rows_apart() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        if b is not None:
            raise ServeError(ErrorKind.INTERNAL, "no such index")
        return x

    found = with_optional(mix)
    assert found.rows_depend == (
        "rows could not be tried with the optional inputs, of which the model refuses made-up ones: no such index"
    )
    assert not found.refused


def test_model_that_needs_its_optional_inputs_is_brought_them() -> None:
    def mix(x: np.ndarray, b: np.ndarray | None) -> np.ndarray:
        if b is None:
            raise ServeError(ErrorKind.INTERNAL, "there is none")
        both: np.ndarray = x + b
        return both

    found = with_optional(mix)
    assert found.brings_optional
    assert not found.rows_depend
    assert found.latencies


def test_device_that_is_lost_at_any_run_ends_the_warm_up_and_is_no_matter_of_the_models_taste() -> None:
    free, optional = (
        TensorSpec("x", DataType.FP32, (-1, -1)),
        TensorSpec("z", DataType.FP32, (-1, 4), is_optional=True),
    )
    signature = ModelSignature((free, optional), (TensorSpec("y", DataType.FP32, (-1, -1)),))

    def run_until(last: int) -> int:
        """How many runs there were before the device was lost."""
        runs = 0

        def compute(batch: Batch) -> Arrays:
            nonlocal runs
            if runs == last:
                raise DeviceLostError("cuda:0 is lost")
            runs += 1
            return (np.concatenate(batch.parts[0]),)

        warm_up(ComputingRunner(compute), signature, budget_s=60, max_rows=2, clock=lambda: 0)
        return runs

    runs = run_until(-1)
    assert runs > 10
    for last in range(runs):
        with pytest.raises(DeviceLostError):
            run_until(last)


def test_device_that_is_lost_in_a_sample_is_not_the_samples_fault() -> None:
    clock = FakeClock()
    runner = TimedRunner(clock, lambda rows: MS, DeviceLostError("cuda:0 is lost"))
    with pytest.raises(DeviceLostError, match=r"^cuda:0 is lost$"):
        run_samples(runner, [Sample("s", (np.zeros((1, 4), np.float32),), 1, 1)], Progress(clock))
