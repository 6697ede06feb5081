"""The metrics port, for real."""

import gzip
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry

from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.exposition import MetricsServer
from ortserve.telemetry.metrics import Metrics


def test_metrics_are_served_until_the_port_is_closed() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert b"ortserve_build_info{" in answer.read()
    finally:
        server.close()

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_text_is_compressed_for_who_asks_for_it() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        asking = Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept-Encoding": "gzip"})
        with urlopen(asking, timeout=10) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            body = answer.read()
        assert len(body) == int(answer.headers["Content-Length"])
        assert b"ortserve_build_info{" in gzip.decompress(body)
    finally:
        server.close()


def test_health_is_answered_at_its_paths_alone() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    asked: list[str] = []

    def health(path: str) -> tuple[int, bytes] | None:
        asked.append(path)
        return (503, b'{"error":"no"}') if path == "/v2/health/ready" else None

    server = MetricsServer(registry, "127.0.0.1", 0, health=health)
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


def test_callers_keep_neither_many_threads_nor_one_for_long() -> None:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, max_s=0.2, max_connections=2)
    address = ("127.0.0.1", server.port)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        slow = [socket.create_connection(address, timeout=10) for _ in range(2)]
        for connection in slow:
            connection.sendall(b"GET /metrics HTTP/1.1\r\na: ")
        with pytest.raises(OSError, match=r"closed|reset"):
            urlopen(url, timeout=10)
        for connection in slow:
            assert connection.recv(1) == b""
            connection.close()
        with urlopen(url, timeout=10) as answer:
            assert answer.status == 200
    finally:
        server.close()


def test_taken_port_is_told_by_the_name_of_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServeError, match=rf"^metrics_port: cannot listen on 127\.0\.0\.1:{port}: .*in use"
        ) as raised:
            MetricsServer(CollectorRegistry(), "127.0.0.1", port)

    assert raised.value.kind is ErrorKind.CONFLICT
