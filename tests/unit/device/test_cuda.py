"""The CUDA device on a runtime of host memory: its calls, their arguments and their order."""

import ctypes
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from apart import UnavailableError, installed_apart
from device_models import SIZES, batch_of, landed, on_device
from models import builders
from ortserve.device.accounting import Ledger
from ortserve.device.capture_lock import CaptureLock
from ortserve.device.cuda import CudaDevice
from ortserve.device.devices import DEVICE_PROVIDERS, DeviceProvider, Devices, OpenDevice
from ortserve.device.region import DeviceRegion
from ortserve.engine.provider_options import CUDA, TENSORRT
from servers import LONG_S


class HostRuntime:
    """The functions of ``cupy.cuda.runtime`` that the device uses, with cupy 14.2's signatures, on host memory.

    Streams work at once. Uses of released resources, or of resources that were never created, raise an error.
    """

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N815 - the names are CUDA's
    eventBlockingSync, eventDisableTiming = 1, 2  # noqa: N815

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.handles: dict[int, float] = {}
        self.capturing: set[int] = set()
        self.calls: list[str] = []

    def getDeviceCount(self) -> int:  # noqa: N802
        return 2

    def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
        return f"0000:0{device}:00.0"

    def setDevice(self, device: int) -> None:  # noqa: N802
        self.calls.append(f"setDevice {device}")

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 2**30, 2**31

    def malloc(self, size: int) -> int:
        block = (ctypes.c_uint8 * size)()
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, ptr: int) -> None:
        del self.memory[ptr]

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        return self.malloc(size)

    def freeHost(self, ptr: int) -> None:  # noqa: N802
        self.free(ptr)

    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == 1, "a blocking stream waits for the null stream"
        return self._handle()

    def streamDestroy(self, stream: int) -> None:  # noqa: N802
        del self.handles[stream]

    def streamEndCapture(self, stream: int) -> int:  # noqa: N802
        if stream not in self.capturing:
            raise RuntimeError("cudaErrorIllegalState: the operation cannot be performed in the present state")
        self.capturing.remove(stream)
        return self._handle()

    def graphDestroy(self, graph: int) -> None:  # noqa: N802
        del self.handles[graph]

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags & self.eventBlockingSync, "a wait must sleep, not spin"
        return self._handle()

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        del self.handles[event]

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        assert stream in self.handles
        on_device = {self.memcpyHostToDevice: (dst,), self.memcpyDeviceToHost: (src,)}.get(kind, (dst, src))
        for device in on_device:
            assert any(start <= device < start + len(block) for start, block in self.memory.items())
        ctypes.memmove(dst, src, size)

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        assert stream in self.handles
        self.handles[event] = time.monotonic()

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        assert self.handles[event]
        assert stream in self.handles

    def eventSynchronize(self, event: int) -> None:  # noqa: N802
        assert self.handles[event]

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:  # noqa: N802
        assert flags == 1
        address = int.from_bytes(handle, "little")
        assert address in self.memory
        self.calls.append("open")
        return address

    def ipcCloseMemHandle(self, devPtr: int) -> None:  # noqa: N802, N803
        assert devPtr in self.memory
        self.calls.append("close")

    def eventElapsedTime(self, start: int, end: int) -> float:  # noqa: N802
        return (self.handles[end] - self.handles[start]) * 1e3

    def _handle(self) -> int:
        number = len(self.calls) + len(self.handles) + 1000
        while number in self.handles:
            number += 1
        self.handles[number] = 0.0
        return number


class HostDriver:
    """The function of ``libcuda.so.1`` that the device uses."""

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime

    def cuMemGetAddressRange_v2(self, pbase: Any, psize: Any, dptr: ctypes.c_uint64) -> int:  # noqa: N802
        for start, block in self._runtime.memory.items():
            if start <= dptr.value < start + len(block):
                pbase._obj.value, psize._obj.value = start, len(block)
                return 0
        return 1


class CpuComputes(CudaDevice):
    """The CUDA device, for sessions on the CPU."""

    ort_name = "cpu"


def test_batches_run_through_cuda_and_release_everything(tmp_path: Path) -> None:
    runtime = HostRuntime()
    with on_device(builders.mlp(tmp_path / "m.onnx"), CpuComputes(0, runtime)) as made:
        assert made.prepared.bound == SIZES
        for rows in (1, 3, 8):
            x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
            bucket = next(size for size in SIZES if size >= rows)
            (y,) = landed(made.start(batch_of((x,), bucket=bucket)))
            np.testing.assert_allclose(y, made.plainly((x,))[0], rtol=1e-5)
        del y
        assert made.instance.counts.bound == 3
        assert made.instance.counts.timed_in_ns > 0
    assert not runtime.memory
    assert not runtime.handles
    assert runtime.calls.count("setDevice 0") >= 3, "each thread has a device of its own"


def test_answers_in_pinned_memory_are_stable_while_read(tmp_path: Path) -> None:
    runtime = HostRuntime()
    with on_device(builders.identity(tmp_path / "m.onnx"), CpuComputes(0, runtime)) as made:
        kept = [landed(made.start(batch_of((np.full((2, 4), number, np.float32),))))[0][1:] for number in range(20)]
        assert [float(y[0, 0]) for y in kept] == list(range(20))
        opened = made.opened
    assert runtime.memory, "closed, but read"
    assert [float(y[0, 3]) for y in kept] == list(range(20))
    del kept
    opened.reclaim()
    assert not runtime.memory


def test_session_options_name_the_stream_and_the_capture() -> None:
    cuda, tensorrt = DEVICE_PROVIDERS[CUDA], DEVICE_PROVIDERS[TENSORRT]
    assert cuda.provider_options(4711, captures=True) == {
        "user_compute_stream": "4711",
        "enable_cuda_graph": "1",
        "do_copy_in_default_stream": "1",
    }
    assert cuda.provider_options(4711, captures=False)["enable_cuda_graph"] == "0"
    assert tensorrt.provider_options(4711, captures=True) == {
        "user_compute_stream": "4711",
        "trt_cuda_graph_enable": "true",
    }
    assert tensorrt.provider_options(4711, captures=False)["trt_cuda_graph_enable"] == "false"


def test_sessions_of_cuda_and_tensorrt_share_a_gpu_and_its_accounts() -> None:
    def make(number: int) -> CudaDevice:
        return CudaDevice(number, HostRuntime())

    devices = Devices({name: replace(use, make=make) for name, use in DEVICE_PROVIDERS.items()})
    assert devices.open(CUDA, 1) is devices.open(TENSORRT, 1)
    assert devices.open(CUDA, 0) is not devices.open(TENSORRT, 1)
    assert [opened.device.name for opened in devices.opened()] == ["cuda:1", "cuda:0"]


def test_active_capture_is_ended_and_otherwise_nothing_happens() -> None:
    runtime = HostRuntime()
    device = CudaDevice(0, runtime)
    stream = device.make_stream()
    device.end_capture(stream)
    runtime.capturing.add(stream)
    device.end_capture(stream)
    assert not runtime.capturing
    device.destroy_stream(stream)
    assert not runtime.handles


def test_error_names_an_absent_device() -> None:
    with pytest.raises(RuntimeError, match="there is no CUDA device 2: there are 2"):
        CudaDevice(2, HostRuntime())


def test_error_explains_a_missing_cupy_or_device() -> None:
    def no_cupy(number: int) -> CudaDevice:
        raise ImportError("No module named 'cupy'")

    assert Devices({CUDA: DeviceProvider(no_cupy)}).open(CUDA, 0) == "cupy cannot be used: No module named 'cupy'"
    few = Devices({CUDA: DeviceProvider(lambda number: CudaDevice(number, HostRuntime()))})
    assert few.open(CUDA, 5) == f"{CUDA} has no device 5: there is no CUDA device 5: there are 2"
    assert few.open("OtherExecutionProvider", 0) == "OtherExecutionProvider has none"
    assert few.open(CUDA, 0) is few.open(CUDA, 0)


def test_client_memory_is_copied_through_cuda_and_closed() -> None:
    runtime = HostRuntime()
    device = CudaDevice(1, runtime, HostDriver(runtime))
    address = runtime.malloc(64)
    opened = OpenDevice(device, Ledger(device.name, device.memory), CaptureLock())
    region = DeviceRegion(opened, "r", address.to_bytes(64, "little"), 64)
    region.write(8, bytes(range(16)))
    assert region.read(10, 4) == bytes([2, 3, 4, 5])
    assert device.nbytes_from(address + 60) == 4
    region.close()
    assert [call for call in runtime.calls if not call.startswith("setDevice")] == ["open", "close"]
    assert not runtime.handles
    runtime.free(address)
    with pytest.raises(RuntimeError, match="cuMemGetAddressRange: CUDA error 1"):
        device.nbytes_from(address)


def test_memory_is_copied_within_the_device() -> None:
    device = CudaDevice(0, HostRuntime())
    stream, source, target = device.make_stream(), device.allocate(8), device.allocate(8)
    device.copy_in(source, np.arange(8, dtype=np.uint8), stream)
    device.copy_within(target + 2, source + 4, 3, stream)
    copied = np.zeros(3, np.uint8)
    device.copy_out(copied, target + 2, stream)
    assert copied.tolist() == [4, 5, 6]


_CUPY: Final = ("cupy-cuda13x==14.2.0", "cuda-pathfinder==1.9.0")
_CUPY_TELLS: Final = """
import json, sys
from cupy.cuda import runtime
from ortserve.device.cuda import count_devices
from ortserve.device.protocol import DEVICE_ERRORS
assert issubclass(runtime.CUDARuntimeError, DEVICE_ERRORS)
assert count_devices() >= 0
found = {name: getattr(runtime, name, None) for name in sys.argv[1:]}
json.dump({name: one if isinstance(one, int) else one and one.__doc__ for name, one in found.items()}, sys.stdout)
"""


@pytest.fixture
def runtime_of_cupy() -> dict[str, int | str | None]:
    """The definitions of ``HostRuntime``'s names: values of constants, and first lines like ``free(intptr_t ptr)``.

    cupy is that of the environment if it has one, as on a GPU machine. Its import needs no GPU.
    """
    path = [os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("cupy") is None:
        try:
            options = ("--no-deps", "--only-binary=:all:", "--timeout=15", "--retries=1")
            path.insert(0, str(installed_apart("cupy-cuda13x-14.2.0", *options, *_CUPY)))
        except UnavailableError as error:
            pytest.skip(f"cupy cannot be installed here: {error}")
    names = [name for name in dir(HostRuntime) if not name.startswith("_")]
    completed = subprocess.run(
        [sys.executable, "-c", _CUPY_TELLS, *names],
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert completed.returncode == 0, completed.stderr
    found: dict[str, int | str | None] = json.loads(completed.stdout)
    return found


@pytest.mark.timeout(400)  # cupy may need to be installed
def test_every_used_cuda_function_and_constant_exists_in_cupy(
    runtime_of_cupy: dict[str, int | str | None],
) -> None:
    for name, of_cupy in runtime_of_cupy.items():
        ours = getattr(HostRuntime, name)
        if isinstance(ours, int):
            assert of_cupy == ours, name
            continue
        assert isinstance(of_cupy, str), f"cupy has no {name}"
        _, *parameters = inspect.signature(ours).parameters.values()
        # Parsed by hand, because C functions state their signature only in this text: "f(intptr_t ptr, unsigned int
        # flags=0) -> int".
        (inside,) = re.findall(rf"^{name}\((.*?)\)", of_cupy)
        theirs = [one.partition("=") for one in inside.split(", ") if one]
        assert [one.name for one in parameters] == [kind_and_name.split()[-1] for kind_and_name, _, _ in theirs], name
        # The device may omit only the parameters with defaults in cupy.
        for parameter, (_, equals, _) in zip(parameters, theirs, strict=True):
            assert equals or parameter.default is inspect.Parameter.empty, f"{name}: {parameter}"
