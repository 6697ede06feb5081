"""How busy the machine's processors and memory are, by Linux's ``/proc``: read when somebody asks, on their thread."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.telemetry.machine import CpuReading

_LEAST_NS: Final = 1_000_000_000
"""Of a time over which the busy share is taken: Triton looks every second, and the kernel counts hundredths."""


@dataclass(frozen=True, slots=True)
class _Ticks:
    """What the kernel has counted for all processors, in its own unit."""

    busy: int
    idle: int


class CpuReader:
    """Reads what holds for the whole machine, in a container, too, as Triton does. From any thread; never raises.

    Where there is no ``/proc``, nothing is known. The busy share is that since the last scrape, or since this was
    made; a scrape within a second of the last one is told the same again, so that two who scrape take nothing from
    each other.
    """

    def __init__(self, clock: Clock, folder: Path = Path("/proc")) -> None:
        self._clock = clock
        self._folder = folder
        self._lock = threading.Lock()
        self._since_ns = clock()
        self._ticks = _read_ticks(folder)
        self._utilization: float | None = None

    def read(self) -> CpuReading:
        """As it stands. The files are the kernel's own, so that nothing waits for a disk."""
        total, available = _read_memory(self._folder)
        used = None if total is None or available is None else max(0, total - available)
        return CpuReading(self._read_utilization(), total, used)

    def _read_utilization(self) -> float | None:
        with self._lock:
            now_ns = self._clock()
            if self._utilization is not None and now_ns - self._since_ns < _LEAST_NS:
                return self._utilization
            ticks, before = _read_ticks(self._folder), self._ticks
            if ticks is None or before is None:
                return None
            # The kernel's count of idle time may go back a little.
            busy, idle = max(0, ticks.busy - before.busy), max(0, ticks.idle - before.idle)
            if busy + idle:
                self._utilization = busy / (busy + idle)
                self._ticks, self._since_ns = ticks, now_ns
            return self._utilization


def _read_ticks(folder: Path) -> _Ticks | None:
    """Of ``/proc/stat``, whose first line sums up all processors (man 5 proc_stat)."""
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
    """Bytes of memory, and those of them that can be had, by ``/proc/meminfo``, which counts in kibibytes."""
    try:
        lines = (folder / "meminfo").read_text().splitlines()
        kibibytes = {name: int(rest.split()[0]) for name, colon, rest in (line.partition(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        return None, None
    total, available = kibibytes.get("MemTotal"), kibibytes.get("MemAvailable")
    return None if total is None else total * 1024, None if available is None else available * 1024
