"""Runs the handlers of calls: quick ones without a task, all others in a task as grpc.aio would run them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import grpc

from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import (
    INTERNAL_ERROR,
    Handler,
    Metadata,
    MetadataEntry,
    check_key,
    status_of,
    visible_error,
)
from ortserve.frontends.grpc.native.header_blocks import literal, metadata_block
from ortserve.frontends.grpc.native.messages import RejectedMessageError, compress, inflate
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.frontends.grpc.quick_calls import QuickCall
from ortserve.service.access import Guard
from ortserve.service.gate import BodyGate, Reservation

logger: Final = logging.getLogger(__name__)


class CallDispatcher:
    """Starts the handlers for the calls of all connections. Loop thread only.

    Attributes:
        gate: Reserves the memory of requests.
        max_quick_bytes: Maximum size of the message of a quick call.
    """

    def __init__(
        self,
        find: Callable[[str], Handler],
        quick: Mapping[str, QuickCall],
        gate: BodyGate,
        *,
        max_quick_bytes: int,
        max_message_bytes: Callable[[str], int],
        compression: str = "none",
        guards: Mapping[str, Guard] | None = None,
    ) -> None:
        """Store the parameters.

        Args:
            find: Returns the handler of a path; every path has a handler.
            quick: Unary calls that need no task, by path.
            gate: Reserves the memory of requests.
            max_quick_bytes: Maximum size of the message of a quick call.
            max_message_bytes: Returns the limit of a message of any other call by path, before and after decompression.
            compression: Compression of answers to callers that accept it, as ``grpc_response_compression`` names it.
            guards: Checks of the keys of callers, by path.
        """
        self._guards = guards or None
        self._find = find
        self._quick = quick
        self.gate: Final = gate
        self.max_quick_bytes: Final = max_quick_bytes
        self._max_message_bytes = max_message_bytes
        self._encoding = b"" if compression == "none" else compression.encode()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, stream: Stream, sending: Sending) -> None:
        """Start a call whose headers have arrived."""
        if self._guards is not None:
            guard = self._guards.get(stream.head.path)
            if guard is not None and (error := check_key(guard, stream.head.metadata)) is not None:
                sending.end(stream, *status_of(error))
                return
        if self._encoding and self._encoding in stream.head.accepts:
            stream.encoding = self._encoding
        if stream.head.path not in self._quick:
            stream.reader.max_bytes = self._max_message_bytes(stream.head.path)
            handler = self._find(stream.head.path)
            if handler.unary_unary is None:
                stream.takes_messages = True
                self._start_handler(handler, stream, sending)

    def on_message(self, stream: Stream, sending: Sending) -> None:
        """Continue a call after new messages, or after the end of the caller's side."""
        if stream.takes_messages:
            stream.wake_reader()
            return
        if stream.message_count != 1:
            text = f"expected one message, got {'more' if stream.message_count else 'none'}"
            sending.end(stream, grpc.StatusCode.UNIMPLEMENTED, text, is_prompt=True)
            return
        if stream.cancel is not None:
            return  # the call runs already, and the caller has ended its side
        start = self._quick.get(stream.head.path)
        if start is None or stream.messages[0][1]:  # the first message is compressed
            self._start_handler(self._find(stream.head.path), stream, sending)
            return
        message, _ = stream.take()
        timeout_ns: int | None = None
        if stream.deadline_ns is not None:
            timeout_ns = max(0, stream.deadline_ns - sending.clock())
        on_answer = partial(self._on_answer, stream, sending)
        on_failure = partial(_on_failure, stream, sending)
        try:
            cancel = start(message, timeout_ns, stream.head, on_answer, on_failure)
        except Exception as error:  # noqa: BLE001 - it would end the connection with all of its calls
            _on_failure(stream, sending, visible_error(error))
            return
        if not stream.is_over and stream.trailers is None:
            stream.cancel = cancel

    def _on_answer(
        self,
        stream: Stream,
        sending: Sending,
        answer: bytes | memoryview,
        server_timing: bytes,
        further: MetadataEntry | None,
    ) -> None:
        """Send the answer of a quick call, an ``OnAnswer``; in a task if it is to be compressed."""
        stream.cancel = None
        if not stream.encoding:
            trailing = literal(b"server-timing", server_timing)
            if further is not None:
                trailing += metadata_block((further,))
            sending.answer(stream, answer, trailing)
        else:
            metadata: Metadata = (("server-timing", server_timing.decode()),)
            if further is not None:
                metadata += (further,)
            self._start(stream, NativeContext(stream, sending, self.gate).answer(answer, metadata))

    async def until_done(self) -> None:
        """Wait for the tasks that still run after the end of their stream."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start_handler(self, handler: Handler, stream: Stream, sending: Sending) -> None:
        self._start(stream, NativeContext(stream, sending, self.gate).run(handler))

    def _start(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop keeps no strong reference to a waiting task
        task.add_done_callback(self._tasks.discard)
        stream.cancel = partial(_cancel, task)


class NativeContext:
    """A call that runs in a task, with the part of ``grpc.aio.ServicerContext`` that handlers use. Loop thread only."""

    def __init__(self, stream: Stream, sending: Sending, gate: BodyGate) -> None:
        """``gate`` reserves memory for the decompressed form of a message."""
        self._stream = stream
        self._sending = sending
        self._gate = gate
        self._trailing: Metadata = ()

    async def run(self, handler: Handler) -> None:
        """Call a handler, and end the call."""
        stream, sending = self._stream, self._sending
        try:
            call: Any = handler.unary_unary or handler.stream_stream
            if handler.unary_unary is None:
                await call(None, self)
            else:
                request = await self.read()
                if request is grpc.aio.EOF:
                    await self.abort(grpc.StatusCode.UNIMPLEMENTED, "expected one message, got none")
                await self.send(await call(request, self))
            sending.end(stream, grpc.StatusCode.OK, metadata=self._trailing)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            sending.end(stream, grpc.StatusCode.CANCELLED, "the call was cancelled")  # if the caller is still connected
            raise
        except Exception:
            logger.exception("call failed")
            sending.end(stream, *status_of(INTERNAL_ERROR), is_prompt=True)

    async def answer(self, message: bytes | memoryview, metadata: Metadata) -> None:
        """Send the answer of a quick call, compressed, and end the call."""
        try:
            await self.send(message)
            self._sending.end(self._stream, grpc.StatusCode.OK, metadata=metadata)
        except Exception:
            logger.exception("an answer could not be compressed")
            self._sending.end(self._stream, *status_of(INTERNAL_ERROR), is_prompt=True)

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without a deadline."""
        by_ns = self._stream.deadline_ns
        return None if by_ns is None else max(0.0, (by_ns - self._sending.clock()) / 1e9)

    def invocation_metadata(self) -> Metadata:
        return self._stream.head.metadata

    def set_trailing_metadata(self, metadata: Sequence[MetadataEntry]) -> None:
        self._trailing = tuple(metadata)

    def has_unread(self) -> bool:
        """Whether a message that ``read`` has not returned has arrived or is arriving. Not in grpcio."""
        return self._stream.is_arriving(self._sending.clock())

    async def read(self) -> Any:
        """Return the next message; ``grpc.aio.EOF`` after the last message, or if the call has ended."""
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
            # The handler makes its own reservation for the message, in the turn in which this one ends.
            with Reservation(self._gate, 0) as reservation:
                return await inflate(message, stream.head.encoding, reservation, max_bytes=stream.reader.max_bytes)
        except RejectedMessageError as rejection:
            self._sending.end(stream, rejection.code, rejection.text, is_prompt=True)
        except ServeError as error:  # another name than above: mypyc gives a name one type in a coroutine
            self._sending.end(stream, *status_of(error), is_prompt=True)
        return grpc.aio.EOF

    async def write(self, message: bytes | memoryview) -> None:
        """Send a message. Returns when the transport has accepted it."""
        await self.send(message)
        stream = self._stream
        while stream.unsent:
            stream.writing = asyncio.get_running_loop().create_future()
            await stream.writing

    async def send(self, message: bytes | memoryview) -> None:
        """Queue a message, compressed if the answer has an encoding."""
        stream = self._stream
        is_compressed = False
        if stream.encoding:
            message, is_compressed = await compress(message, stream.encoding, self._gate.memory)
        self._sending.send_message(stream, message, is_compressed=is_compressed)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[MetadataEntry] = ()
    ) -> NoReturn:
        self._sending.end(self._stream, code, details, (*self._trailing, *trailing_metadata))
        raise grpc.aio.AbortError


def _on_failure(stream: Stream, sending: Sending, error: ServeError) -> None:
    stream.cancel = None
    sending.end(stream, *status_of(error), is_prompt=True)  # drops the rest of an answer that failed in the middle


def _cancel(task: asyncio.Task[None]) -> None:
    if task is not asyncio.current_task():  # a handler that ends its own call is not cancelled
        task.cancel()
