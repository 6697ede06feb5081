"""What a handler sees of its call: the part of ``grpc.aio.ServicerContext`` that the calls use."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native.compression import compressed, inflate
from ortserve.frontends.grpc.native.messages import RefusedMessageError
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.service.gate import Hold


class NativeContext:
    """Loop thread only, from within the call's task."""

    def __init__(self, stream: Stream, sending: Sending, open_hold: Callable[[], Hold]) -> None:
        """``open_hold`` has room counted for what compressed messages become."""
        self._stream = stream
        self._sending = sending
        self._open_hold = open_hold
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
        try:
            # Let go of where the handler takes over, which counts what it keeps: nothing comes between.
            with self._open_hold() as hold:
                hold.count(len(message))
                return await inflate(message, stream.head.encoding, hold, max_bytes=stream.reader.max_bytes)
        except RefusedMessageError as refusal:
            self._sending.end(stream, refusal.code, refusal.text, is_prompt=True)
        except ServeError as error:
            self._sending.end(stream, *status_of(error), is_prompt=True)
        return grpc.aio.EOF

    async def write(self, message: bytes | memoryview) -> None:
        """Send a message; returns when the transport has taken it."""
        await self.send(message)
        stream = self._stream
        while stream.unsent:
            stream.writing = asyncio.get_running_loop().create_future()
            await stream.writing

    async def send(self, message: bytes | memoryview) -> None:
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
