"""One stream of a connection: what came of a call's request and what is still to be sent of its answer.

Holds state only; ``receiving`` and ``sending`` move it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ortserve.core.large_memory import LargeMemory
from ortserve.frontends.grpc.native.messages import Message, MessageReader
from ortserve.frontends.grpc.native.request_head import RequestHead
from ortserve.frontends.grpc.native.windows import ReceiveWindow
from ortserve.service.gate import Hold

STREAM_WINDOW: Final = 1024 * 1024
"""What a caller may send of one stream before it hears of us."""

_MESSAGE_OVERHEAD: Final = 128
"""Bytes that a message costs beside its own, so that empty ones are not free."""


class Stream:
    """Loop thread only.

    Attributes:
        head: What its headers said.
        begun_ns: When they came.
        reader: Puts the messages together.
        messages: Whole ones that nobody took yet.
        window: What the caller may still send.
        hold: The room that is counted for what is kept of the request; None where nothing ever was.
        since_ns: When the time began in which the message that is not whole must come on.
        since_bytes: What was here of it then.
        announced_left: Bytes of DATA that its content-length says are still to come; None where there is none.
        is_half_closed: Whether the caller has sent all.
        takes_messages: Whether a handler reads one message after the other.
        reading: Done when there is something new to read; None where nobody waits.
        send_window: Bytes that the caller takes; below 0 after it has lowered its settings.
        unsent: Parts of messages, in order.
        sent_bytes: Of messages that had to wait.
        trailers: The header block that ends it, once all messages are sent; None while it goes on.
        writing: Done when nothing is unsent any more; None where nobody waits.
        has_headers: Whether its headers were sent.
        encoding: How messages to the caller are compressed; empty where they are not.
        is_over: Whether nothing is to be sent any more.
        deadline_ns: When its caller waits no longer (monotonic), None for no bound.
        cancel: Ends the work for it; None where there is none.
    """

    __slots__ = (
        "_waiting_bytes",
        "announced_left",
        "begun_ns",
        "cancel",
        "deadline_ns",
        "encoding",
        "has_headers",
        "head",
        "hold",
        "id",
        "is_half_closed",
        "is_over",
        "messages",
        "reader",
        "reading",
        "send_window",
        "sent_bytes",
        "since_bytes",
        "since_ns",
        "takes_messages",
        "trailers",
        "unsent",
        "window",
        "writing",
    )

    def __init__(
        self,
        stream_id: int,
        head: RequestHead,
        begun_ns: int,
        *,
        max_message_bytes: int,
        send_window: int,
        memory: LargeMemory,
    ) -> None:
        self.id = stream_id
        self.head = head
        self.begun_ns = begun_ns
        self.reader = MessageReader(max_message_bytes, memory)
        self.messages: deque[Message] = deque()
        self._waiting_bytes = 0
        self.window = ReceiveWindow(STREAM_WINDOW)
        self.hold: Hold | None = None
        self.since_ns = 0
        self.since_bytes = 0
        self.announced_left = head.content_length
        self.is_half_closed = False
        self.takes_messages = False
        self.reading: asyncio.Future[None] | None = None
        self.send_window = send_window
        self.unsent: deque[bytes | memoryview] = deque()
        self.sent_bytes = 0
        self.trailers: bytes | None = None
        self.writing: asyncio.Future[None] | None = None
        self.has_headers = False
        self.encoding = b""
        self.is_over = False
        self.deadline_ns: int | None = None
        self.cancel: Callable[[], object] | None = None

    @property
    def kept_bytes(self) -> int:
        """Of the request, what is here and nobody took."""
        return self.reader.kept_bytes + self._waiting_bytes

    def put(self, messages: list[Message]) -> None:
        """Have whole messages wait for who takes them."""
        self.messages.extend(messages)
        self._waiting_bytes += sum(len(message) + _MESSAGE_OVERHEAD for message, _ in messages)

    @property
    def waits_for_caller(self) -> bool:
        """Whether something is kept that is of no use before the caller sends more."""
        return not self.is_half_closed and self.reader.kept_bytes > 0

    def take(self) -> Message:
        """Take the oldest whole message."""
        message = self.messages.popleft()
        size = len(message[0]) + _MESSAGE_OVERHEAD
        self._waiting_bytes -= size
        if self.hold is not None:
            self.hold.shrink(size)
        return message

    def forget_request(self) -> None:
        """Let go of all that is kept of the request."""
        self.reader.clear()
        self.messages.clear()
        self._waiting_bytes = 0
        if self.hold is not None:
            self.hold.release()

    def wake_reader(self) -> None:
        if self.reading is not None and not self.reading.done():
            self.reading.set_result(None)

    def wake_writer(self) -> None:
        if self.writing is not None and not self.writing.done():
            self.writing.set_result(None)
