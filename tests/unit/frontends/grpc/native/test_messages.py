"""gRPC messages in the bytes of a stream, and their compression."""

import asyncio
import gzip
import tracemalloc
import zlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.compression import Encoding, compress
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.native.messages import Message, MessageReader, RejectedMessageError, inflate
from ortserve.service.gate import BodyGate, Reservation

MIB = 1024 * 1024


def framed(message: bytes, *, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def feed(reader: MessageReader, data: bytes) -> list[Message]:
    """Feed the bytes between other bytes."""
    return reader.feed(b"ab" + data + b"c", 2, 2 + len(data))


def test_messages_are_found_in_two_segments() -> None:
    messages = [b"", b"a", b"bc" * 10, b""]
    sent = b"".join(framed(message, flag=number % 2) for number, message in enumerate(messages))
    for cut in range(len(sent) + 1):
        reader = MessageReader(100, LargeMemory())
        found = feed(reader, sent[:cut]) + feed(reader, sent[cut:])
        assert found == [(message, number % 2 == 1) for number, message in enumerate(messages)]
        assert (reader.length, reader.prefix) == (-1, b"")
        assert reader.kept_bytes == 0


@given(st.lists(st.binary(max_size=9000), max_size=5), st.lists(st.integers(1, 6000), min_size=1))
def test_messages_are_found_under_any_segmentation(messages: list[bytes], cuts: list[int]) -> None:
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


def test_single_bytes_are_not_stored_as_separate_chunks() -> None:
    reader = MessageReader(100_000, LargeMemory())
    feed(reader, framed(bytes(50_000))[:5])
    for _ in range(40_000):
        feed(reader, b"x")
    assert len(reader._parts) < 20


def test_rest_of_a_dropped_message_is_not_counted() -> None:
    reader = MessageReader(100, LargeMemory())
    feed(reader, framed(b"hello")[:7])
    assert (reader.kept_bytes, reader.length) == (2, 5)
    reader.clear()
    assert (reader.length, reader.prefix) == (-1, b"")
    assert (reader.kept_bytes, reader.length) == (0, -1)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(framed(b"x", flag=3), grpc.StatusCode.INTERNAL), (framed(bytes(101)), grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
def test_malformed_or_oversized_message_is_rejected_by_its_prefix(sent: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(RejectedMessageError) as caught:
        feed(MessageReader(100, LargeMemory()), sent[:5])
    assert caught.value.code is code


def inflated(message: bytes, encoding: bytes, max_bytes: int, gate: BodyGate | None = None) -> bytes:
    async def work() -> bytes:
        with Reservation((gate or BodyGate(10**9)), len(message)) as reservation:
            return bytes(await inflate(message, encoding, reservation, max_bytes=max_bytes))

    return asyncio.run(work())


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("message", [b"", b"x", bytes(100_000), bytes(9 * MIB)])
def test_message_survives_a_round_trip(encoding: bytes, message: bytes) -> None:
    assert inflated(compress(message, Encoding(encoding.decode())), encoding, len(message)) == message


def test_foreign_compression_is_decoded() -> None:
    assert inflated(gzip.compress(b"hello"), b"gzip", 100) == b"hello"
    assert inflated(zlib.compress(b"hello"), b"deflate", 100) == b"hello"


@pytest.mark.parametrize(
    ("message", "encoding", "code"),
    [
        (b"x", b"identity", grpc.StatusCode.INTERNAL),
        (b"x", b"br", grpc.StatusCode.UNIMPLEMENTED),
        (b"x", b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(b"hello")[:-9], b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(b"hello") + b"more", b"gzip", grpc.StatusCode.INTERNAL),
        (gzip.compress(bytes(101)), b"gzip", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (gzip.compress(bytes(10_000_000), 1), b"gzip", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    # gzip's bytes contain the time.
    ids=["identity", "unknown", "nothing of gzip", "cut off", "more behind", "too long", "far too long"],
)
def test_undecodable_message_is_rejected(message: bytes, encoding: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(RejectedMessageError) as caught:
        inflated(message, encoding, 100)
    assert caught.value.code is code


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_decompression_bomb_stays_within_the_limit(encoding: bytes) -> None:
    bomb = compress(bytes(64 * MIB), Encoding(encoding.decode()))
    limit = 4 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(RejectedMessageError) as caught:
            inflated(bomb, encoding, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak < 4 * limit


def test_inflated_message_counts_and_is_rejected_at_the_limit() -> None:
    gate = BodyGate(10 * MIB)
    others = Reservation(gate, MIB)
    with pytest.raises(ServeError) as caught:
        inflated(compress(bytes(16 * MIB), Encoding.GZIP), b"gzip", 16 * MIB, gate)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert gate.held_bytes == MIB
    others.release()
    # No other task holds the gate.
    assert len(inflated(compress(bytes(16 * MIB), Encoding.GZIP), b"gzip", 16 * MIB, gate)) == 16 * MIB


def test_small_message_counts_past_the_limit_without_rejection() -> None:
    async def work() -> None:
        gate = BodyGate(MIB)
        Reservation(gate, MIB)
        message = compress(bytes(MIB), Encoding.GZIP)
        with Reservation(gate, 0) as reservation:
            await inflate(message, b"gzip", reservation, max_bytes=MIB)
            assert gate.held_bytes == MIB + len(message) + MIB
        assert gate.held_bytes == MIB

    asyncio.run(work())
