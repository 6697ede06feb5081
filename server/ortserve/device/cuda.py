"""A CUDA device through cupy's thin wrappers of the CUDA runtime: the only module that imports cupy.

Handles are plain integers and memory does not come from cupy's pools, so that Python's garbage collector frees no CUDA
resource: its calls of CUDA could break a capture in another thread (``capture_lock``).

cupy 14.2 releases the interpreter lock in ``eventSynchronize``. Streams do not synchronize with the null stream, which
no code here uses. This module has not run on a GPU yet; ``tests/gpu`` holds its tests.
"""

import ctypes
from contextlib import suppress
from typing import Any, Final

import numpy as np

from ortserve.device.protocol import BoundRun, MemoryInfo
from ortserve.engine.output_buffers import address_of

_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking
_PORTABLE: Final = 1  # cudaHostAllocPortable: pinned for all devices of the process
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that exists
_DRIVER: Final = "libcuda.so.1"


def load_runtime() -> Any:
    """Import cupy's wrappers of the CUDA runtime.

    Raises:
        ImportError: cupy is missing or cannot be loaded.
    """
    from cupy.cuda import runtime

    return runtime


def count_devices() -> int:
    """The number of CUDA devices that this process can use; 0 without cupy or a driver."""
    try:
        return int(load_runtime().getDeviceCount())
    except (ImportError, RuntimeError):
        return 0


class CudaDevice:
    """One CUDA device."""

    ort_name = "cuda"

    def __init__(self, device_id: int, runtime: Any = None, driver: Any = None) -> None:
        """Check that the device exists. ``runtime`` and ``driver`` replace cupy's wrappers and the installed library.

        Raises:
            ImportError: cupy is missing.
            RuntimeError: The device or the driver is missing.
        """
        self.name = f"cuda:{device_id}"
        self.device_id = device_id
        self._runtime = load_runtime() if runtime is None else runtime
        self._driver = driver
        count = self._runtime.getDeviceCount()
        if device_id >= count:
            raise RuntimeError(f"there is no CUDA device {device_id}: there are {count}")
        self.pci_bus_id = str(self._runtime.deviceGetPCIBusId(device_id))

    def use(self) -> None:
        self._runtime.setDevice(self.device_id)

    def memory(self) -> MemoryInfo:
        free_bytes, total_bytes = self._runtime.memGetInfo()
        return MemoryInfo(free_bytes, total_bytes)

    def allocate(self, nbytes: int) -> int:
        return int(self._runtime.malloc(nbytes))

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def allocate_host(self, nbytes: int) -> np.ndarray:
        address = self._runtime.hostAlloc(nbytes, _PORTABLE)
        return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)

    def free_host(self, block: np.ndarray) -> None:
        self._runtime.freeHost(address_of(block))

    def make_stream(self) -> int:
        return int(self._runtime.streamCreateWithFlags(_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._runtime.streamDestroy(stream)

    def make_event(self, *, is_timed: bool = False) -> int:
        runtime = self._runtime
        # Blocking synchronization: a waiting thread sleeps instead of spinning on a processor.
        flags = runtime.eventBlockingSync | (0 if is_timed else runtime.eventDisableTiming)
        return int(runtime.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        self._runtime.eventDestroy(event)

    def copy_in(self, address: int, source: np.ndarray, stream: int) -> None:
        runtime = self._runtime
        runtime.memcpyAsync(address, address_of(source), source.nbytes, runtime.memcpyHostToDevice, stream)

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        runtime = self._runtime
        runtime.memcpyAsync(address_of(target), address, target.nbytes, runtime.memcpyDeviceToHost, stream)

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def make_wait(self, stream: int, event: int) -> None:
        self._runtime.streamWaitEvent(stream, event)

    def wait(self, event: int) -> None:
        self._runtime.eventSynchronize(event)

    def end_capture(self, stream: int) -> None:
        with suppress(RuntimeError):  # the stream does not capture, or this call ended a broken capture
            self._runtime.graphDestroy(self._runtime.streamEndCapture(stream))

    def open_shared(self, handle: bytes) -> int:
        return int(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))

    def close_shared(self, address: int) -> None:
        self._runtime.ipcCloseMemHandle(address)

    def nbytes_from(self, address: int) -> int:
        # Only the driver has this call. Its library is already loaded, because the runtime uses it.
        driver = ctypes.CDLL(_DRIVER) if self._driver is None else self._driver
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        result = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if result:
            raise RuntimeError(f"cuMemGetAddressRange: CUDA error {result}")
        return base.value + size.value - address

    def elapsed_ns(self, first: int, second: int) -> int:
        milliseconds: float = self._runtime.eventElapsedTime(first, second)
        return round(milliseconds * 1e6)

    def run(self, bound: BoundRun, stream: int) -> None:
        # The session computes on this stream. The options of ``bound`` say whether the call waits; TensorRT's provider
        # always waits for replays.
        bound.session.run_with_iobinding(bound.binding, bound.options)
