"""A caller's memory on a GPU, which it shares by a handle: opening it, and copying to and from it by way of the host.

Every call is inside the gate and may wait there for a capture to end.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from ortserve.core.region import RegionMemory
from ortserve.engine.device.cuda import count_devices
from ortserve.engine.device.devices import Devices, OpenDevice
from ortserve.engine.device.failures import DEVICE_ERRORS, give_back, says_lost
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.provider_options import CUDA
from ortserve.errors import DeviceLostError, ErrorKind, ServeError, invalid_input

_HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t


class DeviceRegion(RegionMemory):
    """The first bytes of an allocation of another process. Copies are made in a stream of its own."""

    may_wait = True

    def __init__(self, opened: OpenDevice, region: str, handle: bytes, byte_size: int) -> None:
        """Open it. Blocks.

        Args:
            opened: The device that it is on.
            region: For the messages.
            handle: Of the allocation; it can be opened by any process but the one that made it.
            byte_size: That the region has.

        Raises:
            ServeError: invalid_input, for a handle of no allocation that can be opened, and for one that is smaller;
                not_ready, where the device is lost.
        """
        self._opened = opened
        self._region = region
        device = opened.device
        if len(handle) != _HANDLE_BYTES:
            raise refused(region, f"expected a raw_handle of {_HANDLE_BYTES} bytes, got {len(handle)}")
        self._undo: list[Callable[[], object]] = []
        with opened.gate.shared():
            self._require_device()
            try:
                device.use()
                self._address = device.open_shared(handle)
                self._undo.append(partial(device.close_shared, self._address))
                there = device.nbytes_from(self._address)
                self._stream = device.make_stream()
                self._undo.append(partial(device.destroy_stream, self._stream))
                self._copied = device.make_event()
                self._undo.append(partial(device.destroy_event, self._copied))
            except DEVICE_ERRORS as error:
                give_back(*reversed(self._undo))
                reason = without_paths(str(error))
                raise self._lost(error) or refused(region, f"failed to open CUDA IPC handle: {reason}") from error
        if byte_size > there:
            self.close()
            raise refused(region, f"expected byte_size within the {there} bytes of its memory, got {byte_size}")

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
        with self._opened.gate.shared():
            give_back(self._opened.device.use, *reversed(self._undo))

    def _copy(self, enqueue: Callable[[], None]) -> None:
        device = self._opened.device
        with self._opened.gate.shared():
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
        """That the device is lost, if the error says so and the device does, too: it was a caller's memory."""
        if not says_lost(error):
            return None
        try:
            self._opened.device.memory()
        except DEVICE_ERRORS:
            return self._opened.failure(error)
        return None


def open_region(devices: Devices, region: str, handle: bytes, device_id: int, byte_size: int) -> DeviceRegion:
    """Open a region on a GPU. Blocks.

    Raises:
        ServeError: As ``DeviceRegion``; invalid_input, too, where there is no such GPU that can be used.
    """
    opened = devices.open(CUDA, device_id)
    if isinstance(opened, str):
        raise refused(region, f"GPUs not supported: {opened}")
    return DeviceRegion(opened, region, handle, byte_size)


def are_regions_possible() -> bool:
    """Whether there is any GPU for them."""
    return count_devices() > 0


def refused(region: str, reason: str) -> ServeError:
    """A registration that cannot be, as clients know its text."""
    return invalid_input(f"failed to register CUDA shared memory region: '{region}', {reason}")
