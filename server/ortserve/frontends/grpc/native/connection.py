"""One HTTP/2 connection of gRPC callers: frames in, calls begun, answers out (RFC 9113; gRPC over HTTP/2).

What a peer may cost is bounded: streams, header lists, what of a message is kept, windows, the time for a preface and a
header block, and by ``Patience`` whatever brings nobody an answer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol, cast

import grpc

from ortserve.clock import Clock
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError, Http2StreamError
from ortserve.frontends.grpc.native.header_blocks import HeaderReader
from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.messages import MessageReader, RefusedMessageError
from ortserve.frontends.grpc.native.patience import Patience
from ortserve.frontends.grpc.native.request_head import MalformedRequestError, read_head
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import STREAM_WINDOW, Stream

logger: Final = logging.getLogger(__name__)

_CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""What a caller may send before it hears of us: more than fits a network's delay, and little enough to be kept."""

_MAX_HEADER_BYTES: Final = 16 * 1024
"""Of a header block and of its list, as grpc has it."""
_MAX_CONTINUATIONS: Final = 8
_HANDSHAKE_S: Final = 10.0
_HEADER_BLOCK_S: Final = 10.0
_WRITE_BUFFER_BYTES: Final = 1024 * 1024


class Work(Protocol):
    """What is done with calls; its methods are called on the loop."""

    def begin(self, stream: Stream, sending: Sending) -> None:
        """A call came, whose messages are still to come."""
        ...

    def on_message(self, stream: Stream, sending: Sending) -> None:
        """There are new messages, or the caller has sent all."""
        ...

    def admit(self, size: int) -> Callable[[], None]:
        """Let a message of so many bytes in; returns what lets them go. Raises ServeError: overloaded."""
        ...


class Connection(asyncio.Protocol):
    """Made for each socket; ``connections`` holds those that are open."""

    def __init__(
        self, work: Work, limits: Limits, connections: "set[Connection]", clock: Clock, max_age_s: float | None
    ) -> None:
        """``max_age_s`` is this connection's own, so that not all that came together leave together."""
        self._work = work
        self._limits = limits
        self._connections = connections
        self._clock = clock
        self._max_age_s = max_age_s
        self._loop = asyncio.get_running_loop()
        self.closed: Final = self._loop.create_future()
        self._streams: dict[int, Stream] = {}
        self._headers = HeaderReader(_MAX_HEADER_BYTES)
        now_ns = clock()
        self._patience = Patience(now_ns)
        self._made_ns = self._heard_ns = self._useful_ns = now_ns
        self._rest = frames.PREFACE[:0]
        self._has_preface = False
        self._has_settings = False
        self._last_id = 0
        self._goaway_id = frames.MAX_STREAM_ID
        self._is_draining = False
        self._drain_ends_ns: int | None = None
        self._receive_window = _CONNECTION_WINDOW
        self._uncredited = 0
        self._data_stream: Stream | None = None
        self._data_left = 0
        self._data_ends = False
        self._block: list[bytes] | None = None
        self._block_bytes = 0
        self._block_flags = 0
        self._block_id = 0
        self._block_began_ns = 0
        self._pinged_ns: int | None = None
        self._ping_heard_ns = 0
        self._ping_strikes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_ns = 0

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._sending = Sending(self._loop, self._clock, self._transport, self._on_over)
        self._connections.add(self)
        ours = {
            frames.MAX_CONCURRENT_STREAMS: self._limits.max_streams,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
        }
        self._sending.control(frames.settings(ours))
        self._sending.control(frames.window_update(0, _CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    def data_received(self, data: bytes) -> None:
        self._heard_ns = self._clock()
        if self._rest:
            data = self._rest + data
            self._rest = b""
        try:
            position = self._take(data)
        except Http2ConnectionError as error:
            self._fail(error)
            return
        except Exception:
            logger.exception("a gRPC connection failed")
            self._fail(Http2ConnectionError(ErrorCode.INTERNAL_ERROR, ""))
            return
        if position < len(data):
            self._rest = data[position:]

    def eof_received(self) -> None:
        """A caller who sends nothing more reads nothing either: the transport closes."""

    def connection_lost(self, _error: Exception | None) -> None:
        self._connections.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
        for stream in list(self._streams.values()):
            self._leave(stream)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._sending.pause()
        # Who does not read what it asked for shall not ask for more.
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()
        self._sending.resume()

    # The server's calls

    def begin_drain(self, grace_s: float | None = None) -> None:
        """Tell the caller to go elsewhere, finish what it has begun, then close; after ``grace_s`` in any case."""
        if self._is_draining:
            return
        self._is_draining = True
        if grace_s is not None:
            self._drain_ends_ns = self._clock() + int(grace_s * 1e9)
        # Calls that are on their way still count; what comes after the answer to the ping does not.
        self._sending.control(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
        self._sending.control(frames.frame(frames.PING, 0, 0, _DRAIN_PING))
        self._loop.call_later(1.0, self._end_drain)

    def abort(self) -> None:
        self._transport.abort()

    def on_tick(self, now_ns: int) -> None:
        """Look at the clock, about once a second."""
        limits = self._limits
        if not self._has_settings:
            if now_ns - self._made_ns > _HANDSHAKE_S * 1e9:
                self._transport.abort()
        elif self._block is not None and now_ns - self._block_began_ns > _HEADER_BLOCK_S * 1e9:
            self._fail(Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a header block took too long"))
        elif self._drain_ends_ns is not None and now_ns > self._drain_ends_ns:
            self._transport.abort()
        elif self._max_age_s is not None and now_ns - self._made_ns > self._max_age_s * 1e9:
            self.begin_drain(limits.max_age_grace_s)
        elif limits.max_idle_s is not None and not self._streams and now_ns - self._useful_ns > limits.max_idle_s * 1e9:
            self.begin_drain()
        elif self._pinged_ns is not None:
            if now_ns - self._pinged_ns > limits.keepalive_timeout_s * 1e9 and self._heard_ns < self._pinged_ns:
                self._transport.abort()
            elif self._heard_ns >= self._pinged_ns:
                self._pinged_ns = None
        elif now_ns - self._heard_ns > limits.keepalive_s * 1e9:
            self._pinged_ns = now_ns
            self._sending.control(frames.frame(frames.PING, 0, 0, bytes(8)))

    # Frames

    def _take(self, data: bytes) -> int:
        """Handle all that is whole, and of DATA what is there; returns where the rest begins."""
        position = 0
        if not self._has_preface:
            if data[: len(frames.PREFACE)] != frames.PREFACE[: len(data)]:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "this is no HTTP/2")
            if len(data) < len(frames.PREFACE):
                return 0
            self._has_preface = True
            position = len(frames.PREFACE)
        size = len(data)
        while True:
            if self._data_left:
                part = data[position : position + self._data_left]
                if not part:
                    return position
                position += len(part)
                self._data_left -= len(part)
                self._on_data_part(part)
                continue
            if size - position < frames.HEADER_BYTES:
                return position
            length_and_kind, flags, stream_id = frames.read_header(data, position)
            length, kind = length_and_kind >> 8, length_and_kind & 0xFF
            stream_id &= frames.MAX_STREAM_ID
            if length > frames.MIN_FRAME_SIZE:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "the frame is too large")
            if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the header block is not at its end")
            if not self._has_settings and kind != frames.SETTINGS:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            if kind == frames.DATA and not flags & frames.PADDED:
                position += frames.HEADER_BYTES
                self._begin_data(stream_id, length, bool(flags & frames.END_STREAM))
                self._data_left = length
                if not length:
                    self._on_data_part(b"")
                continue
            end = position + frames.HEADER_BYTES + length
            if size < end:
                return position
            payload = data[position + frames.HEADER_BYTES : end]
            position = end
            try:
                self._on_frame(kind, flags, stream_id, payload)
            except Http2StreamError as error:
                self._reset(error.stream_id, error.code)

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._on_headers(stream_id, flags, payload)
        elif kind == frames.DATA:
            self._begin_data(stream_id, len(payload), bool(flags & frames.END_STREAM))
            self._on_data_part(frames.without_padding(payload, flags))
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.PING:
            self._on_ping(stream_id, flags, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(stream_id, flags, payload)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, payload)
        elif kind == frames.PRIORITY:
            _check(len(payload) == 5, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of another length than 5")
            _check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
            self._charge()
        elif kind == frames.GOAWAY:
            _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
            self._charge()
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._charge()  # unknown ones are to be ignored

    def _begin_data(self, stream_id: int, length: int, is_end: bool) -> None:
        if stream_id == 0 or stream_id > self._last_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "DATA of a stream that is not open")
        self._receive_window -= length
        if self._receive_window < 0:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than there is room for")
        self._uncredited += length
        if self._uncredited >= _CONNECTION_WINDOW // 2:
            self._receive_window += self._uncredited
            self._sending.control(frames.window_update(0, self._uncredited))
            self._uncredited = 0
        if length == 0 and not is_end:
            self._charge()
        stream = self._streams.get(stream_id)
        self._data_stream, self._data_ends = stream, is_end
        if stream is None:
            self._charge()  # it may have been on its way when the stream ended
        elif stream.is_half_closed:
            self._data_stream = None
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
        else:
            stream.receive_window -= length
            if stream.receive_window < 0:
                self._data_stream = None
                self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            else:
                stream.uncredited += length

    def _on_data_part(self, part: bytes) -> None:
        stream = self._data_stream
        if stream is None or stream.is_over:
            return
        if part:
            try:
                messages = stream.reader.feed(part)
            except RefusedMessageError as error:
                self._sending.end(stream, error.code, error.text)
                return
            if messages:
                stream.messages.extend(messages)
            elif not stream.messages:
                self._sending.credit(stream)  # of a message that is not whole; whole ones wait for their reader
        if self._data_ends and not self._data_left:
            self._half_close(stream)
        elif stream.messages:
            self._work.on_message(stream, self._sending)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id % 2 == 1, ErrorCode.PROTOCOL_ERROR, "HEADERS of a stream that no client opens")
        payload = frames.without_padding(payload, flags)
        if flags & frames.HAS_PRIORITY:
            _check(len(payload) >= 5, ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, flags, payload)
            return
        self._block = [payload]
        self._block_bytes = len(payload)
        self._block_flags = flags
        self._block_id = stream_id
        self._block_began_ns = self._heard_ns

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > 2 * _MAX_HEADER_BYTES or len(block) > 1 + _MAX_CONTINUATIONS:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(self._block_id, self._block_flags, b"".join(block))

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        headers = self._headers.read(block)  # whatever becomes of it: later blocks build on it
        is_end = bool(flags & frames.END_STREAM)
        stream = self._streams.get(stream_id)
        if stream is not None:  # trailers
            if stream.is_half_closed:
                raise Http2StreamError(stream_id, ErrorCode.STREAM_CLOSED, "HEADERS after the end")
            if not is_end:
                raise Http2StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "HEADERS in the middle")
            self._half_close(stream)
            return
        if stream_id <= self._last_id:
            raise Http2StreamError(stream_id, ErrorCode.STREAM_CLOSED, "HEADERS of a stream that has ended")
        self._last_id = stream_id
        if stream_id > self._goaway_id:
            self._charge()
            return
        if len(self._streams) >= self._limits.max_streams:
            raise Http2StreamError(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        try:
            head = read_head(headers)
        except MalformedRequestError as error:
            raise Http2StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        stream = Stream(
            stream_id,
            head,
            MessageReader(self._limits.max_message_bytes, self._work.admit),
            receive_window=STREAM_WINDOW,
            send_window=self._sending.initial_window,
        )
        self._streams[stream_id] = stream
        self._useful_ns = self._heard_ns
        self._ping_strikes = 0
        stream.is_half_closed = is_end
        if head.http_status != 200:
            self._sending.refuse_http(stream, head.http_status)
        elif head.refusal is not None:
            self._sending.end(stream, *head.refusal)
        else:
            if head.timeout_ns is not None:
                self._set_deadline(stream, self._heard_ns + head.timeout_ns)
            self._work.begin(stream, self._sending)
            if is_end:
                self._half_close(stream)

    def _half_close(self, stream: Stream) -> None:
        stream.is_half_closed = True
        if not stream.reader.is_between_messages:
            self._sending.end(stream, grpc.StatusCode.INTERNAL, "the stream ended in the middle of a message")
            return
        stream.wake_reader()
        if not stream.is_over:
            self._work.on_message(stream, self._sending)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than 4")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        sending = self._sending
        if stream_id == 0:
            _check(increment > 0, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            sending.window += increment
            _check(sending.window <= frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        else:
            _check(stream_id <= self._last_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that is idle")
            stream = self._streams.get(stream_id)
            if increment == 0:
                raise Http2StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            if stream is None:
                self._charge()
                return
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                raise Http2StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        sending.on_window()

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        _check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, "PING of another length than 8")
        if flags & frames.ACK:
            if payload == _DRAIN_PING:
                self._end_drain()
            return
        self._charge()
        if not self._streams:
            if self._heard_ns - self._ping_heard_ns < self._limits.min_ping_interval_s * 1e9:
                self._ping_strikes += 1
                if self._ping_strikes > self._limits.max_ping_strikes > 0:
                    raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
            self._ping_heard_ns = self._heard_ns
        self._sending.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            _check(not payload, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS that confirm and set")
            _check(self._has_settings, ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            return
        _check(len(payload) % 6 == 0, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of no whole number of values")
        if self._has_settings:
            self._charge()
        self._has_settings = True
        sending = self._sending
        for number, value in frames.read_settings(payload):
            if number == frames.INITIAL_WINDOW_SIZE:
                _check(value <= frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
                change = value - sending.initial_window
                sending.initial_window = value
                for stream in self._streams.values():
                    stream.send_window += change
                    _check(
                        stream.send_window <= frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large"
                    )
            elif number == frames.MAX_FRAME_SIZE:
                _check(
                    frames.MIN_FRAME_SIZE <= value <= frames.LARGEST_FRAME_SIZE,
                    ErrorCode.PROTOCOL_ERROR,
                    "MAX_FRAME_SIZE out of its range",
                )
                sending.max_frame_size = value
            elif number == frames.ENABLE_PUSH:
                _check(value <= 1, ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        sending.control(frames.frame(frames.SETTINGS, frames.ACK, 0))
        sending.on_window()

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length than 4")
        _check(0 < stream_id <= self._last_id, ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that is idle")
        self._charge()
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._leave(stream)

    # The life of streams

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._charge()
        self._sending.control(frames.rst_stream(stream_id, code))
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Nobody waits for the rest of a stream any more."""
        self._sending.drop(stream)
        self._on_over(stream)

    def _on_over(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        stream.reader.clear()
        stream.messages.clear()
        self._useful_ns = self._clock()
        cancel, stream.cancel = stream.cancel, None
        if cancel is not None:
            cancel()
        if self._is_draining and not self._streams and self._goaway_id != frames.MAX_STREAM_ID:
            self._sending.flush()
            self._transport.close()

    def _end_drain(self) -> None:
        if self._goaway_id != frames.MAX_STREAM_ID or not self._is_draining or self._transport.is_closing():
            return
        self._goaway_id = self._last_id
        self._sending.control(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
        if not self._streams:
            self._sending.flush()
            self._transport.close()

    def _set_deadline(self, stream: Stream, by_ns: int) -> None:
        """One alarm for all streams, at the first of their deadlines: most calls end long before theirs."""
        stream.deadline_ns = by_ns
        if self._deadline is None or by_ns < self._deadline_ns:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline_ns = by_ns
            self._deadline = self._loop.call_later(max(0, by_ns - self._clock()) / 1e9, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        now_ns = self._clock()
        first_ns: int | None = None
        for stream in list(self._streams.values()):
            by_ns = stream.deadline_ns
            if by_ns is None:
                continue
            if by_ns <= now_ns:
                self._sending.end(stream, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", is_prompt=True)
            elif first_ns is None or by_ns < first_ns:
                first_ns = by_ns
        if first_ns is not None:
            self._deadline_ns = first_ns
            self._deadline = self._loop.call_later((first_ns - now_ns) / 1e9, self._on_deadline)

    def _charge(self) -> None:
        if self._patience.is_lost(self._heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nobody an answer")

    def _fail(self, error: Http2ConnectionError) -> None:
        self._sending.control(frames.goaway(self._last_id, error.code, error.text.encode()))
        self._sending.flush()
        self._transport.close()


_DRAIN_PING: Final = b"draining"


def _check(is_right: bool, code: ErrorCode, text: str) -> None:
    if not is_right:
        raise Http2ConnectionError(code, text)
