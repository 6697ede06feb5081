"""Frames in bytes, under any segmentation."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from interpreted import interpreted_only
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frame_reader import FrameReader

pytestmark = interpreted_only


class Heard:
    """Stands for ``Receiving`` and ``ControlFrames``, and records their calls, with DATA in one piece."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._data = b""

    def on_data(self, stream_id: int, length: int, *, is_end: bool) -> None:
        self.calls.append(("DATA", stream_id, length, is_end))

    def on_data_part(self, data: bytes | None, begin: int, end: int, *, is_last: bool) -> None:
        assert data is not None, "nothing was placed"
        self._data += data[begin:end]
        if is_last:
            self.calls.append(("bytes", self._data))
            self._data = b""

    def on_header_block(self, stream_id: int, block: bytes, *, is_end: bool) -> None:
        self.calls.append(("block", stream_id, block, is_end))

    def on_window_update(self, stream_id: int, payload: bytes) -> None:
        self.on_frame(frames.WINDOW_UPDATE, 0, stream_id, payload)

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self.calls.append(("frame", kind, flags, stream_id, payload))


def reading_into(heard: Any) -> FrameReader:
    return FrameReader(heard, heard)


SENT = b"".join(
    (
        frames.PREFACE,
        frames.settings({frames.INITIAL_WINDOW_SIZE: 5}),
        frames.frame(
            frames.HEADERS, frames.END_HEADERS | frames.PADDED | frames.HAS_PRIORITY, 1, b"\x02" + b"prio!ab__"
        ),
        frames.frame(frames.DATA, 0, 1, b"hello"),
        frames.frame(frames.DATA, frames.PADDED, 1, b"\x03world___"),
        frames.frame(frames.HEADERS, frames.END_STREAM, 3, b"ab"),
        frames.frame(frames.CONTINUATION, 0, 3, b""),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 3, b"cd"),
        frames.frame(frames.DATA, frames.END_STREAM, 1, b""),
        frames.frame(0xEE, 0x7, 9, b"?"),
    )
)
EXPECTED_CALLS = [
    ("frame", frames.SETTINGS, 0, 0, bytes((0, 4, 0, 0, 0, 5))),
    ("block", 1, b"ab", False),
    ("DATA", 1, 5, False),
    ("bytes", b"hello"),
    ("DATA", 1, 9, False),
    ("bytes", b"world"),
    ("block", 3, b"abcd", True),
    ("DATA", 1, 0, True),
    ("bytes", b""),
    ("frame", 0xEE, 7, 9, b"?"),
]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_frames_are_independent_of_segmentation(cuts: list[int]) -> None:
    heard = Heard()
    reader = reading_into(heard)
    position = number = 0
    while position < len(SENT):
        size = cuts[number % len(cuts)]
        reader.feed(SENT[position : position + size], number)
        position += size
        number += 1
    assert heard.calls == EXPECTED_CALLS
    assert reader.unfinished_since_ns is None
    assert reader.has_settings


def test_frame_counts_as_unfinished_from_when_the_one_before_it_ended() -> None:
    reader = reading_into(Heard())
    reader.feed(frames.PREFACE + frames.settings({}), 1)
    ping = frames.frame(frames.PING, 0, 0, bytes(8))
    reader.feed(ping[:3], 2)
    reader.feed(ping[3:6], 3)
    assert reader.unfinished_since_ns == 2
    reader.feed(ping[6:] + ping[:1], 4)
    assert reader.unfinished_since_ns == 4
    reader.feed(ping[1:], 5)
    assert reader.unfinished_since_ns is None


def test_header_block_counts_as_unfinished_from_its_first_frame() -> None:
    reader = reading_into(Heard())
    reader.feed(frames.PREFACE + frames.settings({}), 1)
    reader.feed(frames.frame(frames.HEADERS, 0, 1, b"a"), 2)
    reader.feed(frames.frame(frames.CONTINUATION, 0, 1, b"b"), 3)
    assert reader.unfinished_since_ns == 2
    reader.feed(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"c"), 4)
    assert reader.unfinished_since_ns is None


def test_slow_data_frame_is_not_unfinished() -> None:
    reader = reading_into(Heard())
    reader.feed(frames.PREFACE + frames.settings({}), 1)
    reader.feed(frames.frame(frames.DATA, 0, 1, b"hello")[:-2], 2)
    assert reader.unfinished_since_ns is None
