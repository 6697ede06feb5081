"""Calls of embeddings with many texts or long answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from loop_turns import run_counting_turns
from ortserve.frontends.http.embeddings_routes import LongResponse, _Running

PIECE_BYTES = 256 * 1024


async def test_long_response_is_written_in_several_turns_although_the_caller_reads_at_once() -> None:
    """26 MB held the event loop for 27 ms."""
    sent: list[Mapping[str, Any]] = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the request was received before")

    parts: list[bytes | memoryview] = [b"[", b"1" * (5 * PIECE_BYTES), b",", memoryview(b"2" * PIECE_BYTES), b"]"]
    _, turns = await run_counting_turns(LongResponse(parts, {"server-timing": "x"})({"type": "http"}, receive, send))
    head, *pieces = sent
    assert dict(head["headers"])[b"content-length"] == b"%d" % sum(map(len, parts))
    assert dict(head["headers"])[b"server-timing"] == b"x"
    assert b"".join(piece.get("body", b"") for piece in pieces) == b"".join(parts)
    assert max(len(piece.get("body", b"")) for piece in pieces) < 2 * PIECE_BYTES
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert turns >= 6


async def test_requests_of_a_call_are_created_in_several_turns() -> None:
    """2,048 at once held the event loop for 2 ms or longer."""

    class Silent:
        complete_ns = 0

        def begin(self) -> "Silent":
            return self

        def start(self, *_: object) -> None:
            pass

        def cancel(self) -> None:
            pass

    created: list[int] = []

    def create(index: int) -> Any:
        created.append(index)
        return None, None

    silent: Any = Silent()
    running = asyncio.create_task(_Running(silent, silent, create, 2048, 2048).run())
    counts = [0]
    while counts[-1] < 2048:
        await asyncio.sleep(0)
        counts.append(len(created))
        assert counts[-1] - counts[-2] <= 8
    assert created == list(range(2048))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
