"""The bridge to the ASGI application: its requests and responses on a connection without a socket."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Message, Scope

from fakes.http import TURNS, HttpSide, turns
from fakes.transport import FakeTransport
from interpreted import interpreted_only
from ortserve.frontends.http import control_app
from ortserve.frontends.http.console_routes import EventStream
from ortserve.frontends.http.control_app import make_control_app
from ortserve.frontends.http.protocol import HttpProtocol
from ortserve.service.observation import Viewer

pytestmark = interpreted_only

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Faulty:
    """Services in which every call raises an exception."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("tensors: 1, 2, 3")

        return fail


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "\r\n"]).encode()


async def answer(app: ASGIApp, *pieces: bytes) -> tuple[int, dict[str, str], bytes, bool]:
    """Send requests. Returns status, headers, content and whether the connection is closed."""
    written, is_closed = await HttpSide(app).answer(list(pieces))
    head, _, content = written.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), headers, content, is_closed


def sending(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def start(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_internal_error_is_logged_and_answered_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    names = ("statistics", "repository", "logs", "traces", "profiling", "labels", "rollouts")
    nothing: Any = SimpleNamespace(**dict.fromkeys(names))
    faulty: Any = Faulty()
    app = make_control_app(faulty, nothing, nothing, nothing, nothing, title="t")
    status, _, content, _ = await answer(app, get("/v2/models/m"))
    assert (status, json.loads(content)) == (500, {"error": "internal error"})
    (record,) = [record for record in caplog.records if record.name == "ortserve.frontends.http.asgi_exchange"]
    assert record.message == "a call failed unexpectedly"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_openapi_document_is_built_once_while_other_callers_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, builds = threading.Event(), list[int]()

    def build(**values: Any) -> dict[str, Any]:
        builds.append(1)
        assert may_end.wait(60)
        return get_openapi(**values)

    monkeypatch.setattr(control_app, "get_openapi", build)
    nothing: Any = Faulty()
    app = make_control_app(nothing, nothing, nothing, nothing, nothing, title="t")
    side, written = HttpSide(app), bytearray()
    protocols = [side.connect(written)[0] for _ in range(3)]
    for protocol in protocols:
        protocol.data_received(get("/openapi.json"))
    await turns()
    assert (await answer(app, get("/nowhere")))[0] == 404
    assert not written
    may_end.set()
    await asyncio.wait(side.state.tasks)
    assert written.count(b"HTTP/1.1 200 ") == 3
    assert len(builds) == 1
    for protocol in protocols:
        protocol.connection_lost(None)


@pytest.mark.parametrize(("query", "passed"), [(b"model=a%20b", b"model=a%20b"), (b"a=b&" * 700, b"")])
async def test_long_query_is_ignored(query: bytes, passed: bytes) -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["query_string"])
        await sending(start((b"content-length", b"0")), part(b""))(scope, receive, send)

    status, _, _, _ = await answer(app, get(f"/x?{query.decode()}"))
    assert (status, seen) == (200, [passed])


@pytest.mark.parametrize("target", ["http://x", "http://x?a=b", "http://x/?a=b", "/"])
async def test_url_with_a_host_and_no_path_means_the_root(target: str) -> None:
    """RFC 9112, section 3.2.2: a proxy may pass on the URL of a client as it is."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await sending(start((b"content-length", b"0")), part(b""))(scope, receive, send)

    assert (await answer(app, get(target)))[0] == 200
    assert seen == ["/"]


async def test_response_of_unknown_length_is_chunked() -> None:
    app = sending(start(), part(b"hello", more=True), part(b"", more=True), part(b" world"))
    status, headers, content, is_closed = await answer(app, get("/x"))
    assert (status, headers["transfer-encoding"], is_closed) == (200, "chunked", False)
    assert content == b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


async def test_response_of_unknown_length_ends_with_the_connection_over_http_1_0() -> None:
    app = sending(start(), part(b"hello", more=True), part(b"", more=True), part(b" world"))
    status, headers, content, is_closed = await answer(app, get("/x").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (status, content, is_closed) == (200, b"hello world", True)
    assert "transfer-encoding" not in headers


@pytest.mark.parametrize("path", ["/x", "/v2/models/double/infer"])
async def test_http_1_0_gets_no_interim_response(path: str) -> None:
    """Such a client takes it for the final one."""
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    head = get(path, "Expect: 100-continue", f"Content-Length: {len(body)}", method="POST")
    written, _ = await HttpSide().answer([head.replace(b"HTTP/1.1", b"HTTP/1.0"), body])
    assert written.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("header", [(b"content-length", b"5"), (b"x", b"y")])
async def test_head_response_equals_get_without_the_body(header: tuple[bytes, bytes]) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["method"])
        await sending(start(header), part(b"hello"))(scope, receive, send)

    status, headers, content, _ = await answer(app, get("/x", method="HEAD"))
    assert (status, headers[header[0].decode()], content) == (200, header[1].decode(), b"")
    assert "transfer-encoding" not in headers
    assert seen == ["GET"]


async def test_body_reaches_the_application_in_parts_and_completely() -> None:
    body = bytes(200_000)
    seen = bytearray()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            seen.extend(message["body"])
            more = message["more_body"]
        await sending(start((b"content-length", b"0")), part(b""))(scope, receive, send)

    head = get("/x", f"Content-Length: {len(body)}", method="POST")
    status, _, _, is_closed = await answer(app, head, *(body[at : at + 8_000] for at in range(0, len(body), 8_000)))
    assert (status, is_closed, bytes(seen)) == (200, False, body)


async def test_100_continue_is_sent_when_the_application_reads() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/reads":
            await receive()
        await sending(start((b"content-length", b"0")), part(b""))(scope, receive, send)

    for path, sends_continue in (("/reads", True), ("/ignores", False)):
        head = get(path, "Expect: 100-continue", "Content-Length: 2", method="POST")
        written, _ = await HttpSide(app).answer([head, b"{}"])
        assert written.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ") == sends_continue


@pytest.mark.parametrize("path", ["/x", "/v2/models/double/infer"])
@pytest.mark.parametrize("length", [None, 2])
async def test_response_to_a_caller_that_waits_with_its_body_closes_the_connection(
    path: str, length: int | None
) -> None:
    """Such a caller may leave the body out, so the next request must not be taken for it."""
    head = get(path, "Expect: 100-continue", *([f"Content-Length: {length}"] if length else []), method="DELETE")
    following = get("/y")
    written, _ = await HttpSide(sending(start((b"content-length", b"0")), part(b""))).answer([head, following])
    assert written.count(b"HTTP/1.1 ") == (1 if length else 2)
    assert (b"connection: close" in written) == (length is not None)


@pytest.mark.parametrize(
    "messages",
    [
        (start((b"content-length", b"9")), part(b"short")),
        (start((b"content-length", b"2")), part(b"long")),
        (start((b"content-length", b"5")), part(b"he", more=True)),
    ],
    ids=["short", "long", "unfinished"],
)
async def test_connection_of_an_incomplete_response_is_closed(messages: tuple[Message, ...]) -> None:
    *_, content, is_closed = await answer(sending(*messages), get("/x"))
    assert is_closed
    assert content in (b"", b"he", b"short")


@pytest.mark.parametrize(
    "messages",
    [(), (part(b"x"),), (start((b"x", b"a\r\nb: c")),), (start((b"a b", b"c")),)],
    ids=["nothing", "no head", "line break in a value", "invalid name"],
)
async def test_application_without_a_valid_response_is_answered_by_500(messages: tuple[Message, ...]) -> None:
    status, headers, content, is_closed = await answer(sending(*messages), get("/x"))
    assert (status, headers["connection"], json.loads(content)) == (500, "close", {"error": "internal error"})
    assert is_closed


async def test_application_awaiting_a_body_is_notified_of_a_disconnect() -> None:
    seen: list[str] = []
    is_over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            pass
        seen.append(message["type"])
        await send(start())
        is_over.set()

    side = HttpSide(app)
    written, _ = await side.answer([get("/x", "Content-Length: 5", method="POST"), b"ab"])
    await asyncio.wait_for(is_over.wait(), 10)
    assert (written, seen) == (b"", ["http.disconnect"])
    await asyncio.sleep(0)  # the application's task ends, and is removed in the next iteration
    assert side.state.tasks == set()


@pytest.mark.parametrize("path", ["/x", "/x%0a", "/v2/models/m/infer"], ids=["application", "unknown", "wrong method"])
async def test_responses_do_not_accumulate_while_the_caller_reads_nothing(path: str) -> None:
    """The answers of the exchange itself have no task that could wait for the transport."""
    count = 50
    written = bytearray()
    protocol, _ = HttpSide().connect(written)
    protocol.pause_writing()
    protocol.data_received(get(path) * count)
    await turns(TURNS * count)
    assert written.count(b"HTTP/1.1 ") <= 1
    protocol.resume_writing()
    await turns(TURNS * count)
    assert written.count(b"HTTP/1.1 ") == count
    protocol.connection_lost(None)


async def test_no_request_is_read_while_many_wait_for_their_answers() -> None:
    """Otherwise a caller that sends faster than it is answered fills the memory with waiting requests."""
    count = 5_000
    side = HttpSide()
    protocol = HttpProtocol(side.context, side.endpoint, side.asgi, side.state)
    transport = FakeTransport(asyncio.get_running_loop(), protocol)
    protocol.connection_made(transport)
    transport.receive(get("/x") * count)
    answered = 0
    while answered < count:
        await asyncio.sleep(0)
        answered += transport.take().count(b"HTTP/1.1 200 ")
        assert not transport.is_reading() or answered >= count - 2, answered
    protocol.connection_lost(None)


async def test_drain_answers_the_requests_that_wait_and_then_closes() -> None:
    written = bytearray()
    side = HttpSide()
    protocol, _ = side.connect(written)
    side.context.is_draining = True
    protocol.data_received(get("/x") * 3)
    await turns(3 * TURNS)
    answers = bytes(written).split(b"HTTP/1.1 200 ")[1:]
    assert [b"connection: close" in answer for answer in answers] == [False, False, True]
    assert protocol.transport.is_closing()
    protocol.connection_lost(None)


async def test_drain_answers_a_malformed_request_that_waits() -> None:
    written = bytearray()
    side = HttpSide()
    protocol, _ = side.connect(written)
    protocol.data_received(get("/x") * 2 + b"no request\r\n\r\n")
    side.context.is_draining = True
    protocol.shutdown()
    await turns(3 * TURNS)
    answers = bytes(written).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"400"]
    assert [b"connection: close" in answer for answer in answers] == [False, False, True]
    assert protocol.connection.is_lingering
    protocol.connection_lost(None)


async def test_last_response_of_an_old_connection_is_not_lost_to_a_reset() -> None:
    """A close with unread bytes would reset the connection; the requests behind the last one are not answered."""
    written = bytearray()
    side = HttpSide()
    protocol, _ = side.connect(written)
    protocol.connection.is_old = True
    protocol.data_received(get("/x") * 3)
    await turns()
    assert written.count(b"HTTP/1.1 200 ") == 1
    assert protocol.connection.is_lingering
    protocol.connection_lost(None)


async def test_stream_whose_caller_left_before_it_began_ends() -> None:
    may_begin, viewer = asyncio.Event(), Viewer(None)
    left: list[Viewer] = []
    observation: Any = SimpleNamespace(leave=left.append)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_begin.wait()
        await EventStream(observation, viewer)(scope, receive, send)

    side = HttpSide(app)
    protocol, _ = side.connect(bytearray())
    protocol.data_received(get("/v2/console/stream"))
    await turns()
    protocol.connection_lost(None)
    may_begin.set()
    await turns()
    assert left == [viewer]
    assert side.state.tasks == set()
