"""SETTINGS of a peer."""

import pytest

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.peer_settings import PeerSettings, read_peer_settings


def payload(*values: tuple[int, int]) -> bytes:
    return b"".join(frames.settings({number: value})[9:] for number, value in values)


def test_last_value_counts_and_the_smallest_table_is_remembered() -> None:
    told = payload((frames.INITIAL_WINDOW_SIZE, 1), (frames.INITIAL_WINDOW_SIZE, 2), (frames.MAX_FRAME_SIZE, 20_000))
    tables = payload((frames.HEADER_TABLE_SIZE, 5), (frames.HEADER_TABLE_SIZE, 4096))
    assert read_peer_settings(told + tables) == PeerSettings(2, 20_000, 5)


def test_unknown_settings_are_ignored() -> None:
    assert read_peer_settings(payload((0x99, 2**32 - 1), (frames.ENABLE_PUSH, 1))) == PeerSettings()
    assert read_peer_settings(b"") == PeerSettings()


@pytest.mark.parametrize(
    ("number", "value", "code"),
    [
        (frames.ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
        (frames.INITIAL_WINDOW_SIZE, 2**31, ErrorCode.FLOW_CONTROL_ERROR),
        (frames.MAX_FRAME_SIZE, 16_383, ErrorCode.PROTOCOL_ERROR),
        (frames.MAX_FRAME_SIZE, 2**24, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_value_out_of_its_range_ends_the_connection(number: int, value: int, code: ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as caught:
        read_peer_settings(payload((number, value)))
    assert caught.value.code is code
    assert str(value) in caught.value.text


def test_what_is_no_list_or_too_long_a_one_ends_the_connection() -> None:
    for told, code in ((b"x", ErrorCode.FRAME_SIZE_ERROR), (bytes(6 * 65), ErrorCode.ENHANCE_YOUR_CALM)):
        with pytest.raises(Http2ConnectionError) as caught:
            read_peer_settings(told)
        assert caught.value.code is code
