"""HTTP/2 frames: constants (RFC 9113, sections 6, 7), encodings of sent frames, and the peer's SETTINGS. Pure."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

HEADER_BYTES: Final = 9
DEFAULT_WINDOW: Final = 65_535
DEFAULT_TABLE_SIZE: Final = 4_096
MAX_WINDOW: Final = 2**31 - 1
MIN_FRAME_SIZE: Final = 16_384
"""Largest frame that either side may send until the other side allows more."""
LARGEST_FRAME_SIZE: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1


class ErrorCode(IntEnum):
    """Reasons for which a stream or a connection ends."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB


class Http2ConnectionError(Exception):
    """A violation of the protocol that ends the connection, after a GOAWAY with ``code`` and ``text``."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


read_header: Final = struct.Struct(">IBI").unpack_from
"""Unpacks nine bytes: ``length << 8 | type``, flags, and the stream id with its reserved bit."""

pack_header: Final = struct.Struct(">IBI").pack
"""The inverse of ``read_header``."""

_U32: Final = struct.Struct(">I").pack
_SETTING: Final = struct.Struct(">HI")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return pack_header(len(payload) << 8 | kind, flags, stream_id) + payload


def frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Encode the header alone, for payloads that are sent without a copy."""
    return pack_header(length << 8 | kind, flags, stream_id)


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def header_block(stream_id: int, block: bytes, max_frame_size: int, *, is_end: bool) -> bytes:
    """Encode a HEADERS frame, followed by CONTINUATION frames if the block is larger than one frame."""
    flags = END_STREAM if is_end else 0
    if len(block) <= max_frame_size:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [block[begin : begin + max_frame_size] for begin in range(0, len(block), max_frame_size)]
    first, *middle, last = parts
    return b"".join(
        (
            frame(HEADERS, flags, stream_id, first),
            *(frame(CONTINUATION, 0, stream_id, part) for part in middle),
            frame(CONTINUATION, END_HEADERS, stream_id, last),
        )
    )


def too_large_window(window: int) -> Http2ConnectionError:
    """Return the error for a window of more than ``MAX_WINDOW`` bytes."""
    text = f"window: expected at most {MAX_WINDOW} bytes, got {window}"
    return Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, text)


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _U32(increment))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _U32(code))


def goaway(last_stream_id: int, code: ErrorCode, text: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _U32(last_stream_id) + _U32(code) + text)


def without_padding(payload: bytes) -> bytes:
    """Remove the padding from the payload of a padded HEADERS frame.

    Raises:
        Http2ConnectionError: The frame has more padding than payload.
    """
    if not payload or payload[0] >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


_MAX_SETTINGS: Final = 64
"""Maximum number of values in a frame. Fewer than ten settings are defined."""

_HIGHEST: Final = {
    ENABLE_PUSH: (1, ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH"),
    INITIAL_WINDOW_SIZE: (MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE"),
    MAX_FRAME_SIZE: (LARGEST_FRAME_SIZE, ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE"),
}


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The values of a SETTINGS frame that affect sending; None for values that the frame does not contain.

    Attributes:
        initial_window: Bytes that the peer accepts on a new stream.
        max_frame_size: Maximum size of frames to the peer.
        lowest_table: Smallest value of HEADER_TABLE_SIZE: the dynamic table for header blocks to the peer.
    """

    initial_window: int | None = None
    max_frame_size: int | None = None
    lowest_table: int | None = None


def read_peer_settings(payload: bytes) -> PeerSettings:
    """Parse a SETTINGS frame without ACK. The last one of repeated values counts, except for ``lowest_table``.

    Raises:
        Http2ConnectionError: A value is out of range, or the payload is not a list of settings.
    """
    if len(payload) % 6:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS: expected a multiple of 6 bytes")
    if len(payload) > 6 * _MAX_SETTINGS:
        text = f"SETTINGS: expected at most {_MAX_SETTINGS} values, got {len(payload) // 6}"
        raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
    values: dict[int, int] = {}
    lowest_table: int | None = None
    for number, value in _SETTING.iter_unpack(payload):
        if number in _HIGHEST:
            highest, code, name = _HIGHEST[number]
            lowest = MIN_FRAME_SIZE if number == MAX_FRAME_SIZE else 0
            if not lowest <= value <= highest:
                raise Http2ConnectionError(code, f"{name}: expected {lowest} to {highest}, got {value}")
        elif number == HEADER_TABLE_SIZE:
            lowest_table = value if lowest_table is None else min(lowest_table, value)
        values[number] = value
    return PeerSettings(values.get(INITIAL_WINDOW_SIZE), values.get(MAX_FRAME_SIZE), lowest_table)
