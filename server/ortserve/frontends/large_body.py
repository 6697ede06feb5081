"""A large body or message, received where it stays: in the memory that tensors are views on until they are staged.

What comes as parts has been an object each, and is joined in the end, which costs several times what receiving it does
(``loadtests/large_requests.py``).
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

LARGE_BYTES: Final = 64 * 1024
"""Less than this is kept as parts."""

_HUGE_BYTES: Final = 4 * 1024 * 1024
"""From this size on numpy asks the kernel for pages of 2 MiB, and the first byte of a page takes all of it."""

_EARNEST_BYTES: Final = 1024 * 1024
"""What has to be there of a body of that size: who announces one and sends a byte is not to take a page by it."""

_DROPPED_BYTES: Final = 16 * 1024


class LargeBody:
    """Room for a body of known size, filled from its begin. Memory that nothing was written to is not taken yet.

    Attributes:
        size: Of the whole, in bytes.
        came: What is there of it.
    """

    __slots__ = ("_content", "_is_dropped", "came", "size")

    def __init__(self, size: int) -> None:
        """Raises MemoryError: There are no such addresses."""
        self._content = np.empty(size, np.uint8).data
        self._is_dropped = False
        self.size: Final = size
        self.came = 0

    @property
    def is_whole(self) -> bool:
        return self.came == self.size

    def room(self) -> memoryview:
        """Where the next bytes belong; whoever writes some there says so by ``add``."""
        if self._is_dropped:
            return self._content[: self.size - self.came]
        return self._content[self.came :]

    def add(self, count: int) -> None:
        """The next ``count`` bytes are there."""
        self.came += count

    def put(self, part: bytes | memoryview) -> None:
        """Copy the next bytes, of which there are no more than are missing."""
        end = self.came + len(part)
        if not self._is_dropped:
            self._content[self.came : end] = part
        self.came = end

    def drop(self) -> None:
        """Give the memory back, and receive what is still to come into next to none: nobody will read it."""
        self._content = memoryview(bytearray(_DROPPED_BYTES))
        self._is_dropped = True

    def content(self) -> memoryview:
        """All of it, to be read. It must be whole."""
        return self._content.toreadonly()


def begin_large(size: int, came: Sequence[bytes], came_bytes: int) -> LargeBody | None:
    """Room for ``size`` bytes, with the parts in it that came; None where the rest is better kept as parts, too.

    ``came_bytes`` is the length of the parts together.
    """
    is_earnest = size < _HUGE_BYTES or came_bytes >= _EARNEST_BYTES
    if size - came_bytes < LARGE_BYTES or not is_earnest:
        return None
    try:
        large = LargeBody(size)
    except MemoryError:  # there may be some by the time that it has come
        return None
    for part in came:
        large.put(part)
    return large


class Receiver(asyncio.BufferedProtocol):
    """Stands in for a protocol at its transport, which then writes what comes into a place that it is given.

    Subclasses say where (``get_buffer``) and hear how much (``buffer_updated``). All else is for the protocol itself.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
