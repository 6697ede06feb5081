"""What only a GPU can show, of buffers and replay; where host memory can stand in for it, the same is shown there."""

import gc
import random
import subprocess
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import gpu_models
from device_models import SIZES, OnDevice, Place, batch_of, bucket_for, landed, on_device
from models import builders
from ortserve.core.batch import BatchResult
from ortserve.core.closeness import TOLERANCES, as_float64
from ortserve.core.dtypes import DataType
from ortserve.engine.device.device_region import open_region
from ortserve.engine.device.devices import Devices
from ortserve.engine.device.protocol import BoundRun
from ortserve.engine.placement import read_placement
from ortserve.engine.provider_options import CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import OutOfMemoryError, ServeError
from ortserve.registry.capture_trial import CaptureTrials, TrialOrder
from ortserve.registry.synthetic import synthetic_inputs

EXACT = {"use_tf32": "0"}
"""TF32 differs from the CPU's FP32 by more than its tolerance."""
both_ways = pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])


def options_of(place: Place) -> dict[str, str]:
    return EXACT if place.is_gpu else {}


def is_near(output: np.ndarray, right: np.ndarray, datatype: DataType) -> bool:
    """As the CPU's, within what other kernels make of it: convolutions by other algorithms, sums in other orders."""
    if datatype not in TOLERANCES:
        return bool(np.array_equal(output, right))
    relative, absolute = TOLERANCES[datatype]
    values, wanted = as_float64(output, datatype), as_float64(right, datatype)
    return bool(np.allclose(values, wanted, rtol=relative, atol=max(1e-3, 10 * absolute)))


def all_sizes_are_right(made: OnDevice) -> None:
    for rows in range(1, SIZES[-1] + 1):
        inputs = synthetic_inputs(made.signature, rows, 100 + rows)
        outputs = landed(made.start(batch_of(inputs, bucket=bucket_for(rows))))
        for spec, output, right in zip(made.signature.outputs, outputs, made.plainly(inputs), strict=True):
            assert output.shape == right.shape
            assert is_near(output, right, spec.datatype), f"{spec.name} of {rows} rows"


@pytest.mark.gpu
def test_the_gpu_really_runs_the_model(gpu: Place, tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    session = open_session(path, "m", SessionOptions(ProviderChoice(CUDA), 1))
    assert session.get_providers()[0] == CUDA
    assert set(read_placement(session)) == {CUDA}


@both_ways
@pytest.mark.parametrize("datatype", [kind for kind in DataType if kind is not DataType.BYTES], ids=lambda k: k.value)
def test_every_type_is_as_on_the_cpu_at_every_size(
    place: Place, tmp_path: Path, datatype: DataType, captures: bool
) -> None:
    path = builders.identity(tmp_path / "m.onnx", datatype)
    with on_device(path, place.make(), provider=place.provider, captures=captures) as made:
        assert made.prepared.bound == SIZES
        all_sizes_are_right(made)


@both_ways
@pytest.mark.parametrize("kind", ["mlp", "mlp16", "encoder", "image"])
def test_networks_are_as_on_the_cpu_at_every_size(place: Place, tmp_path: Path, kind: str, captures: bool) -> None:
    path = tmp_path / "m.onnx"
    match kind:
        case "mlp":
            gpu_models.mlp(path, layers=4, width=64)
        case "mlp16":
            gpu_models.mlp(path, layers=4, width=64, dtype=np.float16)
        case "encoder":
            gpu_models.encoder(path, layers=2, hidden=64, heads=4, length=16)
        case "image":
            gpu_models.residual(path, blocks=(1, 1), width=8, size=32, classes=10)
    device, options = place.make(), options_of(place)
    with on_device(path, device, provider=place.provider, captures=captures, options=options) as made:
        assert made.prepared.bound == SIZES, made.prepared
        assert made.prepared.replayed == (SIZES if captures else ()), made.prepared
        all_sizes_are_right(made)


def test_a_shape_run_under_the_id_of_another_is_answered_with_the_other(place: Place, tmp_path: Path) -> None:
    """What ONNX Runtime does, and why an id is made of the rows it is bound with and of nothing else."""
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, place.make(), provider=place.provider, captures=True) as made:
        binding = made.instance.binding
        assert binding is not None

        def run_four_rows_as_two() -> np.ndarray:
            buffers = binding.sets[0]
            two, four = (binding.bind(rows, buffers, is_graph=True) for rows in (2, 4))
            wrong = BoundRun(four.session, four.binding, two.options, two.graph_id)
            x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
            binding.poison(buffers, [x])
            return binding.finish(binding.begin(batch_of((x,)), buffers, wrong)).outputs[0].copy()

        y = made.instance.call(run_four_rows_as_two)
        x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
        assert np.array_equal(y[:2], x[:2])
        assert not np.array_equal(y[2:], x[2:]), "rows that the captured graph does not have"
        all_sizes_are_right(made)


def test_sets_in_flight_never_mix_their_rows(place: Place, tmp_path: Path) -> None:
    """Random batches, two on their way at a time, each output poisoned by the answer before it in its set."""
    path, drawn = builders.identity(tmp_path / "m.onnx"), random.Random(0)
    with on_device(path, place.make(), provider=place.provider, captures=True) as made:
        waiting: deque[tuple[np.ndarray, Future[BatchResult | Exception]]] = deque()

        def land() -> bool:
            x, future = waiting.popleft()
            return np.array_equal(landed(future)[0], x)

        for number in range(place.times):
            rows = drawn.randint(1, SIZES[-1])
            x = np.full((rows, 4), number, np.float32) + np.arange(rows, dtype=np.float32)[:, None] / 16
            if len(waiting) == 2:
                assert land(), number
            waiting.append((x, made.start(batch_of((x,), bucket=bucket_for(rows)))))
        assert [land() for _ in range(len(waiting))] == [True, True]
        assert made.instance.counts.replayed == place.times


def test_a_replay_reads_its_own_set_alone(place: Place, tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "m.onnx")
    with on_device(path, place.make(), provider=place.provider, captures=True) as made:
        binding = made.instance.binding
        assert binding is not None

        def wrong_answers() -> int:
            wrong = 0
            for number in range(max(100, place.times // 100)):
                buffers = binding.sets[number % 2]
                x = np.full((4, 4), number, np.float32)
                for poisoned in binding.sets:
                    binding.poison(poisoned, [x])
                (y,) = binding.finish(binding.begin(batch_of((x,)), buffers)).outputs
                wrong += not np.array_equal(y, x)
            return wrong

        assert made.instance.call(wrong_answers) == 0


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_is_refused_by_its_trial_and_runs_without(gpu: Place, tmp_path: Path) -> None:
    """NonZero tells the host how much it found while the graph is being captured."""
    path = gpu_models.counting(tmp_path / "m.onnx")
    order = TrialOrder(str(path), "m/1", CUDA, {}, 1, [1, 4], {})
    assert CaptureTrials(timeout_s=100).why_not(order)
    with on_device(path, gpu.make(), provider=CUDA) as made:
        assert made.prepared.bound == SIZES
        inputs = synthetic_inputs(made.signature, 4, 1)
        assert np.allclose(landed(made.start(batch_of(inputs)))[0], made.plainly(inputs)[0])


@pytest.mark.gpu
def test_a_model_with_control_flow_is_refused(gpu: Place, tmp_path: Path) -> None:
    path = builders.slow(tmp_path / "m.onnx", steps=3)
    reason = CaptureTrials(timeout_s=100).why_not(TrialOrder(str(path), "m/1", CUDA, {}, 1, [1], {}))
    assert "control flow" in reason or "Loop" in reason


@pytest.mark.gpu
def test_a_model_that_can_be_captured_is_in_its_trial(gpu: Place, tmp_path: Path) -> None:
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=4, width=64)
    assert CaptureTrials(timeout_s=100).why_not(TrialOrder(str(path), "m/1", CUDA, {}, 1, [1, 8], {})) == ""


@pytest.mark.gpu
def test_too_little_memory_is_known_for_what_it_is_and_smaller_batches_run(gpu: Place, tmp_path: Path) -> None:
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=2, width=1024)
    limited = EXACT | {"gpu_mem_limit": str(64 * 2**20)}
    with on_device(path, gpu.make(), provider=CUDA, options=limited) as made:
        large = np.zeros((64 * 1024, 1024), np.float32)  # 256 MiB
        with pytest.raises(OutOfMemoryError):
            landed(made.start(batch_of((large,))))
        all_sizes_are_right(made)
        assert not made.instance.lost


EXPORTER = """
import sys

import numpy as np
from cupy.cuda import runtime

content = np.arange(4096, dtype=np.uint8)
address = runtime.malloc(4096)
runtime.memcpy(address, content.ctypes.data, 4096, runtime.memcpyHostToDevice)
print(runtime.ipcGetMemHandle(address).hex(), flush=True)
sys.stdin.readline()
runtime.memcpy(content.ctypes.data, address, 4096, runtime.memcpyDeviceToHost)
print(content.tobytes().hex(), flush=True)
"""


@pytest.mark.gpu
def test_another_processs_memory_is_read_and_written_and_no_more_of_it_than_there_is(gpu: Place) -> None:
    devices = Devices({CUDA: lambda _: gpu.make()})
    content = bytes(range(256)) * 16
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = bytes.fromhex(owner.stdout.readline())
        region = open_region(devices, "r", handle, 0, 4096)
        assert region.read(100, 200) == content[100:300]
        region.write(4000, b"x" * 96)
        with pytest.raises(ServeError, match=r"expected byte_size within the \d+ bytes of its memory, got"):
            open_region(devices, "all", handle, 0, 2**40)
        region.close()
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert bytes.fromhex(owner.stdout.readline()) == content[:4000] + b"x" * 96
    with pytest.raises(ServeError, match="failed to open CUDA IPC handle"):
        open_region(devices, "none", b"\1" * 64, 0, 8)


@pytest.mark.gpu
def test_a_hundred_loads_leave_the_memory_as_it_was(gpu: Place, tmp_path: Path) -> None:
    path = gpu_models.mlp(tmp_path / "m.onnx", layers=8, width=1024)  # 32 MiB of weights
    device = gpu.make()
    device.use()
    free: list[int] = []
    for number in range(100):
        with on_device(path, device, provider=CUDA, sizes=(8,), captures=number % 2 == 1):
            pass
        gc.collect()
        free.append(device.memory().free_bytes)
    assert free[5] - free[-1] < 32 * 2**20, [f"{size >> 20} MiB" for size in free]
