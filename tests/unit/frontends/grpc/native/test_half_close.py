"""Peers that close their side of the connection: they send no more requests and may still read answers."""

import asyncio

import pytest

from native_wire import ECHO, HOLD, STREAM, Client, Wire, framed, on_wire
from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native import frames

PING = frames.frame(frames.PING, 0, 0, bytes(8))


def test_complete_calls_are_answered_then_the_connection_closes() -> None:
    async def test(wire: Wire, client: Client) -> None:
        streams = [client.open(HOLD) for _ in range(3)]
        for stream in streams:
            client.send(stream, framed(b"x"), is_end=True)
        echoing = client.open(STREAM)
        client.send(echoing, framed(b"y"))
        await client.exchange()
        wire.transport.receive_eof()
        await client.exchange()
        assert not wire.transport.is_closing()
        assert client.answers[echoing].is_ended
        assert client.answers[echoing].messages == [b"y"]
        wire.release()
        await client.exchange()
        assert [client.answers[stream].messages for stream in streams] == [[b"x"]] * 3
        assert wire.transport.is_lost

    on_wire(test)


@pytest.mark.parametrize("sent", [framed(b"xyz")[:-1], framed(b"xyz")[:3], framed(bytes(200_000))[:100_000]])
def test_incomplete_call_ends_at_once(sent: bytes) -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        cut = client.open(STREAM)
        await client.exchange()
        client.send(cut, sent[:65_000])
        await client.exchange()
        client.send(cut, sent[65_000:])
        await client.exchange()
        assert wire.running == 2
        wire.transport.receive_eof()
        await client.exchange()
        assert wire.running == 1
        assert client.answers[cut].reset is not None
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert wire.transport.is_lost

    on_wire(test)


def test_connection_without_calls_closes_at_once() -> None:
    async def test(wire: Wire, client: Client) -> None:
        assert (await client.call(ECHO, b"x")).messages == [b"x"]
        wire.transport.receive_eof()
        await wire.turn()
        assert wire.transport.is_lost

    on_wire(test)


def test_keepalive_ping_detects_a_closed_client() -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        wire.transport.receive_eof()
        assert await wire.turn() == PING
        await asyncio.sleep(0.1)
        assert await wire.turn() == PING
        wire.lose()  # caused by its reset
        await wire.turn()
        assert wire.cancelled == 1

    on_wire(test)


def test_client_that_answers_pings_can_wait() -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        wire.transport.receive_eof()
        for _ in range(200):
            await asyncio.sleep(1)
            await wire.turn()
        assert wire.running == 1
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert wire.transport.is_lost

    on_wire(
        test,
        options=GrpcOptions(
            grpc_keepalive_time_s=10, grpc_keepalive_permit_without_calls=True, grpc_max_connection_idle_s=20
        ),
    )


def test_answer_larger_than_the_windows_fails_its_call() -> None:
    """The peer can no longer enlarge them."""

    async def test(wire: Wire, client: Client) -> None:
        client.reads = False
        stream = client.open(HOLD)
        await client.send_all(stream, framed(bytes(200_000)))
        await client.exchange()
        wire.transport.receive_eof()
        wire.release()
        await client.exchange()
        await asyncio.sleep(1.1)
        await client.exchange()
        assert client.answers[stream].status == 14
        assert wire.transport.is_lost
        assert wire.cut_answers == ["unavailable"]

    on_wire(test)


def test_drain_of_a_half_closed_connection_waits_for_its_calls() -> None:
    async def test(wire: Wire, client: Client) -> None:
        held = client.open(HOLD)
        client.send(held, framed(b"x"), is_end=True)
        await client.exchange()
        wire.transport.receive_eof()
        wire.connection.begin_drain()
        await asyncio.sleep(5)
        assert wire.running == 1
        wire.release()
        await client.exchange()
        assert client.answers[held].messages == [b"x"]
        assert wire.transport.is_lost

    on_wire(test)
