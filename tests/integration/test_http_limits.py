"""Too many headers, slow requests and too many connections are rejected without effects on other clients."""

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import psutil
import pytest
from hpack import Encoder

from http_wire import reset
from models import builders, costly
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.frontends.grpc.native import frames
from servers import (
    LONG_S,
    LOOK_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    wait_for_sample,
)

MAX_HEADERS: Final = 20
MAX_HEADER_BYTES: Final = 4096
BODY: Final = json.dumps({"inputs": [json_input("x", np.ones((1, 4), np.float32))]}).encode()
INFER: Final = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\n"
GET: Final = b"GET /v2/models/identity HTTP/1.1\r\nHost: x\r\n"
LOAD: Final = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\n"
STREAM: Final = b"GET /v2/console/stream HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request whose response never ends."""
GOOD: Final = INFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("http-limits")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "wide", builders.identity, shape=("batch", 1_000_000))
    limits = ("--http-max-headers", str(MAX_HEADERS), "--http-max-header-bytes", str(MAX_HEADER_BYTES))
    with serving(repository, *SHORT_WARMUP, *limits, "--http-send-timeout-s", "0.8") as server:
        yield server


@pytest.fixture(scope="module")
def hasty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with timeouts that a client on a busy machine may miss."""
    repository = tmp_path_factory.mktemp("hasty")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "loop", costly.counted_loop)
    times = ("--http-header-timeout-s", "0.8", "--http-body-timeout-s", "0.8", "--http-min-body-bytes-per-s", "1000000")
    with serving(repository, *SHORT_WARMUP, *times, "--idle-timeout-s", "1.5") as server:
        yield server


@pytest.fixture(scope="module")
def patient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a timeout for callers that read nothing, shorter than the system takes to accept more."""
    repository = tmp_path_factory.mktemp("patient")
    add_model(repository, "widened", costly.widened)
    with serving(repository, *SHORT_WARMUP, "--http-send-timeout-s", "2", "--grpc-send-timeout-s", "2") as server:
        yield server


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that holds few bytes and accepts few connections."""
    repository = tmp_path_factory.mktemp("narrow")
    add_model(repository, "identity", builders.identity)
    with serving(repository, *SHORT_WARMUP, "--max-inflight-bytes", "100000", "--http-max-connections", "3") as server:
        yield server


@contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    came = b""
    try:
        while data := connection.recv(65536):
            came += data
    except ConnectionError:
        pass  # bytes were still in transit
    return came


def answers_to(server: ServerProcess, request: bytes) -> list[bytes]:
    with connected(server) as connection:
        connection.sendall(request)
        return read_to_the_end(connection).split(b"HTTP/1.1 ")[1:]


def is_well(server: ServerProcess) -> bool:
    return httpx.post(rest_url(server, "identity"), content=BODY, timeout=LONG_S).status_code == 200


def rejected(server: ServerProcess, reason: str) -> float:
    samples = read_metrics(server).by_labels("ortserve_rejected_requests_total", "model", "reason")
    return samples.get(f" {reason}", 0)


@pytest.mark.parametrize("begin", [INFER, GET, LOAD], ids=["infer", "get", "post"])
@pytest.mark.parametrize(
    ("headers", "expected_error"),
    [
        (b"a: b\r\n" * MAX_HEADERS, "http_max_headers: expected at most 20 headers, got more"),
        (
            b"a: " + b"b" * MAX_HEADER_BYTES + b"\r\n",
            "http_max_header_bytes: expected at most 4096 bytes of headers, got 4",
        ),
        (b"a" * MAX_HEADER_BYTES + b": b\r\n", "http_max_header_bytes: expected at most 4096 bytes"),
    ],
    ids=["many", "large", "long name"],
)
def test_headers_over_the_limits_are_rejected_and_the_connection_closed(
    server: ServerProcess, begin: bytes, headers: bytes, expected_error: str
) -> None:
    before = rejected(server, "headers_too_large")
    (answer,) = answers_to(server, begin + headers + b"Content-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"431 Request Header Fields Too Large\r\n")
    assert b"\r\nconnection: close\r\n" in answer
    assert expected_error in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert rejected(server, "headers_too_large") == before + 1
    assert is_well(server)


def test_too_many_trailers_in_one_read_are_rejected(server: ServerProcess) -> None:
    chunked = INFER + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    (answer,) = answers_to(server, chunked + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
    assert answer.startswith(b"431 Request Header Fields Too Large\r\n")
    assert b"http_max_headers: expected at most 20 headers, got more" in answer
    few = chunked + b"a: b\r\n" * (MAX_HEADERS - 2) + b"\r\n"
    first, second = answers_to(server, few + GOOD.replace(b"Host", b"Connection: close\r\nHost"))
    assert (first[:4], second[:4]) == (b"200 ", b"200 ")


def test_headers_at_the_limits_are_accepted(server: ServerProcess) -> None:
    more = b"a: b\r\n" * (MAX_HEADERS - 3) + b"Connection: close\r\n"
    (answer,) = answers_to(server, INFER + more + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    assert answer.startswith(b"200 ")


@pytest.mark.parametrize("begin", [INFER, GET], ids=["infer", "get"])
def test_url_counts_against_the_header_limit(server: ServerProcess, begin: bytes) -> None:
    long = begin.replace(b" HTTP", b"?" + b"x" * MAX_HEADER_BYTES + b" HTTP")
    (answer,) = answers_to(server, long + b"Content-Length: 0\r\n\r\n")
    assert answer.startswith(b"431 ")


def test_rejection_follows_the_earlier_answers(server: ServerProcess) -> None:
    answers = answers_to(server, GOOD + GOOD + INFER + b"a: b\r\n" * 50 + b"\r\n" + GOOD)
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"431"]


def endless(begin: bytes, part: bytes) -> Callable[[ServerProcess], bytes]:
    """Returns a function that sends ``begin``, then ``part`` until the server closes, and returns the answer."""

    def send(server: ServerProcess) -> bytes:
        with connected(server) as connection:
            connection.sendall(begin)
            sent = 0
            try:
                for _ in range(20_000):
                    connection.sendall(part)
                    sent += len(part)
            except ConnectionError:
                pass
            assert sent < 19_999 * len(part), "the server takes it for ever"
            return read_to_the_end(connection)

    return send


CHUNKED: Final = INFER + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "send",
    [
        endless(INFER, b"a: b\r\n" * 100),
        endless(GET + b"a: ", b"b" * 1000),
        endless(INFER, b"b" * 1000),
        endless(CHUNKED + b"0\r\n", b"a: b\r\n" * 100),
        endless(CHUNKED + b"0\r\na: ", b"b" * 1000),
        endless(CHUNKED + b"1;", b"b" * 1000),
    ],
    ids=["headers", "value", "name", "trailers", "value of a trailer", "chunk extension"],
)
def test_endless_heads_and_trailers_are_rejected(server: ServerProcess, send: Callable[[ServerProcess], bytes]) -> None:
    came = send(server)
    assert came == b"" or came.startswith(b"HTTP/1.1 431 ")  # a reset may overtake the answer
    assert is_well(server)


def trickle(server: ServerProcess, begin: bytes, part: bytes) -> bytes:
    """Send parts with pauses until the server answers or closes the connection."""
    with connected(server) as connection:
        connection.sendall(begin)
        came: list[bytes] = []

        def read() -> None:
            try:
                came.append(connection.recv(65536))
            except ConnectionResetError:  # the server closed before it had read all sent bytes
                came.append(b"")

        reader = threading.Thread(target=read)
        reader.start()
        while reader.is_alive():
            try:
                connection.sendall(part)
            except ConnectionError:
                break
            reader.join(0.05)
        reader.join(LONG_S)
        return came[0]


GENERATE: Final = LOAD.replace(b"repository/index", b"models/identity/generate")
TRICKLES: Final = {
    "first byte": (b"P", b"", "http_header_timeout_s"),
    "infer headers": (INFER + b"a", b"b", "http_header_timeout_s"),
    "get headers": (GET + b"a", b"b", "http_header_timeout_s"),
    "infer body": (INFER + b"Content-Length: 100000\r\n\r\n", b" ", "http_body_timeout_s"),
    "infer chunks": (CHUNKED, b"1\r\n \r\n", "http_body_timeout_s"),
    "control body": (LOAD + b"Content-Length: 100000\r\n\r\n", b" ", "http_body_timeout_s"),
    "generate body": (GENERATE + b"Content-Length: 9000\r\n\r\n", b" ", "http_body_timeout_s"),
    "no request": (b"", b"", ""),
    "empty lines": (b"", b"\r\n", ""),
}


def test_trickled_requests_are_rejected_as_too_slow(hasty_server: ServerProcess) -> None:
    with ThreadPoolExecutor(len(TRICKLES)) as pool:
        sending = {name: pool.submit(trickle, hasty_server, begin, part) for name, (begin, part, _) in TRICKLES.items()}
        assert is_well(hasty_server)
    for name, (_, _, expected_error) in TRICKLES.items():
        answer = sending[name].result()
        if not expected_error:
            assert answer == b"", name
        else:
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), name
            assert expected_error in json.loads(answer.partition(b"\r\n\r\n")[2])["error"], name


@pytest.mark.parametrize("end", [b" ", b""], ids=["slow", "incomplete"])
def test_request_whose_body_does_not_arrive_is_rejected_after_the_answer_before_it(
    hasty_server: ServerProcess, end: bytes
) -> None:
    body = json.dumps({"n": 2**62}).encode()  # an endless run, which its deadline ends
    head = GENERATE.replace(b"identity", b"loop") + b"X-Request-Timeout-Ms: 3000\r\nContent-Length: %d\r\n\r\n"
    with connected(hasty_server) as connection:
        connection.sendall(head % len(body) + body + GENERATE + b"Content-Length: 9000\r\n\r\n" + end)
        if not end:
            connection.shutdown(socket.SHUT_WR)
        answers = read_to_the_end(connection)
    assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"504", b"408" if end else b"400"]


def test_announced_body_counts_only_received_bytes(narrow_server: ServerProcess) -> None:
    """Otherwise a client that announces a large body and sends little would exhaust the limit."""
    with connected(narrow_server) as first, connected(narrow_server) as second:
        for connection in (first, second):
            connection.sendall(INFER + b"Content-Length: 90000\r\n\r\n" + b" " * 100)
        for _ in itertools.takewhile(lambda _: not is_well(narrow_server), range(1000)):
            pass  # until the server has detected the pause
        assert all(is_well(narrow_server) for _ in range(5))


def test_client_that_reads_nothing_is_disconnected(server: ServerProcess) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1_000_000], "data": [0] * 1_000_000}]})
    request = INFER.replace(b"identity", b"wide") + b"Content-Length: %d\r\n\r\n" % len(body) + body.encode()
    count = 4  # answers of 4 MB each, more than the system buffers
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = connection.getsockname()[1]
        with contextlib.suppress(ConnectionError):  # the last bytes may be in transit when the server closes
            connection.sendall(request * count)
        until_s = time.monotonic() + LONG_S
        while any(one.raddr and one.raddr.port == port for one in psutil.Process(server.pid).net_connections("tcp")):
            assert time.monotonic() < until_s, "the server keeps the connection"
            time.sleep(LOOK_S)
        assert read_to_the_end(connection).count(b"HTTP/1.1 200") < count
    assert is_well(server)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_that_reads_slowly_is_not_disconnected(patient_server: ServerProcess, protocol: str) -> None:
    """The system accepts hundreds of kilobytes at a time, so the server writes nothing for longer than its timeout."""
    width, read_s = 4_000_000, 8
    if protocol == "http":
        address, request = patient_server.http, wide_request(width)
    else:
        message = pb.ModelInferRequest(model_name="widened", raw_input_contents=[np.array([width]).tobytes()])
        message.inputs.add(name="n", datatype="INT64", shape=[1])
        address, request = patient_server.grpc, call_with_large_windows(message.SerializeToString())
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(request)
        end_s, received = time.monotonic() + read_s, 0
        while time.monotonic() < end_s and (part := connection.recv(8192)):
            received += len(part)
            time.sleep(0.1)
        while received < 4 * width and (part := connection.recv(2**20)):
            received += len(part)
    assert received >= 4 * width


def call_with_large_windows(message: bytes) -> bytes:
    """A gRPC call whose answer needs no WINDOW_UPDATE."""
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")]
    block = Encoder().encode([*head, (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")])
    return b"".join(
        (
            frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**30}) + frames.window_update(0, 2**30),
            frames.header_block(1, block, frames.MIN_FRAME_SIZE, is_end=False),
            frames.frame(frames.DATA, frames.END_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message),
        )
    )


def wanting(width: int) -> bytes:
    """The body of a request for an answer of ``width`` numbers of 4 bytes, to the model ``widened``."""
    output = {"name": "y", "parameters": {"binary_data": True}}
    return json.dumps({"inputs": [json_input("n", np.array([width]))], "outputs": [output]}).encode()


def wide_request(width: int) -> bytes:
    body = wanting(width)
    return INFER.replace(b"identity", b"widened") + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_unread_answers_are_cut_and_read_ones_are_not(tmp_path: Path) -> None:
    add_model(tmp_path, "widened", costly.widened)
    count, size, limit = 8, 8_000_000, 30_000_000
    with serving(tmp_path, *SHORT_WARMUP, "--http-unsent-bytes", str(limit)) as server, contextlib.ExitStack() as stack:
        unread = []
        for _ in range(count):
            connection = stack.enter_context(connected(server))
            connection.sendall(wide_request(size // 4))
            assert connection.recv(12) == b"HTTP/1.1 200"
            unread.append(connection)
        for _ in range(3):
            answer = httpx.post(rest_url(server, "widened"), content=wanting(3 * size // 4), timeout=LONG_S)
            assert len(answer.content) > 3 * size
        cut = wait_for_sample(
            server, "ortserve_http_cut_answers_total", lambda cut: cut >= count // 2, cause="overloaded"
        )
        for connection in unread:
            connection.shutdown(socket.SHUT_WR)
        assert sum([len(read_to_the_end(connection)) < size for connection in unread]) == cut < count


def test_connections_past_the_limit_are_answered_and_closed(narrow_server: ServerProcess) -> None:
    for _ in itertools.takewhile(lambda _: not is_served(narrow_server), range(1000)):
        pass  # until the server has noticed the end of other tests' connections
    with connected(narrow_server) as first, connected(narrow_server) as second, connected(narrow_server) as third:
        for connection in (first, second, third):
            connection.sendall(STREAM)
            assert connection.recv(12) == b"HTTP/1.1 200"
        for request in (b"", GOOD):
            with connected(narrow_server) as fourth:
                fourth.sendall(request)
                answer = fourth.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: 1\r\n" in answer
                assert b"http_max_connections: expected at most 3 open connections, got one more" in answer
        for connection in (first, second, third):
            reset(connection)
        for _ in itertools.takewhile(lambda _: not is_served(narrow_server), range(1000)):
            pass  # until the server has noticed a free place
        assert is_served(narrow_server)
    assert rejected(narrow_server, "overloaded") >= 2


def is_served(server: ServerProcess) -> bool:
    """Whether a new connection finds a free place."""
    with connected(server) as connection:
        connection.sendall(GOOD)
        return connection.recv(12) == b"HTTP/1.1 200"
