"""Measures a server during a load: processor time and memory, if it runs on this machine, and its batches."""

import socket
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import psutil

from ortserve.tools.address import Address
from ortserve.tools.bench.result import ServerUsage
from ortserve.tools.control import Control


class UsageMeter:
    """Measures a server during one or more intervals, each from ``begin`` to ``end``.

    Attributes:
        batches: Counts of the batches that ran in all intervals, by rows.
    """

    def __init__(self, control: Control | None) -> None:
        """``control`` is None for a model in the process of the generator."""
        self._control = control
        self._processes = _listeners(control.address) if control else []
        self._resident = 0
        self._spent_s: dict[int, float] = {}
        """The processor time of each process so far, by its id; of one that has ended, when it was last looked at."""
        self._used_s = np.zeros(4)
        """Processor time of the server, time, and processor time of this machine, in total and idle."""
        self._at_begin: tuple[np.ndarray, dict[int, int] | None] | None = None
        """The same and the batches when the interval began; None outside of an interval."""
        self.batches: Counter[int] = Counter()

    def begin(self) -> None:
        """Begin an interval, unless one has begun."""
        if self._at_begin is None:
            batches = self._batches()
            self._at_begin = self._times_s(), batches

    def end(self) -> None:
        """End the interval, if it has begun."""
        if self._at_begin is not None:
            times_s, before = self._at_begin
            self._at_begin = None
            self._used_s += self._times_s() - times_s
            after = self._batches()
            if before is None or after is None or any(after.get(rows, 0) < count for rows, count in before.items()):
                return  # the server did not say, has ended, or began to count anew
            self.batches.update(after)
            self.batches.subtract(before)

    def look(self) -> float:
        """Record the memory in use. Returns the processor time so far, in seconds."""
        resident = 0
        for process in self._processes:
            with suppress(psutil.Error):  # it may have ended
                times = process.cpu_times()
                self._spent_s[process.pid] = times.user + times.system
                resident += process.memory_info().rss
        self._resident = max(self._resident, resident)
        return sum(self._spent_s.values())

    def usage(self, answers: int) -> ServerUsage | None:
        """The usage in all intervals, in which the server gave ``answers``. None if no process was found."""
        used_s, seconds, all_s, idle_s = self._used_s.tolist()
        if not self._processes or not seconds:
            return None
        return ServerUsage(
            processes=len(self._processes),
            processors=used_s / seconds,
            cpu_us_per_request=used_s / max(1, answers) * 1e6,
            resident_bytes=self._resident,
            machine_busy=1 - idle_s / max(1e-9, all_s),
        )

    def _batches(self) -> dict[int, int] | None:
        return self._control.batches() if self._control else None

    def _times_s(self) -> np.ndarray:
        times = psutil.cpu_times()  # the guests at their end are part of user
        return np.array([self.look(), time.monotonic(), sum(times[:8]), times.idle + times.iowait])


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
