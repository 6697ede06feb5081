"""What a peer's SETTINGS say (RFC 9113, section 6.5). Pure."""

from dataclasses import dataclass
from typing import Final

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError

_MAX_VALUES: Final = 64
"""Of one frame; there are not ten settings that anybody knows."""

_HIGHEST: Final = {
    frames.ENABLE_PUSH: (1, ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH"),
    frames.INITIAL_WINDOW_SIZE: (frames.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE"),
    frames.MAX_FRAME_SIZE: (frames.LARGEST_FRAME_SIZE, ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE"),
}


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The settings that change what we send; None where the frame does not say.

    Attributes:
        initial_window: Bytes that the peer takes of a new stream.
        max_frame_size: Of frames to it.
        lowest_table: The smallest table for header blocks to it that the frame asks for, if only in passing.
    """

    initial_window: int | None = None
    max_frame_size: int | None = None
    lowest_table: int | None = None


def read_peer_settings(payload: bytes) -> PeerSettings:
    """Read a SETTINGS frame that confirms nothing; of values that come twice the last one counts.

    Raises:
        Http2ConnectionError: A value out of its range, or what is no list of settings.
    """
    if len(payload) % 6:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of no whole number of values")
    if len(payload) > 6 * _MAX_VALUES:
        raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS")
    values: dict[int, int] = {}
    lowest_table: int | None = None
    for number, value in frames.read_settings(payload):
        if number in _HIGHEST:
            highest, code, name = _HIGHEST[number]
            lowest = frames.MIN_FRAME_SIZE if number == frames.MAX_FRAME_SIZE else 0
            if not lowest <= value <= highest:
                raise Http2ConnectionError(code, f"{name}: expected {lowest} to {highest}, got {value}")
        elif number == frames.HEADER_TABLE_SIZE:
            lowest_table = value if lowest_table is None else min(lowest_table, value)
        values[number] = value
    return PeerSettings(values.get(frames.INITIAL_WINDOW_SIZE), values.get(frames.MAX_FRAME_SIZE), lowest_table)
