"""The machine's GPUs as NVIDIA's management library knows them, where the package nvidia-ml-py is installed.

For all that this process may use, whether a model is on them or not; ``engine.device`` has the numbers of those that
models are on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortserve.engine.device.nvml import open_library
from ortserve.telemetry.machine import GpuReading


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in NVML's order, which is that of the PCI bus.

    Attributes:
        handle: NVML's.
        uuid: As NVIDIA's tools show it.
        model: The name of its kind.
        energy_mj: Millijoules it had taken up when the server started; None where it does not count them.
    """

    handle: Any
    uuid: str
    model: str = ""
    energy_mj: int | None = None


class GpuReader:
    """Reads the GPUs that this process may use. From any thread; never raises.

    NVML's calls are none of the CUDA runtime's, and so disturb no capture of a graph.
    """

    def __init__(self, environment: Mapping[str, str], library: Any = None) -> None:
        """Find the GPUs.

        Args:
            environment: Of the process, whose ``CUDA_VISIBLE_DEVICES`` may leave some out.
            library: None for the package's; without it, or without a driver, there are no GPUs.
        """
        self._library = library = open_library(library)
        self._gpus: list[Gpu] = []
        if library is None:
            return
        try:
            found = [self._find(number) for number in range(library.nvmlDeviceGetCount())]
        except library.NVMLError:
            return
        self._gpus = visible_gpus(found, environment)

    def read(self) -> list[GpuReading]:
        """All of them as they stand."""
        return [self._read(gpu) for gpu in self._gpus]

    def _find(self, number: int) -> Gpu:
        library = self._library
        handle = library.nvmlDeviceGetHandleByIndex(number)
        return Gpu(
            handle,
            str(library.nvmlDeviceGetUUID(handle)),
            str(library.nvmlDeviceGetName(handle)),
            self._ask("nvmlDeviceGetTotalEnergyConsumption", handle),
        )

    def _read(self, gpu: Gpu) -> GpuReading:
        rates = self._ask("nvmlDeviceGetUtilizationRates", gpu.handle)
        # Its second version does not count what the driver keeps for itself as used, as nvidia-smi and Triton do not.
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle, self._library.nvmlMemory_v2)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", gpu.handle)
        limit_mw = self._ask("nvmlDeviceGetPowerManagementLimit", gpu.handle)
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.handle)
        return GpuReading(
            gpu.uuid,
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.used),
            None if power_mw is None else power_mw / 1e3,
            None if limit_mw is None else limit_mw / 1e3,
            None if energy_mj is None or gpu.energy_mj is None else (energy_mj - gpu.energy_mj) / 1e3,
        )

    def _ask(self, call: str, *arguments: Any) -> Any:
        """What a GPU tells, or None: many tell only some of it, one that is divided among users nothing but power."""
        try:
            return getattr(self._library, call)(*arguments)
        except self._library.NVMLError:
            return None


def visible_gpus(found: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA shows to a process, by ``CUDA_VISIBLE_DEVICES`` as the CUDA programming guide has it.

    Entries are numbers or beginnings of UUIDs; from the first one on that names none, nothing more is visible. All
    are, where it cannot be told: for parts of a GPU (MIG), and for numbers where GPUs of several kinds are not
    numbered as the bus is.
    """
    wished = environment.get("CUDA_VISIBLE_DEVICES")
    if wished is None:
        return list(found)
    entries = [entry.strip() for entry in wished.split(",")]
    is_by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in found}) <= 1
    if any(entry.startswith("MIG") or (entry.isdecimal() and not is_by_bus) for entry in entries):
        return list(found)
    chosen: list[Gpu] = []
    for entry in entries:
        named = _named(found, entry)
        if named is None:
            break
        if named not in chosen:
            chosen.append(named)
    return chosen


def _named(found: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return found[int(entry)] if int(entry) < len(found) else None
    matching = [gpu for gpu in found if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
