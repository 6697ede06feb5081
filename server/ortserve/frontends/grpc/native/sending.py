"""The sending half of a connection: frames out, as far as both windows and the transport allow.

What is written in one turn of the loop is handed to the transport together. A stream whose own window is full waits for
that window alone; all others that have something unsent stand in one line and get their turns.
"""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import quote

import grpc

from ortserve.clock import Clock
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.compression import ENCODINGS
from ortserve.frontends.grpc.native.header_blocks import RESIZED_TO_NOTHING, literal
from ortserve.frontends.grpc.native.losses import Losses
from ortserve.frontends.grpc.native.patience import PART_CREDIT
from ortserve.frontends.grpc.native.stream import Stream
from ortserve.frontends.grpc.native.unsent_room import UnsentRoom

_TURN_BYTES: Final = 256 * 1024
"""Of one stream's message that go out before others have their turn."""

_MAX_PIECES: Final = 256
"""Handed to the transport at once."""

_MAX_FRAME_BYTES: Final = 64 * 1024
"""Of DATA, where the peer takes larger frames: others shall not wait long for the end of one."""

_MAX_PAUSED_BYTES: Final = 256 * 1024
"""Of frames that no window holds back, while the peer reads nothing."""

_MAX_DETAILS: Final = 6_000
"""Characters of a status message on the wire: peers refuse trailers of more than 8 KiB."""

_STATUS_200: Final = b"\x88"  # the static table's entry (RFC 7541, appendix A)
_RESPONSE: Final = _STATUS_200 + literal(b"content-type", b"application/grpc")
_ACCEPTED: Final = literal(b"grpc-accept-encoding", ENCODINGS)
_OK: Final = literal(b"grpc-status", b"0")
_SAFE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

_ENDS: Final = frames.END_HEADERS | frames.END_STREAM
_HEADERS_BEFORE_DATA: Final = len(_RESPONSE) << 8 | frames.HEADERS


class Sending:
    """Loop thread only.

    Attributes:
        clock: Monotonic nanoseconds.
        window: Bytes that the peer takes on the whole connection.
        initial_window: Bytes that it takes of a new stream.
        unsent_bytes: Of messages that no window or transport has room for yet.
        sent_bytes: Of messages that had to wait, of all streams.
        written_bytes: All that the transport got.
        has_answered: Whether anything of a call was sent since somebody last asked.
        window_credit: For ``WindowUpdates``: bytes of DATA sent, and ``PART_CREDIT`` for each whole part.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        transport: asyncio.Transport,
        on_over: Callable[[Stream], bool],
        room: UnsentRoom,
        losses: Losses,
    ) -> None:
        """``on_over`` is told when nothing more will be queued of a stream, and says whether others are open; ``room``
        and ``losses`` are those of all connections.
        """
        self.clock = clock
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.unsent_bytes = 0
        self.sent_bytes = 0
        self.written_bytes = 0
        self.window_credit = 0
        self.has_answered = False
        self._max_frame_size = frames.MIN_FRAME_SIZE
        self._resize = b""
        self._has_resized = False
        self._loop = loop
        self._transport = transport
        self._out: list[bytes | memoryview] = []
        self._is_flush_due = False
        self._is_paused = False
        self._paused_bytes = 0
        self._waiting: dict[int, Stream] = {}
        self._is_pump_due = False
        self._on_over = on_over
        self._room = room
        self._losses = losses

    def control(self, frame: bytes) -> None:
        """Send a frame that no window holds back."""
        self._out.append(frame)
        self._flush_soon()
        if self._is_paused:
            self._paused_bytes += len(frame)
            if self._paused_bytes > _MAX_PAUSED_BYTES:
                # Who reads none of the answers shall ask for no more of them.
                self._transport.pause_reading()

    def answer(self, stream: Stream, message: bytes | memoryview, trailing: bytes) -> None:
        """Send a whole answer of one message, uncompressed; ``trailing`` is a header block."""
        size = len(message) + 5
        if (
            size > frames.MIN_FRAME_SIZE
            or size > stream.send_window
            or size > self.window
            or self._is_paused
            or self._waiting
            or self._resize
            or stream.has_headers
            or stream.is_over
        ):
            self.send_message(stream, message)
            self._finish(stream, _OK + trailing)
            return
        header, stream_id = frames.pack_header, stream.id
        self._out.append(
            b"".join(
                (
                    header(_HEADERS_BEFORE_DATA, frames.END_HEADERS, stream_id),
                    _RESPONSE,
                    header(size << 8 | frames.DATA, 0, stream_id),
                    b"\x00",
                    (size - 5).to_bytes(4, "big"),
                    message,
                    header(len(_OK) + len(trailing) << 8 | frames.HEADERS, _ENDS, stream_id),
                    _OK,
                    trailing,
                )
            )
        )
        # Not before: where joining fails, the call can still end with an error.
        self.window -= size
        self.window_credit += PART_CREDIT
        self.has_answered = True
        stream.has_headers = True
        if self._close(stream):
            self._flush_soon()
        else:
            self.flush()  # there is nobody whose answer could go with it

    def send_message(self, stream: Stream, message: bytes | memoryview, *, is_compressed: bool = False) -> None:
        """Queue a message, behind the headers where these were not sent yet."""
        if stream.is_over or stream.trailers is not None:
            return
        self._begin(stream)
        prefix = (b"\x01" if is_compressed else b"\x00") + len(message).to_bytes(4, "big")
        if len(message) <= frames.MIN_FRAME_SIZE:
            stream.unsent.append(b"".join((prefix, message)))
        else:
            stream.unsent.append(prefix)
            stream.unsent.append(memoryview(message))
        self._count_unsent(len(prefix) + len(message))
        if stream.id not in self._waiting:
            self._send_data(stream)
        self._room.look()

    def end(
        self,
        stream: Stream,
        code: grpc.StatusCode,
        details: str = "",
        metadata: Iterable[tuple[str, str | bytes]] = (),
        *,
        is_prompt: bool = False,
    ) -> None:
        """End a call with a status; once. ``is_prompt`` leaves out what is unsent."""
        if stream.is_over or (stream.trailers is not None and not is_prompt):
            return
        block = literal(b"grpc-status", b"%d" % code.value[0])
        if details:
            block += literal(b"grpc-message", _percent_encoded(details))
        block += metadata_block(metadata)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            block += _ACCEPTED
        if is_prompt:
            self._forget_unsent(stream, code.name.lower())
        self._finish(stream, block)

    def refuse_http(self, stream: Stream, status: int) -> None:
        """Answer what is no gRPC."""
        # Literal without indexing, with the name of the static table's entry 8, :status.
        self._headers(stream, b"\x08\x03%d" % status, is_end=True)
        self._close(stream)

    def credit(self, stream: Stream) -> None:
        """Give the caller room again for what was taken from a stream."""
        if not stream.is_half_closed and not stream.is_over:
            room = stream.window.credit()
            if room:
                self.has_answered = True
                self.control(frames.window_update(stream.id, room))

    def drop(self, stream: Stream, cause: str) -> None:
        """Send nothing more of a stream: it was reset, or its connection has ended."""
        self._forget_unsent(stream, cause)
        stream.is_over = True
        self._on_over(stream)

    def has_too_much_unsent(self) -> bool:
        """Whether the connection should begin no more calls."""
        return self._room.is_exceeded_by(self.unsent_bytes)

    def waits_for_window(self, stream: Stream) -> bool:
        """Whether a WINDOW_UPDATE is all that helps a stream on."""
        return bool(stream.unsent) and (stream.send_window <= 0 or self.window <= 0)

    def on_window(self) -> None:
        """The peer takes more on the whole connection."""
        if self._waiting and not self._is_paused:
            self._pump_soon()

    def on_stream_window(self, stream: Stream) -> None:
        """The peer takes more of a stream.

        Frames are cut once all that came together was read: WINDOW_UPDATEs of some bytes each make one frame.
        """
        if stream.unsent and stream.send_window > 0:
            self._waiting[stream.id] = stream
            self._pump_soon()

    def taken(self, streams: Iterable[Stream]) -> dict[int, int]:
        """For ``SendWaits``, what the peer has taken of each stream that has something unsent, and of the transport.

        A stream that waits for the connection, not for its own window, gets its turns as the connection goes on: while
        the transport is full, as that empties.
        """
        buffered = self._transport.get_write_buffer_size()
        of_connection = self.written_bytes - buffered if self._is_paused else self.sent_bytes
        taken = {
            stream.id: of_connection if stream.id in self._waiting else stream.sent_bytes
            for stream in streams
            if stream.unsent
        }
        if buffered:
            taken[0] = self.written_bytes - buffered
        return taken

    def set_max_frame_size(self, size: int) -> None:
        self._max_frame_size = min(size, _MAX_FRAME_BYTES)

    def set_table_size(self, lowest: int) -> None:
        """The peer keeps a smaller table of headers, which the next block has to confirm (RFC 7541, section 4.2).

        None is used, so that none it is for ever then.
        """
        if lowest < frames.DEFAULT_TABLE_SIZE and not self._has_resized:
            self._has_resized = True
            self._resize = RESIZED_TO_NOTHING

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._paused_bytes > _MAX_PAUSED_BYTES:
            self._transport.resume_reading()
        self._paused_bytes = 0
        self.on_window()

    def flush(self) -> None:
        self._is_flush_due = False
        out, self._out = self._out, []
        if out and not self._transport.is_closing():
            if len(out) == 1:
                self.written_bytes += len(out[0])
                self._transport.write(out[0])
            else:
                self.written_bytes += sum(map(len, out))
                self._transport.writelines(out)

    def _begin(self, stream: Stream) -> None:
        if not stream.has_headers:
            stream.has_headers = True
            block = _RESPONSE
            if stream.encoding:
                block += literal(b"grpc-encoding", stream.encoding)
            self._headers(stream, block)

    def _headers(self, stream: Stream, block: bytes, *, is_end: bool = False) -> None:
        if self._resize:
            block = self._resize + block
            self._resize = b""
        self.has_answered = True
        self.control(frames.header_block(stream.id, block, self._max_frame_size, is_end=is_end))

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
        """Send what may be sent of a stream, and have it wait where something stays."""
        unsent = stream.unsent
        budget = _TURN_BYTES
        while unsent:
            part = unsent[0]
            room = min(stream.send_window, self.window, self._max_frame_size)
            if room <= 0 or self._is_paused or budget <= 0:
                if stream.send_window > 0:
                    self._waiting[stream.id] = stream
                if room > 0 and not self._is_paused:
                    self.flush()  # or the transport could not say that it has enough
                    self._pump_soon()
                return
            if len(part) <= room:
                unsent.popleft()
                self.window_credit += PART_CREDIT
            else:
                unsent[0] = memoryview(part)[room:]
                part = memoryview(part)[:room]
            size = len(part)
            self.window_credit += size
            stream.send_window -= size
            self.window -= size
            self._count_unsent(-size)
            self.sent_bytes += size
            stream.sent_bytes += size
            budget -= size
            self.has_answered = True
            self.control(frames.frame_header(frames.DATA, 0, stream.id, size))
            self._out.append(part)
        stream.wake_writer()
        if stream.trailers is not None:
            self._send_trailers(stream)

    def _send_trailers(self, stream: Stream) -> None:
        assert stream.trailers is not None
        self._headers(stream, stream.trailers, is_end=True)
        self._close(stream)

    def _close(self, stream: Stream) -> bool:
        stream.is_over = True
        if not stream.is_half_closed:  # the rest of the request is of no use (RFC 9113, section 8.1)
            self.control(frames.rst_stream(stream.id, frames.ErrorCode.NO_ERROR))
        return self._on_over(stream)

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)
        elif len(self._out) > _MAX_PIECES:
            self.flush()  # so that the transport can say that it has enough

    def _forget_unsent(self, stream: Stream, cause: str) -> None:
        if not stream.unsent:
            return
        self._losses.cut_answer(cause)
        self._waiting.pop(stream.id, None)
        self._count_unsent(-sum(len(part) for part in stream.unsent))
        stream.unsent.clear()

    def _count_unsent(self, change: int) -> None:
        self.unsent_bytes += change
        self._room.held_bytes += change

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        for stream in list(self._waiting.values()):
            if self._is_paused or self.window <= 0:
                return
            if self._waiting.pop(stream.id, None) is not None:  # to the back of the line, where something stays again
                self._send_data(stream)
        self.flush()


def metadata_block(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Metadata as a header block."""
    block = b""
    for name, value in metadata:
        if isinstance(value, bytes):
            block += literal(name.encode(), b64encode(value).rstrip(b"="))
        else:
            block += literal(name.encode(), value.encode("latin-1", "replace"))
    return block


def _percent_encoded(details: str) -> bytes:
    """A ``grpc-message``; what would be too long is cut between characters."""
    encoded = quote(details[:_MAX_DETAILS], safe=_SAFE, errors="replace")
    while len(encoded) > _MAX_DETAILS:
        details = details[: min(len(details) - 1, len(details) * _MAX_DETAILS // len(encoded))]
        encoded = quote(details, safe=_SAFE, errors="replace")
    return encoded.encode()
