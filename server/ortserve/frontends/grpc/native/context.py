"""What a handler sees of its call: the part of ``grpc.aio.ServicerContext`` that the calls use."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import grpc

from ortserve.frontends.grpc.native.compression import deflate, inflate
from ortserve.frontends.grpc.native.messages import Message, RefusedMessageError
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream

_INFLATED_INLINE_BYTES: Final = 1024
"""Compressed messages up to this size are inflated on the loop; they may grow a thousandfold."""

_DEFLATED_INLINE_BYTES: Final = 32 * 1024
"""Messages up to this size are compressed on the loop, in less than 1 ms."""


class NativeContext:
    """Loop thread only, from within the call's task."""

    def __init__(self, stream: Stream, sending: Sending) -> None:
        self._stream = stream
        self._sending = sending
        self.trailing: tuple[tuple[str, str | bytes], ...] = ()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None where there is none."""
        by_ns = self._stream.deadline_ns
        return None if by_ns is None else max(0.0, (by_ns - self._sending.clock()) / 1e9)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._stream.head.metadata

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self.trailing = tuple(metadata)

    async def read(self) -> Any:
        """The next message; ``grpc.aio.EOF`` when the caller has sent all, or the call is over."""
        stream = self._stream
        while not stream.messages:
            if stream.is_half_closed or stream.is_over:
                return grpc.aio.EOF
            stream.reading = asyncio.get_running_loop().create_future()
            try:
                await stream.reading
            finally:
                stream.reading = None
        message, is_compressed = stream.take()
        if not stream.messages:
            self._sending.credit(stream)
        if not is_compressed:
            return message
        arguments = (message, stream.head.encoding, stream.reader.max_bytes)
        try:
            if len(message) <= _INFLATED_INLINE_BYTES:
                return inflate(*arguments)
            return await asyncio.get_running_loop().run_in_executor(None, inflate, *arguments)
        except RefusedMessageError as error:
            self._sending.end(stream, error.code, error.text, is_prompt=True)
            return grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the transport has taken it."""
        await self.send(message)
        stream = self._stream
        while stream.unsent:
            stream.writing = asyncio.get_running_loop().create_future()
            await stream.writing

    async def send(self, message: bytes) -> None:
        """Queue a message, compressed where the caller takes it so."""
        stream = self._stream
        is_compressed = False
        if stream.encoding:
            message, is_compressed = await compressed(message, stream.encoding)
        self._sending.send_message(stream, message, is_compressed=is_compressed)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        self._sending.end(self._stream, code, details, (*self.trailing, *trailing_metadata))
        raise grpc.aio.AbortError


async def compressed(message: bytes, encoding: bytes) -> Message:
    """What to send for a message: itself where compression makes it no smaller."""
    if len(message) <= _DEFLATED_INLINE_BYTES:
        smaller = deflate(message, encoding)
    else:
        smaller = await asyncio.get_running_loop().run_in_executor(None, deflate, message, encoding)
    return (smaller, True) if len(smaller) < len(message) else (message, False)
