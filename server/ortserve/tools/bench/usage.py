"""The processes of a server on this machine: their processor time and memory."""

import socket
import time

import psutil

from ortserve.tools.bench.result import ServerUsage


def find_server(host: str, port: int) -> list[psutil.Process]:
    """The processes that listen on a port of this machine, with their children. Empty for another machine's, and for
    processes of other users.
    """
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        own = {address.address for found in psutil.net_if_addrs().values() for address in found}
        if not wanted & own:
            return []
        listening = {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (port,)
        }
        roots = [psutil.Process(pid) for pid in listening]
        found = {process.pid: process for root in roots for process in (root, *root.children(recursive=True))}
        return list(found.values())
    except (OSError, psutil.Error):
        return []


class UsageMeter:
    """Measures processes in one or more stretches of time, from ``begin`` to ``end``."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._cpu_s = self._began_s = self._used_s = self._seconds = 0.0
        self._resident = 0

    def begin(self) -> None:
        """A stretch begins."""
        self._cpu_s, self._began_s = self.look(), time.monotonic()

    def end(self) -> None:
        """A stretch ends."""
        if self._began_s:
            self._used_s += max(0.0, self.look() - self._cpu_s)
            self._seconds += time.monotonic() - self._began_s
            self._began_s = 0.0

    def look(self) -> float:
        """Notice the memory in use; returns the processor time so far."""
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
        """The usage of all stretches, shared by so many answers; None without processes."""
        if not self._processes or not self._seconds:
            return None
        used = self._used_s
        return ServerUsage(len(self._processes), used / self._seconds, used / max(1, answers) * 1e6, self._resident)
