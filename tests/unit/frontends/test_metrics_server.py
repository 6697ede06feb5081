"""The metrics port on a real socket."""

import gzip
import json
import socket
import ssl
import threading
from http.client import HTTPResponse, RemoteDisconnected
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry

from certificates import Secret
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.responses import HttpResponse
from ortserve.frontends.metrics_server import MetricsServer
from ortserve.telemetry.families import TextFormat
from ortserve.telemetry.metrics import Metrics
from scarcity import no_threads


def test_metrics_are_served_until_the_port_is_closed() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    server = MetricsServer(TextFormat(registry).write, "127.0.0.1", 0)
    try:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert b"ortserve_build_info{" in answer.read()
    finally:
        server.close()

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_taken_port_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="metrics_port"):
        MetricsServer(bytes, "127.0.0.1", taken.getsockname()[1])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("permitted", "missing"), [(0, "metrics-connection"), (1, "metrics")])
def test_port_without_a_thread_is_an_error_that_names_it(permitted: int, missing: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with no_threads(but=permitted), pytest.raises(ServeError, match=f"start the thread '{missing}'"):
        MetricsServer(bytes, "127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_text_is_compressed_when_accepted() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    server = MetricsServer(TextFormat(registry).write, "127.0.0.1", 0)
    try:
        asking = Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept-Encoding": "gzip"})
        with urlopen(asking, timeout=10) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            body = answer.read()
        assert len(body) == int(answer.headers["Content-Length"])
        assert b"ortserve_build_info{" in gzip.decompress(body)
        asking.add_header("Accept-Encoding", "br, gzip;q=0, *;q=0.1")
        with urlopen(asking, timeout=10) as answer:
            assert answer.headers["Content-Encoding"] is None
            assert b"ortserve_build_info{" in answer.read()
    finally:
        server.close()


def test_other_paths_are_404_and_head_has_no_body() -> None:
    server = MetricsServer(bytes, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}"
    try:
        for path in ("/", "/healthz", "/v2/health/ready/", "/v2/models/m/ready"):
            with pytest.raises(HTTPError) as refused:
                urlopen(url + path, timeout=10)
            with refused.value as answer:
                assert (answer.code, answer.headers["Content-Type"]) == (404, "application/json")
        with urlopen(Request(f"{url}/metrics?name[]=up", method="HEAD"), timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert answer.read() == b""
    finally:
        server.close()


@pytest.mark.parametrize(
    ("request_line", "status", "error"),
    [
        ("POST /metrics HTTP/1.1", 405, "Method Not Allowed: expected GET, HEAD, got POST"),
        ("GET", 400, "malformed HTTP request: Bad request syntax ('GET')"),
        ("GET /metrics HTTP/x", 400, "malformed HTTP request: Bad request version ('HTTP/x')"),
        ('GET /"\x01 now HTTP/1.1', 400, "malformed HTTP request: Bad request syntax ('GET /\"\\x01 now HTTP/1.1')"),
        ("GET /" + "a" * 70_000 + " HTTP/1.1", 414, "malformed HTTP request: "),
    ],
    ids=["method", "short", "version", "quote", "long"],
)
def test_other_requests_get_the_errors_of_the_http_port(request_line: str, status: int, error: str) -> None:
    server = MetricsServer(bytes, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(f"{request_line}\r\n\r\n".encode())
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == status
            assert json.loads(answer.read())["error"].startswith(error)
            assert (answer.headers["Content-Type"], answer.headers["Server"]) == ("application/json", None)
            assert answer.headers["Allow"] == ("GET, HEAD" if status == 405 else None)
    finally:
        server.close()


def test_health_is_answered_at_its_paths_only() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    asked: list[str] = []

    def health(path: str) -> HttpResponse | None:
        asked.append(path)
        error = HttpResponse(503, b'{"error":"no"}', ((b"content-type", b"application/json"),))
        return error if path == "/v2/health/ready" else None

    server = MetricsServer(TextFormat(registry).write, "127.0.0.1", 0, health=health)
    try:
        with pytest.raises(HTTPError) as refused:
            urlopen(f"http://127.0.0.1:{server.port}/v2/health/ready", timeout=10)
        with refused.value as answer:
            assert (answer.code, answer.read()) == (503, b'{"error":"no"}')
            assert answer.headers["Content-Type"] == "application/json"
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b"ortserve_build_info{" in answer.read()
    finally:
        server.close()
    assert asked == ["/v2/health/ready", "/metrics"]


def is_answered(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def test_connections_hold_a_bounded_number_of_threads() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def write() -> bytes:
        begun.release()
        release.wait(60)
        return b""

    server = MetricsServer(write, "127.0.0.1", 0, max_connections=2)
    try:
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
        for connection in slow:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert begun.acquire(timeout=60)
        assert not is_answered(server.port)
        release.set()
        for connection in slow:
            assert connection.recv(100).startswith(b"HTTP/1.0 200 ")
            connection.close()
        assert any(is_answered(server.port) for _ in range(1000))  # until the server has seen that they left
    finally:
        release.set()
        server.close()


def test_connection_without_a_request_yields_to_a_new_one() -> None:
    """32 idle connections kept scrapes and health probes away for 30 s at a time."""
    server = MetricsServer(bytes, "127.0.0.1", 0, max_connections=2)
    try:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
        idle[1].sendall(b"GET /metrics HTTP/1.1\r\na: ")
        assert is_answered(server.port)
        assert idle[0].recv(1) == b""
        idle[1].sendall(b"b\r\n\r\n")
        assert idle[1].recv(100).startswith(b"HTTP/1.0 200 ")
        for connection in idle:
            connection.close()
    finally:
        server.close()


def test_connection_in_its_handshake_yields_to_a_new_one(tmp_path: Path) -> None:
    """Its plain socket was already detached, so it kept its thread until the time limit of handshakes."""
    secret = Secret(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secret.cert, secret.key)
    begun = threading.Semaphore(0)

    def tls() -> ssl.SSLContext:
        begun.release()
        return context

    server = MetricsServer(bytes, "127.0.0.1", 0, tls=tls, max_connections=2)
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
    try:
        for _ in idle:
            assert begun.acquire(timeout=60)
        with urlopen(f"https://127.0.0.1:{server.port}/metrics", timeout=20, context=secret.client_context()) as answer:
            assert answer.status == 200
    finally:
        for connection in idle:
            connection.close()
        server.close()


def test_health_is_answered_while_the_system_permits_no_further_thread(capsys: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer(bytes, "127.0.0.1", 0)
    try:
        with no_threads():
            assert is_answered(server.port)
            assert is_answered(server.port)
    finally:
        server.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\na: "])
def test_connection_holds_its_thread_until_the_timeout_without_a_traceback(
    sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server = MetricsServer(bytes, "127.0.0.1", 0, max_s=0.1)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b""
        assert any(is_answered(server.port) for _ in range(100))  # on a busy machine that may take too long, too
    finally:
        server.close()
    assert capsys.readouterr().err == ""


def test_failed_scrape_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> bytes:
        raise ValueError("unreadable")

    server = MetricsServer(write, "127.0.0.1", 0)
    try:
        with pytest.raises(RemoteDisconnected):
            urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
    finally:
        server.close()
    assert caplog.messages == ["a call of the metrics port failed unexpectedly"]
    assert "ValueError: unreadable" in caplog.text
    assert capsys.readouterr().err == ""


def test_error_for_a_port_in_use_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServeError, match=rf"^metrics_port: cannot listen on 127\.0\.0\.1:{port}: .*in use"
        ) as raised:
            MetricsServer(bytes, "127.0.0.1", port)

    assert raised.value.kind is ErrorKind.CONFLICT
