"""HTTP/2 frames: their numbers (RFC 9113, sections 6, 7 and 6.5.2), and the bytes of those a server sends. Pure."""

import struct
from collections.abc import Mapping
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
"""The largest frame that either side may send until the other allows more."""
LARGEST_FRAME_SIZE: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

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
    """The peer did what no connection survives; it is told so and closed."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


read_header: Final = struct.Struct(">IBI").unpack_from
"""Length and type (``length << 8 | type``), flags, and stream id with its reserved bit, of nine bytes."""

pack_header: Final = struct.Struct(">IBI").pack
"""What ``read_header`` reads."""

_U32: Final = struct.Struct(">I").pack
_SETTING: Final = struct.Struct(">HI")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return pack_header(len(payload) << 8 | kind, flags, stream_id) + payload


def frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """The header alone, for payloads that are not worth copying."""
    return pack_header(length << 8 | kind, flags, stream_id)


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Pairs of number and value, in the order in which they are to be applied."""
    return list(_SETTING.iter_unpack(payload))


def header_block(stream_id: int, block: bytes, max_frame_size: int, *, is_end: bool) -> bytes:
    """HEADERS, and what of the block they do not hold in CONTINUATIONs."""
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


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _U32(increment))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _U32(code))


def goaway(last_stream_id: int, code: ErrorCode, text: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _U32(last_stream_id) + _U32(code) + text)


def without_padding(payload: bytes, flags: int) -> bytes:
    """What a HEADERS frame carries.

    Raises:
        Http2ConnectionError: There is more padding than payload.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
