"""The machine's GPUs, read through a fake management library."""

from types import SimpleNamespace
from typing import Any

import pytest

from ortserve.device.nvml import Gpu, GpuReader, visible_gpus
from ortserve.telemetry.machine import GpuReading


class FakeNvml:
    """The interface of nvidia-ml-py 13: GPU 0 has every reading, GPU 1 has none."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 0x2000028  # noqa: N815 - the names are NVML's

    def __init__(self, *, has_driver: bool = True, failed: int | None = None) -> None:
        self._has_driver = has_driver
        self._failed = failed
        self.energy_mj = 5_000_000

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._has_driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == self._failed:
            raise self.NVMLError
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return self._reading(handle, SimpleNamespace(gpu=25, memory=3))

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> Any:  # noqa: N802
        assert version == self.nvmlMemory_v2
        return self._reading(handle, SimpleNamespace(total=2**37, reserved=2**29, free=2**36, used=2**35))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:  # noqa: N802
        return self._reading(handle, 312_500)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> Any:  # noqa: N802
        return self._reading(handle, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> Any:  # noqa: N802
        return self._reading(handle, self.energy_mj)

    def _reading(self, handle: int, answer: Any) -> Any:
        if handle:
            raise self.NVMLError
        return answer


def test_gpu_readings_have_tritons_units_and_omit_unsupported_values() -> None:
    library = FakeNvml()
    reader = GpuReader({}, library)
    library.energy_mj += 2_500
    assert reader.read() == [GpuReading("GPU-0", 0.25, 2**37, 2**35, 312.5, 700.0, 2.5), GpuReading("GPU-1")]


def test_no_gpus_without_a_driver_or_visible_devices() -> None:
    assert GpuReader({}, FakeNvml(has_driver=False)).read() == []
    assert GpuReader({"CUDA_VISIBLE_DEVICES": ""}, FakeNvml()).read() == []


def test_gpu_that_has_failed_hides_no_other() -> None:
    assert [gpu.uuid for gpu in GpuReader({}, FakeNvml(failed=0)).read()] == ["GPU-1"]


@pytest.mark.parametrize(("visible", "read"), [("1", ["GPU-1"]), ("0,1", ["GPU-1"]), ("0", [])])
def test_gpus_keep_their_numbers_beside_one_that_has_failed(visible: str, read: list[str]) -> None:
    reader = GpuReader({"CUDA_VISIBLE_DEVICES": visible}, FakeNvml(failed=0))
    assert [gpu.uuid for gpu in reader.read()] == read


ALIKE = [Gpu(number, f"GPU-{number}{number}", "a") for number in range(3)]
MIXED = [Gpu(number, f"GPU-{number}{number}", model) for number, model in enumerate("aba")]


@pytest.mark.parametrize(
    ("found", "environment", "numbers"),
    [
        (ALIKE, {}, [0, 1, 2]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 0]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,1"}, [1]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-22"}, [1, 2]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [1]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1,3,2"}, [1]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-7c8"}, [0, 1, 2]),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, [0, 1, 2]),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, [1]),
    ],
)
def test_gpus_are_those_visible_to_cuda(found: list[Gpu], environment: dict[str, str], numbers: list[int]) -> None:
    assert [gpu.handle for gpu in visible_gpus(found, environment)] == numbers
