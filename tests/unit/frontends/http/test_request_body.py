"""Compressed bodies, inflated on the event loop and on threads, and counted as they grow."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.types import Message

from interpreted import interpreted_only
from ortserve.codecs.compression import Encoding, compress
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.request_body import IncomingBody, inflate, read_body
from ortserve.frontends.http.responses import HttpResponse, compressed, compresses_inline, should_compress
from ortserve.frontends.large_body import MIN_RECEIVED_BYTES, LargeBody
from ortserve.service.gate import BodyGate, Reservation
from scarcity import little_memory

TEXT = b"[" + b"0.123456," * 3000 + b"0]"


class CountingExecutor(ThreadPoolExecutor):
    """The event loop's executor, which counts its calls."""

    asked = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().submit(fn, *args, **kwargs)


@pytest.fixture
async def executor() -> CountingExecutor:
    executor = CountingExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    return executor


@pytest.mark.parametrize("encoding", list(Encoding))
async def test_short_body_is_inflated_at_once_and_a_long_one_in_threads(
    executor: CountingExecutor, encoding: Encoding
) -> None:
    gate = BodyGate(10**9)
    for body, is_short in ((TEXT, True), (os.urandom(60_000), True), (bytes(10**7), False), (os.urandom(10**5), False)):
        executor.asked = 0
        packed = compress(body, encoding)
        with Reservation(gate, len(packed)) as reservation:
            assert await inflate(packed, encoding, reservation, max_bytes=10**7) == body
            assert gate.held_bytes == len(packed) + len(body)
        assert gate.held_bytes == 0
        assert (executor.asked == 0) == is_short


async def test_body_inflating_past_the_memory_limit_is_rejected_early() -> None:
    gate = BodyGate(10**7)
    packed = compress(bytes(10**8), Encoding.GZIP)
    with Reservation(gate, 10**6), Reservation(gate, len(packed)) as reservation:
        with pytest.raises(ServeError) as caught:
            await inflate(packed, Encoding.GZIP, reservation, max_bytes=10**9)
        assert gate.held_bytes <= 10**7
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert gate.held_bytes == 0


async def test_oversized_inflated_body_is_rejected_in_loop_and_threads() -> None:
    for size in (1001, 10**7):
        with Reservation(BodyGate(10**9), 0) as reservation, pytest.raises(ServeError) as caught:
            await inflate(compress(bytes(size), Encoding.DEFLATE), Encoding.DEFLATE, reservation, max_bytes=1000)
        assert caught.value.kind is ErrorKind.TOO_LARGE


async def test_body_in_parts_that_no_memory_can_hold_is_overloaded() -> None:
    parts = [bytes(2**20)] * 2048  # joined, more than malloc can hold from earlier tests

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    gate = BodyGate(2**32)
    with (
        little_memory(2**24),
        Reservation(gate, 0) as reservation,
        pytest.raises(ServeError, match="memory for receiving") as caught,
    ):
        await read_body(receive, reservation, max_bytes=2**32)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert gate.held_bytes == 0


def answer(body: bytes) -> HttpResponse:
    return HttpResponse(200, body, ((b"content-type", b"application/json"),))


@interpreted_only
def test_parts_of_a_few_bytes_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    put, puts = LargeBody.put, 0

    def count_puts(large: LargeBody, part: bytes | memoryview) -> None:
        nonlocal puts
        puts += 1
        put(large, part)

    monkeypatch.setattr(LargeBody, "put", count_puts)
    parts = [b"%020d" % number for number in range(MIN_RECEIVED_BYTES // 20 + 2)]
    with Reservation(BodyGate(10**8), 0) as reservation:
        body = IncomingBody(reservation, max_bytes=10**7)
        for part in parts:
            body.keep(part)
        assert puts < 5
        assert body.take() == b"".join(parts)


def test_answer_is_compressed_when_large_and_smaller() -> None:
    assert should_compress(answer(TEXT), min_bytes=len(TEXT))
    assert not should_compress(answer(TEXT), min_bytes=len(TEXT) + 1)
    assert not should_compress(answer(os.urandom(20_000)), min_bytes=0)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_compressed_answer_adds_its_content_encoding(encoding: Encoding) -> None:
    packed = compressed(answer(TEXT), encoding)
    assert packed.headers == (
        (b"content-type", b"application/json"),
        (b"content-encoding", encoding.value.encode()),
    )
    assert len(packed.body) < len(TEXT) / 2
    assert compresses_inline(answer(TEXT))
    assert not compresses_inline(answer(TEXT * 3))
