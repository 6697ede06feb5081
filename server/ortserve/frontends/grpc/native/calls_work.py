"""From streams to the handlers of the calls: quick ones without a task, all others as grpc.aio would run them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import grpc

from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import (
    INTERNAL_ERROR,
    Handler,
    Metadata,
    MetadataEntry,
    QuickCall,
    check_key,
    seen,
    status_of,
)
from ortserve.frontends.grpc.native.compression import compressed
from ortserve.frontends.grpc.native.context import NativeContext
from ortserve.frontends.grpc.native.header_blocks import literal
from ortserve.frontends.grpc.native.sending import Sending, metadata_block
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.service.access import Guard
from ortserve.service.gate import Hold

logger: Final = logging.getLogger(__name__)


class CallsWork:
    """The ``Work`` of connections. Loop thread only.

    Attributes:
        memory: For large messages.
    """

    def __init__(
        self,
        find: Callable[[str], Handler],
        quick: Mapping[str, QuickCall],
        hold: Callable[[int], Hold],
        *,
        max_message_bytes: Callable[[str], int],
        encoding: bytes = b"",
        guards: Mapping[str, Guard] | None = None,
    ) -> None:
        """Take what answers.

        Args:
            find: The handler of a path; there is one for each.
            quick: By path, unary calls that need no task.
            hold: Lets so many bytes of a request in. Raises ServeError: overloaded.
            max_message_bytes: Of a message by its path, also without its compression; quick calls take as large ones
                as the connection.
            encoding: How answers are compressed to callers who understand it; empty for not at all.
            guards: By path, what asks callers for their keys.
        """
        self._guards = guards or None
        self._find = find
        self._quick = quick
        self._hold = hold
        self.memory = hold(0).memory
        self._max_message_bytes = max_message_bytes
        self._encoding = encoding
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def open_hold(self) -> Hold:
        return self._hold(0)

    def begin(self, stream: Stream, sending: Sending) -> None:
        if self._guards is not None:
            guard = self._guards.get(stream.head.path)
            if guard is not None and (error := check_key(guard, stream.head.metadata)) is not None:
                sending.end(stream, *status_of(error))
                return
        if self._encoding and self._encoding in stream.head.accepts:
            stream.encoding = self._encoding
        if stream.head.path not in self._quick:
            stream.reader.max_bytes = self._max_message_bytes(stream.head.path)
            self._start_handler(stream, sending)

    def on_message(self, stream: Stream, sending: Sending) -> None:
        if stream.takes_messages:
            stream.wake_reader()
            return
        has_begun = stream.cancel is not None
        if len(stream.messages) + has_begun != 1:
            text = f"expected one message, got {'more' if stream.messages else 'none'}"
            sending.end(stream, grpc.StatusCode.UNIMPLEMENTED, text, is_prompt=True)
            return
        if has_begun:
            return  # the caller has sent all only now
        if stream.messages[0][1]:  # compressed
            self._start_handler(stream, sending)
            return
        message, _ = stream.take()
        timeout_ns: int | None = None
        if stream.deadline_ns is not None:
            timeout_ns = max(0, stream.deadline_ns - sending.clock())
        on_answer = partial(self._on_answer, stream, sending)
        on_failure = partial(_on_failure, stream, sending)
        try:
            cancel = self._quick[stream.head.path](message, timeout_ns, stream.head, on_answer, on_failure)
        except Exception as error:  # noqa: BLE001 - it would end the connection, and all of its calls
            _on_failure(stream, sending, seen(error))
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
            self._start(stream, _answer_compressed(stream, sending, answer, metadata))

    async def until_done(self) -> None:
        """Wait for what still winds up after its stream was left."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start_handler(self, stream: Stream, sending: Sending) -> None:
        stream.takes_messages = True
        context = NativeContext(stream, sending, self.open_hold)
        self._start(stream, _run(self._find(stream.head.path), stream, sending, context))

    def _start(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself would let go of one that waits
        task.add_done_callback(self._tasks.discard)
        stream.cancel = partial(_cancel, task)


def _on_failure(stream: Stream, sending: Sending, error: ServeError) -> None:
    stream.cancel = None
    sending.end(stream, *status_of(error), is_prompt=True)  # of an answer that failed in its middle, nothing more


def _cancel(task: asyncio.Task[None]) -> None:
    if task is not asyncio.current_task():  # else it is over because its handler has ended it
        task.cancel()


async def _run(handler: Handler, stream: Stream, sending: Sending, context: NativeContext) -> None:
    try:
        call: Any = handler.unary_unary or handler.stream_stream
        if handler.unary_unary is None:
            await call(None, context)
        else:
            request = await context.read()
            if request is grpc.aio.EOF:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "expected one message, got none")
            await context.send(await call(request, context))
        sending.end(stream, grpc.StatusCode.OK, metadata=context.trailing)
    except grpc.aio.AbortError:
        pass
    except asyncio.CancelledError:
        sending.end(stream, grpc.StatusCode.CANCELLED, "the call was cancelled")  # unless its caller has left
        raise
    except Exception:
        logger.exception("call failed")
        sending.end(stream, *status_of(INTERNAL_ERROR), is_prompt=True)


async def _answer_compressed(stream: Stream, sending: Sending, answer: bytes | memoryview, metadata: Metadata) -> None:
    try:
        message, is_compressed = await compressed(answer, stream.encoding)
        sending.send_message(stream, message, is_compressed=is_compressed)
        sending.end(stream, grpc.StatusCode.OK, metadata=metadata)
    except Exception:
        logger.exception("an answer could not be compressed")
        sending.end(stream, *status_of(INTERNAL_ERROR), is_prompt=True)
