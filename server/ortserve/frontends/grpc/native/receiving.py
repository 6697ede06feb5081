"""The receiving half of a connection: turns frames into streams, messages and windows.

It limits the cost that a peer can cause: the number of streams, and the memory of requests and of unsent answers.
``flood_limits`` limits the frames that carry no request, and ``frame_reader`` header blocks and frames.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import grpc

from ortserve.errors import ServeError, out_of_memory
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.flood_limits import (
    PART_CREDIT,
    SMALL_FRAME_BYTES,
    WINDOW_UPDATE_BYTES,
    PingLimit,
    ResetLimit,
    TokenBucket,
)
from ortserve.frontends.grpc.native.flow_control import CONNECTION_WINDOW, STREAM_WINDOW, ReceiveWindow
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import HeaderReader, Headers
from ortserve.frontends.grpc.native.limits import Lifetime, Limits
from ortserve.frontends.grpc.native.messages import RejectedMessageError
from ortserve.frontends.grpc.native.request_head import TOO_LARGE, MalformedRequestError, check_trailers, read_head
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.frontends.grpc.native.timeouts import CallTimeouts
from ortserve.frontends.large_body import LargeBody

_KEPT_GAPS: Final = 64
"""Maximum number of stored gaps between the ids of consecutive streams. Clients leave at most one, at the beginning."""

_FLOOD: Final = "too many frames without a request"

DRAIN_PING: Final = b"draining"
"""Payload of the PING after the first GOAWAY. The answer shows that the peer has read the GOAWAY."""


class Receiving:
    """Handles the frames of one connection, as a ``FrameTaker``. Loop thread only.

    Attributes:
        last_id: Highest id of a stream that was begun or rejected.
        goaway_id: Highest id of a stream that may still begin.
    """

    def __init__(
        self,
        dispatcher: CallDispatcher,
        limits: Limits,
        sending: Sending,
        writer: FrameWriter,
        timeouts: CallTimeouts,
        life: Lifetime,
        on_drain_answer: Callable[[], None],
    ) -> None:
        """``on_drain_answer`` handles the answer to ``DRAIN_PING``."""
        self._dispatcher = dispatcher
        self._limits = limits
        self._sending = sending
        self._writer = writer
        self._timeouts = timeouts
        self._life = life
        self._on_drain_answer = on_drain_answer
        self._streams: Final = sending.streams
        self._headers = HeaderReader()
        self._last_headers: Headers | None = None
        """Headers of the latest request; ``_last_head`` holds the result of ``read_head`` for them. Most calls of a
        client repeat their headers. They may contain a key, as the HPACK table may; both end with the connection."""
        self._last_head = TOO_LARGE
        self._flood = TokenBucket(life.heard_ns)
        self._resets = ResetLimit(self._flood)
        self._window_updates = TokenBucket(life.heard_ns)
        self._small_frames = TokenBucket(life.heard_ns)
        self._data_credit = 0
        self._pings = PingLimit(limits)
        self.last_id = 0
        self._skipped: Final[deque[tuple[int, int]]] = deque(maxlen=_KEPT_GAPS)
        self.goaway_id = frames.MAX_STREAM_ID
        self._window = ReceiveWindow(CONNECTION_WINDOW)
        self._data_stream: Stream | None = None
        self._data_is_end = False

    # DATA

    def on_data(self, stream_id: int, length: int, *, is_end: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_begun(stream_id, "DATA")
        if not self._window.take(length):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the connection")
        credit = self._window.credit()
        if credit:
            self._writer.control(frames.window_update(0, credit))
        if length == 0 and (stream is None or not is_end):
            self._charge()
        self._data_stream, self._data_is_end = stream, is_end
        if stream is None:
            return  # the frame was on its way when the stream ended
        if stream.is_half_closed:
            self._data_stream = None
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
        elif not stream.window.take(length):
            self._data_stream = None
            self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        elif length >= SMALL_FRAME_BYTES:
            self._data_credit += length // SMALL_FRAME_BYTES
        elif 0 < length < stream.reader.length - stream.reader.kept_bytes:
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
        stream = self._data_stream
        if stream is None or stream.is_over:
            return
        if stream.trailers is not None:  # the call has ended; the rest of its request is discarded
            stream.is_half_closed = is_last and self._data_is_end
            return
        if stream.announced_left is not None:
            stream.announced_left -= end - begin
            if stream.announced_left < 0:
                self._reset(stream.id, ErrorCode.PROTOCOL_ERROR)
                return
        reader = stream.reader
        if end > begin:
            was_length = reader.length
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
                begins = reader.length if messages or was_length < 0 else 0
                if not self._reserve(stream, announced=begins):
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

        ``announced`` is the size of a message that begins, else 0. A message that cannot fit is rejected at its
        beginning, but only received bytes stay reserved: otherwise a caller could block others by announcing a message.
        A stream of many requests does not end for one of them: memory up to its window is counted without a limit, and
        the handler that reads the message rejects this request.
        """
        hold = stream.hold
        if hold is None:
            hold = stream.hold = self._dispatcher.open_hold()
        if announced > 0:
            stream.since_ns, stream.since_bytes = self._life.heard_ns, 0
        kept = stream.kept_bytes
        if stream.takes_messages and stream.reader.length <= STREAM_WINDOW:
            hold.count(kept)
            return True
        try:
            if announced > 0:
                hold.resize(kept - stream.reader.kept_bytes + announced)
            hold.resize(kept)
        except ServeError as error:
            self._sending.end(stream, *status_of(error), is_prompt=True)
            return False
        return True

    # HEADERS

    def on_header_block(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        headers = self._headers.read(block)  # always decode: later blocks depend on the table
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, headers, is_end=is_end)
            return
        if stream_id <= self.last_id:
            self._check_begun(stream_id, "HEADERS")
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
            return
        if stream_id > self.last_id + 2:
            self._skipped.append((self.last_id, stream_id))
        self.last_id = stream_id
        if stream_id > self.goaway_id:
            self._charge()
            return
        sending = self._sending
        if len(self._streams) >= self._limits.max_streams or (sending.unsent_bytes and sending.has_too_much_unsent()):
            self._reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if headers is not self._last_headers:  # the reader returns the same object for a cached block
            try:
                self._last_head = TOO_LARGE if headers is None else read_head(headers)
            except MalformedRequestError:
                self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
            self._last_headers = headers
        head = self._last_head
        self._resets.begun += 1
        heard_ns = self._life.heard_ns
        stream = Stream(
            stream_id,
            head,
            heard_ns,
            max_message_bytes=self._limits.max_message_bytes,
            send_window=sending.initial_window,
            memory=self._dispatcher.memory,
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

    def _check_begun(self, stream_id: int, frame: str) -> None:
        """End the connection if the peer never began the stream of a frame.

        A stream is idle until its HEADERS. HEADERS of a higher stream close it unused (RFC 9113, section 5.1.1).
        """
        if (
            stream_id % 2 == 0
            or stream_id > self.last_id
            or any(after < stream_id < before for after, before in self._skipped)
        ):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"{frame} of an idle stream")

    def _on_trailers(self, stream: Stream, headers: Headers | None, *, is_end: bool) -> None:
        if stream.is_half_closed:
            self._reset(stream.id, ErrorCode.STREAM_CLOSED)
            return
        try:
            if headers is not None:
                check_trailers(headers)
        except MalformedRequestError:
            is_end = False
        if is_end:
            self._half_close(stream)
        else:
            self._reset(stream.id, ErrorCode.PROTOCOL_ERROR)

    def _half_close(self, stream: Stream) -> None:
        stream.is_half_closed = True
        if stream.is_over or stream.trailers is not None:
            return
        if stream.announced_left:  # less DATA than announced by content-length (RFC 9113, section 8.1.1)
            self._reset(stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        if stream.reader.length >= 0 or stream.reader.prefix:
            text = "the stream ended in the middle of a message"
            self._sending.end(stream, grpc.StatusCode.INTERNAL, text, is_prompt=True)
            return
        self._dispatcher.on_message(stream, self._sending)

    # Other frames

    def on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE: expected 4 bytes")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        sending = self._sending
        credit, sending.window_credit = sending.window_credit, 0
        if not self._window_updates.take(self._life.heard_ns, credit / WINDOW_UPDATE_BYTES):
            text = "too many WINDOW_UPDATEs for the bytes that were sent"
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        if stream_id == 0:
            if increment == 0:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE: expected at least 1, got 0")
            sending.window += increment
            if sending.window > frames.MAX_WINDOW:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            sending.on_window()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_begun(stream_id, "WINDOW_UPDATE")
        if increment == 0:
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream is not None:
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            elif stream.unsent:
                sending.on_stream_window(stream)

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.PING:
            self._on_ping(stream_id, flags, payload)
        elif kind == frames.SETTINGS:
            _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
            self._charge()
            if flags & frames.ACK:
                _check(not payload, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK: expected no payload")
            else:
                self._sending.apply(frames.read_peer_settings(payload))
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if kind == frames.PRIORITY:
                _check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
                _check(len(payload) == 5, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY: expected 5 bytes")
            elif kind == frames.GOAWAY:
                _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
                _check(len(payload) >= 8, ErrorCode.FRAME_SIZE_ERROR, "GOAWAY: expected at least 8 bytes")
            self._charge()  # these frames need no reaction, and unknown types are ignored

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        _check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, "PING: expected 8 bytes")
        self._charge()
        if flags & frames.ACK:
            if payload == DRAIN_PING:
                self._on_drain_answer()
            return
        if self._sending.has_answered:
            self._sending.has_answered = False
            self._pings.reset()
        if not self._pings.admit(self._life.heard_ns, has_calls=bool(self._streams)):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._writer.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM: expected 4 bytes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_begun(stream_id, "RST_STREAM")
        begun_ns = None if stream is None else stream.begun_ns
        if not self._resets.admit(begun_ns, len(self._streams), self._life.heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, _FLOOD)
        if stream is not None:
            self._sending.drop(stream, "reset_by_caller")

    # The end of streams

    def end_input(self) -> None:
        """Continue the complete requests and end the incomplete ones: the peer has closed its side."""
        for stream in list(self._streams.values()):
            if stream.is_half_closed:
                continue
            if stream.announced_left or stream.reader.length >= 0 or stream.reader.prefix:
                self._writer.control(frames.rst_stream(stream.id, ErrorCode.CANCEL))
                self._sending.drop(stream, "disconnected")
            else:
                self._half_close(stream)

    def close(self, cause: str) -> None:
        """End all streams, because the connection has ended."""
        self._timeouts.close()
        for stream in list(self._streams.values()):
            self._sending.drop(stream, cause)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._charge()
        self._writer.control(frames.rst_stream(stream_id, code))
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._sending.drop(stream, "stream_error")

    def _charge(self) -> None:
        """Count a frame that carries no request. Raises Http2ConnectionError: The frame exceeds the limit."""
        if not self._flood.take(self._life.heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, _FLOOD)


def _check(is_valid: bool, code: ErrorCode, text: str) -> None:
    if not is_valid:
        raise Http2ConnectionError(code, text)
