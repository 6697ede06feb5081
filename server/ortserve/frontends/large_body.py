"""Receives or inflates large bodies and messages of both protocols directly into their final memory.

Tensors are views of this memory until they are staged. A body received in parts needs an object for each part and a
copy at the end, which costs several times as much (``loadtests/large_requests.py``).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from ortserve.codecs.compression import Inflater
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import out_of_memory

LARGE_BYTES: Final = 64 * 1024
"""Minimum size of the missing rest of a large body. Shorter bodies are received in parts."""

_HUGE_BYTES: Final = 4 * 1024 * 1024
"""Size from which numpy asks the kernel for pages of 2 MiB. The first byte of such a page allocates all of it."""

MIN_RECEIVED_BYTES: Final = 1024 * 1024
"""Bytes of a body of at least ``_HUGE_BYTES`` that must arrive before its memory is allocated: an announcement and one
byte must not cost a huge page."""

_DROPPED_BYTES: Final = 16 * 1024

_READ_BYTES: Final = 32 * 1024
"""Maximum size of a read. libuv makes up to 32 reads in a loop turn while each read fills the buffer, and a socket may
hold 32 MB: with the whole body as buffer, one turn took 40 ms."""

_FRESH_READ_BYTES: Final = 8 * 1024
"""Maximum size of a read into memory that was never written. The kernel clears each page first, which takes 4 µs, and
up to 20 µs if the host of a virtual machine must allocate the memory."""

_INLINE_INFLATE_BYTES: Final = 64 * 1024
"""Maximum size of compressed and inflated bytes that the event loop inflates itself, in about 0.2 ms."""

_INFLATE_STEP_BYTES: Final = 4 * 1024 * 1024
"""Bytes that a thread inflates before the memory limit is checked again."""

_INFLATE_PIECE_BYTES: Final = 32 * 1024
"""Bytes inflated in one call: the first output block of zlib, which joins further blocks under the interpreter lock."""


class LargeBody:
    """Memory for a body, which is filled from the beginning. The system allocates each page at its first write.

    Attributes:
        size: Size of the whole body, or its limit, in bytes.
        received_bytes: Number of received bytes.
    """

    __slots__ = ("_block", "_content", "_is_dropped", "received_bytes", "size")

    def __init__(self, size: int, memory: LargeMemory) -> None:
        """Borrow ``size`` bytes of memory. Raises MemoryError: The address space has no room."""
        self._block, self._content = memory.lend(size)
        self._is_dropped = False
        self.size: Final = size
        self.received_bytes = 0

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.size

    def room(self) -> memoryview:
        """Return the buffer for the next bytes. The caller reports written bytes with ``add``."""
        if self._is_dropped:
            return self._content[: self.size - self.received_bytes]
        step = _READ_BYTES if self.received_bytes < self._block.touched_bytes else _FRESH_READ_BYTES
        return self._content[self.received_bytes : self.received_bytes + step]

    def add(self, count: int) -> None:
        """Account for ``count`` bytes that were written into ``room``."""
        self.received_bytes += count
        if self.received_bytes > self._block.touched_bytes and not self._is_dropped:
            self._block.touched_bytes = self.received_bytes

    def put(self, part: bytes | memoryview) -> None:
        """Copy the next bytes, at most as many as are missing."""
        if not self._is_dropped:
            self._content[self.received_bytes : self.received_bytes + len(part)] = part
        self.add(len(part))

    def drop(self) -> None:
        """Return the memory, and receive the rest into a small buffer that is never read."""
        self._content = memoryview(bytearray(_DROPPED_BYTES))
        self._is_dropped = True

    def content(self) -> memoryview:
        """Return a read-only view of the received bytes."""
        return self._content[: self.received_bytes].toreadonly()


def begin_large(size: int, received: Sequence[bytes], received_bytes: int, memory: LargeMemory) -> LargeBody | None:
    """Allocate memory for ``size`` bytes and copy the parts ``received`` into it.

    ``received_bytes`` is the total size of these parts.

    Returns:
        The memory; None if the rest should be received in parts, too.
    """
    may_allocate = size < _HUGE_BYTES or received_bytes >= MIN_RECEIVED_BYTES
    if size - received_bytes < LARGE_BYTES or not may_allocate:
        return None
    try:
        large = LargeBody(size, memory)
    except MemoryError:  # memory may be free again when the body is complete
        return None
    for part in received:
        large.put(part)
    return large


class Receiver(asyncio.BufferedProtocol):
    """Replaces a protocol at its transport, which then reads into a buffer that a subclass provides.

    Subclasses implement ``get_buffer`` and ``buffer_updated``. The replaced protocol receives all other events.
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


class BodyReceiver(Receiver):
    """Receives the rest of a large body into its memory."""

    def __init__(
        self, protocol: asyncio.Protocol, body: LargeBody, on_placed: Callable[[LargeBody, int], object]
    ) -> None:
        """``on_placed`` is called after each read, with the body and the number of received bytes."""
        super().__init__(protocol)
        self._body = body
        self._on_placed = on_placed

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._body.add(nbytes)
        self._on_placed(self._body, nbytes)


async def inflate_all(
    inflater: Inflater, *, compressed_bytes: int, reserve: Callable[[int], None], memory: LargeMemory
) -> bytes | memoryview:
    """Inflate ``compressed_bytes`` bytes: short data on the event loop, long data in a thread.

    ``reserve`` reserves memory for each inflated part; its argument is the size of the part.

    Raises:
        ServeError: As from ``Inflater.read`` and ``reserve``; overloaded if memory is too short.
    """
    try:
        begin = b""
        if compressed_bytes <= _INLINE_INFLATE_BYTES:
            begin = inflater.read(_INLINE_INFLATE_BYTES)
            reserve(len(begin))
            if inflater.is_done:
                return begin
        loop = asyncio.get_running_loop()
        room = memory.take(inflater.max_bytes)
        room[: len(begin)] = begin
        size = len(begin)
        while not inflater.is_done:
            part_bytes = await loop.run_in_executor(None, _inflate_step, inflater, room[size:])
            reserve(part_bytes)
            size += part_bytes
        return room[:size].toreadonly()
    except MemoryError:
        raise out_of_memory("inflating a request") from None


def _inflate_step(inflater: Inflater, room: memoryview) -> int:
    """Inflate about ``_INFLATE_STEP_BYTES`` into ``room``. Returns the number of written bytes."""
    size = 0
    while size < _INFLATE_STEP_BYTES and not inflater.is_done:
        piece = inflater.read(_INFLATE_PIECE_BYTES)
        room[size : size + len(piece)] = piece
        size += len(piece)
    return size
