"""The sending half of a connection: frames out, as far as both windows and the transport allow.

What is written in one turn of the loop is handed to the transport together.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import quote

import grpc

from ortserve.clock import Clock
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.header_blocks import literal
from ortserve.frontends.grpc.native.messages import ENCODINGS
from ortserve.frontends.grpc.native.stream import STREAM_WINDOW, Stream

_TURN_BYTES: Final = 256 * 1024
"""Of one stream's message that go out before others have their turn."""

_STATUS_200: Final = b"\x88"  # the static table's entry (RFC 7541, appendix A)
_RESPONSE: Final = _STATUS_200 + literal(b"content-type", b"application/grpc")
_ACCEPTED: Final = literal(b"grpc-accept-encoding", ENCODINGS)
_OK: Final = literal(b"grpc-status", b"0")
_SAFE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class Sending:
    """Loop thread only.

    Attributes:
        clock: Monotonic nanoseconds.
        window: Bytes that the peer takes on the whole connection.
        initial_window: Bytes that it takes of a new stream.
        max_frame_size: Of frames to it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        transport: asyncio.Transport,
        on_over: Callable[[Stream], None],
    ) -> None:
        """``on_over`` is told when the last frame of a stream was queued."""
        self.clock = clock
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_FRAME_SIZE
        self._loop = loop
        self._transport = transport
        self._out: list[bytes | memoryview] = []
        self._is_flush_due = False
        self._is_paused = False
        self._blocked: dict[int, Stream] = {}
        self._is_pump_due = False
        self._on_over = on_over

    def control(self, frame: bytes) -> None:
        """Send a frame that no window holds back."""
        self._out.append(frame)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def answer(self, stream: Stream, message: bytes, trailing: bytes) -> None:
        """Send a whole answer of one message; ``trailing`` is a header block."""
        self.send_message(stream, message)
        self._finish(stream, _OK + trailing)

    def send_message(self, stream: Stream, message: bytes) -> None:
        """Queue a message, behind the headers where these were not sent yet."""
        if stream.is_over:
            return
        self._begin(stream)
        prefix = b"\x00" + len(message).to_bytes(4, "big")
        if len(message) <= frames.MIN_FRAME_SIZE:
            stream.unsent.append(prefix + message)
        else:
            stream.unsent.append(prefix)
            stream.unsent.append(memoryview(message))
        self._send_data(stream)

    def end(
        self,
        stream: Stream,
        code: grpc.StatusCode,
        details: str = "",
        metadata: Iterable[tuple[str, str]] = (),
        *,
        is_prompt: bool = False,
    ) -> None:
        """End a call with a status; once. ``is_prompt`` leaves out what is unsent."""
        if stream.is_over or (stream.trailers is not None and not is_prompt):
            return
        block = literal(b"grpc-status", b"%d" % code.value[0])
        if details:
            block += literal(b"grpc-message", quote(details, safe=_SAFE).encode())
        for name, value in metadata:
            block += literal(name.encode(), value.encode("latin-1", "replace"))
        if code is grpc.StatusCode.UNIMPLEMENTED:
            block += _ACCEPTED
        if is_prompt:
            stream.unsent.clear()
        self._finish(stream, block)

    def refuse_http(self, stream: Stream, status: int) -> None:
        """Answer what is no gRPC."""
        block = b"\x08\x03%d" % status  # literal without indexing, with the name of the static table's entry 8, :status
        stream.trailers = block
        self.control(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, block))
        self._close(stream)

    def credit(self, stream: Stream) -> None:
        """Give the caller room again for what was taken from a stream."""
        if stream.uncredited >= STREAM_WINDOW // 2 and not stream.is_half_closed and not stream.is_over:
            stream.receive_window += stream.uncredited
            self.control(frames.window_update(stream.id, stream.uncredited))
            stream.uncredited = 0

    def drop(self, stream: Stream) -> None:
        """Send nothing more of a stream, for it was reset."""
        self._blocked.pop(stream.id, None)
        stream.unsent.clear()
        stream.is_over = True
        stream.wake_reader()
        stream.wake_writer()

    def on_window(self) -> None:
        """The peer takes more."""
        if self._blocked and not self._is_paused:
            self._pump()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.on_window()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def flush(self) -> None:
        self._is_flush_due = False
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            if len(out) == 1:
                self._transport.write(out[0])
            else:
                self._transport.writelines(out)

    def _begin(self, stream: Stream) -> None:
        if not stream.has_headers:
            stream.has_headers = True
            self.control(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.id, _RESPONSE))

    def _finish(self, stream: Stream, block: bytes) -> None:
        if stream.is_over:
            return
        if not stream.has_headers:  # trailers only
            stream.has_headers = True
            block = _RESPONSE + block
        stream.trailers = block
        if not stream.unsent:
            self._send_trailers(stream)

    def _send_data(self, stream: Stream) -> None:
        """Send what may be sent of a stream, and note it down where something stays."""
        unsent = stream.unsent
        budget = _TURN_BYTES
        while unsent:
            part = unsent[0]
            room = min(stream.send_window, self.window, self.max_frame_size)
            if room <= 0 or self._is_paused or budget <= 0:
                self._blocked[stream.id] = stream
                if budget <= 0 and room > 0 and not self._is_paused:
                    self._pump_soon()
                return
            if len(part) <= room:
                unsent.popleft()
            else:
                unsent[0] = memoryview(part)[room:]
                part = memoryview(part)[:room]
            size = len(part)
            stream.send_window -= size
            self.window -= size
            budget -= size
            self.control(frames.frame_header(frames.DATA, 0, stream.id, size))
            self._out.append(part)
        self._blocked.pop(stream.id, None)
        stream.wake_writer()
        if stream.trailers is not None:
            self._send_trailers(stream)

    def _send_trailers(self, stream: Stream) -> None:
        assert stream.trailers is not None
        flags = frames.END_HEADERS | frames.END_STREAM
        self.control(frames.frame(frames.HEADERS, flags, stream.id, stream.trailers))
        self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._blocked.pop(stream.id, None)
        stream.is_over = True
        if not stream.is_half_closed:  # the rest of the request is of no use (RFC 9113, section 8.1)
            self.control(frames.rst_stream(stream.id, frames.ErrorCode.NO_ERROR))
        self._on_over(stream)

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        for stream in list(self._blocked.values()):
            if self._is_paused or self.window <= 0:
                return
            del self._blocked[stream.id]  # to the back of the line, where something stays again
            self._send_data(stream)
            self.flush()  # or the transport could not say that it has enough
