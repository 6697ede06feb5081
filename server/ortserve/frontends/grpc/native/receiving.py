"""The receiving half of a connection: turns the frames of requests into streams and messages.

It limits the cost that a peer can cause: the number of streams, and the memory of requests and of unsent answers.
``control_frames`` handles the other frames, and ``frame_reader`` limits header blocks and frames.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final

import grpc

from ortserve.config.option_groups import GrpcOptions
from ortserve.errors import ServeError, out_of_memory
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.flood_limits import (
    FLOOD,
    PART_CREDIT,
    SMALL_FRAME_BYTES,
    TokenBucket,
)
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import HeaderReader, Headers
from ortserve.frontends.grpc.native.limits import CONNECTION_WINDOW, STREAM_WINDOW, Lifetime, max_calls
from ortserve.frontends.grpc.native.messages import RejectedMessageError
from ortserve.frontends.grpc.native.request_head import TOO_LARGE, MalformedRequestError, check_trailers, read_head
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import ReceiveWindow, Stream
from ortserve.frontends.grpc.native.timeouts import CallTimeouts
from ortserve.frontends.large_body import LARGE_BYTES, LargeBody
from ortserve.service.gate import Reservation

_KEPT_GAPS: Final = 64
"""Maximum number of stored gaps between the ids of consecutive streams. Clients leave at most one, at the beginning."""


_SMALL_BYTES: Final = 256
"""Maximum size of a message that is received beyond the memory limit. A stream itself takes more memory."""


class Receiving:
    """Handles the HEADERS and DATA of one connection. Loop thread only.

    The methods that handle frames raise Http2ConnectionError if the connection must end.

    Attributes:
        flood: Limits the frames of the connection that carry no request.
        begun_calls: Number of calls so far.
        last_id: Highest id of a stream that was begun or rejected.
        accepts_calls: Whether calls may still begin.
    """

    def __init__(
        self,
        dispatcher: CallDispatcher,
        options: GrpcOptions,
        sending: Sending,
        writer: FrameWriter,
        timeouts: CallTimeouts,
        life: Lifetime,
    ) -> None:
        self._dispatcher = dispatcher
        self._max_calls = max_calls(options)
        self._sending = sending
        self._writer = writer
        self._timeouts = timeouts
        self._life = life
        self._streams: Final = sending.streams
        self._headers = HeaderReader()
        self._last_headers: Headers | None = None
        """Headers of the latest request; None if they were too large. Most calls of a client repeat their headers. They
        may contain a key, as the HPACK table may; both end with the connection."""
        self._last_head = TOO_LARGE
        """The head that was read from ``_last_headers``."""
        self.flood: Final = TokenBucket(life.heard_ns)
        self._small_frames = TokenBucket(life.heard_ns)
        self._data_credit = 0
        self.begun_calls = 0
        self.last_id = 0
        self._skipped: Final[deque[tuple[int, int]]] = deque(maxlen=_KEPT_GAPS)
        self.accepts_calls = True
        self._window = ReceiveWindow(CONNECTION_WINDOW)
        self._data_stream: Stream | None = None
        self._data_is_end = False

    # DATA

    def on_data(self, stream_id: int, length: int, *, is_end: bool) -> None:
        """Handle the beginning of a DATA frame; ``length`` includes the padding."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self.check_begun(stream_id, "DATA")
        if not self._window.take(length):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the connection")
        credit = self._window.credit()
        if credit:
            self._writer.control(frames.window_update(0, credit))
        ends_request = is_end and (stream is not None or self._writer.forget_reset(stream_id))
        if length == 0 and not ends_request:
            self.charge()
        self._data_stream, self._data_is_end = stream, is_end
        if stream is None:
            return  # the frame was on its way when the stream ended
        if stream.is_half_closed:
            self._data_stream = None
            self.reset(stream_id, ErrorCode.STREAM_CLOSED)
        elif not stream.window.take(length):
            self._data_stream = None
            self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        elif length >= SMALL_FRAME_BYTES:
            self._data_credit += length // SMALL_FRAME_BYTES
        elif 0 < length < stream.reader.length - stream.reader.kept_bytes:  # small, and does not complete its message
            credit, self._data_credit = self._data_credit, 0
            if not self._small_frames.take(self._life.heard_ns, credit):
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many small DATA frames within messages")

    def placing(self) -> LargeBody | None:
        """Return the memory for the next bytes of DATA; None if they are not part of a large message."""
        stream = self._data_stream
        if stream is None or stream.is_over or stream.trailers is not None:
            return None
        return stream.reader.large

    def on_data_part(self, data: bytes | None, begin: int, end: int, *, is_last: bool) -> None:
        """Handle the next bytes of the current DATA frame: ``data`` from ``begin`` to ``end``, empty without payload.

        ``data`` is None for bytes that were received directly into their final memory.
        """
        stream = self._data_stream
        if stream is None or stream.is_over:
            return
        if stream.trailers is not None:  # the call has ended; the rest of its request is discarded
            stream.is_half_closed = is_last and self._data_is_end
            return
        if stream.announced_left is not None:
            stream.announced_left -= end - begin
            if stream.announced_left < 0:
                self.reset(stream.id, ErrorCode.PROTOCOL_ERROR)
                return
        reader = stream.reader
        if end > begin:
            was_between_messages = reader.length < 0
            try:
                messages = reader.add(end - begin) if data is None else reader.feed(data, begin, end)
            except RejectedMessageError as error:
                self._sending.end(stream, error.code, error.text, is_prompt=True)
                return
            except MemoryError:
                self._sending.end(stream, *status_of(out_of_memory("receiving a message")), is_prompt=True)
                return
            if messages:
                stream.put(messages)
            if reader.length >= 0 or (messages and stream.takes_messages):
                begins = was_between_messages or bool(messages)
                if not self._reserve(stream, announced=max(0, reader.length) if begins else 0):
                    return
        else:
            messages = []
        if is_last and self._data_is_end:
            self._half_close(stream)
        elif messages:
            self._dispatcher.on_message(stream, self._sending)
        elif not stream.messages:
            self._sending.credit(stream)  # incomplete message; the handler of complete messages returns their credit

    def _reserve(self, stream: Stream, *, announced: int) -> bool:
        """Reserve memory for the received part of a request. Returns False if memory is short; the call has then ended.

        ``announced`` is the size of a message that begins, else 0. The rule depends on the message:

        - A message of a stream of many requests, up to the size of its window, is only counted. The handler that reads
          it rejects this one request, and the stream goes on. But a large one ends the stream if the sum of all
          reservations exceeds twice the limit; otherwise a thousand streams could each hold the bytes of their window.
        - A small message is only counted: a health check is answered at the limit, in however many frames it arrives.
        - Any other message that cannot fit is rejected at its beginning. Then only its received bytes stay reserved, so
          that no caller blocks others by announcing a message.
        """
        reservation = stream.reservation
        if reservation is None:
            reservation = stream.reservation = Reservation(self._dispatcher.gate, 0)
        if announced > 0:
            stream.since_ns, stream.since_bytes = self._life.heard_ns, 0
        kept = stream.kept_bytes
        try:
            if stream.takes_messages and stream.reader.length <= STREAM_WINDOW:
                if kept <= LARGE_BYTES:
                    reservation.set_unchecked(kept)
                else:
                    reservation.set_up_to_twice(kept)
            elif max(stream.reader.length, kept) <= _SMALL_BYTES:
                reservation.set_unchecked(kept)
            else:
                if announced > 0:
                    reservation.resize(kept - stream.reader.kept_bytes + announced)
                reservation.resize(kept)
        except ServeError as error:
            self._sending.end(stream, *status_of(error), is_prompt=True)
            return False
        return True

    # HEADERS

    def on_header_block(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        """Handle a complete header block; ``is_end`` if it ends its stream."""
        headers = self._headers.read(block)  # always decode: later blocks depend on the table
        if stream_id <= self.last_id:
            self._on_trailers(stream_id, headers, is_end=is_end)
            return
        if stream_id > self.last_id + 2:
            self._skipped.append((self.last_id, stream_id))
        self.last_id = stream_id
        if not self.accepts_calls:
            self.charge()
            return
        sending = self._sending
        if len(self._streams) >= self._max_calls or (sending.unsent_bytes and sending.has_too_much_unsent()):
            self.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if headers is not self._last_headers:  # the reader returns the same object for a cached block
            try:
                self._last_head = TOO_LARGE if headers is None else read_head(headers)
            except MalformedRequestError:
                self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
            self._last_headers = headers
        head = self._last_head
        self.begun_calls += 1
        heard_ns = self._life.heard_ns
        stream = Stream(
            stream_id,
            head,
            heard_ns,
            max_message_bytes=self._dispatcher.max_quick_bytes,
            memory=self._dispatcher.gate.memory,
        )
        self._streams[stream_id] = stream
        sending.window_credit += PART_CREDIT  # some peers enlarge the window of each new stream
        self._life.useful_ns = heard_ns
        stream.is_half_closed = is_end
        if head.http_status != 200:
            sending.reject_http(stream, head.http_status)
        elif head.rejection is not None:
            sending.end(stream, *head.rejection)
        else:
            if head.timeout_ns is not None:
                stream.deadline_ns = by_ns = heard_ns + head.timeout_ns
                if by_ns < self._timeouts.next_deadline_ns:
                    self._timeouts.wake_at(by_ns)
            self._dispatcher.begin(stream, sending)
            if is_end:
                self._half_close(stream)

    def check_begun(self, stream_id: int, frame: str) -> None:
        """End the connection if the peer never began the stream of a frame.

        A stream is idle until its HEADERS. HEADERS of a higher stream close it unused (RFC 9113, section 5.1.1).
        """
        if (
            stream_id % 2 == 0
            or stream_id > self.last_id
            or any(after < stream_id < before for after, before in self._skipped)
        ):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"{frame} of an idle stream")

    def _on_trailers(self, stream_id: int, headers: Headers | None, *, is_end: bool) -> None:
        """Handle a header block of a stream that has begun: it may only end the request."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self.check_begun(stream_id, "HEADERS")
            if not (is_end and self._writer.forget_reset(stream_id)):  # the request was answered before its end
                self.reset(stream_id, ErrorCode.STREAM_CLOSED)
            return
        if stream.is_half_closed:
            self.reset(stream_id, ErrorCode.STREAM_CLOSED)
            return
        try:
            if headers is not None:
                check_trailers(headers)
        except MalformedRequestError:
            is_end = False
        if is_end:
            self._half_close(stream)
        else:
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _half_close(self, stream: Stream) -> None:
        stream.is_half_closed = True
        if stream.is_over or stream.trailers is not None:
            return
        if stream.announced_left:  # less DATA than announced by content-length (RFC 9113, section 8.1.1)
            self.reset(stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        if stream.reader.length >= 0 or stream.reader.prefix:
            text = "the stream ended in the middle of a message"
            self._sending.end(stream, grpc.StatusCode.INTERNAL, text, is_prompt=True)
            return
        self._dispatcher.on_message(stream, self._sending)

    # The end of streams

    def end_input(self) -> Iterator[None]:
        """End the input of a stream with each step: the peer has closed its side. Incomplete requests end."""
        for stream in list(self._streams.values()):
            if stream.is_half_closed or stream.is_over:  # it may have ended between two steps
                continue
            if stream.announced_left or stream.reader.length >= 0 or stream.reader.prefix:
                self._writer.control(frames.rst_stream(stream.id, ErrorCode.CANCEL))
                self._sending.drop(stream, "disconnected")
            else:
                self._half_close(stream)
            yield

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Send RST_STREAM, which costs a token, and end the stream if it is open."""
        self.charge()
        self._writer.forget_reset(stream_id)
        self._writer.control(frames.rst_stream(stream_id, code))
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._sending.drop(stream, "stream_error")

    def charge(self) -> None:
        """Count a frame that carries no request. Raises Http2ConnectionError: The frame exceeds the limit."""
        if not self.flood.take(self._life.heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, FLOOD)
