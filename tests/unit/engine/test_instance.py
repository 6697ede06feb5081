"""Runs of the real ONNX Runtime, on the caller's thread and on the worker's."""

import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from models import builders
from ortserve.core.batch import Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.device.capture_lock import CaptureLock
from ortserve.device.protocol import device_run_error
from ortserve.engine.child_process import call_in_child
from ortserve.engine.instance import GpuAccess, Instance, runs_on_its_thread
from ortserve.engine.model_signature import read_signature
from ortserve.engine.process_memory import give_back_freed, read_held_memory
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import DeviceLostError, ErrorKind, ServeError

Open = Callable[[Path], Instance]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def open_instance(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens instances with one thread and with two, and closes them."""
    instances: list[Instance] = []

    def open_one(path: Path) -> Instance:
        session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), request.param))
        instances.append(
            Instance(
                session,
                read_signature(session),
                name="m/1",
                intra_op_threads=request.param,
                clock=time.monotonic_ns,
            )
        )
        return instances[-1]

    yield open_one
    for instance in instances:
        instance.close()


def batch_of(*parts: np.ndarray, bucket: int = 0) -> Batch:
    rows = sum(map(len, parts))
    return Batch((parts,), rows, bucket or rows)


def run_on_worker(instance: Instance, batch: Batch) -> tuple[BatchResult | Exception, threading.Thread]:
    outcomes: queue.SimpleQueue[tuple[BatchResult | Exception, threading.Thread]] = queue.SimpleQueue()
    instance.start(batch, lambda outcome: outcomes.put((outcome, threading.current_thread())))
    return outcomes.get(timeout=30)


def test_parts_of_several_requests_run_as_one(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx"))
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    result = instance.run(batch_of(rows[:1], rows[1:4], rows[4:]))
    (output,) = result.outputs
    np.testing.assert_array_equal(output, rows)


def test_inputs_and_outputs_are_in_the_order_of_the_signature(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.two_batch_names(tmp_path / "model.onnx"))
    a, b = np.ones((2, 4), np.float32), np.full((3, 4), 2, np.float32)
    (output,) = instance.run(Batch(((a,), (b,)), 1, 1)).outputs
    np.testing.assert_array_equal(output, np.full((2, 3), 8))


def unaligned(array: np.ndarray) -> np.ndarray:
    body = b"x" + array.tobytes()
    view = np.frombuffer(body, array.dtype, offset=1).reshape(array.shape)
    assert not view.flags.aligned
    return view


@pytest.mark.parametrize(
    "form",
    [unaligned, np.asfortranarray, lambda array: np.repeat(array, 2, axis=0)[::2]],
    ids=["unaligned", "F", "step"],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_array_of_any_layout_is_read_correctly(
    tmp_path: Path, open_instance: Open, form: Callable[[np.ndarray], np.ndarray], parts: int
) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx"))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    (output,) = instance.run(batch_of(*[form(rows)] * parts)).outputs
    np.testing.assert_array_equal(output, np.concatenate([rows] * parts))


@pytest.mark.parametrize("rows_of_parts", [[1], [2, 1], [1, 1, 1, 1, 2], [7]])
def test_rows_of_a_padded_batch_are_those_of_one_without_padding(
    tmp_path: Path, open_instance: Open, rows_of_parts: list[int]
) -> None:
    instance = open_instance(builders.mlp(tmp_path / "model.onnx"))
    draw = np.random.default_rng(0)
    parts = [draw.standard_normal((rows, 64), np.float32) for rows in rows_of_parts]
    (plain,) = instance.run(batch_of(*parts)).outputs
    padded, _ = run_on_worker(instance, batch_of(*parts, bucket=8))
    assert isinstance(padded, BatchResult)
    (output,) = padded.outputs
    assert output.shape == plain.shape == (sum(rows_of_parts), 10)
    np.testing.assert_allclose(output, plain, rtol=1e-5, atol=1e-6)


def test_padded_strings_are_returned_without_padding(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx", DataType.BYTES, ("batch",)))
    texts = [np.array(["a", "b"], object), np.array(["c"], object)]
    assert instance.run(batch_of(*texts, bucket=8)).outputs[0].tolist() == ["a", "b", "c"]


def test_output_with_other_rows_than_the_bucket_stays_unchanged(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.two_batch_names(tmp_path / "model.onnx"))  # all pairs of rows of a and rows of b
    b = np.ones((2, 4), np.float32)
    (output,) = instance.run(Batch(((np.ones((5, 4), np.float32),), (b,)), 2, 4)).outputs
    assert output.shape == (5, 4)


def test_answers_survive_reuse_of_the_staging_buffer(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx"))
    (first,) = instance.run(batch_of(*[np.full((1, 4), 1, np.float32)] * 3, bucket=4)).outputs
    instance.run(batch_of(*[np.full((1, 4), 2, np.float32)] * 4, bucket=4))
    assert first.tolist() == [[1] * 4] * 3


def test_empty_input_of_an_unbatched_model_stays_empty(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx", shape=("n", 4)))
    (output,) = instance.run(Batch(((np.zeros((0, 4), np.float32),),), 1, 1)).outputs
    assert output.shape == (0, 4)


def test_strings_pass_unchanged(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx", DataType.BYTES, ("batch",)))
    texts = [np.array(["", "größer"], object), np.array(["nul\0inside"], object)]
    (output,) = instance.run(batch_of(*texts)).outputs
    assert output.tolist() == ["", "größer", "nul\0inside"]


def test_worker_runs_on_its_own_thread_and_reports_durations(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.mlp(tmp_path / "model.onnx"))
    rows = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    began_ns = time.monotonic_ns()
    result, thread = run_on_worker(instance, batch_of(rows))
    ended_ns = time.monotonic_ns()
    assert isinstance(result, BatchResult)
    np.testing.assert_array_equal(result.outputs[0], instance.run(batch_of(rows)).outputs[0])
    assert thread is not threading.current_thread()
    assert thread.name == "run m/1"
    assert began_ns <= result.staged_ns <= result.computed_ns <= ended_ns
    assert 0 < result.run_ns <= result.computed_ns - result.staged_ns


def test_batches_are_run_in_the_order_they_were_started(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx"))
    finished: queue.SimpleQueue[float] = queue.SimpleQueue()

    def done(outcome: BatchResult | Exception) -> None:
        assert isinstance(outcome, BatchResult)
        finished.put(float(outcome.outputs[0][0, 0]))

    for number in range(20):
        instance.start(batch_of(np.full((1, 4), number, np.float32)), done)
    assert [finished.get(timeout=30) for _ in range(20)] == list(range(20))


BAD = [
    pytest.param(np.full((1, 4), builders.POISON, np.int64), "indices element out of data bounds", id="data"),
    pytest.param(np.zeros((1, 3), np.int64), "invalid dimensions for input: x", id="shape"),
    pytest.param(np.zeros((1, 4), np.float32), "Unexpected input data type", id="type"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_failed_run_has_a_reason_without_paths_and_the_next_works(
    tmp_path: Path, open_instance: Open, bad: np.ndarray, reason: str
) -> None:
    instance = open_instance(builders.poison(tmp_path / "model.onnx"))
    good = batch_of(np.ones((1, 4), np.int64))
    with pytest.raises(ServeError) as caught:
        instance.run(batch_of(bad))
    outcome, _ = run_on_worker(instance, batch_of(bad))
    assert isinstance(outcome, ServeError)
    for error in (caught.value, outcome):
        assert error.kind is ErrorKind.REJECTED_BY_MODEL
        assert error.message.startswith("the model rejected the inputs: ")
        assert reason in error.message
        assert not re.search(r"(^|\s)/", error.message)
        assert "\n" not in error.message
    recovered, _ = run_on_worker(instance, good)
    assert isinstance(recovered, BatchResult)
    np.testing.assert_array_equal(recovered.outputs[0], np.full((1, 4), 0.5))
    np.testing.assert_array_equal(instance.run(good).outputs[0], np.full((1, 4), 0.5))


def test_parts_that_do_not_fit_together_are_a_failed_run(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.unnamed_dims(tmp_path / "model.onnx"))
    parts = np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)
    outcome, _ = run_on_worker(instance, batch_of(*parts))
    assert isinstance(outcome, ServeError)
    assert outcome.kind is ErrorKind.INTERNAL


def test_close_finishes_started_work_then_ends_the_worker(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.slow(tmp_path / "model.onnx", steps=2000))
    outcomes: list[BatchResult | Exception] = []
    threads = set(threading.enumerate())
    for _ in range(3):
        instance.start(batch_of(np.ones((1, 4), np.float32)), outcomes.append)
    instance.close()
    assert [type(outcome) for outcome in outcomes] == [BatchResult] * 3
    (worker,) = [thread for thread in threads if thread.name == "run m/1" and not thread.is_alive()]
    assert not worker.is_alive()


def test_close_frees_the_session(tmp_path: Path) -> None:
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m/1", SessionOptions(ProviderChoice(CPU), 1))
    freed = weakref.ref(session)
    instance = Instance(session, read_signature(session), name="m/1", intra_op_threads=1, clock=time.monotonic_ns)
    del session
    run_on_worker(instance, batch_of(np.ones((1, 64), np.float32)))
    assert freed() is not None
    instance.close()
    assert freed() is None


def test_waiting_worker_holds_no_arrays(tmp_path: Path, open_instance: Open) -> None:
    instance = open_instance(builders.identity(tmp_path / "model.onnx"))
    are_freed = [threading.Event(), threading.Event()]
    rows = np.ones((1, 4), np.float32)
    weakref.finalize(rows, are_freed[0].set)
    outcome, _ = run_on_worker(instance, batch_of(rows))
    assert isinstance(outcome, BatchResult)
    (output,) = outcome.outputs
    weakref.finalize(output, are_freed[1].set)
    del rows, outcome, output
    assert [freed.wait(timeout=30) for freed in are_freed] == [True, True]


@pytest.mark.parametrize(
    ("providers", "mode", "threads", "expected"),
    [
        (["CPUExecutionProvider"], ort.ExecutionMode.ORT_SEQUENTIAL, 1, True),
        (["CPUExecutionProvider"], ort.ExecutionMode.ORT_SEQUENTIAL, 2, False),
        (["CPUExecutionProvider"], ort.ExecutionMode.ORT_PARALLEL, 1, False),
        (["AzureExecutionProvider", "CPUExecutionProvider"], ort.ExecutionMode.ORT_SEQUENTIAL, 1, False),
    ],
)
def test_run_is_timed_by_thread_cpu_time_only_if_single_threaded(
    tmp_path: Path, providers: list[str], mode: ort.ExecutionMode, threads: int, expected: bool
) -> None:
    native = ort.SessionOptions()
    native.execution_mode = mode
    native.inter_op_num_threads = 2
    session = ort.InferenceSession(str(builders.mlp(tmp_path / "model.onnx")), native, providers=providers)
    assert runs_on_its_thread(session, threads) is expected


class Broken:
    """A session whose GPU is lost."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, *args: Any) -> Any:
        raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")


def test_run_without_buffers_reports_a_lost_gpu(tmp_path: Path) -> None:
    path = builders.unnamed_dims(tmp_path / "model.onnx")
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    lock = CaptureLock()
    instance = Instance(
        Broken(session),
        read_signature(session),
        name="m/1",
        intra_op_threads=1,
        clock=time.monotonic_ns,
        gpu=GpuAccess(lock.shared, partial(device_run_error, device="the GPU")),
    )
    try:
        with lock.exclusive():
            assert not instance.runs_on_host
        outcome, _ = run_on_worker(instance, batch_of(np.zeros((1, 4), np.float32)))
        assert isinstance(outcome, DeviceLostError)
        with lock.exclusive():
            pass  # the run has released the lock
    finally:
        instance.close()


ENDLESS = 2**62


def test_endless_run_is_aborted_and_the_instance_continues(open_instance: Open, tmp_path: Path) -> None:
    instance = open_instance(builders.repeats(tmp_path / "m.onnx"))
    outcomes: queue.SimpleQueue[BatchResult | Exception] = queue.SimpleQueue()
    for _ in range(2):
        endless = batch_of(np.array([ENDLESS]))
        instance.start(endless, outcomes.put)
        with pytest.raises(queue.Empty):
            outcomes.get(timeout=0.05)  # it is then inside the loop, or about to enter it
        instance.terminate(endless)
        outcome = outcomes.get(timeout=30)
        assert isinstance(outcome, ServeError)
        assert "terminate" in outcome.message
        result, _ = run_on_worker(instance, batch_of(np.array([3])))
        assert isinstance(result, BatchResult)
        assert result.outputs[0] == 3
    # A termination after the run does not end later runs.
    instance.terminate(endless)
    assert instance.run(batch_of(np.array([4]))).outputs[0] == 4


def test_an_abandoned_instance_is_not_waited_for(open_instance: Open, tmp_path: Path) -> None:
    instance = open_instance(builders.repeats(tmp_path / "m.onnx"))
    outcomes: queue.SimpleQueue[BatchResult | Exception] = queue.SimpleQueue()
    endless = batch_of(np.array([ENDLESS]))
    instance.start(endless, outcomes.put)
    instance.abandon()
    instance.close()
    assert instance.is_running
    instance.terminate(endless)
    while instance.is_running:
        time.sleep(0.001)
    assert outcomes.empty(), "the loop may be closed by then"


def measure_large_batch(path: Path, threads: int) -> tuple[int, int]:
    """The private memory that a large batch adds, and the part of it that remains after ``release_memory``."""
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), threads))
    instance = Instance(session, read_signature(session), name="m/1", intra_op_threads=threads, clock=time.monotonic_ns)
    small, large = batch_of(np.ones((1, 4), np.float32)), batch_of(np.ones((512, 4), np.float32))
    answer = instance.run(small).outputs[0].copy()
    give_back_freed()
    before = read_held_memory().private
    instance.run(large)
    grown = read_held_memory().private - before
    instance.release_memory(small)
    left = read_held_memory().private - before
    np.testing.assert_array_equal(instance.run(small).outputs[0], answer)
    assert instance.run(large).outputs[0].shape == (512, 1)
    return grown, left


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_of_large_batches_is_released(tmp_path: Path, threads: int) -> None:
    """In a new process, where no garbage of earlier tests is freed meanwhile.

    Only anonymous memory counts: under memory pressure the kernel drops pages of libraries at any time.
    """
    path = builders.mlp(tmp_path / "model.onnx", inputs=4, hidden=65536, outputs=1)
    grown, left = call_in_child(60, measure_large_batch, path, threads)
    assert grown > 2**27
    assert left < grown / 4


def test_release_memory_raises_for_a_rejected_batch(open_instance: Open, tmp_path: Path) -> None:
    instance = open_instance(builders.mlp(tmp_path / "model.onnx"))
    with pytest.raises(ServeError) as caught:
        instance.release_memory(batch_of(np.ones((1, 5), np.float32)))
    assert caught.value.kind is ErrorKind.REJECTED_BY_MODEL
