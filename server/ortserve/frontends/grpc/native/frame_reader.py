"""Finds the frames in the bytes of a connection, and joins header blocks.

DATA is passed on as it arrives, because a slow network may transfer only one frame in a second. All other frames are
passed on when they are complete. ``receiving`` and ``control_frames`` interpret the frames.
"""

from typing import Final

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.control_frames import ControlFrames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import MAX_BLOCK_BYTES
from ortserve.frontends.grpc.native.receiving import Receiving

MAX_DATA_BYTES: Final = 1024 * 1024
"""Maximum size of a DATA frame; large, because each frame has a fixed cost. Other frames, which are stored until they
are complete, have lower limits."""

_MAX_CONTINUATIONS: Final = 8
"""Maximum number of CONTINUATION frames of a header block: CVE-2024-27316 and similar attacks never end a block."""

_FRAMES_AT_ONCE: Final = 64
"""Maximum number of frames that are read at once, without WINDOW_UPDATE and DATA that ends no stream. Each other frame
may start or cancel a call, whose first steps take up to 0.15 ms, and 8 KiB hold 600 of them. A call has two."""


class FrameReader:
    """Reads the frames of one connection.

    Attributes:
        has_more: Whether ``feed`` must be called again to read the rest of the bytes it got.
        has_settings: Whether the preface and the first frame, which must be SETTINGS, have arrived.
        data_left: Missing bytes of the current DATA frame.
        unfinished_since_ns: Start of the incomplete frame or header block; None without one.
    """

    def __init__(self, requests: Receiving, others: ControlFrames) -> None:
        """``requests`` receives HEADERS and DATA, ``others`` all other frames, in their order on the wire."""
        self._requests = requests
        self._others = others
        self._rest = b""
        self._has_preface = False
        self.has_more = False
        self.has_settings = False
        self.unfinished_since_ns: int | None = None
        self.data_left = 0
        self._padding_left = 0
        self._block: list[bytes] = []
        self._block_bytes = 0
        self._block_id = 0
        self._block_is_end = False

    def feed(self, data: bytes, now_ns: int) -> None:
        """Read the next bytes, and those that it has not read before.

        Raises:
            Http2ConnectionError: The peer violates the protocol or a limit, so the connection must end.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self.has_more = False
        position = self._read(data)
        if position < len(data):
            self._rest = data[position:]
        elif not self._block:
            self.unfinished_since_ns = None
            return
        # The time of a block starts with its first frame, that of a frame with the end of the previous one.
        if self.unfinished_since_ns is None or (position and not self._block):
            self.unfinished_since_ns = now_ns

    def skip(self, count: int) -> None:
        """Account for ``count`` bytes, at most ``data_left``, that were received directly into their final memory."""
        self.data_left -= count
        self._requests.on_data_part(None, 0, count, is_last=not self.data_left)

    def _read(self, data: bytes) -> int:
        """Pass on complete frames and received DATA. Returns the position of the rest.

        Each round of the loop reads one of three parts: received bytes of the current DATA frame, its padding, or the
        next header, which for all other types includes the whole frame.
        """
        requests = self._requests
        position = 0
        if not self._has_preface:
            if not self._read_preface(data):
                return 0
            position = len(frames.PREFACE)
        size = len(data)
        frames_left = _FRAMES_AT_ONCE
        while frames_left or self.data_left:  # stops between frames: large messages are received by another protocol
            left = self.data_left
            if left:
                begin, position = position, min(position + left, size)
                if begin == position:
                    return position
                self.data_left = left = left - (position - begin)
                requests.on_data_part(data, begin, position, is_last=not left)
                continue
            if self._padding_left:
                padding = min(self._padding_left, size - position)
                if not padding:
                    return position
                position += padding
                self._padding_left -= padding
                continue
            if size - position < frames.HEADER_BYTES:
                return position
            length_and_kind, flags, stream_id = frames.read_header(data, position)
            length, kind = length_and_kind >> 8, length_and_kind & 0xFF
            stream_id &= frames.MAX_STREAM_ID
            if length > frames.MIN_FRAME_SIZE or self._block or not self.has_settings:
                self._check_header(kind, length, flags, stream_id)
            begin = position + frames.HEADER_BYTES
            if kind == frames.DATA:
                left, padding = length, 0
                if flags & frames.PADDED:
                    if length and begin == size:
                        return position
                    padding = data[begin] if length else 0
                    if padding >= length:
                        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
                    left -= 1 + padding
                    begin += 1
                position = begin
                is_end = bool(flags & frames.END_STREAM)
                frames_left -= is_end
                requests.on_data(stream_id, length, is_end=is_end)
                self.data_left, self._padding_left = left, padding
                if not left:
                    requests.on_data_part(data, begin, begin, is_last=True)
                continue
            end = begin + length
            if size < end:
                return position
            payload = data[begin:end]
            position = end
            if kind == frames.WINDOW_UPDATE:
                self._others.on_window_update(stream_id, payload)
                continue
            frames_left -= 1
            if kind == frames.HEADERS:
                self._on_headers(stream_id, flags, payload)
            elif kind == frames.CONTINUATION:
                self._on_continuation(flags, payload)
            else:
                self.has_settings = True
                self._others.on_frame(kind, flags, stream_id, payload)
        self.has_more = position < size
        return position

    def _read_preface(self, data: bytes) -> bool:
        """Check the first bytes of the connection. Returns False if more of the preface is to come."""
        if data[: len(frames.PREFACE)] != frames.PREFACE[: len(data)]:
            text = f"expected the HTTP/2 preface, got {data[: len(frames.PREFACE)]!r}"
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, text)
        self._has_preface = len(data) >= len(frames.PREFACE)
        return self._has_preface

    def _check_header(self, kind: int, length: int, flags: int, stream_id: int) -> None:
        """Check the size of a frame, and whether a frame of its type may come now."""
        if length > MAX_DATA_BYTES:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, _too_large("frame", MAX_DATA_BYTES, length))
        if length > frames.MIN_FRAME_SIZE and kind != frames.DATA and length > _max_bytes(kind):
            text = _too_large(f"frame of type {kind}", _max_bytes(kind), length)
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        if self._block and (kind != frames.CONTINUATION or stream_id != self._block_id):
            text = f"expected CONTINUATION of the header block, got a frame of type {kind}"
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, text)
        if not self.has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            text = f"expected SETTINGS without ACK as the first frame, got a frame of type {kind}"
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, text)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS: expected an odd stream id")
        if flags & frames.PADDED:
            payload = frames.without_padding(payload)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS: expected 5 bytes of priority")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._requests.on_header_block(stream_id, payload, is_end=bool(flags & frames.END_STREAM))
            return
        self._block = [payload]
        self._block_bytes = len(payload)
        self._block_id = stream_id
        self._block_is_end = bool(flags & frames.END_STREAM)

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if not block:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > MAX_BLOCK_BYTES or len(block) > 1 + _MAX_CONTINUATIONS:
            text = f"header block: expected at most {MAX_BLOCK_BYTES} bytes in at most {1 + _MAX_CONTINUATIONS} frames"
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"{text}, got more")
        if flags & frames.END_HEADERS:
            self._block = []
            self._requests.on_header_block(self._block_id, b"".join(block), is_end=self._block_is_end)


def _max_bytes(kind: int) -> int:
    return MAX_BLOCK_BYTES if kind in (frames.HEADERS, frames.CONTINUATION) else frames.MIN_FRAME_SIZE


def _too_large(what: str, max_bytes: int, length: int) -> str:
    return f"{what}: expected at most {max_bytes} bytes, got {length}"
