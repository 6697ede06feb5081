"""The end of the HTTP server: requests in flight at the begin of a drain are answered."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from fakes.http import HttpSide
from grpc_frontends import wait_until
from http_wire import get
from interpreted import interpreted_only
from ortserve.frontends.http import protocol
from ortserve.frontends.http import server as http_server
from ortserve.frontends.http.server import HttpServer
from servers import LONG_S

REQUEST = get("/x")


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    side = HttpSide()
    server = HttpServer(side.endpoint, side.asgi, side.context)
    yield server
    await server.stop(0)


async def test_connections_that_wait_to_be_accepted_are_answered(server: HttpServer) -> None:
    port = await server.start()
    callers = [socket.create_connection(("127.0.0.1", port), LONG_S) for _ in range(3)]  # the event loop is blocked
    for caller in callers:
        caller.sendall(REQUEST)
    assert server._server is not None
    server.begin_drain()
    listeners = [shown._sock for one in server._server.servers for shown in one.sockets]  # type: ignore[attr-defined]

    await server._server.shutdown(listeners)

    for caller in callers:
        with caller, caller.makefile("rb") as answer:
            whole = answer.read()
            assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in whole


@interpreted_only
@pytest.mark.parametrize("begins", [b"", b"GET /x HTT"], ids=["new connection", "part of a head"])
async def test_request_that_arrives_soon_is_answered(
    server: HttpServer, begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_S", LONG_S)
    monkeypatch.setattr(http_server, "_CLOSE_S", LONG_S)
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begins)
    await wait_until(lambda: server.connection_count > 0)
    stopping = asyncio.create_task(server.stop(0))
    inner = server._server
    assert inner is not None
    await wait_until(lambda: not any(one.is_serving() for one in inner.servers))

    writer.write(REQUEST[len(begins) :])

    answer = await asyncio.wait_for(reader.read(), LONG_S)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    await stopping
    writer.close()


@interpreted_only
async def test_unused_connection_closes_after_a_moment(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.01)
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await wait_until(lambda: server.connection_count > 0)

    await server.stop(LONG_S)

    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(("ends", "is_whole"), [(b"invalid\r\n", True), (b"", False)], ids=["answered", "unanswered"])
async def test_connection_that_only_lingers_is_not_cut_off(server: HttpServer, ends: bytes, is_whole: bool) -> None:
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    inner = server._server
    assert inner is not None
    await wait_until(lambda: any(one.has_unanswered for one in inner.server_state.connections))  # type: ignore[union-attr]
    stopping = asyncio.create_task(server.stop(1))
    await wait_until(lambda: not any(one.is_serving() for one in inner.servers))
    writer.write(ends)
    if is_whole:
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    assert await stopping is is_whole
    writer.close()
