"""One stream of a connection: the received part of a call's request and the unsent part of its answer.

State only: ``receiving`` and ``sending`` change it. ``ReceiveWindow`` also limits what a whole connection receives.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ortserve.core.large_memory import LargeMemory
from ortserve.frontends.grpc.native.limits import STREAM_WINDOW
from ortserve.frontends.grpc.native.messages import Message, MessageReader
from ortserve.frontends.grpc.quick_calls import RequestHead
from ortserve.service.gate import Reservation

_MESSAGE_OVERHEAD: Final = 128
"""Bytes counted for a message besides its content, so that empty messages are not free."""

_ARRIVAL_NS: Final = 10_000_000_000
_ARRIVAL_BYTES_PER_S: Final = 4096
"""An incomplete message may take the first time, or longer at this rate, before its stream counts as idle."""


class ReceiveWindow:
    """Counts the bytes that the peer may still send, on a stream or a connection (RFC 9113, section 5.2).

    At least half of the window is returned to the peer at a time, so that few WINDOW_UPDATEs are sent.
    """

    __slots__ = ("_half", "_left", "_taken")

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._left = size
        self._taken = 0

    def take(self, size: int) -> bool:
        """Count received bytes. Returns False if the window was too small for them."""
        self._left -= size
        self._taken += size
        return self._left >= 0

    def credit(self) -> int:
        """Return the window to give back to the peer, after all received bytes were consumed; 0 below half of it."""
        taken = self._taken
        if taken < self._half:
            return 0
        self._left += taken
        self._taken = 0
        return taken


class Stream:
    """The state of one stream. Loop thread only.

    Attributes:
        id: Stream id of HTTP/2.
        head: Parsed headers of the request.
        begun_ns: Time at which the headers arrived.
        reader: Reads the messages of the request.
        messages: Complete messages that no handler has taken.
        message_count: Number of complete messages so far.
        window: Bytes that the caller may still send.
        reservation: Reservation for the request; None if no memory was reserved.
        since_ns: Start of the current measurement of the rate at which the incomplete message arrives. The message of a
            unary call is incomplete from ``begun_ns`` on.
        since_bytes: Received bytes of the incomplete message at ``since_ns``.
        announced_left: Bytes of DATA that ``content-length`` announced and that are missing; None without this header.
        is_half_closed: Whether the caller has ended its side.
        takes_messages: Whether a handler reads the messages; otherwise the request is a single message.
        reading: Done when a message or the end of the request has arrived; None if no handler waits.
        added_window: The caller's WINDOW_UPDATEs less the sent bytes; the window without ``Sending.initial_window``.
        unsent: Unsent parts of messages, in order.
        sent_bytes: Sent bytes of messages, without answers that were sent at once.
        trailers: Header block that ends the stream, sent after ``unsent``; None before the call has ended.
        writing: Done when ``unsent`` is empty; None if no handler waits.
        has_headers: Whether the headers of the answer were sent.
        encoding: Compression of messages to the caller; empty for uncompressed messages.
        is_over: Whether no further frame will be sent.
        deadline_ns: Monotonic time of the deadline of the call; None without a deadline.
        cancel: Cancels the work of the call; None without work.
    """

    def __init__(
        self,
        stream_id: int,
        head: RequestHead,
        begun_ns: int,
        *,
        max_message_bytes: int,
        memory: LargeMemory,
    ) -> None:
        self.id = stream_id
        self.head = head
        self.begun_ns = begun_ns
        self.reader = MessageReader(max_message_bytes, memory)
        self.messages: deque[Message] = deque()
        self.message_count = 0
        self._waiting_bytes = 0
        self.window = ReceiveWindow(STREAM_WINDOW)
        self.reservation: Reservation | None = None
        self.since_ns = begun_ns
        self.since_bytes = 0
        self.announced_left = head.content_length
        self.is_half_closed = False
        self.takes_messages = False
        self.reading: asyncio.Future[None] | None = None
        self.added_window = 0
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
        """Bytes of the request in memory that no handler has taken."""
        return self.reader.kept_bytes + self._waiting_bytes

    @property
    def waits_for_caller(self) -> bool:
        """Whether memory holds part of a message whose rest the caller has not sent, or a unary call has no message."""
        if self.is_half_closed:
            return False
        return self.reader.kept_bytes > 0 or not (self.takes_messages or self.message_count)

    def is_arriving(self, now_ns: int) -> bool:
        """Whether a message has arrived that no handler has taken, or content of one that does not arrive slowly."""
        if self.messages:
            return True
        waited_ns = now_ns - self.since_ns
        is_slow = (self.reader.kept_bytes - self.since_bytes) * 1e9 < waited_ns * _ARRIVAL_BYTES_PER_S
        return self.reader.kept_bytes > 0 and (waited_ns < _ARRIVAL_NS or not is_slow)

    def put(self, messages: list[Message]) -> None:
        """Enqueue complete messages."""
        self.messages.extend(messages)
        self.message_count += len(messages)
        for message, _ in messages:
            self._waiting_bytes += len(message) + _MESSAGE_OVERHEAD

    def take(self) -> Message:
        """Dequeue the oldest complete message."""
        message = self.messages.popleft()
        size = len(message[0]) + _MESSAGE_OVERHEAD
        self._waiting_bytes -= size
        if self.reservation is not None:
            self.reservation.shrink(size)
        return message

    def forget_request(self) -> None:
        """Free the received part of the request, and release its reservation."""
        if self.reader.length >= 0:
            self.reader.clear()
        self.messages.clear()
        self._waiting_bytes = 0
        if self.reservation is not None:
            self.reservation.release()

    def wake_reader(self) -> None:
        if self.reading is not None and not self.reading.done():
            self.reading.set_result(None)

    def wake_writer(self) -> None:
        if self.writing is not None and not self.writing.done():
            self.writing.set_result(None)
