"""One stream of a connection: what came of a call's request and what is still to be sent of its answer.

Holds state only; ``connection`` moves it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ortserve.frontends.grpc.native.messages import MessageReader
from ortserve.frontends.grpc.native.request_head import RequestHead

STREAM_WINDOW: Final = 1024 * 1024
"""What a caller may send of one stream before it hears of us."""


class Stream:
    """Loop thread only.

    Attributes:
        head: What its headers said.
        reader: Puts the messages together.
        messages: Whole ones that nobody took yet, each with whether it is compressed.
        is_half_closed: Whether the caller has sent all.
        receive_window: Bytes that the caller may still send.
        uncredited: Bytes that came and that the caller was not yet given room for again.
        reading: Done when there is something new to read; None where nobody waits.
        send_window: Bytes that the caller takes; below 0 after it has lowered its settings.
        unsent: Parts of messages, in order.
        trailers: The header block that ends it, once all messages are sent; None while it goes on.
        writing: Done when nothing is unsent any more; None where nobody waits.
        has_headers: Whether its headers were sent.
        is_over: Whether nothing is to be sent any more.
        deadline_ns: When its caller waits no longer (monotonic), None for no bound.
        cancel: Ends the work for it; None where there is none.
    """

    __slots__ = (
        "cancel",
        "deadline_ns",
        "has_headers",
        "head",
        "id",
        "is_half_closed",
        "is_over",
        "messages",
        "reader",
        "reading",
        "receive_window",
        "send_window",
        "trailers",
        "uncredited",
        "unsent",
        "writing",
    )

    def __init__(
        self, stream_id: int, head: RequestHead, reader: MessageReader, *, receive_window: int, send_window: int
    ) -> None:
        self.id = stream_id
        self.head = head
        self.reader = reader
        self.messages: deque[tuple[bytes, bool]] = deque()
        self.is_half_closed = False
        self.receive_window = receive_window
        self.uncredited = 0
        self.reading: asyncio.Future[None] | None = None
        self.send_window = send_window
        self.unsent: deque[bytes | memoryview] = deque()
        self.trailers: bytes | None = None
        self.writing: asyncio.Future[None] | None = None
        self.has_headers = False
        self.is_over = False
        self.deadline_ns: int | None = None
        self.cancel: Callable[[], object] | None = None

    def wake_reader(self) -> None:
        if self.reading is not None and not self.reading.done():
            self.reading.set_result(None)

    def wake_writer(self) -> None:
        if self.writing is not None and not self.writing.done():
            self.writing.set_result(None)
