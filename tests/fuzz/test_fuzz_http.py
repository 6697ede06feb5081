"""Bad input over HTTP: every request gets a valid answer in time, and never the status of a server fault."""

import json
import random
import socket
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from encodings_of_requests import rest_json
from fuzz.bounds import CASES, LONG_ENOUGH, MAX_S, SEED, watching_memory
from fuzz.mutations import INTERNAL_BY_PROTOCOL, ROUTES, HttpCase, broken_http, http_case
from servers import LONG_S, SHORT_WARMUP, ServerProcess, read_metrics, serving
from unit.frontends.test_access import ROUTES as SERVED

pytestmark = LONG_ENOUGH


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that writes traces, whose files must be valid JSON under any request id and trace setting."""
    file = tmp_path_factory.mktemp("traces") / "trace"
    tracing = ("--trace-file", file, "--trace-level", "TIMESTAMPS", "--trace-rate", "1", "--trace-log-frequency", "100")
    flags = ("--max-body-bytes", "4000000", "--allow-client-shm")
    with serving("--example", *SHORT_WARMUP, *tracing, *flags) as server:
        _check_health(server)  # traces exist for at least this request
        yield server
    firsts = [json.loads(path.read_bytes())[0].keys() for path in file.parent.iterdir()]
    assert any({"id", "model_name", "model_version", "timestamps"} <= keys for keys in firsts)


class Connection:
    """Sends cases one after the other, on a new connection after the server has closed the old one."""

    def __init__(self, server: ServerProcess) -> None:
        host, port = server.http.split(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None

    def ask(self, request: bytes, *, method: str) -> tuple[int, bytes]:
        """Send a request. Returns the status and the body of the answer."""
        for _ in range(2):
            is_new = self._socket is None
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=MAX_S)
            try:
                self._socket.sendall(request)
                return self._read(method)
            except ConnectionError:
                self.close()
                if is_new:
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _read(self, method: str) -> tuple[int, bytes]:
        came = b""
        while b"\r\n\r\n" not in came:
            came += self._receive()
        head, _, body = came.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        status = int(lines[0].split(" ")[1])
        if status == 100:
            assert body == b""
            return self._read(method)
        headers = dict(line.split(": ", 1) for line in lines[1:])
        if method != "HEAD":
            if headers.get("transfer-encoding") == "chunked":
                while not body.endswith(b"0\r\n\r\n"):
                    body += self._receive()
            while len(body) < int(headers.get("content-length", "0")):
                body += self._receive()
        if headers.get("connection") == "close":
            self.close()
        return status, body

    def _receive(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError
        return data


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[Connection]:
    connection = Connection(server)
    yield connection
    connection.close()


def is_fine(status: int, body: bytes) -> bool:
    """Whether an answer is valid for bad input: an internal error is valid only if the protocol requires it."""
    if status == 500:
        return any(text.encode() in body for text in INTERNAL_BY_PROTOCOL)
    return 200 <= status < 500 or status in (501, 503, 504)


def test_bad_requests_get_answers_in_time_and_good_requests_succeed(
    server: ServerProcess, connection: Connection
) -> None:
    statuses: dict[int, int] = {}
    with watching_memory(server) as memory:
        for number in range(CASES):
            case = http_case(random.Random(f"{SEED}/{number}"))
            began = time.monotonic()
            try:
                status, body = connection.ask(case.encode(), method=case.method)
            except (OSError, ValueError) as error:
                raise AssertionError(f"case {SEED}/{number} got no answer: {error!r}: {_shown(case)}") from error
            took_s = time.monotonic() - began
            statuses[status] = statuses.get(status, 0) + 1
            assert is_fine(status, body), f"case {SEED}/{number}: {status} {body[:300]!r} for {_shown(case)}"
            assert took_s < MAX_S, f"case {SEED}/{number} took {took_s:.1f} s: {_shown(case)}"
            if status >= 400 and case.method != "HEAD":
                assert _is_error(body), f"case {SEED}/{number}: {status} {body[:300]!r} for {_shown(case)}"
            memory.after(f"{SEED}/{number}")
    # The cases must be varied: the server must decode many up to the model, and some must succeed.
    assert statuses[200] > CASES / 100
    assert statuses[400] > CASES / 4
    _check_health(server)


def test_malformed_http_is_rejected_or_closed_and_good_requests_succeed(server: ServerProcess) -> None:
    host, port = server.http.split(":")
    with watching_memory(server) as memory:
        for number in range(CASES // 10):
            request = broken_http(random.Random(f"{SEED}/broken/{number}"))
            came = b""
            with socket.create_connection((host, int(port)), timeout=MAX_S) as connection:
                try:
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                    while data := connection.recv(65536):
                        came += data
                except TimeoutError as error:
                    raise AssertionError(f"case {SEED}/broken/{number} hangs: {request[:300]!r}") from error
                except OSError:
                    pass  # the server has already closed the connection
            assert b"HTTP/1.1 500" not in came, f"case {SEED}/broken/{number}: {came[:300]!r} for {request[:300]!r}"
            memory.after(f"{SEED}/broken/{number}")
    _check_health(server)


def test_every_route_is_fuzzed(server: ServerProcess) -> None:
    # The document contains the infer routes, which the application does not serve. The application has routes that are
    # not in the document.
    document = httpx.get(f"{server.url}/openapi.json", timeout=LONG_S).raise_for_status().json()
    routes = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    routes |= {(method, route.path) for route in SERVED for method in route.methods or () if method != "HEAD"}
    assert routes - set(ROUTES) == {("GET", "/v2/console/stream")}  # its answers do not end


def _check_health(server: ServerProcess) -> None:
    """Check that no memory is held and no request is waiting, and that a good request is answered correctly."""
    ones = {name: np.ones((1, 16), np.int32) for name in ("INPUT0", "INPUT1")}
    assert (rest_json(server, "simple", ones)["OUTPUT0"] == 2).all()
    waiting = read_metrics(server).by_labels("ortserve_queue_rows", "model")
    assert waiting == {}
    assert "Traceback" not in server.output


def _is_error(body: bytes) -> bool:
    try:
        return set(json.loads(body)) == {"error"}
    except ValueError:
        return False


def _shown(case: HttpCase) -> str:
    return f"{case.method} {case.target[:200]} {case.headers} {case.body[:600]!r}"
