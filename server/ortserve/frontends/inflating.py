"""Inflating bodies and messages: short ones on the loop, long ones in a thread, and never more than may be held."""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.codecs.compression import Inflater
from ortserve.errors import out_of_memory

_INLINE_BYTES: Final = 64 * 1024
"""Of what came, and of what it becomes, that are inflated on the loop, in about 0.2 ms."""

_STEP_BYTES: Final = 4 * 1024 * 1024
"""What is inflated before the server looks whether it may hold more."""


async def inflate_all(inflater: Inflater, *, came_bytes: int, hold: Callable[[int], None]) -> bytes:
    """All that ``inflater`` reads, which was made for ``came_bytes``; ``hold`` is told of each part's bytes.

    Raises:
        ServeError: As ``Inflater.read`` and ``hold``; overloaded, where there is too little memory.
    """
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    try:
        while not inflater.is_done:
            if not parts and came_bytes <= _INLINE_BYTES:
                part = inflater.read(_INLINE_BYTES)
            else:
                part = await loop.run_in_executor(None, inflater.read, _STEP_BYTES)
            hold(len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else await loop.run_in_executor(None, b"".join, parts)
    except MemoryError:
        raise out_of_memory("inflating a request") from None
