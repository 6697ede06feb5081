"""Messages with and without their compression."""

import asyncio
import gzip
import tracemalloc
import zlib

import grpc
import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.native.compression import deflate, inflate
from ortserve.frontends.grpc.native.messages import RefusedMessageError
from ortserve.service.gate import BodyGate

MIB = 1024 * 1024


def inflated(message: bytes, encoding: bytes, max_bytes: int, gate: BodyGate | None = None) -> bytes:
    async def work() -> bytes:
        with (gate or BodyGate(10**9)).hold(len(message)) as hold:
            return bytes(await inflate(message, encoding, hold, max_bytes=max_bytes))

    return asyncio.run(work())


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("message", [b"", b"x", bytes(100_000), bytes(9 * MIB)])
def test_message_comes_back(encoding: bytes, message: bytes) -> None:
    assert inflated(deflate(message, encoding), encoding, len(message)) == message


def test_other_peoples_compression_is_understood() -> None:
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
    # Those of gzip hold the time.
    ids=["identity", "unknown", "nothing of gzip", "cut off", "more behind", "too long", "far too long"],
)
def test_what_cannot_be_inflated_is_refused(message: bytes, encoding: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(RefusedMessageError) as caught:
        inflated(message, encoding, 100)
    assert caught.value.code is code


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_bomb_takes_no_more_memory_than_the_limit(encoding: bytes) -> None:
    bomb = deflate(bytes(256 * MIB), encoding)
    limit = 4 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(RefusedMessageError) as caught:
            inflated(bomb, encoding, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak < 4 * limit


def test_message_that_grows_counts_and_is_refused_where_the_server_holds_too_much() -> None:
    gate = BodyGate(10 * MIB)
    others = gate.hold(MIB)
    with pytest.raises(ServeError) as caught:
        inflated(deflate(bytes(64 * MIB), b"gzip"), b"gzip", 64 * MIB, gate)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert gate.held_bytes == MIB
    others.release()
    assert len(inflated(deflate(bytes(64 * MIB), b"gzip"), b"gzip", 64 * MIB, gate)) == 64 * MIB  # nobody else is there


def test_message_that_fits_a_window_counts_and_is_for_its_handler_to_refuse() -> None:
    async def work() -> None:
        gate = BodyGate(MIB)
        gate.hold(MIB)
        message = deflate(bytes(MIB), b"gzip")
        with gate.hold(0) as hold:
            await inflate(message, b"gzip", hold, max_bytes=MIB)
            assert gate.held_bytes == MIB + len(message) + MIB
        assert gate.held_bytes == MIB

    asyncio.run(work())
