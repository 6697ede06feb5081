"""gRPC messages, however their bytes were cut."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.core.large_memory import LargeMemory
from ortserve.frontends.grpc.native.messages import Message, MessageReader, RefusedMessageError


def framed(message: bytes, *, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def feed(reader: MessageReader, data: bytes) -> list[Message]:
    """The same bytes among others."""
    return reader.feed(b"ab" + data + b"c", 2, 2 + len(data))


def test_messages_are_found_wherever_the_bytes_are_cut_in_two() -> None:
    messages = [b"", b"a", b"bc" * 10, b""]
    sent = b"".join(framed(message, flag=number % 2) for number, message in enumerate(messages))
    for cut in range(len(sent) + 1):
        reader = MessageReader(100, LargeMemory())
        found = feed(reader, sent[:cut]) + feed(reader, sent[cut:])
        assert found == [(message, number % 2 == 1) for number, message in enumerate(messages)]
        assert reader.is_between_messages
        assert reader.kept_bytes == 0


@given(st.lists(st.binary(max_size=9000), max_size=5), st.lists(st.integers(1, 6000), min_size=1))
def test_messages_are_found_wherever_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(framed(message) for message in messages)
    reader = MessageReader(10_000, LargeMemory())
    found = []
    position = number = 0
    while position < len(sent):
        size = cuts[number % len(cuts)]
        found += feed(reader, sent[position : position + size])
        position += size
        number += 1
        assert reader.kept_bytes == sum(len(part) for part in reader._parts)
    assert [message for message, _ in found] == messages


def test_bytes_that_come_one_by_one_are_not_kept_one_by_one() -> None:
    reader = MessageReader(100_000, LargeMemory())
    feed(reader, framed(bytes(50_000))[:5])
    for _ in range(40_000):
        feed(reader, b"x")
    assert len(reader._parts) < 20


def test_rest_of_a_message_that_was_let_go_is_not_counted() -> None:
    reader = MessageReader(100, LargeMemory())
    feed(reader, framed(b"hello")[:7])
    assert not reader.is_between_messages
    assert (reader.kept_bytes, reader.length) == (2, 5)
    reader.clear()
    assert reader.is_between_messages
    assert (reader.kept_bytes, reader.length) == (0, -1)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(framed(b"x", flag=3), grpc.StatusCode.INTERNAL), (framed(bytes(101)), grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
def test_message_that_is_none_or_too_large_is_refused_by_its_prefix(sent: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(RefusedMessageError) as caught:
        feed(MessageReader(100, LargeMemory()), sent[:5])
    assert caught.value.code is code
