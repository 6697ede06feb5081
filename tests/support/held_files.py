"""Regular files that take long to open, as on a slow file server, so that a load waits until the test ends it.

The kernel lets a program that opens a file wait while another one has a lease on it, for at most
``/proc/sys/fs/lease-break-time``, 45 s unless set (fcntl(2)). The server itself fails a load whose file has not
answered for 30 to 60 s.
"""

import asyncio
import fcntl
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SET_SIGNAL: Final = 10
"""``F_SETSIG``, which chooses the signal for accesses. The usual one would end the process."""
_MAX_S: Final = 30.0
"""Time after which a load that waits for a file may have failed."""


class HeldFile:
    """A file that nothing can open until ``release``."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        fcntl.fcntl(self._descriptor, _SET_SIGNAL, signal.SIGURG)
        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        self._is_held = True
        self._awaited_s = math.inf
        """When a program was first seen to wait."""

    @property
    def is_awaited(self) -> bool:
        """Whether a program waits to open the file."""
        is_awaited = fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_WRLCK
        if is_awaited:
            self._awaited_s = min(self._awaited_s, time.monotonic())
        return is_awaited

    async def wait(self) -> None:
        """Wait until a program waits to open the file."""
        while not self.is_awaited:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)

    def release(self) -> None:
        """Let the file be opened. Does nothing the second time. Fails if a program was seen to wait for too long."""
        if self._is_held:
            self._is_held = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(self._descriptor)
            assert time.monotonic() - self._awaited_s < _MAX_S, "held for too long"


@contextmanager
def held_file(file: Path) -> Iterator[HeldFile]:
    """Hold a file until the context exits, or until it is released before."""
    hold = HeldFile(file)
    try:
        yield hold
    finally:
        hold.release()
