"""The processor time and memory of a server on this machine."""

import socket
import time

import numpy as np
import psutil

from ortserve.tools.address import Address
from ortserve.tools.bench.result import ServerUsage


class UsageMeter:
    """Measures the processes of a server during one or more intervals, each from ``begin`` to ``end``."""

    def __init__(self, address: Address | None) -> None:
        self._processes = _listeners(address) if address else []
        self._cpu_s = self._began_s = self._used_s = self._seconds = 0.0
        self._resident = 0
        self._machine_s = np.zeros(2)

    def begin(self) -> None:
        """Begin an interval."""
        self._cpu_s, self._began_s = self.look(), time.monotonic()
        self._machine_s -= _machine_s()

    def end(self) -> None:
        """End the interval."""
        if self._began_s:
            self._used_s += max(0.0, self.look() - self._cpu_s)
            self._seconds += time.monotonic() - self._began_s
            self._began_s = 0.0
            self._machine_s += _machine_s()

    def look(self) -> float:
        """Record the memory in use. Returns the processor time so far, in seconds."""
        total_s, resident = 0.0, 0
        for process in self._processes:
            try:
                times = process.cpu_times()
                total_s += times.user + times.system
                resident += process.memory_info().rss
            except psutil.Error:  # it has ended
                continue
        self._resident = max(self._resident, resident)
        return total_s

    def usage(self, answers: int) -> ServerUsage | None:
        """The usage in all intervals, in which the server gave ``answers``. None if no process was found."""
        if not self._processes or not self._seconds:
            return None
        used, (all_s, idle_s) = self._used_s, self._machine_s
        per_request_us = used / max(1, answers) * 1e6
        busy = float(1 - idle_s / max(1e-9, all_s))
        return ServerUsage(len(self._processes), used / self._seconds, per_request_us, self._resident, busy)


def _machine_s() -> np.ndarray:
    """Seconds of all processors of this machine so far: in total, and idle."""
    times = psutil.cpu_times()
    idle = times.idle + times.iowait
    return np.array([sum(times[:8]), idle])  # without guests, which are part of user


def _listeners(address: Address) -> list[psutil.Process]:
    """The processes that listen at an address, and their children. Other users' are not found."""
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
        if not wanted & {one.address for found in psutil.net_if_addrs().values() for one in found}:
            return []
        listening = {
            one.pid
            for one in psutil.net_connections(kind="tcp")
            if one.status == psutil.CONN_LISTEN and one.pid and one.laddr[1:] == (address.port,)
        }
        roots = [psutil.Process(pid) for pid in listening]
        return list({one for root in roots for one in (root, *root.children(recursive=True))})
    except (OSError, psutil.Error):
        return []
