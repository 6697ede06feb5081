"""Processes long reads of a socket in parts, so that the event loop serves other connections between them.

A read of 256 KB may hold thousands of requests, frames or chunks, which take tens of milliseconds together. libuv makes
up to 32 such reads (8 MB) of one socket before it serves others.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

from ortserve.clock import monotonic_ns
from ortserve.frontends.large_body import Receiver

SHORT_READ_BYTES: Final = 8 * 1024
"""Reads up to this size are processed at once."""

_FIRST_PART_BYTES: Final = 4 * 1024
_MAX_PART_BYTES: Final = 16 * 1024
"""Parts of a read double up to this size within a turn. A small first part shows whether the bytes are costly."""

_TURN_NS: Final = 1_000_000
"""Processing time after which the rest of a read waits for later turns."""

_CHEAP_NS: Final = 100_000
"""Processing time up to which a read of ``SHORT_READ_BYTES`` is cheap. At this rate two or three turns suffice for the
longest read."""

LONG_READ_BYTES: Final = 128 * 1024
"""Size from which a read is the last one of its connection in a turn of the loop."""


class Readable(Protocol):
    """The methods of ``asyncio.Transport`` that this module uses. ``TlsTransport`` provides them, too."""

    def get_protocol(self) -> asyncio.BaseProtocol: ...
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class PartReader(Protocol):
    """An ``asyncio.Protocol`` that accepts reads in parts. Its ``data_received`` passes long reads to ``read_long``."""

    def data_received(self, data: bytes) -> None: ...

    def on_part(self, data: bytes) -> None:
        """Process the next part of a read."""
        ...

    def on_read(self, data: bytes) -> None:
        """Handle the end of a read: all parts of ``data`` are processed."""
        ...

    def may_read(self) -> bool:
        """Whether the transport may continue to read: the protocol has not paused it.

        The rest of a read waits, too, until the protocol calls ``resume_reads``.
        """
        ...


def read_long(reader: PartReader, transport: Readable, data: bytes) -> None:
    """Process a read of more than ``SHORT_READ_BYTES``: as much as a turn allows now, and the rest in later turns.

    Args:
        reader: The protocol of ``transport``.
        transport: Transport of ``reader``, paused until the rest is processed.
        data: The received bytes.
    """
    end = _process(reader, transport, data, 0)
    if transport.is_closing():
        return
    if end < len(data):
        transport.set_protocol(_ShortReads(reader, transport, data, end))
    elif len(data) >= LONG_READ_BYTES:
        pause_for_turn(transport, reader.may_read)


def resume_reads(transport: Readable) -> None:
    """Resume reading after the protocol has paused it, with the rest of the last read if it waits."""
    protocol = transport.get_protocol()
    if isinstance(protocol, _ShortReads):
        protocol.resume()
    else:
        transport.resume_reading()


def pause_for_turn(transport: Readable, may_read: Callable[[], bool]) -> None:
    """Pause reading until the next turn. It stays paused if ``may_read`` then returns False."""
    if not transport.is_closing():
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(_read_on, transport, may_read)


def _read_on(transport: Readable, may_read: Callable[[], bool]) -> None:
    if not transport.is_closing() and may_read():
        transport.resume_reading()


def _process(reader: PartReader, transport: Readable, data: bytes, begin: int) -> int:
    """Process ``data`` from ``begin`` on, for about ``_TURN_NS`` or until the reader pauses.

    Returns the position of the rest.
    """
    part_bytes = _FIRST_PART_BYTES
    began_ns = monotonic_ns()
    while begin < len(data) and not transport.is_closing() and reader.may_read():
        reader.on_part(data[begin : begin + part_bytes])
        begin += part_bytes
        if monotonic_ns() - began_ns >= _TURN_NS:
            break
        part_bytes = min(2 * part_bytes, _MAX_PART_BYTES)
    if begin >= len(data):
        reader.on_read(data)
    return begin


class _ShortReads(Receiver):
    """Processes the rest of a costly read in later turns, then makes short reads until they are cheap again."""

    def __init__(self, reader: PartReader, transport: Readable, data: bytes, end: int) -> None:
        """``data`` is the whole read, which was processed up to ``end``."""
        super().__init__(cast("asyncio.Protocol", reader))
        self._reader = reader
        self._transport = transport
        self._buffer = memoryview(bytearray(SHORT_READ_BYTES))
        self._data = data
        self._end = end
        self._has_ended = False
        self._is_turn_due = False
        self._wait_for_turn()

    def resume(self) -> None:
        """Continue in the next turn: the reader may read again."""
        if self._is_waiting:
            self._begin_turn_soon()
        else:
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        transport = self._transport
        if self._is_waiting:  # the reader resumed the transport, or a TLS session had already decrypted these bytes
            self._data += data
            transport.pause_reading()
            return
        began_ns = monotonic_ns()
        self._reader.data_received(data)
        if nbytes < SHORT_READ_BYTES or transport.is_closing() or transport.get_protocol() is not self:
            return
        if monotonic_ns() - began_ns < _CHEAP_NS:
            transport.set_protocol(self._protocol)
        else:
            self._wait_for_turn()

    def eof_received(self) -> bool | None:
        self._has_ended = self._is_waiting
        return True if self._is_waiting else self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._data = b""
        self._protocol.connection_lost(exc)

    def _wait_for_turn(self) -> None:
        self._is_waiting = True
        self._transport.pause_reading()
        if self._reader.may_read():
            self._begin_turn_soon()

    def _begin_turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_waiting = self._is_turn_due = False
        transport = self._transport
        if self._data:
            self._end = _process(self._reader, transport, self._data, self._end)
            if self._end < len(self._data) and not transport.is_closing():
                self._wait_for_turn()
                return
            self._data, self._end = b"", 0
        if transport.is_closing():
            return
        if self._has_ended and not self._protocol.eof_received():
            transport.close()
        _read_on(transport, self._reader.may_read)
