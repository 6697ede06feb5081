"""What a handler sees of its call: the part of ``grpc.aio.ServicerContext`` that the calls use."""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc

from ortserve.frontends.grpc.native.messages import RefusedMessageError, inflate
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream

_INLINE_BYTES = 16 * 1024
"""Compressed messages up to this size are inflated on the loop."""


class NativeContext:
    """Loop thread only, from within the call's task."""

    def __init__(self, stream: Stream, sending: Sending, *, max_message_bytes: int) -> None:
        self._stream = stream
        self._sending = sending
        self._max_message_bytes = max_message_bytes
        self.trailing: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None where there is none."""
        by_ns = self._stream.deadline_ns
        return None if by_ns is None else max(0.0, (by_ns - self._sending.clock()) / 1e9)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._stream.head.metadata

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.trailing = tuple(metadata)

    async def read(self) -> Any:
        """The next message; ``grpc.aio.EOF`` when the caller has sent all."""
        stream = self._stream
        while not stream.messages:
            if stream.is_half_closed:
                return grpc.aio.EOF
            stream.reading = asyncio.get_running_loop().create_future()
            await stream.reading
        message, is_compressed = stream.messages.popleft()
        if not stream.messages:
            self._sending.credit(stream)
        if not is_compressed:
            return message
        arguments = (message, stream.head.encoding, self._max_message_bytes)
        try:
            if len(message) <= _INLINE_BYTES:
                return inflate(*arguments)
            return await asyncio.get_running_loop().run_in_executor(None, inflate, *arguments)
        except RefusedMessageError as error:
            await self.abort(error.code, error.text)

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the transport has taken it."""
        stream = self._stream
        self._sending.send_message(stream, message)
        while stream.unsent:
            stream.writing = asyncio.get_running_loop().create_future()
            await stream.writing

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str]] = ()
    ) -> NoReturn:
        self._sending.end(self._stream, code, details, (*self.trailing, *trailing_metadata))
        raise grpc.aio.AbortError
