"""Malformed requests are rejected with a text that the client can read even while it sends more."""

import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from http_wire import Answers, connect, get, is_read, post, wait_until
from models import builders
from servers import SHORT_WARMUP, ServerProcess, add_model, json_input, serving

KEY = "a-key-of-the-tests"
BODY = json.dumps({"inputs": [json_input("x", np.ones((1, 4), np.float32))]}).encode()
MOST = 100_000
"""Maximum bytes of a body."""
MORE = b"a: " + b"b" * 2**20
"""Further bytes from a client that reads only at the end."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose ``control`` calls need a key."""
    repository = tmp_path_factory.mktemp("refusals")
    add_model(repository, "identity", builders.identity)
    (keys := tmp_path_factory.mktemp("keys") / "control.keys").write_text(f"{KEY}\n")
    limits = ("--max-body-bytes", str(MOST), "--max-inflight-bytes", "50000", "--control-keys-file", str(keys))
    with serving(repository, *SHORT_WARMUP, *limits) as server:
        yield server
        server.stop()
        assert not [line for line in server.lines if " ERROR " in line]


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


@pytest.fixture
def holding(server: ServerProcess) -> Iterator[socket.socket]:
    """A second connection to the server."""
    with connect(server) as connection:
        yield connection


INFER = post("identity", BODY)
METADATA = get("/v2/models/identity")


@pytest.mark.parametrize("request_bytes", [INFER, METADATA], ids=["infer", "metadata"])
@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (b"", "header Host: expected one value, got 0"),
        (b"Host: x\r\nHost: x\r\n", "header Host: expected one value, got 2"),
        (b"Host: x, y\r\n", "header Host: expected a host and an optional port, got x, y"),
        (b"Host: a@b\r\n", "header Host: expected a host and an optional port, got a@b"),
    ],
    ids=["none", "two", "list", "user"],
)
def test_request_needs_exactly_one_host_header(
    connection: socket.socket, request_bytes: bytes, hosts: bytes, text: str
) -> None:
    connection.sendall(request_bytes.replace(b"Host: x\r\n", hosts) + METADATA)
    answers = Answers(connection)
    status, headers, document = answers.next()
    assert (status, headers["connection"], document) == (400, "close", {"error": text})
    assert answers.is_at_end()


@pytest.mark.parametrize("host", [b"", b"Host: \r\n", b"Host: [::1]:80\r\n"], ids=["none", "empty", "address"])
def test_http_1_0_needs_no_host(connection: socket.socket, host: bytes) -> None:
    connection.sendall(post("identity", BODY, version="1.0").replace(b"Host: x\r\n", host))
    assert Answers(connection).next()[0] == 200


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"no request\r\n\r\n", "invalid method encountered"),
        (b"GET /v2 x HTTP/1.1\r\n\r\n", "expected HTTP/, RTSP/ or ICE/"),
        (b"GET /v2 HTTP/1.1\r\nno header\r\n\r\n", "invalid header token"),
        (INFER.replace(b"Content-Length: ", b"Content-Length: x"), "invalid character in Content-Length"),
        (INFER.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"), "content-Length can't be present with"),
    ],
    ids=["method", "target", "header", "length", "framing"],
)
def test_rejection_of_a_malformed_request_names_the_fault(connection: socket.socket, sent: bytes, text: str) -> None:
    connection.sendall(sent)
    status, _, document = Answers(connection).next()
    assert status == 400
    assert document["error"].startswith(f"malformed HTTP request: {text}")


CHUNKED = INFER.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
GENERATE = CHUNKED.replace(b"/infer", b"/generate")
INDEX = CHUNKED.replace(b"/models/identity/infer", b"/repository/index")


@pytest.mark.parametrize("head", [CHUNKED, GENERATE, INDEX], ids=["infer", "generate", "control"])
@pytest.mark.parametrize("chunk", [b"8000000000000000\r\n", b"1\r\n{\r\n186a1;a=b\r\n{", b"00FFffFFff\r\n{"])
@pytest.mark.parametrize("is_apart", [False, True], ids=["at once", "apart"])
def test_chunk_over_the_limit_is_rejected_by_its_size_line(
    connection: socket.socket, head: bytes, chunk: bytes, is_apart: bool
) -> None:
    connection.sendall(head if is_apart else head + chunk)
    if is_apart:
        wait_until(lambda: is_read(connection))
        connection.sendall(chunk)
    answers = Answers(connection)
    status, headers, document = answers.next()
    assert (status, headers["connection"]) == (413, "close")
    assert f"expected at most {MOST} bytes" in document["error"]
    assert answers.is_at_end()


def test_content_that_looks_like_a_large_chunk_is_content(connection: socket.socket) -> None:
    content = BODY[:-1] + b"\r\nffffffff\r\n" + BODY[-1:]
    connection.sendall(CHUNKED + b"%x\r\n" % len(content) + content[:-1])
    wait_until(lambda: is_read(connection))
    connection.sendall(content[-1:] + b"\r\n0\r\n\r\n")
    status, _, document = Answers(connection).next()
    assert (status, "failed to parse the request JSON" in document["error"]) == (400, True)


def announcing(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


MODEL = "/v2/models/identity"
REFUSED = {
    "endless head": (INFER.partition(b"Content-Length")[0], MORE, 431),
    "many headers": (INFER.partition(b"Content-Length")[0] + b"a: b\r\n" * 200, MORE, 431),
    "no request": (b"no request\r\n", MORE, 400),
    "no host": (METADATA.replace(b"Host", b"X"), MORE, 400),
    "other version": (INFER.replace(b"HTTP/1.1", b"HTTP/1.3"), MORE, 505),
    "chunk": (CHUNKED + b"fffffff\r\n", MORE, 413),
    "chunk behind others": (CHUNKED + b"11170\r\n" + b" " * 70_000 + b"\r\nfffffff\r\n", MORE, 413),
    "broken chunk": (CHUNKED + b"x\r\n", MORE, 400),
    "large body": (announcing(f"{MODEL}/infer", 2_000_000), MORE, 413),
    "large body for generate": (announcing(f"{MODEL}/generate", 2_000_000), MORE, 413),
    "large body for control": (announcing("/v2/repository/index", 2_000_000), MORE, 413),
    "no room": (announcing(f"{MODEL}/infer", 90_000), b" " * 80_000, 429),
    "no key": (announcing("/v2/repository/models/identity/load", 2_000_000), MORE, 401),
    "coding": (CHUNKED.replace(b"chunked", b"gzip"), MORE, 501),
    "control over HTTP/1.0": (announcing("/v2/repository/index", 2_000_000).replace(b"1.1", b"1.0"), MORE, 413),
    "method over HTTP/1.0": (
        announcing(f"{MODEL}/infer", 2_000_000).replace(b"POST", b"PUT").replace(b"1.1", b"1.0"),
        MORE,
        405,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_client_that_keeps_sending_reads_its_rejection(
    connection: socket.socket, holding: socket.socket, name: str
) -> None:
    """Closing with unread bytes would reset the connection and lose the answer on many clients' systems."""
    begin, more, expected = REFUSED[name]
    if name == "no room":
        holding.sendall(announcing(f"{MODEL}/infer", 40_000) + b" " * 39_999)
        wait_until(lambda: is_read(holding))
    connection.sendall(begin)
    for first in range(0, len(more), 4096):
        connection.sendall(more[first : first + 4096])
    wait_until(lambda: is_read(connection))
    connection.shutdown(socket.SHUT_WR)
    answers = Answers(connection)
    status, _, document = answers.next()
    assert status == expected, document
    assert "error" in document
    assert answers.is_at_end()


def test_pipelined_rejection_arrives_after_earlier_answers(connection: socket.socket) -> None:
    connection.sendall(INFER + METADATA + b"no request\r\n" + MORE)
    wait_until(lambda: is_read(connection))
    answers = Answers(connection)
    assert [answers.next()[0] for _ in range(3)] == [200, 200, 400]
    assert answers.is_at_end()


def test_client_that_never_stops_sending_is_disconnected(connection: socket.socket) -> None:
    connection.sendall(b"no request\r\n")
    with pytest.raises(ConnectionError):
        connection.sendall(MORE * 100)
