"""Standard error that never makes its writers wait: for log lines, which the event loop writes.

A pipe is full when its reader stalls: a log driver, a journal, a terminal that the user has stopped. A usual write then
waits, and all callers with it.
"""

import io
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

_MAX_HELD_BYTES: Final = 1 << 20
"""Lines are held up to this size while standard error takes none; further ones are dropped and counted."""


class StandardError(io.TextIOBase):
    """Writes whole lines to a file descriptor, and holds those that it does not take. Thread-safe.

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
        """Write the lines of ``text`` as far as the descriptor takes them at once."""
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
        """Write held lines as far as the descriptor takes them at once."""
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
