"""Long reads of a socket end its turn of the event loop: libuv makes up to 32 reads, 8 MB, before it serves others.

A read of 256 KB may hold thousands of requests, frames or chunks, which take tens of milliseconds. After such a read
the connection is read in short parts, one in each turn, until parts of this size take little time again.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from ortserve.clock import monotonic_ns
from ortserve.frontends.large_body import Receiver

SHORT_READ_BYTES: Final = 16 * 1024
"""Longer reads are measured, and costly ones are followed by reads of at most this size."""

_LONG_READ_BYTES: Final = 128 * 1024
"""After a read of this size the next one waits for the next turn of the loop."""

_COSTLY_NS: Final = 2_000_000
_CHEAP_NS: Final = 250_000
"""Of a read of ``SHORT_READ_BYTES``: at this rate one of ``_LONG_READ_BYTES`` is not costly."""


class Readable(Protocol):
    """The methods of ``asyncio.Transport`` that are used here."""

    def get_extra_info(self, name: str, default: Any = None) -> Any: ...
    def get_protocol(self) -> asyncio.BaseProtocol: ...
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...
    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def end_read(
    protocol: asyncio.Protocol, transport: Readable, may_read: Callable[[], bool], nbytes: int, began_ns: int
) -> None:
    """Let other connections have their turn after a read of more than ``SHORT_READ_BYTES``.

    Args:
        protocol: Has processed the read.
        transport: Of the protocol.
        may_read: Says in the next turn whether the transport may read again: nothing else has paused it.
        nbytes: Of the read.
        began_ns: When the protocol got it (monotonic).
    """
    if nbytes >= _LONG_READ_BYTES:
        _pause_for_turn(transport, may_read)
    if monotonic_ns() - began_ns < _COSTLY_NS or transport.is_closing() or transport.get_protocol() is not protocol:
        return
    if transport.get_extra_info("sslcontext") is None:  # else the socket below the session is read in short parts
        transport.set_protocol(_ShortReads(protocol, transport, may_read))


class _ShortReads(Receiver):
    """Receives a short part of a connection in each turn of the loop."""

    def __init__(self, protocol: asyncio.Protocol, transport: Readable, may_read: Callable[[], bool]) -> None:
        super().__init__(protocol)
        self._reader = protocol
        self._transport = transport
        self._may_read = may_read
        self._buffer = memoryview(bytearray(SHORT_READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        began_ns = monotonic_ns()
        self._reader.data_received(bytes(self._buffer[:nbytes]))
        transport = self._transport
        if nbytes < SHORT_READ_BYTES or transport.is_closing() or transport.get_protocol() is not self:
            return
        if monotonic_ns() - began_ns < _CHEAP_NS:
            transport.set_protocol(self._reader)
        _pause_for_turn(transport, self._may_read)


def _pause_for_turn(transport: Readable, may_read: Callable[[], bool]) -> None:
    if not transport.is_closing():
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(_read_on, transport, may_read)


def _read_on(transport: Readable, may_read: Callable[[], bool]) -> None:
    if may_read() and not transport.is_closing():
        transport.resume_reading()
