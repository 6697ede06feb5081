"""HTTP/2 frames, and the effect of a peer's SETTINGS."""

import hyperframe.frame as hyper
import pytest

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError, PeerSettings, read_peer_settings


def parse(data: bytes) -> hyper.Frame:
    frame, length = hyper.Frame.parse_frame_header(memoryview(data[:9]))
    assert length == len(data) - 9
    frame.parse_body(memoryview(data[9:]))
    return frame


def test_frames_equal_those_of_another_library() -> None:
    parsed = parse(frames.settings({frames.INITIAL_WINDOW_SIZE: 5, frames.MAX_CONCURRENT_STREAMS: 7}))
    assert isinstance(parsed, hyper.SettingsFrame)
    assert parsed.settings == {4: 5, 3: 7}
    window = parse(frames.window_update(3, 9))
    assert isinstance(window, hyper.WindowUpdateFrame)
    assert (window.stream_id, window.window_increment) == (3, 9)
    reset = parse(frames.rst_stream(5, ErrorCode.CANCEL))
    assert isinstance(reset, hyper.RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (5, 8)
    goaway = parse(frames.goaway(7, ErrorCode.NO_ERROR, b"bye"))
    assert isinstance(goaway, hyper.GoAwayFrame)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (7, 0, b"bye")
    block = parse(frames.header_block(1, b"abc", 100, is_end=True))
    assert isinstance(block, hyper.HeadersFrame)
    assert (block.data, set(block.flags)) == (b"abc", {"END_STREAM", "END_HEADERS"})


def test_frame_header_is_the_frame_without_its_payload() -> None:
    assert frames.frame_header(frames.DATA, 1, 3, 4) + b"abcd" == frames.frame(frames.DATA, 1, 3, b"abcd")
    assert frames.read_header(frames.frame(frames.DATA, 1, 3, b"abcd")) == (4 << 8, 1, 3)


@pytest.mark.parametrize(("payload", "kept"), [(b"\x00abc", b"abc"), (b"\x02abc", b"a"), (b"\x03abc", b"")])
def test_padding_is_removed(payload: bytes, kept: bytes) -> None:
    assert frames.without_padding(payload) == kept


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04abc"])
def test_padding_longer_than_the_payload_is_an_error(payload: bytes) -> None:
    with pytest.raises(Http2ConnectionError):
        frames.without_padding(payload)


def payload(*values: tuple[int, int]) -> bytes:
    return b"".join(frames.settings({number: value})[9:] for number, value in values)


def test_last_setting_wins_and_the_smallest_table_size_is_kept() -> None:
    sent = payload((frames.INITIAL_WINDOW_SIZE, 1), (frames.INITIAL_WINDOW_SIZE, 2), (frames.MAX_FRAME_SIZE, 20_000))
    tables = payload((frames.HEADER_TABLE_SIZE, 5), (frames.HEADER_TABLE_SIZE, 4096))
    assert read_peer_settings(sent + tables) == PeerSettings(2, 20_000, 5)


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


def test_malformed_or_oversized_settings_end_the_connection() -> None:
    for sent, code in ((b"x", ErrorCode.FRAME_SIZE_ERROR), (bytes(6 * 65), ErrorCode.ENHANCE_YOUR_CALM)):
        with pytest.raises(Http2ConnectionError) as caught:
            read_peer_settings(sent)
        assert caught.value.code is code
