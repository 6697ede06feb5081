"""A large body or message, received where it stays: in the memory that tensors are views on until they are staged.

What comes as parts has been an object each, and is joined in the end, which costs several times what receiving it does
(``loadtests/large_requests.py``).
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from ortserve.core.large_memory import LargeMemory

LARGE_BYTES: Final = 64 * 1024
"""Less than this is kept as parts."""

_HUGE_BYTES: Final = 4 * 1024 * 1024
"""From this size on numpy asks the kernel for pages of 2 MiB, and the first byte of a page takes all of it."""

EARNEST_BYTES: Final = 1024 * 1024
"""What has to be there of a body of that size: who announces one and sends a byte is not to take a page by it."""

_DROPPED_BYTES: Final = 16 * 1024

_READ_BYTES: Final = 32 * 1024
"""Received at a time. libuv reads up to 32 times in a turn of the loop while the room is filled, and a socket may hold
32 MB: with all of the body as room, one turn took 40 ms."""

_FRESH_READ_BYTES: Final = 8 * 1024
"""The same for memory that was never written to, of which the kernel clears each page first: 4 µs, and up to 20 where
the host of a virtual machine has to find the memory."""


class LargeBody:
    """Room for a body, filled from its begin. Memory that nothing was written to is not taken yet.

    Attributes:
        size: Of the whole, in bytes, or the most that it may be.
        came: What is there of it.
    """

    __slots__ = ("_block", "_content", "_is_dropped", "came", "size")

    def __init__(self, size: int, memory: LargeMemory) -> None:
        """Raises MemoryError: There are no such addresses."""
        self._block, self._content = memory.lend(size)
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
        step = _READ_BYTES if self.came < self._block.touched_bytes else _FRESH_READ_BYTES
        return self._content[self.came : self.came + step]

    def add(self, count: int) -> None:
        """The next ``count`` bytes are there."""
        self.came += count
        if self.came > self._block.touched_bytes and not self._is_dropped:
            self._block.touched_bytes = self.came

    def put(self, part: bytes | memoryview) -> None:
        """Copy the next bytes, of which there are no more than are missing."""
        if not self._is_dropped:
            self._content[self.came : self.came + len(part)] = part
        self.add(len(part))

    def drop(self) -> None:
        """Give the memory back, and receive what is still to come into next to none: nobody will read it."""
        self._content = memoryview(bytearray(_DROPPED_BYTES))
        self._is_dropped = True

    def content(self) -> memoryview:
        """All that came, to be read."""
        return self._content[: self.came].toreadonly()


def begin_large(size: int, came: Sequence[bytes], came_bytes: int, memory: LargeMemory) -> LargeBody | None:
    """Room for ``size`` bytes, with the parts in it that came; None where the rest is better kept as parts, too.

    ``came_bytes`` is the length of the parts together.
    """
    is_earnest = size < _HUGE_BYTES or came_bytes >= EARNEST_BYTES
    if size - came_bytes < LARGE_BYTES or not is_earnest:
        return None
    try:
        large = LargeBody(size, memory)
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
