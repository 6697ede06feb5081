"""The receiving half of a connection: frames become streams, messages and windows, and streams end.

What a peer may cost is bounded: streams, what of requests is kept, what waits to be sent, and by ``Patience`` whatever
brings nobody an answer. Header blocks and frames are bounded where they are read.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import grpc

from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ServeError, out_of_memory
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.deadlines import Deadlines
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import HeaderReader, Headers
from ortserve.frontends.grpc.native.late_calls import LateCalls
from ortserve.frontends.grpc.native.lifetime import Lifetime
from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.messages import RefusedMessageError
from ortserve.frontends.grpc.native.patience import PART_CREDIT, Patience, Resets, WindowUpdates
from ortserve.frontends.grpc.native.peer_settings import read_peer_settings
from ortserve.frontends.grpc.native.ping_strikes import PingStrikes
from ortserve.frontends.grpc.native.request_head import TOO_LARGE, MalformedRequestError, check_trailers, read_head
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import STREAM_WINDOW, Stream
from ortserve.frontends.grpc.native.windows import ReceiveWindow
from ortserve.frontends.large_body import LargeBody
from ortserve.service.gate import Hold

CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""What a caller may send before it hears of us: more than fits a network's delay, and little enough to be kept."""

_KEPT_GAPS: Final = 64
"""Of ids between those of two streams that were begun one after the other. Clients leave one at most, at the begin."""

_COSTS: Final = "too many frames that bring nobody an answer"

DRAIN_PING: Final = b"draining"
"""What the PING after a first GOAWAY carries: its answer shows that the peer knows."""


class Work(Protocol):
    """What is done with calls; its methods are called on the loop.

    ``memory`` is for large messages.
    """

    memory: LargeMemory

    def begin(self, stream: Stream, sending: Sending) -> None:
        """A call came, whose messages are still to come."""
        ...

    def on_message(self, stream: Stream, sending: Sending) -> None:
        """There are new messages, or the caller has sent all."""
        ...

    def open_hold(self) -> Hold:
        """Room for what will be kept of a request."""
        ...


class Receiving:
    """A ``FrameTaker``. Loop thread only.

    Attributes:
        streams: Those that are open, by their ids.
        late: Ends those whose callers keep the server waiting.
        last_id: The highest stream that was begun or refused.
        goaway_id: The highest that may still begin.
    """

    def __init__(
        self,
        work: Work,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        sending: Sending,
        life: Lifetime,
        on_drain_answer: Callable[[], None],
    ) -> None:
        """``on_drain_answer`` is told when the peer knows that the connection drains."""
        self._work = work
        self._limits = limits
        self._sending = sending
        self._life = life
        self._on_drain_answer = on_drain_answer
        self.streams: dict[int, Stream] = {}
        self.late: Final = LateCalls(self.streams, sending, limits)
        self._deadlines = Deadlines(loop, sending.clock, self.streams, self.late.end_at_deadline)
        self._headers = HeaderReader()
        self._patience = Patience(life.heard_ns)
        self._resets = Resets(self._patience)
        self._window_updates = WindowUpdates(life.heard_ns)
        self._pings = PingStrikes(limits)
        self.last_id = 0
        self._skipped: Final[deque[tuple[int, int]]] = deque(maxlen=_KEPT_GAPS)
        self.goaway_id = frames.MAX_STREAM_ID
        self._window = ReceiveWindow(CONNECTION_WINDOW)
        self._data_stream: Stream | None = None
        self._data_is_end = False

    # DATA

    def on_data(self, stream_id: int, length: int, *, is_end: bool) -> None:
        if stream_id not in self.streams:
            self._check_begun(stream_id, "DATA")
        if not self._window.take(length):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than there is room for")
        room = self._window.credit()
        if room:
            self._sending.control(frames.window_update(0, room))
        stream = self.streams.get(stream_id)
        if length == 0 and (stream is None or not is_end):
            self._charge()
        self._data_stream, self._data_is_end = stream, is_end
        if stream is None:
            return  # it may have been on its way when the stream ended
        if stream.is_half_closed:
            self._data_stream = None
            self._reset(stream_id, ErrorCode.STREAM_CLOSED)
        elif not stream.window.take(length):
            self._data_stream = None
            self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def placing(self) -> LargeBody | None:
        """Where the next bytes of DATA belong, if they are part of a large message; else None."""
        stream = self._data_stream
        if stream is None or stream.is_over or stream.trailers is not None:
            return None
        return stream.reader.large

    def on_data_part(self, data: bytes | None, begin: int, end: int, *, is_last: bool) -> None:
        stream = self._data_stream
        if stream is None or stream.is_over:
            return
        if stream.trailers is not None:  # nobody reads on
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
            except RefusedMessageError as error:
                self._sending.end(stream, error.code, error.text, is_prompt=True)
                return
            except MemoryError:
                self._sending.end(stream, *status_of(out_of_memory("receiving a message")), is_prompt=True)
                return
            if messages:
                stream.put(messages)
            if reader.length >= 0 or (messages and stream.takes_messages):
                begins = reader.length if messages or was_length < 0 else 0
                if not self._keep(stream, announced=begins):
                    return
        else:
            messages = []
        if is_last and self._data_is_end:
            self._half_close(stream)
        elif messages:
            self._work.on_message(stream, self._sending)
        elif not stream.messages:
            self._sending.credit(stream)  # of a message that is not whole; whole ones wait for their reader

    def _keep(self, stream: Stream, *, announced: int) -> bool:
        """Count what is kept of a request; False where there is no room, and the call has ended.

        A message is refused at its beginning if it would not fit, but counts only as far as it came: its sender could
        keep others out by announcing alone. A stream of many requests does not end for one of them: what fits its
        window may be kept, and is refused as a request when its handler takes it.
        """
        hold = stream.hold
        if hold is None:
            hold = stream.hold = self._work.open_hold()
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
        headers = self._headers.read(block)  # whatever becomes of it: later blocks build on it
        stream = self.streams.get(stream_id)
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
        if len(self.streams) >= self._limits.max_streams or sending.has_too_much_unsent():
            self._reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        try:
            head = TOO_LARGE if headers is None else read_head(headers)
        except MalformedRequestError:
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        self._resets.begun += 1
        stream = Stream(
            stream_id,
            head,
            self._life.heard_ns,
            max_message_bytes=self._limits.max_message_bytes,
            send_window=sending.initial_window,
            memory=self._work.memory,
        )
        self.streams[stream_id] = stream
        sending.window_credit += PART_CREDIT  # some peers open a stream's window wider as they begin it
        self._life.useful_ns = self._life.heard_ns
        stream.is_half_closed = is_end
        if head.http_status != 200:
            sending.refuse_http(stream, head.http_status)
        elif head.refusal is not None:
            sending.end(stream, *head.refusal)
        else:
            if head.timeout_ns is not None:
                self._deadlines.set(stream, self._life.heard_ns + head.timeout_ns)
            self._work.begin(stream, sending)
            if is_end:
                self._half_close(stream)

    def _check_begun(self, stream_id: int, frame: str) -> None:
        """End the connection for a frame of a stream that the peer never began.

        A stream is idle until its HEADERS, and closed unused once those of a higher one came (RFC 9113, section 5.1.1).
        """
        if (
            stream_id % 2 == 0
            or stream_id > self.last_id
            or any(after < stream_id < before for after, before in self._skipped)
        ):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"{frame} of a stream that was not begun")

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
        if stream.announced_left:  # of what content-length announced, RFC 9113, section 8.1.1
            self._reset(stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        if not stream.reader.is_between_messages:
            text = "the stream ended in the middle of a message"
            self._sending.end(stream, grpc.StatusCode.INTERNAL, text, is_prompt=True)
            return
        self._work.on_message(stream, self._sending)

    # Other frames

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.PING:
            self._on_ping(stream_id, flags, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(stream_id, flags, payload)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            if kind == frames.PRIORITY:
                _check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
                _check(len(payload) == 5, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of another length than 5")
            elif kind == frames.GOAWAY:
                _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
                _check(len(payload) >= 8, ErrorCode.FRAME_SIZE_ERROR, "GOAWAY that is too short")
            self._charge()  # these ask nothing of us, and unknown ones are to be ignored

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than 4")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        sending = self._sending
        credit, sending.window_credit = sending.window_credit, 0
        if self._window_updates.are_too_many(credit, self._life.heard_ns):
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, "too many WINDOW_UPDATEs for the bytes that they let flow"
            )
        if stream_id == 0:
            _check(increment > 0, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            sending.window += increment
            _check(sending.window <= frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            sending.on_window()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_begun(stream_id, "WINDOW_UPDATE")
        if increment == 0:
            self._reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream is not None:
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                self._reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            else:
                sending.on_stream_window(stream)

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        _check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, "PING of another length than 8")
        self._charge()
        if flags & frames.ACK:
            if payload == DRAIN_PING:
                self._on_drain_answer()
            return
        if self._sending.has_answered:
            # Clients measure their bandwidth by pings beside what they read.
            self._sending.has_answered = False
            self._pings.forget()
        if self._pings.on_ping(self._life.heard_ns, has_calls=bool(self.streams)):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._sending.control(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        _check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        self._charge()
        if flags & frames.ACK:
            _check(not payload, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS that confirm and set")
            return
        settings = read_peer_settings(payload)
        sending = self._sending
        if settings.max_frame_size is not None:
            sending.set_max_frame_size(settings.max_frame_size)
        if settings.lowest_table is not None:
            sending.set_table_size(settings.lowest_table)
        sending.control(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if settings.initial_window is not None:
            self._change_windows(settings.initial_window)

    def _change_windows(self, initial: int) -> None:
        """What streams take changes with what new ones would, also where more is under way (RFC 9113, 6.9.2)."""
        sending = self._sending
        change = initial - sending.initial_window
        sending.initial_window = initial
        for stream in list(self.streams.values()):
            stream.send_window += change
            _check(stream.send_window <= frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            if change > 0:
                sending.on_stream_window(stream)

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        _check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length than 4")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_begun(stream_id, "RST_STREAM")
        if self._resets.is_patience_lost(
            None if stream is None else stream.begun_ns, len(self.streams), self._life.heard_ns
        ):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, _COSTS)
        if stream is not None:
            self._sending.drop(stream, "reset_by_caller")

    # The end of streams

    def end_input(self) -> None:
        """The peer has sent all: requests that came whole go on, those that did not end."""
        for stream in list(self.streams.values()):
            if stream.is_half_closed:
                continue
            if stream.announced_left or not stream.reader.is_between_messages:
                self._sending.control(frames.rst_stream(stream.id, ErrorCode.CANCEL))
                self._sending.drop(stream, "disconnected")
            else:
                self._half_close(stream)

    def close(self, cause: str) -> None:
        """End all streams of a connection that has ended."""
        self._deadlines.close()
        for stream in list(self.streams.values()):
            self._sending.drop(stream, cause)

    def on_over(self, stream: Stream) -> bool:
        """The last frame of a stream was sent, or none will be: let go of it, and of the work for it.

        Returns:
            Whether others are open.
        """
        self.streams.pop(stream.id, None)
        stream.forget_request()
        stream.wake_reader()
        stream.wake_writer()
        self._life.useful_ns = self._sending.clock()
        cancel, stream.cancel = stream.cancel, None
        if cancel is not None:
            cancel()
        return bool(self.streams)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self._charge()
        self._sending.control(frames.rst_stream(stream_id, code))
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._sending.drop(stream, "stream_error")

    def _charge(self) -> None:
        if self._patience.is_lost(self._life.heard_ns):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, _COSTS)


def _check(is_right: bool, code: ErrorCode, text: str) -> None:
    if not is_right:
        raise Http2ConnectionError(code, text)
