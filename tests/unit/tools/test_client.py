"""Addresses of servers, and blocking calls to the programs that answer there."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import is_url, parse_address
from ortserve.tools.client import Client, path_of
from ortserve.tools.models.server import ModelServer


def test_address_has_what_its_url_and_the_flags_say(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# keys\n\n  secret-1  \nsecret-2\n")

    address = parse_address("https://[::1]:8443/of-a-proxy/v2/", headers=["X-Tenant: a"], key_file=tmp_path / "keys")

    assert (address.host, address.port, address.authority) == ("::1", 8443, "[::1]:8443")
    assert (address.is_tls, address.is_grpc, address.prefix) == (True, False, "/of-a-proxy")
    assert address.headers == {"authorization": "Bearer secret-1", "x-tenant": "a"}
    ports = [parse_address(f"{scheme}://h").port for scheme in ("http", "https", "grpc", "grpcs")]
    assert ports == [80, 443, 8001, 8001]


URLS = (
    "http://",
    "ftp://h",
    "http://h:port",
    "http://.svc:8000",
    f"grpc://{'a' * 64}:8001",
    "http://[::1",
    "grpc://h/v2/models",
    "h:8000",
    "http://h?x=1",
    "http://h/#x",
)


@pytest.mark.parametrize("url", URLS)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ServeError, match="expected a URL such as") as raised:
        parse_address(url)
    assert raised.value.kind is ErrorKind.INVALID_INPUT


def test_schemes_have_any_case() -> None:
    assert is_url("HTTP://h")
    assert (parse_address("GRPCS://h").is_tls, parse_address("http://h:0").port) == (True, 0)


@pytest.mark.parametrize("header", ["", "name", ": value", "two names: x", "x-ü: x", "x: ü", "x: a\r\ny: b"])
def test_headers_that_a_protocol_does_not_permit_are_refused(header: str) -> None:
    with pytest.raises(ServeError, match="--header: expected NAME: VALUE") as raised:
        parse_address("http://h", headers=[header])
    assert raised.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize("scheme", ["http", "grpc", "ftp"])
@pytest.mark.parametrize("password", ["s3cret", "s3/cret", "s3#cret", "s3:cret", "s3@cret"])
def test_url_with_a_password_is_refused_without_showing_it(scheme: str, password: str) -> None:
    with pytest.raises(ServeError, match="expected a URL without user and password") as raised:
        parse_address(f"{scheme}://user:{password}@host:8000")
    assert raised.value.kind is ErrorKind.INVALID_INPUT
    assert "cret" not in raised.value.message


def test_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("# keys\n")
    with pytest.raises(ServeError, match="no line with a key"):
        parse_address("http://h", key_file=tmp_path / "none")


@pytest.mark.parametrize("key", ["\ufeffs3cret", "s3crét", "s3 cret", "s3\x01cret"])
def test_key_that_no_header_can_have_is_refused_without_showing_it(tmp_path: Path, key: str) -> None:
    (tmp_path / "keys").write_text(f"{key}\n", encoding="utf-8")
    with pytest.raises(ServeError, match="--key-file: expected a key in printable ASCII without spaces") as raised:
        parse_address("grpc://h", key_file=tmp_path / "keys")
    assert raised.value.kind is ErrorKind.INVALID_INPUT
    assert "s3" not in raised.value.message


def test_names_of_models_cannot_leave_their_place_in_the_path() -> None:
    assert path_of("a/../b", "1") == "/v2/models/a%2F..%2Fb/versions/1"


@contextmanager
def peer(answer: bytes) -> Iterator[Client]:
    """A client of a server that answers its first call with these bytes and closes the connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=30)
        yield client
        client.close()
        thread.join(30)


def http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (http(404, '{"error": "no model m"}'), "not_found", "status 404: no model m"),
        (http(400, '{"detail": "bad"}'), "rejected_by_model", 'status 400: {"detail": "bad"}'),
        (http(404, "<html>"), "unsupported", "expected a server of the Open Inference Protocol v2, got status 404"),
        (http(405, '{"error": "Method Not Allowed"}'), "unsupported", "Protocol v2, got status 405"),
        (http(401, ""), "unauthenticated", "status 401:  (send a key with --key-file)"),
        (http(403, '{"error": "not this key"}'), "forbidden", "not this key (send a key with --key-file)"),
        (http(503, "<html>busy"), "internal", "status 503: <html>busy"),
        (b"\0\0\6\4\0\0\0\0\0", "unsupported", "got an answer that is not HTTP"),
        (b"", "unsupported", "got a closed connection instead of an answer"),
    ],
)
def test_answers_that_are_errors_say_what_they_are(answer: bytes, kind: str, message: str) -> None:
    with peer(answer) as client, pytest.raises(ServeError) as raised:
        client.call("/v2/models/m")
    assert (raised.value.kind.value, message in raised.value.message) == (kind, True), raised.value.message
    assert raised.value.message.startswith(client.address.url)


def test_long_errors_are_cut() -> None:
    with peer(http(500, '{"error": "' + "long " * 20_000 + '"}')) as client, pytest.raises(ServeError) as raised:
        client.call("/v2/models/m")
    assert "status 500: long long" in raised.value.message
    assert len(raised.value.message) < 1100


def test_server_that_has_closed_the_connection_is_no_other_kind_of_server() -> None:
    with peer(http(200, "{}")) as client:
        client.call("/v2")
        with pytest.raises(ServeError, match="cannot reach the server: ") as raised:
            client.call("/v2")
    assert raised.value.kind is ErrorKind.NOT_READY


def test_server_that_ends_during_a_load_is_no_other_kind_of_server() -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(4096).startswith(b"GET /v2 "):
                connection.sendall(http(200, "{}"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve)
        thread.start()
        server = ModelServer(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=30)
        with pytest.raises(ServeError, match="cannot reach the server: it has closed the connection") as raised:
            server.change("POST", "/v2/repository/models/m/load", {})
        thread.join(30)
    assert raised.value.kind is ErrorKind.NOT_READY


def test_answer_may_end_with_its_connection() -> None:
    with peer(b"HTTP/1.0 200 OK\r\n\r\n{}") as client:
        assert client.call("/v2").json() == {}


def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=0.05)
        with pytest.raises(ServeError, match=r"cannot reach the server: no answer within 0\.05 s"):
            client.ask("/v2")


def test_call_without_an_answer_ends_with_a_reset_so_that_the_server_can_drop_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=0.2)
        with pytest.raises(ServeError, match="no answer within"):
            client.ask("/v2")
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as received, pytest.raises(ConnectionResetError):
            received.read()


def test_endless_answer_is_cut_off() -> None:
    has_left = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
            for _ in range(500):
                if not has_left.wait(0.02):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=0.2)
        with pytest.raises(ServeError, match=r"no answer within 0\.2 s"):
            client.ask("/v2")
        has_left.set()
        thread.join(30)


@pytest.mark.parametrize(("head", "opened"), [("", 1), ("Connection: close\r\n", 2)])
def test_connection_stays_open_unless_the_server_closes_it(head: str, opened: int) -> None:
    answer = f"HTTP/1.1 200 OK\r\n{head}Content-Length: 2\r\nServer-Timing: x\r\n\r\n{{}}".encode()
    peers: list[socket.socket] = []

    def serve() -> None:
        for _ in range(2):
            if len(peers) < 1 or head:
                peers.append(listener.accept()[0])
            peers[-1].recv(4096)
            peers[-1].sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        answers = [client.ask("/v2"), client.ask("/v2", b"{}")]
        thread.join(30)
        client.close()

    for peer in peers:
        peer.close()
    assert len(peers) == opened
    assert [each.json() for each in answers] == [{}, {}]
    assert answers[0].headers[b"server-timing"] == b"x"
