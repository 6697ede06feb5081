"""Inflating bodies and messages: short ones on the loop, long ones in a thread, and never more than may be held."""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.codecs.compression import Inflater
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import out_of_memory

_INLINE_BYTES: Final = 64 * 1024
"""Of what came, and of what it becomes, that are inflated on the loop, in about 0.2 ms."""

_STEP_BYTES: Final = 4 * 1024 * 1024
"""What is inflated before the server looks whether it may hold more."""

_PIECE_BYTES: Final = 128 * 1024
"""What zlib gives back at once. It puts a piece together under the interpreter lock, in 0.1 ms."""


async def inflate_all(
    inflater: Inflater, *, came_bytes: int, hold: Callable[[int], None], memory: LargeMemory
) -> bytes | memoryview:
    """All that ``inflater`` reads, which was made for ``came_bytes``; ``hold`` is told of each part's bytes.

    Raises:
        ServeError: As ``Inflater.read`` and ``hold``; overloaded, where there is too little memory.
    """
    try:
        begin = b""
        if came_bytes <= _INLINE_BYTES:
            begin = inflater.read(_INLINE_BYTES)
            hold(len(begin))
            if inflater.is_done:
                return begin
        loop = asyncio.get_running_loop()
        room = memory.take(inflater.max_bytes)
        room[: len(begin)] = begin
        size = len(begin)
        while not inflater.is_done:
            part_bytes = await loop.run_in_executor(None, _fill, inflater, room[size:])
            hold(part_bytes)
            size += part_bytes
        return room[:size].toreadonly()
    except MemoryError:
        raise out_of_memory("inflating a request") from None


def _fill(inflater: Inflater, room: memoryview) -> int:
    """Inflate the next bytes into ``room``, at most ``_STEP_BYTES``; how many they are."""
    size = 0
    while size < _STEP_BYTES and not inflater.is_done:
        piece = inflater.read(_PIECE_BYTES)
        room[size : size + len(piece)] = piece
        size += len(piece)
    return size
