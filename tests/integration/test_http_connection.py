"""Rules of HTTP/1.1 for a connection: order, bodies, keep-alive and back-pressure.

Tested in plain text and over TLS.
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, Final

import httpx
import numpy as np
import psutil
import pytest

from certificates import Secret
from http_wire import Answers, connect, get, is_read, post, reset, wait_until
from models import builders
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
    starting_batch,
    wait_for_queue,
    wait_for_sample,
)

BODY_LIMIT: Final = 4_000_000
IDLE_S: Final = 0.5
ALONE_IN_THE_QUEUE: Final = "closed_loop_wait: false\nqueue_delay_s: {}\n"
"""Options of a model whose single requests wait for others; this takes no processor time."""
AGE_S: Final = 0.25


@pytest.fixture(scope="module", params=["plain", "TLS"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """``wide`` returns its input; ``late`` takes longer than a connection's idle timeout, ``held`` much longer."""
    secret = Secret(tmp_path_factory.mktemp("tls")) if request.param == "TLS" else None
    repository = tmp_path_factory.mktemp("connection")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "wide", builders.identity, shape=("batch", 100_000))
    for name, queue_delay_s in (("late", IDLE_S * 1.5), ("held", 60)):
        folder = add_model(repository, name, builders.identity)
        (folder / "model.yaml").write_text(ALONE_IN_THE_QUEUE.format(queue_delay_s))
    flags = (*SHORT_WARMUP, "--max-body-bytes", str(BODY_LIMIT), "--idle-timeout-s", str(IDLE_S))
    tls = secret.flags if secret else ()
    with serving(repository, *flags, *tls, client=secret.client_context() if secret else None) as server:
        yield server


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


def body_of(number: float, width: int = 4, **more: Any) -> bytes:
    row = np.full((1, width), number, np.float32)
    return json.dumps({"id": str(number), "inputs": [json_input("x", row)], **more}).encode()


def ask(server: ServerProcess, model: str, body: bytes) -> httpx.Response:
    """Send a request on a new connection."""
    answer = httpx.post(rest_url(server, model), content=body, timeout=LONG_S, verify=server.client or True)
    return answer.raise_for_status()


def first_value(document: Any) -> float:
    value: float = document["outputs"][0]["data"][0]
    return value


def test_pipelined_requests_of_all_kinds_are_answered_in_their_order(connection: socket.socket) -> None:
    requests = [
        post("late", body_of(1)),
        get("/v2/health/live"),
        post("identity", body_of(2)),
        post("nowhere", body_of(3)),
        get("/v2/models/identity"),
        post("identity", b"{"),
        post("identity", body_of(4)),
        get("/nowhere"),
    ]
    connection.sendall(b"".join(requests))
    answers = Answers(connection)
    came = [answers.next() for _ in requests]
    assert [status for status, _, _ in came] == [200, 200, 200, 404, 200, 400, 200, 404]
    assert [came[number][2].get("id") for number in (0, 2, 6)] == ["1", "2", "4"]
    assert came[4][2]["name"] == "identity"


def test_thousands_of_pipelined_refusals_are_all_answered(connection: socket.socket) -> None:
    count = 3_000
    # Also the last request at once: the client may take longer than IDLE_S to parse so many answers.
    connection.sendall(post("nowhere", body_of(1)) * count + post("identity", body_of(7)))
    answers = Answers(connection)
    assert {answers.next()[0] for _ in range(count)} == {404}
    assert first_value(answers.next()[2]) == 7


@pytest.mark.parametrize("step", [1, 7, 64])
def test_request_in_pieces_is_the_same_request(connection: socket.socket, step: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = post("identity", body_of(5))
    for first in range(0, len(request), step):
        connection.sendall(request[first : first + step])
    assert first_value(Answers(connection).next()[2]) == 5


def test_chunked_body_is_joined(connection: socket.socket) -> None:
    connection.sendall(b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    body = body_of(6)
    for first in range(0, len(body), 10):
        part = body[first : first + 10]
        connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
    connection.sendall(b"0\r\n\r\n")
    assert first_value(Answers(connection).next()[2]) == 6


def test_expect_continue_gets_100_continue(connection: socket.socket) -> None:
    request = post("identity", body_of(8), "Expect: 100-continue")
    head, body = request.split(b"\r\n\r\n", 1)
    connection.sendall(head + b"\r\n\r\n")
    answers = Answers(connection)
    assert answers.next()[0] == 100
    connection.sendall(body)
    assert first_value(answers.next()[2]) == 8


def test_expect_continue_with_an_oversized_length_is_rejected(connection: socket.socket) -> None:
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_LIMIT + 1}\r\n"
    connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
    status, headers, document = Answers(connection).next()
    assert (status, headers["connection"]) == (413, "close")
    assert str(BODY_LIMIT) in document["error"]


@pytest.mark.parametrize(("version", "header"), [("1.1", "Connection: close"), ("1.0", "Accept: */*")])
def test_connection_close_header_closes_the_connection(connection: socket.socket, version: str, header: str) -> None:
    connection.sendall(post("identity", body_of(9), header, version=version))
    answers = Answers(connection)
    status, headers, _ = answers.next()
    assert (status, headers["connection"]) == (200, "close")
    assert answers.is_at_end()


def test_query_and_escapes_in_the_path_name_the_same_model(connection: socket.socket) -> None:
    answers = Answers(connection)
    for path in ("identity/infer?a=1", "%69dentity/infer", "identity/versions/1/infer", "identity/infer/"):
        body = body_of(3)
        head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert first_value(answers.next()[2]) == 3


def test_idle_connection_is_closed_unless_an_answer_is_pending(connection: socket.socket) -> None:
    answers = Answers(connection)
    connection.sendall(post("late", body_of(1)))
    status, headers, _ = answers.next()
    took_s = sum(float(ms) for ms in re.findall(r"dur=([\d.]+)", headers["server-timing"])) / 1e3
    assert (status, headers.get("connection")) == (200, None)
    assert took_s > IDLE_S
    connection.sendall(post("identity", body_of(2)))
    assert answers.next()[0] == 200
    assert answers.is_at_end()


def test_malformed_request_is_rejected_after_earlier_answers(connection: socket.socket) -> None:
    connection.sendall(post("late", body_of(1)) + b"no request\r\n\r\n")
    answers = Answers(connection)
    assert answers.next()[0] == 200
    assert answers.next()[0] == 400
    assert answers.is_at_end()


def test_client_that_reads_no_answers_is_paused_and_uses_no_memory(server: ServerProcess) -> None:
    process = psutil.Process(server.pid)
    body = body_of(0.123, 100_000, parameters={"binary_data_output": True})
    for _ in range(8):  # remaining bytes of these requests would corrupt all later ones
        ask(server, "wide", body)
    before = process.memory_info().rss
    with connect(server) as connection:
        connection.settimeout(1)
        request = post("wide", body)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400:
                connection.sendall(request)
                sent += 1
        assert sent < 400
        grown = process.memory_info().rss - before
        assert grown < 40 * 2**20, f"{grown / 2**20:.0f} MiB more, after {sent} requests of which no answer was read"
        # The server meanwhile serves other connections.
        assert first_value(ask(server, "identity", body_of(4)).json()) == 4
        connection.settimeout(LONG_S)
        answers = Answers(connection)
        for _ in range(sent):
            status, headers, answered = answers.next()
            assert status == 200
            assert (
                answered[int(headers["inference-header-content-length"]) :] == np.full(100_000, 0.123, "<f4").tobytes()
            )


def test_disconnected_request_leaves_the_queue(server: ServerProcess, connection: socket.socket) -> None:
    labels = {"model": "held", "version": "1", "decision": "left"}
    connection.sendall(post("held", body_of(1)))
    wait_for_queue(server, "held", 1)
    assert read_metrics(server).value("ortserve_batching_decisions_total", **labels) == 0
    reset(connection)
    wait_for_sample(server, "ortserve_batching_decisions_total", lambda left: left == 1, **labels)


def test_requests_past_the_drain_timeout_are_aborted(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=30_000_000)  # runs much longer
    flags = ("--warmup-s", "0", "--drain-timeout-s", "0.2")
    with starting(tmp_path, *flags) as server:
        server.wait_until_loaded()
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            with starting_batch(server, "slow"):
                connection.sendall(post("slow", body_of(1)))
            server.send(signal.SIGTERM)
            try:
                came = connection.recv(100)
            except ConnectionError:
                came = b""
            assert came == b"" or came.startswith(b"HTTP/1.1 500 ")
        assert server.wait() == 1
        assert "connections with unanswered requests are closed protocol=http connections=1 " in server.output


@pytest.fixture(scope="module")
def ageing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("ageing")
    add_model(repository, "identity", builders.identity)
    with serving(repository, *SHORT_WARMUP, "--http-max-connection-age-s", str(AGE_S)) as server:
        yield server


@pytest.mark.parametrize("request_bytes", [post("identity", body_of(1)), get("/v2/models/identity")])
def test_answer_on_an_expired_connection_closes_it(ageing_server: ServerProcess, request_bytes: bytes) -> None:
    host, port = ageing_server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        made_s = time.monotonic()
        answers = Answers(connection)
        connection_headers: list[str | None] = []
        while not connection_headers or connection_headers[-1] is None:
            connection.sendall(request_bytes)
            status, headers, _ = answers.next()
            assert status == 200
            connection_headers.append(headers.get("connection"))
        assert connection_headers[-1] == "close"
        assert answers.is_at_end()
        assert time.monotonic() - made_s > AGE_S * 0.85
        assert len(connection_headers) > 1, "the first answer came late already: the age was not tried"


def test_expired_idle_connection_stays_open_for_one_request(ageing_server: ServerProcess) -> None:
    host, port = ageing_server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=AGE_S * 2) as connection:
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(LONG_S)
        connection.sendall(post("identity", body_of(5)))
        answers = Answers(connection)
        status, headers, document = answers.next()
        assert (status, headers["connection"], first_value(document)) == (200, "close", 5)
        assert answers.is_at_end()


# --- other headers of a request


def offering(request: bytes, *headers: str) -> bytes:
    """The request with headers that offer another protocol."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\n" + "\r\n".join(headers).encode() + b"\r\n\r\n" + body


OFFERS: Final = (
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAA"),
    ("Connection: keep-alive, upgrade", "Upgrade: websocket"),
    ("Upgrade: x", "Connection: Upgrade"),
)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "another"])
def test_upgrade_offer_is_answered_in_http_1_1(
    connection: socket.socket, offer: tuple[str, ...], in_pieces: bool
) -> None:
    """`curl --http2` sends the offer with every request. RFC 9110, section 7.8, permits a server to ignore it."""
    answers = Answers(connection)
    requests = [
        offering(post("identity", body_of(1)), *offer),
        get("/v2/health/live"),
        offering(get("/v2/health/ready"), *offer),
        offering(post("nowhere", body_of(2)), *offer),
        post("identity", body_of(3)),
        offering(post("identity", body_of(4), "Connection: close"), *offer),
    ]
    if in_pieces:
        for request in requests:
            for first in range(0, len(request), 40):
                connection.sendall(request[first : first + 40])
                wait_until(partial(is_read, connection))
    else:
        connection.sendall(b"".join(requests))
    came = [answers.next() for _ in requests]
    assert [status for status, *_ in came] == [200, 200, 200, 404, 200, 200]
    assert [came[number][2]["id"] for number in (0, 4, 5)] == ["1", "3", "4"]
    assert answers.is_at_end()


@pytest.mark.skipif(not which("curl"), reason="curl is not installed")
def test_curl_that_prefers_http2_is_answered(server: ServerProcess, tmp_path: Path) -> None:
    if server.client is not None:
        pytest.skip("over TLS the client negotiates the protocol by ALPN")
    (tmp_path / "body").write_bytes(body_of(5))
    came = subprocess.run(
        ["curl", "--silent", "--http2", "--data-binary", f"@{tmp_path / 'body'}", rest_url(server, "identity")],
        capture_output=True,
        timeout=LONG_S,
        check=True,
    )
    assert json.loads(came.stdout)["id"] == "5"


def test_white_space_after_the_transfer_coding_is_ignored(connection: socket.socket) -> None:
    body = body_of(6)
    head = post("identity", b"", "Transfer-Encoding: chunked ").replace(b"Content-Length: 0\r\n", b"")
    connection.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    status, _, document = Answers(connection).next()
    assert (status, document["id"]) == (200, "6")


def test_body_after_an_upgrade_offer_is_not_a_request(connection: socket.socket) -> None:
    hidden = b"POST /v2/repository/index HTTP/1.1\r\nHost: y\r\nContent-Length: 0\r\n\r\n"
    answers = Answers(connection)
    for request in (post("identity", hidden), post("identity", b"").replace(b"infer", b"config")):
        whole = offering(request, *OFFERS[0])
        connection.sendall(whole[: -len(hidden)] if request.endswith(hidden) else whole)
        wait_until(partial(is_read, connection))
        if request.endswith(hidden):
            connection.sendall(hidden)
            status, _, document = answers.next()
            assert status == 400
            assert "failed to parse" in document["error"]
        else:
            assert answers.next()[0] == 405


@pytest.mark.parametrize(
    ("request_line", "header", "status", "text"),
    [
        ("POST /v2/models/identity/infer HTTP/2.0", "Host: x", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/2.0"),
        ("POST /v2/models/identity/infer HTTP/1.2", "Host: x", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/1.2"),
        ("GET /v2/models/identity HTTP/3.0", "Host: x", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/3.0"),
        ("GET /v2/models/identity", "Host: x", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/0.9"),
        ("PRI * HTTP/2.0", "\r\nSM", 505, "expected HTTP/1.1 or HTTP/1.0, got HTTP/2.0"),
        ("CONNECT /v2/health/live HTTP/1.1", "Host: x", 501, "CONNECT: this server is not a proxy"),
        ("CONNECT x:80 HTTP/1.1", "Host: x", 501, "CONNECT: this server is not a proxy"),
        (
            "POST /v2/models/identity/infer HTTP/1.1",
            "Transfer-Encoding: gzip, chunked",
            501,
            "Transfer-Encoding: expected chunked, got gzip, chunked",
        ),
        ("POST /v2/logging HTTP/1.1", "Transfer-Encoding: gzip, chunked", 501, "Transfer-Encoding: expected chunked"),
    ],
)
def test_unsupported_requests_are_rejected_and_the_connection_closed(
    connection: socket.socket, request_line: str, header: str, status: int, text: str
) -> None:
    connection.sendall(f"{request_line}\r\n{header}\r\n\r\n".encode() + get("/v2/health/live"))
    answers = Answers(connection)
    answered, headers, document = answers.next()
    assert (answered, headers["connection"]) == (status, "close")
    assert document["error"].startswith(text)
    assert answers.is_at_end()
