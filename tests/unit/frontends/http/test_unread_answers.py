"""Answers that their callers do not read are limited, for all connections together."""

import asyncio
from typing import Any

from fakes.clock import FakeClock
from fakes.http import HttpSide, turns
from fakes.transport import FakeTransport
from ortserve.frontends.http.protocol import HttpProtocol

LIMIT = 500_000
ANSWER = 200_000
REQUEST = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


async def whole(scope: Any, receive: Any, send: Any) -> None:
    """An application that writes its answer at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % ANSWER)]})
    await send({"type": "http.response.body", "body": bytes(ANSWER)})


async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
    """An application that holds the rest of its answer while the caller does not read."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % ANSWER)]})
    for _ in range(2):
        await send({"type": "http.response.body", "body": bytes(ANSWER // 2), "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def ask(side: HttpSide) -> tuple[HttpProtocol, FakeTransport]:
    """Connect, and send a request whose answer the caller does not read yet."""
    protocol = HttpProtocol(side.context, side.endpoint, side.asgi, side.state)
    transport = FakeTransport(asyncio.get_running_loop(), protocol)
    protocol.connection_made(transport)
    transport.is_stuck = True
    transport.receive(REQUEST)
    await turns()
    return protocol, transport


async def test_oldest_unread_answer_is_cut_beyond_the_limit() -> None:
    for app in (whole, in_pieces):
        clock = FakeClock()
        side = HttpSide(app, max_unsent_bytes=LIMIT, clock=clock)
        _, first = await ask(side)
        clock.advance(1_000)
        others = [await ask(side) for _ in range(2)]
        assert first.is_lost
        assert not any(transport.is_lost for _, transport in others)
        assert side.cut_answers == ["overloaded"]
        assert 2 * ANSWER <= side.budget.held_bytes < LIMIT
        for protocol, transport in others:
            transport.is_stuck = False
            received = transport.take()
            while len(received) < ANSWER:
                await turns()
                received += transport.take()
            assert side.cut_answers == ["overloaded"]
            protocol.connection_lost(None)
        assert side.budget.held_bytes == 0


async def test_slowly_read_answer_is_counted_as_far_as_it_is_unread() -> None:
    """A transport reports reads only when its buffer is almost empty: an answer that was written once counted whole."""
    side = HttpSide(whole, max_unsent_bytes=LIMIT, clock=FakeClock())
    connections = [await ask(side)]
    connections[0][1].take_some(ANSWER - 70_000)
    connections += [await ask(side) for _ in range(2)]
    assert side.cut_answers == []
    assert 2 * ANSWER + 70_000 <= side.budget.held_bytes < LIMIT
    for protocol, _ in connections:
        protocol.connection_lost(None)
    assert side.budget.held_bytes == 0


async def test_slowly_read_answer_outlasts_an_unread_one() -> None:
    clock = FakeClock()
    side = HttpSide(whole, max_unsent_bytes=LIMIT, clock=clock)
    slow_protocol, slow = await ask(side)
    clock.advance(1_000)
    _, unread = await ask(side)
    clock.advance(1_000)
    slow.take_some(1_000)
    last_protocol, last = await ask(side)
    assert [transport.is_lost for transport in (slow, unread, last)] == [False, True, False]
    for protocol in (slow_protocol, last_protocol):
        protocol.connection_lost(None)


async def test_sole_unread_answer_may_exceed_the_limit() -> None:
    side = HttpSide(whole, max_unsent_bytes=1)
    protocol, transport = await ask(side)
    assert not transport.is_lost
    protocol.connection_lost(None)
    assert (side.cut_answers, side.budget.held_bytes) == (["disconnected"], 0)


async def test_answers_that_are_read_leave_nothing_behind() -> None:
    side = HttpSide(whole, max_unsent_bytes=1)
    protocol = HttpProtocol(side.context, side.endpoint, side.asgi, side.state)
    transport = FakeTransport(asyncio.get_running_loop(), protocol)
    protocol.connection_made(transport)
    for _ in range(3):
        transport.receive(REQUEST)
        await turns()
        assert len(transport.take()) > ANSWER
    assert side.budget.held_bytes == 0
    protocol.connection_lost(None)
    assert side.cut_answers == []
