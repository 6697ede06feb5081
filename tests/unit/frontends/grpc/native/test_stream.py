"""Streams: receive windows, and messages that arrive."""

import pytest

from ortserve.core.large_memory import LargeMemory
from ortserve.frontends.grpc.native.stream import ReceiveWindow, Stream
from ortserve.frontends.grpc.quick_calls import RequestHead

S = 1_000_000_000
PREFIX = b"\0" + (90_000).to_bytes(4, "big")


def test_data_past_the_window_is_an_error() -> None:
    window = ReceiveWindow(100)
    assert window.take(100)
    assert not window.take(1)


def test_window_is_refilled_once_half_is_used() -> None:
    window = ReceiveWindow(100)
    window.take(49)
    assert window.credit() == 0
    window.take(1)
    assert window.credit() == 50
    assert window.credit() == 0
    assert window.take(100)
    assert window.credit() == 100


def fed(data: bytes) -> Stream:
    """A stream that begins at 0 and has received ``data``."""
    stream = Stream(1, RequestHead("/a/b"), 0, max_message_bytes=100_000, memory=LargeMemory())
    stream.put(stream.reader.feed(data, 0, len(data)))
    return stream


@pytest.mark.parametrize(
    ("data", "after_s", "is_arriving"),
    [
        (b"", 0, False),
        (PREFIX, 1, False),
        (PREFIX + b"x", 9, True),
        (PREFIX + b"x", 10, False),
        (PREFIX + bytes(80_000), 19, True),
        (PREFIX + bytes(80_000), 20, False),
        (PREFIX + bytes(90_000), 1000, True),
    ],
)
def test_message_is_arriving_until_it_is_slow_or_taken(data: bytes, after_s: int, is_arriving: bool) -> None:
    stream = fed(data)
    assert stream.is_arriving(after_s * S) is is_arriving
    while stream.messages:
        stream.take()
        assert not stream.is_arriving(after_s * S)
