"""Processors, memory and GPUs of the machine, under Triton's metric names.

Names, units and descriptions are those of Triton's ``metrics.cc``. A value that the machine does not report has no
series; it is not shown as 0.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.telemetry.declarations import Declaration, counter, gauge
from ortserve.telemetry.families import Family


@dataclass(frozen=True, slots=True)
class GpuReading:
    """State of one GPU; None for values that it does not report.

    Attributes:
        uuid: The UUID that NVIDIA's tools show.
        utilization: Share of recent time in which the GPU computed.
        memory_total_bytes: Size of the memory.
        memory_used_bytes: Memory in use by all processes.
        power_watts: Current power.
        power_limit_watts: Power limit.
        energy_joules: Energy since the server started.
    """

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class CpuReading:
    """State of the machine's processors and memory, for all processes; None for unknown values.

    Attributes:
        utilization: Share of the time of all processors in which they were busy.
        memory_total_bytes: Size of the memory.
        memory_used_bytes: Memory that is not available without swapping.
    """

    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


_OF_GPU: Final = ("gpu_uuid",)

_GPU: Final[tuple[tuple[Declaration, Callable[[GpuReading], float | None]], ...]] = (
    (gauge("nv_gpu_utilization", _OF_GPU, "GPU utilization rate [0.0 - 1.0)"), lambda gpu: gpu.utilization),
    (gauge("nv_gpu_memory_total_bytes", _OF_GPU, "GPU total memory, in bytes"), lambda gpu: gpu.memory_total_bytes),
    (gauge("nv_gpu_memory_used_bytes", _OF_GPU, "GPU used memory, in bytes"), lambda gpu: gpu.memory_used_bytes),
    (gauge("nv_gpu_power_usage", _OF_GPU, "GPU power usage in watts"), lambda gpu: gpu.power_watts),
    (gauge("nv_gpu_power_limit", _OF_GPU, "GPU power management limit in watts"), lambda gpu: gpu.power_limit_watts),
    (
        counter("nv_energy_consumption", _OF_GPU, "GPU energy consumption in joules since the server started"),
        lambda gpu: gpu.energy_joules,
    ),
)

_CPU: Final[tuple[tuple[Declaration, Callable[[CpuReading], float | None]], ...]] = (
    (gauge("nv_cpu_utilization", (), "CPU utilization rate [0.0 - 1.0]"), lambda cpu: cpu.utilization),
    (gauge("nv_cpu_memory_total_bytes", (), "CPU total memory (RAM), in bytes"), lambda cpu: cpu.memory_total_bytes),
    (gauge("nv_cpu_memory_used_bytes", (), "CPU used memory (RAM), in bytes"), lambda cpu: cpu.memory_used_bytes),
)

MACHINE_DECLARATIONS: Final = tuple(declaration for declaration, _ in (*_GPU, *_CPU))


def machine_families(gpus: Sequence[GpuReading], cpu: CpuReading) -> Iterator[Family]:
    """The families of the readings."""
    for declaration, of_gpu in _GPU:
        yield Family(declaration, {(gpu.uuid,): value for gpu in gpus if (value := of_gpu(gpu)) is not None})
    for declaration, of_cpu in _CPU:
        value = of_cpu(cpu)
        yield Family(declaration, {} if value is None else {(): value})


_MIN_NS: Final = 1_000_000_000
"""Minimum interval of a utilization. Triton measures every second; the kernel counts hundredths of a second."""


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Busy and idle time of all processors, in the kernel's unit."""

    busy: int
    idle: int


class CpuReader:
    """Reads Linux's ``/proc`` for the whole machine, even in a container, as Triton does. Thread-safe; never raises.

    Without ``/proc`` all values are None. The utilization covers the time since the last scrape, or since construction.
    A scrape within a second of the last one returns the same value, so that two scrapers do not disturb each other.
    """

    def __init__(self, clock: Clock, folder: Path = Path("/proc")) -> None:
        self._clock = clock
        self._folder = folder
        self._lock = threading.Lock()
        self._since_ns = clock()
        self._ticks = _read_ticks(folder)
        self._utilization: float | None = None

    def read(self) -> CpuReading:
        """Read the current state. The kernel provides the files, so reading them does not wait for a disk."""
        total, available = _read_memory(self._folder)
        used = None if total is None or available is None else max(0, total - available)
        return CpuReading(self._read_utilization(), total, used)

    def _read_utilization(self) -> float | None:
        with self._lock:
            now_ns = self._clock()
            if self._utilization is not None and now_ns - self._since_ns < _MIN_NS:
                return self._utilization
            ticks, before = _read_ticks(self._folder), self._ticks
            if ticks is None or before is None:
                return None
            # The kernel's count of idle time may decrease slightly.
            busy, idle = max(0, ticks.busy - before.busy), max(0, ticks.idle - before.idle)
            if busy + idle:
                self._utilization = busy / (busy + idle)
                self._ticks, self._since_ns = ticks, now_ns
            return self._utilization


def _read_ticks(folder: Path) -> _Ticks | None:
    """The first line of ``/proc/stat``, which holds the sums of all processors (man 5 proc_stat)."""
    try:
        with (folder / "stat").open() as file:
            name, *counts = file.readline().split()
        user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = map(int, counts[:8])
    except (OSError, ValueError):
        return None
    if name != "cpu":
        return None
    return _Ticks(user + nice + system + interrupts + soft_interrupts + stolen, idle + waiting)


def _read_memory(folder: Path) -> tuple[int | None, int | None]:
    """Total and available memory in bytes, from ``/proc/meminfo``, which counts kibibytes."""
    try:
        lines = (folder / "meminfo").read_text().splitlines()
        kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        return None, None
    total, available = kibibytes.get("MemTotal"), kibibytes.get("MemAvailable")
    return None if total is None else total * 1024, None if available is None else available * 1024
