"""Reads GPUs through NVIDIA's management library (NVML), if the package nvidia-ml-py and a driver are installed.

NVML does not call the CUDA runtime, so its calls never break the capture of a graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortserve.telemetry.machine import GpuReading


def open_library(library: Any) -> Any:
    """Initialize ``library``, or the package's module if it is None. Returns None without package or driver."""
    if library is None:
        try:
            import pynvml
        except ImportError:
            return None
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


class Nvml:
    """Reads GPUs by their PCI bus ids, because NVML numbers GPUs differently from CUDA. Thread-safe; never raises."""

    def __init__(self, library: Any = None) -> None:
        """``library`` is None for the package's module; without package or driver every reading is None."""
        self._library = open_library(library)

    def utilization(self, pci_bus_id: str) -> float | None:
        """The share of NVML's last sample period (at most a second) in which kernels ran; None if unknown."""
        library = self._library
        if library is None or not pci_bus_id:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except library.NVMLError:
            return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. NVML orders GPUs by their place on the PCI bus.

    Attributes:
        handle: NVML's handle.
        uuid: The UUID that NVIDIA's tools show.
        model: The product name.
        energy_mj: Millijoules consumed before the server started; None if the GPU does not count them.
    """

    handle: Any
    uuid: str
    model: str = ""
    energy_mj: int | None = None


class GpuReader:
    """Reads all GPUs that this process may use, with or without models. Thread-safe; never raises."""

    def __init__(self, environment: Mapping[str, str], library: Any = None) -> None:
        """Find the GPUs. A GPU that NVML cannot open, such as one that has failed, is left out.

        Args:
            environment: The process environment; its ``CUDA_VISIBLE_DEVICES`` may hide GPUs.
            library: None for the package's module; without package or driver there are no GPUs.
        """
        self._library = library = open_library(library)
        found: list[Gpu | None] = []
        for number in range(0 if library is None else self._ask("nvmlDeviceGetCount") or 0):
            try:
                found.append(self._find(number))
            except library.NVMLError:
                found.append(None)
        self._gpus = visible_gpus(found, environment)

    def read(self) -> list[GpuReading]:
        """Read all GPUs."""
        return [self._read(gpu) for gpu in self._gpus]

    def _find(self, number: int) -> Gpu:
        library = self._library
        handle = library.nvmlDeviceGetHandleByIndex(number)
        return Gpu(
            handle,
            uuid=str(library.nvmlDeviceGetUUID(handle)),
            model=str(library.nvmlDeviceGetName(handle)),
            energy_mj=self._ask("nvmlDeviceGetTotalEnergyConsumption", handle),
        )

    def _read(self, gpu: Gpu) -> GpuReading:
        rates = self._ask("nvmlDeviceGetUtilizationRates", gpu.handle)
        # Version 2 does not count the driver's reserved memory as used; nvidia-smi and Triton do the same.
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle, self._library.nvmlMemory_v2)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", gpu.handle)
        limit_mw = self._ask("nvmlDeviceGetPowerManagementLimit", gpu.handle)
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.handle)
        return GpuReading(
            gpu.uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
            power_watts=None if power_mw is None else power_mw / 1e3,
            power_limit_watts=None if limit_mw is None else limit_mw / 1e3,
            energy_joules=None if energy_mj is None or gpu.energy_mj is None else (energy_mj - gpu.energy_mj) / 1e3,
        )

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call NVML. Returns None if the GPU does not support the call; a partitioned GPU supports few calls."""
        try:
            return getattr(self._library, call)(*arguments)
        except self._library.NVMLError:
            return None


def visible_gpus(found: Sequence[Gpu | None], environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA shows to a process, by ``CUDA_VISIBLE_DEVICES`` (CUDA programming guide).

    Entries are numbers or prefixes of UUIDs. CUDA ignores the first entry that matches no GPU and all later entries.
    If the result cannot be determined, all GPUs are returned: for partitions of a GPU (MIG), and for numbers if there
    are several products and CUDA does not number GPUs by the PCI bus. ``found`` has None for GPUs that cannot be
    opened: they are left out, and the others keep their numbers.
    """
    known = [gpu for gpu in found if gpu is not None]
    wished = environment.get("CUDA_VISIBLE_DEVICES")
    if wished is None:
        return known
    entries = [entry.strip() for entry in wished.split(",")]
    is_by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in known}) <= 1
    if any(entry.startswith("MIG") or (entry.isdecimal() and not is_by_bus) for entry in entries):
        return known
    chosen: list[Gpu] = []
    for entry in entries:
        named = _named(found, entry)
        if len(named) != 1:
            break
        chosen += [gpu for gpu in named if gpu is not None and gpu not in chosen]
    return chosen


def _named(found: Sequence[Gpu | None], entry: str) -> Sequence[Gpu | None]:
    if entry.isdecimal():
        return found[int(entry) :][:1]
    return [gpu for gpu in found if gpu is not None and entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
