"""A caller that requests liveness every 5 ms on its own connection, and records its longest wait.

It runs in a separate process, so that load from the test does not delay it. ``python liveness.py host:port`` writes the
longest wait in seconds for each line that it reads, and then starts a new count.
"""

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

EVERY_S: Final = 0.005
_REQUEST: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class LivenessCaller:
    """A test's handle of the process."""

    def __init__(self, asks: IO[str], tells: IO[str]) -> None:
        self._asks = asks
        self._tells = tells

    def longest_wait_s(self) -> float:
        """The longest wait since the last call. A pending request counts; infinite if the connection ended."""
        self._asks.write("\n")
        self._asks.flush()
        return float(self._tells.readline())


@contextmanager
def asking_for_liveness(address: str) -> Iterator[LivenessCaller]:
    """Request liveness from the HTTP port at ``address`` (``host:port``) while the block runs."""
    with subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield LivenessCaller(process.stdin, process.stdout)
        process.stdin.close()


def _main(address: str) -> None:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    longest_s = 0.0
    due = time.monotonic()
    is_waiting = False
    while True:
        now = time.monotonic()
        if not is_waiting and now >= due:
            due, is_waiting = now, True
            connection.sendall(_REQUEST)
        readable, _, _ = select.select([sys.stdin, connection], [], [], None if is_waiting else due - now)
        if is_waiting:
            longest_s = max(longest_s, time.monotonic() - due)
        if connection in readable:
            if not connection.recv(65_536).startswith(b"HTTP/1.1 200"):
                longest_s = float("inf")
            due, is_waiting = due + EVERY_S, False
        if sys.stdin in readable:
            if not sys.stdin.readline():
                return
            print(longest_s, flush=True)
            longest_s = 0.0


if __name__ == "__main__":
    _main(sys.argv[1])
