"""The sending half of a connection: sends answers as far as windows and transport allow, and ends streams.

A stream whose own window is used up waits for that window only. All other streams with unsent bytes are in one queue
and send in turns.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import grpc

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import MetadataEntry, status_of
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.flood_limits import PART_CREDIT
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.frames import PeerSettings
from ortserve.frontends.grpc.native.header_blocks import (
    OK_STATUS,
    RESIZED_TO_NOTHING,
    RESPONSE_HEADERS,
    http_status_block,
    literal,
    status_block,
)
from ortserve.frontends.grpc.native.limits import Lifetime
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.frontends.unsent_answers import UnsentBudget

_TURN_BYTES: Final = 256 * 1024
"""Bytes that one stream sends before other streams get their turn."""

_TURN_STREAMS: Final = 256
"""Streams that continue in one turn of the loop: 2,000 streams, which wait for one frame of the peer, take 12 ms."""

_MAX_FRAME_BYTES: Final = 64 * 1024
"""Maximum size of a DATA frame, even if the peer accepts larger ones: other streams wait for the end of a frame."""

_ENDS: Final = frames.END_HEADERS | frames.END_STREAM
_HEADERS_BEFORE_DATA: Final = len(RESPONSE_HEADERS) << 8 | frames.HEADERS


class Sending:
    """Sends the answers of one connection. An ``AnswerHolder``. Loop thread only.

    Attributes:
        clock: Monotonic nanoseconds.
        streams: The open streams by id, oldest first. ``receiving`` adds streams.
        window: Bytes that the peer accepts on the whole connection.
        initial_window: Bytes that the peer accepts on a new stream.
        unsent_bytes: Bytes of messages that neither a window nor the transport has accepted.
        unsent_since_ns: Time from which neither has accepted any of them.
        has_answered: Whether part of a call was sent since the attribute was last set to False.
        window_credit: Bytes of DATA sent, plus ``PART_CREDIT`` per whole part, since the last WINDOW_UPDATE.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        writer: FrameWriter,
        life: Lifetime,
        budget: UnsentBudget,
        *,
        on_cut_answer: Callable[[str], None],
        on_stream_drained: Callable[[], None],
    ) -> None:
        """Store the parameters.

        Args:
            loop: The event loop of the connection.
            clock: Monotonic nanoseconds.
            writer: Writes the frames.
            life: Lifetime of the connection.
            budget: Budget for unsent answers, which all connections share.
            on_cut_answer: Counts an answer that ends before the transport has accepted all of it; its argument is the
                cause.
            on_stream_drained: Called after the end of each stream while the connection drains.
        """
        self.clock = clock
        self.streams: Final[dict[int, Stream]] = {}
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.unsent_bytes = 0
        self.unsent_since_ns = 0
        self.window_credit = 0
        self.has_answered = False
        self._sent_bytes = 0  # counted like ``Stream.sent_bytes``, but for all streams
        self._max_frame_size = frames.MIN_FRAME_SIZE
        self._resize = b""
        self._has_resized = False
        self._loop = loop
        self._writer = writer
        self._waiting: dict[int, Stream] = {}
        self._is_pump_due = self._have_grown = False
        self._most_added = 0  # no open stream has a greater ``added_window``
        self._life = life
        self._budget = budget
        self._on_cut_answer = on_cut_answer
        self._on_stream_drained = on_stream_drained

    def credit(self, stream: Stream) -> None:
        """Return the consumed part of a stream's window to the caller."""
        if not stream.is_half_closed and not stream.is_over:
            credit = stream.window.credit()
            if credit:
                self.has_answered = True
                self._writer.control(frames.window_update(stream.id, credit))

    # Answers

    def answer(self, stream: Stream, message: bytes | memoryview, trailing: bytes) -> None:
        """Send a complete answer: one uncompressed message. ``trailing`` is the header block of trailing metadata."""
        size = len(message) + 5
        if (
            size > frames.MIN_FRAME_SIZE
            or size > self.window_of(stream)
            or size > self.window
            or self._writer.is_paused
            or self._waiting
            or self._resize
            or stream.has_headers
            or stream.is_over
        ):
            self.send_message(stream, message)
            self._finish(stream, OK_STATUS + trailing)
            return
        header, stream_id = frames.pack_header, stream.id
        self._writer.put(
            b"".join(
                (
                    header(_HEADERS_BEFORE_DATA, frames.END_HEADERS, stream_id),
                    RESPONSE_HEADERS,
                    header(size << 8 | frames.DATA, 0, stream_id),
                    b"\x00",
                    (size - 5).to_bytes(4, "big"),
                    message,
                    header(len(OK_STATUS) + len(trailing) << 8 | frames.HEADERS, _ENDS, stream_id),
                    OK_STATUS,
                    trailing,
                )
            )
        )
        # State changes after the join: if that fails, the call can still end with an error.
        self.window -= size
        self.window_credit += PART_CREDIT
        self.has_answered = True
        stream.has_headers = True
        self._close(stream)
        if self.streams:
            self._writer.flush_soon()
        else:
            self._writer.flush()  # no other call is open whose answer could share the write

    def send_message(self, stream: Stream, message: bytes | memoryview, *, is_compressed: bool = False) -> None:
        """Queue a message; before the first one also the response headers."""
        if stream.is_over or stream.trailers is not None:
            return
        if not stream.has_headers:
            stream.has_headers = True
            block = RESPONSE_HEADERS
            if stream.encoding:
                block += literal(b"grpc-encoding", stream.encoding)
            self._headers(stream, block)
        prefix = (b"\x01" if is_compressed else b"\x00") + len(message).to_bytes(4, "big")
        if len(message) <= frames.MIN_FRAME_SIZE:
            stream.unsent.append(b"".join((prefix, message)))
        else:
            stream.unsent.append(prefix)
            stream.unsent.append(memoryview(message))
        self._budget.count(self, len(prefix) + len(message))
        if stream.id not in self._waiting:
            self._send_data(stream)

    def end(
        self,
        stream: Stream,
        code: grpc.StatusCode,
        details: str = "",
        metadata: Iterable[MetadataEntry] = (),
        *,
        is_prompt: bool = False,
    ) -> None:
        """End a call with a status, unless it has ended already. ``is_prompt`` drops unsent messages."""
        if stream.is_over or (stream.trailers is not None and not is_prompt):
            return
        block = status_block(code, details, metadata)
        if is_prompt:
            self._forget_unsent(stream, code.name.lower())
        self._finish(stream, block)

    def reject_http(self, stream: Stream, status: int) -> None:
        """Answer a request that is not gRPC."""
        self._headers(stream, http_status_block(status), is_end=True)
        self._close(stream)

    def drop(self, stream: Stream, cause: str) -> None:
        """End a stream without sending a frame: the stream was reset, or its connection has ended."""
        self._forget_unsent(stream, cause)
        self._end_stream(stream)

    def count_unsent(self) -> None:
        """Do nothing: all changes are counted at once."""

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        """End the oldest call with unsent bytes, as ``AnswerHolder`` defines."""
        unsent = (stream for stream in self.streams.values() if stream.unsent)
        oldest = next(unsent, None)
        if oldest is None or (is_alone and next(unsent, None) is None):
            return False
        self.end(oldest, *status_of(ServeError(ErrorKind.OVERLOADED, text)), is_prompt=True)
        return True

    # The peer's windows and settings

    def on_window(self) -> None:
        """Continue to send: the window of the connection has grown, or the transport accepts more."""
        if self._waiting and not self._writer.is_paused:
            self._pump_soon()

    def window_of(self, stream: Stream) -> int:
        """Bytes that the caller accepts on a stream; negative if its settings have lowered the window."""
        return self.initial_window + stream.added_window

    def add_window(self, stream: Stream, increment: int) -> bool:
        """Enlarge the window of a stream. Returns False if it exceeds its limit."""
        stream.added_window += increment
        self._most_added = max(self._most_added, stream.added_window)
        return self.window_of(stream) <= frames.MAX_WINDOW

    def on_stream_window(self, stream: Stream) -> None:
        """Continue to send a stream whose window has grown.

        Frames are cut after all received bytes were read, so that several small WINDOW_UPDATEs lead to one frame.
        """
        if stream.unsent and self.window_of(stream) > 0:
            self._waiting[stream.id] = stream
            self._pump_soon()

    def apply(self, settings: PeerSettings) -> None:
        """Acknowledge and apply the settings of the peer. Raises Http2ConnectionError: A window exceeds its limit."""
        if settings.max_frame_size is not None:
            self._max_frame_size = min(settings.max_frame_size, _MAX_FRAME_BYTES)
        is_smaller = settings.lowest_table is not None and settings.lowest_table < frames.DEFAULT_TABLE_SIZE
        if is_smaller and not self._has_resized:
            # The next block has to confirm a smaller table (RFC 7541, section 4.2). The table is never used, so setting
            # its size to 0 once is enough.
            self._has_resized = True
            self._resize = RESIZED_TO_NOTHING
        self._writer.control(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if settings.initial_window is None:
            return
        # The windows of open streams change by the same amount and may become negative (RFC 9113, section 6.9.2). They
        # are relative to the initial one, because a peer may send hundreds of SETTINGS beside 2,000 open streams.
        self._have_grown |= settings.initial_window > self.initial_window
        self.initial_window = settings.initial_window
        if self._most_added + self.initial_window > frames.MAX_WINDOW:
            self._most_added = max([0, *(stream.added_window for stream in self.streams.values())])
            if self._most_added + self.initial_window > frames.MAX_WINDOW:
                raise frames.too_large_window(self._most_added + self.initial_window)
        if self._have_grown and self.unsent_bytes:
            self._pump_soon()

    def has_too_much_unsent(self) -> bool:
        """Whether the connection must reject new calls, because of its unsent answers."""
        return self._budget.is_exceeded_by(self.unsent_bytes)

    def waits_for_window(self, stream: Stream) -> bool:
        """Whether a stream has unsent bytes and no window to send them."""
        return bool(stream.unsent) and (self.window_of(stream) <= 0 or self.window <= 0)

    def sent_by_stream(self) -> dict[int, int]:
        """Return ``sent_of`` each stream with unsent bytes. Key 0 is the transport, if it has unsent bytes."""
        sent = {0: self._writer.count_sent()} if self._writer.buffered_bytes else {}
        return sent | {stream.id: self.sent_of(stream) for stream in self.streams.values() if stream.unsent}

    def sent_of(self, stream: Stream) -> int:
        """Return the input of ``SendProgress`` for a stream: a number that grows when it makes progress.

        A stream that waits for the connection, not for its own window, makes progress whenever the connection sends
        bytes, or, while the transport is full, the transport.
        """
        if stream.id not in self._waiting:
            return stream.sent_bytes
        writer = self._writer
        return writer.sent_bytes if writer.is_paused else self._sent_bytes

    # Internals

    def _headers(self, stream: Stream, block: bytes, *, is_end: bool = False) -> None:
        if self._resize:
            block = self._resize + block
            self._resize = b""
        self.has_answered = True
        self._writer.control(frames.header_block(stream.id, block, self._max_frame_size, is_end=is_end))

    def _finish(self, stream: Stream, block: bytes) -> None:
        if stream.is_over:
            return
        if not stream.has_headers:  # trailers only
            stream.has_headers = True
            block = RESPONSE_HEADERS + block
        stream.trailers = block
        if not stream.unsent:
            self._send_trailers(stream)

    def _send_data(self, stream: Stream) -> None:
        """Send as much of a stream as windows, transport and turn allow. The rest waits for its turn or its window."""
        unsent = stream.unsent
        budget = _TURN_BYTES
        while unsent:
            part = unsent[0]
            window = self.window_of(stream)
            allowed = min(window, self.window, self._max_frame_size)
            if allowed <= 0 or self._writer.is_paused or budget <= 0:
                if window > 0:
                    self._waiting[stream.id] = stream
                if allowed > 0 and not self._writer.is_paused:
                    self._writer.flush()  # so that the transport can pause the writing
                    self._pump_soon()
                return
            if len(part) <= allowed:
                unsent.popleft()
                self.window_credit += PART_CREDIT
            else:
                unsent[0] = memoryview(part)[allowed:]
                part = memoryview(part)[:allowed]
            size = len(part)
            self.window_credit += size
            stream.added_window -= size
            self.window -= size
            self._budget.count(self, -size)
            self._sent_bytes += size
            stream.sent_bytes += size
            budget -= size
            self.has_answered = True
            self._writer.control(frames.frame_header(frames.DATA, 0, stream.id, size))
            self._writer.put(part)
        stream.wake_writer()
        if stream.trailers is not None:
            self._send_trailers(stream)

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        if self._have_grown:
            self._have_grown = False
            for stream in self.streams.values():
                self.on_stream_window(stream)
        self._is_pump_due = False
        for stream in list(islice(self._waiting.values(), _TURN_STREAMS)):
            if self._writer.is_paused or self.window <= 0:
                return
            if self._waiting.pop(stream.id, None) is not None:  # a stream with a rest re-enters at the end
                self._send_data(stream)
        self._writer.flush()
        self.on_window()  # other connections get their turn before the rest

    def _send_trailers(self, stream: Stream) -> None:
        assert stream.trailers is not None
        self._headers(stream, stream.trailers, is_end=True)
        self._close(stream)

    def _close(self, stream: Stream) -> None:
        if not stream.is_half_closed:
            self._writer.reset_later(stream.id)
        self._end_stream(stream)

    def _end_stream(self, stream: Stream) -> None:
        """Remove a stream, free its request, and cancel its work."""
        stream.is_over = True
        self.streams.pop(stream.id, None)
        stream.forget_request()
        if stream.reading is not None:
            stream.wake_reader()
        if stream.writing is not None:
            stream.wake_writer()
        self._life.useful_ns = self.clock()
        cancel, stream.cancel = stream.cancel, None
        if cancel is not None:
            cancel()
        if self._life.is_draining:
            self._on_stream_drained()

    def _forget_unsent(self, stream: Stream, cause: str) -> None:
        if not stream.unsent:
            return
        self._on_cut_answer(cause)
        self._waiting.pop(stream.id, None)
        self._budget.forget(self, sum(len(part) for part in stream.unsent))
        stream.unsent.clear()
