"""A transport with a write buffer that can fill up, without a socket."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_READ_BYTES: Final = 256 * 1024
"""Maximum size of uvloop's reads for a protocol without its own buffers."""


class FakeTransport(asyncio.Transport):
    """Passes received bytes to its protocol as uvloop does, and stores written bytes until ``take``.

    Attributes:
        writes: Number of writes.
        is_stuck: Whether written bytes stay in the buffer, so that it fills up.
        placed_bytes: Number of received bytes that were written into buffers of the protocol.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._high = 65536
        self._buffer = bytearray()
        self._is_paused = False
        self._is_closing = False
        self.is_lost = False
        self.is_stuck = False
        self.writes = 0
        self.placed_bytes = 0
        self._reads = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or self._high

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        assert not self._is_closing
        self.writes += 1
        self._buffer += data
        if len(self._buffer) > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: "Iterable[bytes | bytearray | memoryview[Any]]") -> None:
        self.write(b"".join(list_of_data))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def receive(self, data: bytes) -> None:
        """Pass bytes to the protocol as received bytes."""
        rest = memoryview(data)
        while rest and not self._is_closing:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self._protocol.get_buffer(-1))
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                self._protocol.buffer_updated(count)
                self.placed_bytes += count
            else:
                assert isinstance(self._protocol, asyncio.Protocol)
                count = min(_READ_BYTES, len(rest))
                self._protocol.data_received(bytes(rest[:count]))
            rest = rest[count:]

    def take(self) -> bytes:
        """The bytes written since the last call; empty while the transport is stuck."""
        if self.is_stuck:
            return b""
        data, self._buffer = bytes(self._buffer), bytearray()
        if self._is_paused:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self._lose()
        return data

    def take_some(self, size: int) -> bytes:
        """The first ``size`` written bytes, of which the protocol learns nothing: the buffer is still almost full."""
        data, self._buffer = bytes(self._buffer[:size]), self._buffer[size:]
        return data

    def receive_eof(self) -> None:
        """Report the FIN of the peer."""
        assert isinstance(self._protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        if not self._protocol.eof_received():
            self.close()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True

    def is_reading(self) -> bool:
        return self._reads

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        if not self._buffer:
            self._lose()

    def abort(self) -> None:
        self._is_closing = True
        self._buffer.clear()
        self._lose()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, None)
