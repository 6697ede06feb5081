"""A client's memory region on a device of host memory."""

import threading

import numpy as np
import pytest

from fakes.host_device import HostDevice, Pace
from ortserve.device.devices import DeviceProvider, Devices, OpenDevice
from ortserve.device.protocol import MemoryInfo
from ortserve.device.region import DeviceRegion, open_region
from ortserve.engine.provider_options import CUDA
from ortserve.errors import DeviceLostError, ErrorKind, ServeError

CONTENT = bytes(range(64))


class Callers:
    """A device, and the memory of another process on it."""

    def __init__(self, device: HostDevice | None = None) -> None:
        self.device = device or HostDevice(pace=Pace.LATE)
        self.devices = Devices({CUDA: DeviceProvider(lambda number: self.device)})
        opened = self.devices.open(CUDA, 0)
        assert isinstance(opened, OpenDevice)
        self.opened = opened
        self.address = self.device.allocate(len(CONTENT))
        self.content[:] = np.frombuffer(CONTENT, np.uint8)

    @property
    def content(self) -> np.ndarray:
        return self.device._bytes_at(self.address, len(CONTENT))

    def open(self, byte_size: int = len(CONTENT), handle: bytes | None = None) -> DeviceRegion:
        return open_region(self.devices, "r", handle or self.device.handle_of(self.address), 0, byte_size)


@pytest.mark.parametrize("pace", Pace)
def test_reads_and_writes_use_the_callers_memory(pace: Pace) -> None:
    callers = Callers(HostDevice(pace=pace))
    region = callers.open()
    assert region.read(4, 8) == CONTENT[4:12]
    assert not region.read(64, 0)
    region.write(60, b"\xff\xfe\xfd\xfc")
    region.write(0, memoryview(b"\x99"))
    region.write(64, b"")
    assert callers.content.tobytes() == b"\x99" + CONTENT[1:60] + b"\xff\xfe\xfd\xfc"
    region.close()
    assert callers.device.handles == 0


@pytest.mark.parametrize(
    ("handle", "byte_size", "expected_error"),
    [
        (b"\1" * 63, 8, "expected a raw_handle of 64 bytes, got 63"),
        (b"\1" * 64, 8, "failed to open CUDA IPC handle: cudaErrorInvalidValue: invalid argument"),
        (None, 65, "expected byte_size within the 64 bytes of its memory, got 65"),
    ],
)
def test_invalid_handle_is_rejected_and_closed(handle: bytes | None, byte_size: int, expected_error: str) -> None:
    callers = Callers()
    with pytest.raises(ServeError) as refused:
        callers.open(byte_size, handle)
    assert refused.value.kind is ErrorKind.INVALID_INPUT
    assert refused.value.message == f"failed to register CUDA shared memory region: 'r', {expected_error}"
    assert callers.device.handles == 0


def test_error_explains_an_absent_gpu() -> None:
    def no_cupy(number: int) -> HostDevice:
        raise ImportError("No module named 'cupy'")

    with pytest.raises(ServeError) as refused:
        open_region(Devices({CUDA: DeviceProvider(no_cupy)}), "r", bytes(64), 0, 8)
    assert refused.value.kind is ErrorKind.INVALID_INPUT
    assert refused.value.message == (
        "failed to register CUDA shared memory region: 'r', GPUs not supported: cupy cannot be used: No module named "
        "'cupy'"
    )


class Failing(HostDevice):
    """A device whose copies fail on demand."""

    error = ""
    is_lost = False

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        if self.error:
            raise RuntimeError(self.error)
        super().copy_out(target, address, stream)

    def open_shared(self, handle: bytes) -> int:
        if self.error:
            raise RuntimeError(self.error)
        return super().open_shared(handle)

    def memory(self) -> MemoryInfo:
        if self.is_lost:
            raise RuntimeError(self.error)
        return super().memory()


def test_failed_copy_is_reported_and_the_next_may_succeed() -> None:
    device = Failing()
    callers = Callers(device)
    region = callers.open()
    device.error = "cudaErrorInvalidValue: invalid argument"
    with pytest.raises(ServeError) as failed:
        region.read(0, 8)
    assert failed.value.kind is ErrorKind.INTERNAL
    assert failed.value.message == (
        "cannot copy from or to shared memory region 'r': cudaErrorInvalidValue: invalid argument"
    )
    device.error = ""
    assert region.read(0, 8) == CONTENT[:8]
    region.close()


def test_device_lost_by_a_copy_is_lost_for_all_and_not_used_again() -> None:
    device = Failing()
    callers = Callers(device)
    region, other = callers.open(), callers.open()
    device.error = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    device.is_lost = True
    with pytest.raises(DeviceLostError, match="host:0 is lost"):
        region.read(0, 8)
    device.error = ""
    device.is_lost = False
    assert callers.opened.lost
    with pytest.raises(DeviceLostError):
        other.write(0, b"x")
    with pytest.raises(DeviceLostError):
        callers.open()
    region.close()
    other.close()
    assert callers.device.handles == 0


def test_client_memory_error_does_not_lose_a_working_device() -> None:
    device = Failing()
    callers = Callers(device)
    region = callers.open()
    device.error = "cudaErrorUnknown: unknown error"
    with pytest.raises(ServeError, match="failed to open CUDA IPC handle: cudaErrorUnknown") as refused:
        callers.open()
    assert refused.value.kind is ErrorKind.INVALID_INPUT
    with pytest.raises(ServeError, match="cannot copy from or to") as failed:
        region.read(0, 8)
    assert failed.value.kind is ErrorKind.INTERNAL
    assert not callers.opened.lost
    device.error = ""
    assert region.read(0, 8) == CONTENT[:8]
    region.close()


def test_copies_wait_for_a_capture_to_end() -> None:
    callers = Callers()
    region = callers.open()
    lock, order = callers.devices.capture_lock, list[str]()
    with lock.exclusive():
        reading = threading.Thread(target=lambda: order.append(str(region.read(0, 1)[0])))
        reading.start()
        reading.join(0.1)
        assert reading.is_alive()
        order.append("captured")
    reading.join(10)
    assert order == ["captured", "0"]
