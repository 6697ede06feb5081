"""A stream to standard error that never blocks. The event loop writes log lines to it.

Standard error blocks if it is a full pipe whose reader has stopped: a log driver, a journal, a terminal. A write would
then stop the event loop, and all callers would wait.
"""

import io
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

_MAX_HELD_BYTES: Final = 1 << 20
"""Lines are held up to this size while standard error is blocked; further ones are dropped and counted."""


class StandardError(io.TextIOBase):
    """Writes whole lines to a file descriptor, and holds them while it is blocked. Thread-safe.

    Held lines are written with the next line. Lines are lost without a report if the descriptor fails, because there is
    no other place for the report.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, describe: Callable[[int], str]) -> None:
        """Write to ``fd``; ``describe`` returns the line that reports a number of dropped lines."""
        self._fd = fd
        self._describe = describe
        self._held = bytearray()
        self._n_dropped = 0
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def writable(self) -> bool:
        """Whether the stream can be written to; always."""
        return True

    def fileno(self) -> int:
        """The file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether the file descriptor is a terminal."""
        return os.isatty(self._fd)

    def write(self, text: str, /) -> int:
        """Write as many of the held lines and of the lines of ``text`` as the descriptor accepts without blocking."""
        with self._lock:
            self._send()
            if len(self._held) >= _MAX_HELD_BYTES:
                self._n_dropped += text.count("\n")
            else:
                if self._n_dropped:
                    self._held += self._encoded(self._describe(self._n_dropped) + "\n")
                    self._n_dropped = 0
                self._held += self._encoded(text)
                self._send()
        return len(text)

    def flush(self) -> None:
        """Write as many held lines as the descriptor accepts without blocking."""
        with self._lock:
            self._send()

    def wait_until_written(self, timeout_s: float) -> None:
        """Wait until no lines are held, at most for ``timeout_s``. For the end of the process."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while self._held and (left_s := end_s - time.monotonic()) > 0:
                self._poll.poll(left_s * 1000)
                self._send()

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.encoding, self.errors)

    def _send(self) -> None:
        # A pipe that is writable takes PIPE_BUF bytes without waiting.
        while self._held and self._poll.poll(0):
            end = self._held.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            try:
                n_written = os.write(self._fd, self._held[:end])
            except BlockingIOError:  # another process has made the descriptor non-blocking
                return
            except OSError:
                self._held.clear()
                return
            del self._held[:n_written]
