"""From streams to the handlers of the calls: quick ones without a task, all others as grpc.aio would run them."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import Handler, QuickCall, status_of
from ortserve.frontends.grpc.native.context import NativeContext
from ortserve.frontends.grpc.native.header_blocks import literal
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.service.gate import Hold

logger: Final = logging.getLogger(__name__)


class CallsWork:
    """The ``Work`` of connections. Loop thread only."""

    def __init__(
        self,
        find: Callable[[str], Handler],
        quick: Mapping[str, QuickCall],
        hold: Callable[[int], Hold],
        *,
        max_message_bytes: int,
    ) -> None:
        """Take what answers.

        Args:
            find: The handler of a path; there is one for each.
            quick: By path, unary calls that need no task.
            hold: Lets a message in before it is whole. Raises ServeError: overloaded.
            max_message_bytes: Of a message, without compression.
        """
        self._find = find
        self._quick = quick
        self._hold = hold
        self._max_message_bytes = max_message_bytes
        self._loop = asyncio.get_running_loop()

    def admit(self, size: int) -> Callable[[], None]:
        return self._hold(size).release

    def begin(self, stream: Stream, sending: Sending) -> None:
        if stream.head.path not in self._quick:
            self._start_task(stream, sending)

    def on_message(self, stream: Stream, sending: Sending) -> None:
        if stream.cancel is not None:
            stream.wake_reader()
            return
        if len(stream.messages) > 1 or (stream.is_half_closed and not stream.messages):
            sending.end(stream, grpc.StatusCode.UNIMPLEMENTED, f"expected one message, got {len(stream.messages)}")
            return
        if not stream.is_half_closed:
            return
        if stream.messages[0][1]:  # compressed
            self._start_task(stream, sending)
            return
        message, _ = stream.messages.popleft()

        def on_answer(answer: bytes, server_timing: bytes) -> None:
            stream.cancel = None
            sending.answer(stream, answer, literal(b"server-timing", server_timing))

        def on_failure(error: ServeError) -> None:
            stream.cancel = None
            sending.end(stream, *status_of(error))

        cancel = self._quick[stream.head.path](message, stream.head.timeout_ns, on_answer, on_failure)
        if not stream.is_over:
            stream.cancel = cancel

    def _start_task(self, stream: Stream, sending: Sending) -> None:
        context = NativeContext(stream, sending, max_message_bytes=self._max_message_bytes)
        task = self._loop.create_task(_run(self._find(stream.head.path), stream, sending, context))

        def cancel() -> None:
            if task is not asyncio.current_task():  # else it is over because its handler has ended it
                task.cancel()

        stream.cancel = cancel


async def _run(handler: Handler, stream: Stream, sending: Sending, context: NativeContext) -> None:
    try:
        call: Any = handler.unary_unary or handler.stream_stream
        if handler.unary_unary is None:
            await call(None, context)
        else:
            request = await context.read()
            if request is grpc.aio.EOF or await context.read() is not grpc.aio.EOF:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "expected one message, got another number")
            sending.send_message(stream, await call(request, context))
        sending.end(stream, grpc.StatusCode.OK, metadata=context.trailing)
    except grpc.aio.AbortError:
        pass
    except Exception:
        logger.exception("call failed")
        sending.end(stream, grpc.StatusCode.INTERNAL, "internal error")
