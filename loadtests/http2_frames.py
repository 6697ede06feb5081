"""Frames of HTTP/2 (RFC 9113, section 4) for gRPC clients that write them by hand.

The h2 library would take longer than the server.
"""

from typing import Final

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
"""Types of frames."""
END_STREAM, END_HEADERS, ACK = 1, 4, 1
"""Flags of frames."""
FIRST_WINDOW: Final = 65_535
"""The window of a new connection, in bytes."""


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Encode a frame."""
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


def opening() -> bytes:
    """The first bytes of a client: preface, no settings, and the largest window for all answers together."""
    credit = (2**31 - 1 - FIRST_WINDOW).to_bytes(4)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, credit)


def first_frame(received: bytes) -> tuple[int, int, int, bytes, bytes] | None:
    """Type, flags, stream and content of the first frame, and the bytes behind it; None if it is not complete."""
    end = 9 + int.from_bytes(received[:3])
    if len(received) < max(9, end):
        return None
    return received[3], received[4], int.from_bytes(received[5:9]), received[9:end], received[end:]
