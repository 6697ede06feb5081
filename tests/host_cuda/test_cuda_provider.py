"""Counts the calls of ONNX Runtime's CUDA provider to the CUDA runtime for the server's sessions and runs."""

import asyncio
import ctypes
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gpu_models
from device_models import SIZES, OnDevice, batch_of, landed, numbered, on_device, run_script
from device_sequences import history_sequence, send_array, serving_on, where
from models import builders, sequences
from ortserve.config.model import ModelOptions
from ortserve.device.binding import _WAITED_EVERY
from ortserve.device.cuda import CudaDevice
from ortserve.device.devices import DeviceRuntime, OpenDevice
from ortserve.device.graph_sessions import SETS
from ortserve.device.instance import DeviceInstance
from ortserve.device.preparation import CAPTURING_RUNS
from ortserve.engine.placement import read_placement
from ortserve.engine.provider_options import CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import OutOfMemoryError
from ortserve.registry.load.capture_trial import CaptureTrials
from ortserve.registry.load.loaded_model import LoadedModel, describe_properties
from ortserve.registry.load.pipeline import load_model
from servers import LONG_S

_LIBRARY = ctypes.CDLL("libcudart.so.13")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
TO_DEVICE, TO_HOST = 1, 2
ALLOCATES = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost")


def calls(*names: str) -> list[int]:
    return [_LIBRARY.host_cuda_calls(name.encode()) for name in names]


@contextmanager
def counted(*names: str) -> Iterator[list[int]]:
    """Count calls of these functions during the block; the list is filled at its end."""
    before, counts = calls(*names), list[int]()
    yield counts
    counts += [after - one for after, one in zip(calls(*names), before, strict=True)]


def what_is_there() -> tuple[int, int]:
    """Bytes of device memory, and the number of streams, events, graphs and pinned blocks."""
    gc.collect()
    return _LIBRARY.host_cuda_bytes(), _LIBRARY.host_cuda_handles()


@contextmanager
def on_cuda(path: Path, *, sizes: tuple[int, ...] = SIZES, captures: bool = True) -> Iterator[OnDevice]:
    with on_device(path, CudaDevice(0), provider=CUDA, sizes=sizes, captures=captures) as made:
        assert made.prepared.bound == sizes, made.prepared
        assert made.prepared.replayed == (sizes if captures else ()), made.prepared
        yield made


WEIGHTS = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


def multiplying(path: Path) -> Path:
    """Multiplies rows by a matrix twice: weights on the device, and calls of cuBLAS."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        "multiplying",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(WEIGHTS, "w")],
    )
    return write(graph, path)


def looping(path: Path) -> Path:
    """A model that returns its rows through a loop with one iteration."""
    carried = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("before", "after")]
    goes_on = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("is_on", "goes_on")]
    turn = helper.make_tensor_value_info("turn", TensorProto.INT64, [])
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in (("is_on", "goes_on"), ("before", "after"))]
    body = helper.make_graph(nodes, "body", [turn, goes_on[0], carried[0]], [goes_on[1], carried[1]])
    once = numpy_helper.from_array(np.array(1, np.int64), "once")
    return write(identity_graph([helper.make_node("Loop", ["once", "", "x"], ["y"], body=body)], [once]), path)


def searching(path: Path) -> Path:
    """A model that returns its rows and has a node that only the CPU provider supports."""
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Unique", ["x"], ["found"]),
        helper.make_node("Shape", ["found"], ["z"]),
    ]
    return write(identity_graph(nodes, []), path)


def splitting(path: Path) -> Path:
    """A model that returns its rows and has a node that copies its arguments from pinned memory, for its many parts."""
    parts = [f"part{number}" for number in range(33)]
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Tile", ["x", "repeats"], ["wide"]),
        helper.make_node("Split", ["wide", "sizes"], parts, axis=1),
    ]
    sizes = numpy_helper.from_array(np.array([2] * 31 + [1, 1], np.int64), "sizes")
    return write(identity_graph(nodes, [sizes, numpy_helper.from_array(np.array([1, 16], np.int64), "repeats")]), path)


def identity_graph(nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto]) -> onnx.GraphProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y"))
    return helper.make_graph(nodes, "identity", [x], [y], weights)


def write(graph: onnx.GraphProto, path: Path) -> Path:
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])
def test_batch_is_enqueued_and_awaited_once(tmp_path: Path, captures: bool) -> None:
    with on_cuda(multiplying(tmp_path / "m.onnx"), captures=captures) as made:
        x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
        kept = [landed(made.start(batch_of((x,)))) for _ in range(3)]  # so that memory for answers exists
        del kept
        with counted(*WAITS) as waits, counted(*ALLOCATES) as allocates, counted("cudaMemcpyAsync") as copies:
            for _ in range(10):
                (y,) = landed(made.start(batch_of((x,))))
                np.testing.assert_allclose(y, made.plainly((x,))[0], rtol=1e-4)
        assert waits == [0, 0, 10, 0], dict(zip(WAITS, waits, strict=True))
        assert allocates == [0, 0, 0, 0], dict(zip(ALLOCATES, allocates, strict=True))
        assert copies == [20]


def test_pinned_memory_of_kernels_is_released(tmp_path: Path) -> None:
    """ONNX Runtime keeps it after runs for which it does not wait; 500 such runs of this model filled its first MiB."""
    with on_cuda(splitting(tmp_path / "m.onnx"), sizes=(2,), captures=False) as made:
        x = numbered(2, 1)
        with counted("cudaHostAlloc", "cudaStreamSynchronize") as counts:
            for _ in range(2000):
                landed(made.start(batch_of((x,))))
        assert made.instance.counts.bound == 2000
        assert counts == [0, 2000 // _WAITED_EVERY]


def test_graph_is_captured_once_and_replayed_by_one_launch(tmp_path: Path) -> None:
    with (
        counted("cudaStreamBeginCapture", "cudaGraphInstantiate") as captured,
        on_cuda(multiplying(tmp_path / "m.onnx")) as made,
    ):
        x = np.ones((8, 16), np.float32)
        with counted("cudaGraphLaunch", "cudaLaunchHostFunc", "cudaStreamBeginCapture") as launched:
            for _ in range(7):
                landed(made.start(batch_of((x,))))
        assert launched == [7, 0, 0]
    assert captured == [SETS * len(SIZES)] * 2


def test_the_first_run_with_an_id_captures_and_launches(tmp_path: Path) -> None:
    """``CAPTURING_RUNS`` therefore exceeds the need of this version of ONNX Runtime."""
    with on_cuda(builders.identity(tmp_path / "m.onnx"), sizes=(8,)) as made:
        binding = made.instance.binding
        assert binding is not None

        def run_once() -> list[int]:
            bound = binding.bind(3, binding.sets[0], is_graph=True, is_waited_for=True)
            with counted("cudaStreamBeginCapture", "cudaGraphLaunch") as counts:
                binding.capture(bound, binding.sets[0], (numbered(3, 1),), 1)
            return counts

        assert made.instance.call(run_once) == [1, 1]
        assert made.instance.call(run_once) == [0, 1]
        assert CAPTURING_RUNS > 1


def test_run_without_an_id_neither_captures_nor_replays(tmp_path: Path) -> None:
    with (
        on_cuda(builders.identity(tmp_path / "m.onnx"), sizes=(2,)) as made,
        counted("cudaStreamBeginCapture", "cudaGraphLaunch") as counts,
    ):
        x = numbered(5, 1)
        assert np.array_equal(landed(made.start(batch_of((x,))))[0], x)
        assert made.instance.counts.plain["no_bucket"] == 1
    assert counts == [0, 0]


def test_graph_belongs_to_its_thread(tmp_path: Path) -> None:
    """The reason why the worker captures and replays: another thread does not see the graph and captures again."""
    with on_cuda(builders.identity(tmp_path / "m.onnx"), sizes=(2,)) as made:
        binding = made.instance.binding
        assert binding is not None
        bound = binding.bind(2, binding.sets[0], is_graph=True, is_waited_for=True)
        with counted("cudaStreamBeginCapture") as elsewhere:
            thread = threading.Thread(target=bound.session.run_with_iobinding, args=(bound.binding, bound.options))
            thread.start()
            thread.join()
        with counted("cudaStreamBeginCapture") as on_worker:
            made.instance.call(lambda: bound.session.run_with_iobinding(bound.binding, bound.options))
        assert (elsewhere, on_worker) == ([1], [0])


def load(path: Path, runtime: DeviceRuntime, trials: CaptureTrials | None = None, **options: Any) -> LoadedModel:
    """Load a model as the server does, on the devices and with the lock of ``runtime``.

    ``trials`` start no process for a model that they have captured.
    """
    chosen: dict[str, Any] = {
        "execution_providers": ("cuda",),
        "warmup_s": 0.2,
        "buckets": SIZES,
        "graph_replay": True,
    } | options
    return load_model(path, "m/1", ModelOptions(**chosen), None, runtime, trials or CaptureTrials(timeout_s=LONG_S))


def device_instances(loaded: LoadedModel) -> list[DeviceInstance]:
    return [instance for instance in loaded.instances if isinstance(instance, DeviceInstance)]


def test_captures_exclude_batches_of_other_models(tmp_path: Path) -> None:
    """A capture does not tolerate copies, allocations or waits of any thread."""
    path, runtime, trials = multiplying(tmp_path / "m.onnx"), DeviceRuntime(), CaptureTrials(timeout_s=LONG_S)
    x = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    loaded = load(path, runtime, trials)
    (serving,) = device_instances(loaded)
    right = x @ WEIGHTS @ WEIGHTS
    is_over, problems, answered = threading.Event(), list[str](), 0

    def call() -> None:
        nonlocal answered
        while not is_over.wait(1e-3):
            for rows in (4, 3):  # a replay, and a plain run, which allocates and waits
                outcome = serving.run(batch_of((x[:rows],)))
                if not np.allclose(outcome.outputs[0], right[:rows], rtol=1e-4):
                    problems.append("wrong rows")
                answered += 1

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for _ in range(3):
            other = load(path, runtime, trials)
            assert other.on_device.replayed == SIZES, other.on_device
            other.instances[0].close()
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
        loaded.instances[0].close()
    assert problems == []
    assert answered > 100
    assert serving.counts.plain.keys() == {"no_bucket", "not_prepared"}


@pytest.mark.parametrize(
    ("build", "expected_reason"),
    [
        (looping, "control flow"),
        (searching, "all compute graph nodes have not been partitioned to the CUDAExecutionProvider"),
    ],
)
def test_model_that_its_provider_cannot_capture_is_served_without_replay(
    tmp_path: Path, build: Callable[[Path], Path], expected_reason: str
) -> None:
    loaded = load(build(tmp_path / "m.onnx"), DeviceRuntime(), buckets=(2,), batched=True)
    (instance,) = device_instances(loaded)
    try:
        assert loaded.on_device.replayed == ()
        properties = describe_properties(loaded, 2)
        assert expected_reason in properties["graph_replay"], properties["graph_replay"]
        x = numbered(2, 1)
        assert np.array_equal(instance.run(batch_of((x,))).outputs[0], x)
    finally:
        instance.close()


def test_model_that_breaks_its_capture_is_whole_on_the_gpu(tmp_path: Path) -> None:
    """Otherwise its provider would refuse the session, and ``tests/gpu`` would try no capture that fails."""
    choice = ProviderChoice(CUDA, options={"enable_cuda_graph": "1"})
    session = open_session(gpu_models.counting(tmp_path / "m.onnx"), "m", SessionOptions(choice, 1))
    assert set(read_placement(session)) == {CUDA}


def test_instances_are_on_their_own_gpus(tmp_path: Path) -> None:
    """The run of these tests has two GPUs. A copy to an address that belongs to neither would lose the device."""
    runtime = DeviceRuntime()
    loaded = load(multiplying(tmp_path / "m.onnx"), runtime, instances=3, gpus=(1, 0))
    instances = device_instances(loaded)
    try:
        assert loaded.device_ids == (1, 0, 1)
        assert [opened.device.name for opened in runtime.devices.opened()] == ["cuda:1", "cuda:0"]
        x = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
        for instance in instances:
            np.testing.assert_allclose(instance.run(batch_of((x,))).outputs[0], x @ WEIGHTS @ WEIGHTS, rtol=1e-4)
        used = [opened.device.memory().total_bytes - free_bytes(opened) for opened in runtime.devices.opened()]
        assert used[0] > used[1] > 0
    finally:
        for instance in instances:
            instance.close()


@pytest.mark.parametrize("device_buffers", [True, False])
def test_kernels_run_on_the_second_gpu(tmp_path: Path, device_buffers: bool) -> None:
    """CUDA launches a kernel only in a stream of the thread's own GPU, and each thread begins with the first one."""
    path = splitting(tmp_path / "m.onnx")
    loaded = load(path, DeviceRuntime(), gpus=(1,), instances=2, device_buffers=device_buffers, graph_replay=False)
    try:
        for instance in loaded.instances:
            x = numbered(3, 1)
            assert np.array_equal(instance.run(batch_of((x,))).outputs[0], x)
    finally:
        for instance in loaded.instances:
            instance.close()


def free_bytes(opened: OpenDevice) -> int:
    opened.device.use()
    return opened.device.memory().free_bytes


def test_broken_capture_is_ended_and_its_size_is_served(tmp_path: Path) -> None:
    path = multiplying(tmp_path / "m.onnx")
    before = what_is_there()
    _LIBRARY.host_cuda_break_captures(1)
    with on_device(path, CudaDevice(0), provider=CUDA, captures=True) as made:
        assert _LIBRARY.host_cuda_captures() == 0
        assert made.prepared.bound == SIZES
        assert made.prepared.replayed == SIZES[1:]
        assert made.prepared.not_replayed[SIZES[0]] == (
            "its capture failed: Error in execution: CUDA failure 901: "
            "operation failed due to a previous error during capture"
        )
        for rows in SIZES:
            x = np.random.default_rng(rows).standard_normal((rows, 16)).astype(np.float32)
            (y,) = landed(made.start(batch_of((x,))))
            np.testing.assert_allclose(y, x @ WEIGHTS @ WEIGHTS, rtol=1e-4)
        del y
    del made
    assert what_is_there() == before


def test_graph_of_a_run_that_failed_is_never_replayed(tmp_path: Path) -> None:
    """ONNX Runtime keeps the nodes up to the failed one as the graph of this id, and would replay them as a success."""
    nodes = [
        helper.make_node("Concat", ["x"] * 33, ["wide"], axis=1),  # not capturable with more than 32 inputs
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    path = write(identity_graph(nodes, []), tmp_path / "m.onnx")
    with on_device(path, CudaDevice(0), provider=CUDA, sizes=(2,), captures=True) as made:
        assert made.prepared.bound == (2,)
        assert "at most 32 inputs during CUDA Graph capture" in made.prepared.not_replayed[2]
        x = numbered(2, 1)
        with counted("cudaGraphLaunch") as launched:
            assert np.array_equal(landed(made.start(batch_of((x,))))[0], x)
        assert launched == [0]


@pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])
def test_all_memory_is_released(tmp_path: Path, captures: bool) -> None:
    path = multiplying(tmp_path / "m.onnx")
    before = what_is_there()
    for _ in range(30):
        with on_cuda(path, captures=captures) as made:
            x = np.ones((3, 16), np.float32)
            landed(made.start(batch_of((x,), bucket=4)))
            landed(made.start(batch_of((x,))))
        del made
    assert what_is_there() == before


async def test_growing_states_are_not_copied_to_or_from_the_host(tmp_path: Path) -> None:
    states = [{"input": "PAST", "output": "PRESENT", "initial_dims": [1000, 4]}]
    chosen: dict[str, Any] = {"execution_providers": ["cuda"], "states": states, "controls": {}}
    async with serving_on(None, sequences.history(tmp_path / "m.onnx"), **chosen) as served:
        assert where(served) == "on cuda:0"
        row = np.ones((1, 4), np.float32)
        for step in range(1, 20):
            before = [_LIBRARY.host_cuda_copied(kind) for kind in (TO_DEVICE, TO_HOST)]
            (output,) = await send_array(served, row, 1, start=step == 1)
            after = [_LIBRARY.host_cuda_copied(kind) for kind in (TO_DEVICE, TO_HOST)]
            assert output.shape == (1, 1000 + step, 4)
            assert [one - other for one, other in zip(after, before, strict=True)] == [row.nbytes, output.nbytes]


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
async def test_growing_states_are_right_and_leave_nothing(tmp_path: Path, strategy: str) -> None:
    states = [{"input": "PAST", "output": "PRESENT", "initial_dims": [0, 4]}]
    chosen: dict[str, Any] = {"execution_providers": ["cuda"], "states": states, "controls": {}}
    draw = random.Random(0)
    path = sequences.history(tmp_path / "m.onnx")
    before = what_is_there()
    async with serving_on(None, path, strategy=strategy, **chosen) as served:
        await asyncio.gather(*[history_sequence(served, name, draw.randint(1, 40), draw) for name in range(1, 20)])
    del served
    assert what_is_there() == before


async def test_a_state_that_the_cpu_reads_is_complete_when_it_is_bound(tmp_path: Path) -> None:
    """ONNX Runtime copies such an input when it is bound, after the copies of states in the compute stream."""
    (tmp_path / "initial_state").mkdir()
    first = np.array([1, 2, 3, 4], np.float32)
    (tmp_path / "initial_state" / "first").write_bytes(first.tobytes())
    states = [{"input": "STATE", "output": "NEXT", "initial_file": "first"}]
    chosen: dict[str, Any] = {"execution_providers": ["cuda", "cpu"], "states": states, "controls": {}}
    async with serving_on(None, sequences.rotating(tmp_path / "m.onnx"), **chosen) as served:
        assert where(served) == "on cuda:0"
        x = np.ones((1, 2), np.float32)
        for step in range(12):
            names = [name for name in range(4) if name <= step]  # so that their states differ
            sent = [send_array(served, x, 1 + name, start=name == step) for name in names]
            for name, (output, _) in zip(names, await asyncio.gather(*sent), strict=True):
                assert np.array_equal(output[0], np.roll(first, name - step))


def test_out_of_memory_error_of_the_provider_reduces_batches(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "m.onnx", shape=("batch", 2**16))
    options = {"gpu_mem_limit": str(4 * 2**20)}
    with on_device(path, CudaDevice(0), provider=CUDA, sizes=(1,), options=options) as made:
        with pytest.raises(OutOfMemoryError):
            landed(made.start(batch_of((numbered(32, 1, 2**16),))))
        x = numbered(2, 1, 2**16)
        assert np.array_equal(landed(made.start(batch_of((x,))))[0], x)
        assert not made.instance.lost


def test_out_of_memory_error_of_cublas_is_recognised(tmp_path: Path) -> None:
    """ONNX Runtime's message has the description of cuBLAS's status, without its name."""
    with on_cuda(multiplying(tmp_path / "m.onnx"), captures=False) as made:
        x = np.ones((4, 16), np.float32)
        ctypes.CDLL("libcublas.so.13").host_cuda_fail_product(3)  # CUBLAS_STATUS_ALLOC_FAILED
        with pytest.raises(OutOfMemoryError, match="CUBLAS failure 3: the resource allocation failed"):
            landed(made.start(batch_of((x,))))
        np.testing.assert_allclose(landed(made.start(batch_of((x,))))[0], x @ WEIGHTS @ WEIGHTS, rtol=1e-4)


_LOSE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_cuda_provider import _LIBRARY, batch_of, landed, numbered, on_cuda
from ortserve.errors import DeviceLostError

with on_cuda(Path(sys.argv[1]), captures=False) as bound, on_cuda(Path(sys.argv[1]), captures=True) as replayed:
    bound.instance.call(lambda: _LIBRARY.host_cuda_lose(int(sys.argv[3])))
    for made in (bound, replayed):
        for _ in range(2):
            try:
                landed(made.start(batch_of((numbered(2, 1),))))
            except DeviceLostError as error:
                print(error.message)
        assert made.instance.lost
print("closed")
"""


@pytest.mark.parametrize("error", [700, 719])
def test_lost_device_is_recognised_by_its_error_and_closed(tmp_path: Path, error: int) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    *found, closed = run_script(_LOSE, path, str(Path(__file__).parent), str(error)).splitlines()
    assert len(found) == 4
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all(message.startswith("cuda:0 is lost: ") for message in found)
    assert closed == "closed"
