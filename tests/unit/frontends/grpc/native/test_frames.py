"""The bytes of frames, held against the hyperframe library's reading of them."""

import hyperframe.frame as hyper
import pytest

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError


def parse(data: bytes) -> hyper.Frame:
    frame, length = hyper.Frame.parse_frame_header(memoryview(data[:9]))
    assert length == len(data) - 9
    frame.parse_body(memoryview(data[9:]))
    return frame


def test_frames_are_what_another_library_reads() -> None:
    told = parse(frames.settings({frames.INITIAL_WINDOW_SIZE: 5, frames.MAX_CONCURRENT_STREAMS: 7}))
    assert isinstance(told, hyper.SettingsFrame)
    assert told.settings == {4: 5, 3: 7}
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
def test_padding_is_cut_off(payload: bytes, kept: bytes) -> None:
    assert frames.without_padding(payload, frames.PADDED) == kept
    assert frames.without_padding(payload, 0) == payload


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04abc"])
def test_padding_that_is_more_than_the_payload_is_an_error(payload: bytes) -> None:
    with pytest.raises(Http2ConnectionError):
        frames.without_padding(payload, frames.PADDED)
