"""Long reads of a socket end its turn of the event loop: libuv makes up to 32 reads, 8 MB, before it serves others."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

LONG_READ_BYTES: Final = 128 * 1024
"""After a read of this size the next one waits for the next turn of the loop."""


class Readable(Protocol):
    """The methods of ``asyncio.Transport`` that are used here."""

    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def pause_for_turn(transport: Readable, may_read: Callable[[], bool]) -> None:
    """Read no more in this turn of the loop, so that other connections are served.

    ``may_read`` says in the next turn whether the transport may read again: nothing else has paused it.
    """
    if not transport.is_closing():
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(_read_on, transport, may_read)


def _read_on(transport: Readable, may_read: Callable[[], bool]) -> None:
    if may_read() and not transport.is_closing():
        transport.resume_reading()
