"""Opens GPU memory that another process shares by a handle, and copies between it and host memory.

Every call acquires the capture lock and may wait for a capture to end.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from ortserve.core.region import RegionMemory
from ortserve.device.cuda import count_devices
from ortserve.device.devices import Devices, OpenDevice
from ortserve.device.protocol import DEVICE_ERRORS, is_lost_error, release_all
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.provider_options import CUDA
from ortserve.errors import DeviceLostError, ErrorKind, ServeError, invalid_input

_HANDLE_BYTES = 64  # size of a cudaIpcMemHandle_t


class DeviceRegion(RegionMemory):
    """The first bytes of another process's allocation. The region has a stream of its own for copies."""

    may_wait = True

    def __init__(self, opened: OpenDevice, region: str, handle: bytes, byte_size: int) -> None:
        """Open the allocation. Blocks. The process that made the handle cannot open it.

        Raises:
            ServeError: invalid_input: the handle cannot be opened, or its allocation is smaller than the region;
                not_ready: the device is lost.
        """
        self._opened = opened
        self._region = region
        device = opened.device
        if len(handle) != _HANDLE_BYTES:
            raise refused(region, f"expected a raw_handle of {_HANDLE_BYTES} bytes, got {len(handle)}")
        self._undo: list[Callable[[], object]] = []
        with opened.capture_lock.shared():
            self._require_device()
            try:
                device.use()
                self._address = device.open_shared(handle)
                self._undo.append(partial(device.close_shared, self._address))
                available = device.nbytes_from(self._address)
                self._stream = device.make_stream()
                self._undo.append(partial(device.destroy_stream, self._stream))
                self._copied = device.make_event()
                self._undo.append(partial(device.destroy_event, self._copied))
            except DEVICE_ERRORS as error:
                release_all(*reversed(self._undo))
                reason = without_paths(str(error))
                raise self._lost(error) or refused(region, f"failed to open CUDA IPC handle: {reason}") from error
        if byte_size > available:
            self.close()
            raise refused(region, f"expected byte_size within the {available} bytes of its memory, got {byte_size}")

    def read(self, offset: int, byte_size: int) -> memoryview:
        copy = np.empty(byte_size, np.uint8)
        if byte_size:
            self._copy(lambda: self._opened.device.copy_out(copy, self._address + offset, self._stream))
        return copy.data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        source = np.frombuffer(data, np.uint8)
        if source.nbytes:
            self._copy(lambda: self._opened.device.copy_in(self._address + offset, source, self._stream))

    def close(self) -> None:
        with self._opened.capture_lock.shared():
            release_all(self._opened.device.use, *reversed(self._undo))

    def _copy(self, enqueue: Callable[[], None]) -> None:
        device = self._opened.device
        with self._opened.capture_lock.shared():
            self._require_device()
            try:
                device.use()
                enqueue()
                device.record(self._copied, self._stream)
                device.wait(self._copied)
            except DEVICE_ERRORS as error:
                text = f"cannot copy from or to shared memory region '{self._region}': {without_paths(str(error))}"
                raise self._lost(error) or ServeError(ErrorKind.INTERNAL, text) from error

    def _require_device(self) -> None:
        if self._opened.lost:
            raise DeviceLostError(self._opened.lost)

    def _lost(self, error: Exception) -> ServeError | None:
        """The error of a lost device; None if the device still works.

        The error text alone is no proof, because the failed memory belongs to a caller. So a second call tests the
        device.
        """
        if not is_lost_error(error):
            return None
        try:
            self._opened.device.memory()
        except DEVICE_ERRORS:
            return self._opened.run_error(error)
        return None


def open_region(devices: Devices, region: str, handle: bytes, device_id: int, byte_size: int) -> DeviceRegion:
    """Open a region on a GPU. Blocks.

    Raises:
        ServeError: The errors of ``DeviceRegion``; also invalid_input: the GPU cannot be used.
    """
    opened = devices.open(CUDA, device_id)
    if isinstance(opened, str):
        raise refused(region, f"GPUs not supported: {opened}")
    return DeviceRegion(opened, region, handle, byte_size)


def are_regions_possible() -> bool:
    """Whether this process can use a GPU."""
    return count_devices() > 0


def refused(region: str, reason: str) -> ServeError:
    """The error of a failed registration. Triton's clients expect the beginning of its text."""
    return invalid_input(f"failed to register CUDA shared memory region: '{region}', {reason}")
