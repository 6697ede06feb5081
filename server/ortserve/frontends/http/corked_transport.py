"""Answers in one system call.

uvicorn writes head and body of an answer one after the other, and uvloop hands each to the kernel at once; on a small
answer the second call costs as much as decoding the request.
"""

import asyncio
from collections.abc import Iterable
from typing import Any


class CorkedTransport(asyncio.Transport):
    """Collects what is written in one turn of the loop and hands it on together, uncopied. Loop thread only."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes | bytearray | memoryview] = []
        self._has_ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._has_ended:
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def write_out(self, *data: bytes | memoryview) -> None:
        """Hand on at once, behind what was collected: for who writes once a turn anyway."""
        if self._pending:
            self._pending += data
            self._flush()
        elif len(data) == 1:
            self._transport.write(data[0])
        else:
            self._transport.writelines(data)

    def write_eof(self) -> None:
        """Send a FIN behind what was written. What is written after it is dropped."""
        self._flush()
        self._has_ended = True
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pending.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._pending))

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)
