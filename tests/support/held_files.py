"""Regular files that take long to open, as on a slow file server, so that a load waits until the test ends it.

The kernel lets a program that opens a file wait while another one has a lease on it, for at most
``/proc/sys/fs/lease-break-time``, 45 s unless set (fcntl(2)).
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SET_SIGNAL: Final = 10
"""``F_SETSIG``, which chooses the signal for accesses. The usual one would end the process."""


class HeldFile:
    """A file that nothing can open until ``release``."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        fcntl.fcntl(self._descriptor, _SET_SIGNAL, signal.SIGURG)
        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        self._is_held = True

    @property
    def is_awaited(self) -> bool:
        """Whether a program waits to open the file."""
        return fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_WRLCK

    async def wait(self) -> None:
        """Wait until a program waits to open the file."""
        while not self.is_awaited:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)

    def release(self) -> None:
        """Let the file be opened. Does nothing the second time."""
        if self._is_held:
            self._is_held = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(self._descriptor)


@contextmanager
def held_file(file: Path) -> Iterator[HeldFile]:
    """Hold a file until the context exits, or until it is released before."""
    hold = HeldFile(file)
    try:
        yield hold
    finally:
        hold.release()
