"""At the limit of connections, a new connection replaces an idle one, and no connection with a request in progress."""

import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
import httpx
import numpy as np
import pytest
from hpack import Encoder

from certificates import Secret
from http_wire import post, reset
from models import builders
from ortserve.frontends.grpc.calls import SERVICE_NAME
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving

MOST: Final = 3
"""Connections of each port."""

RATE: Final = 2**20
"""Minimum rate of bodies, and of answers at the limit of connections, in bytes per second."""

LIVE: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM: Final = b"GET /v2/console/stream HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request whose response never ends."""
PART: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
PONG: Final = frames.frame(frames.PING, frames.ACK, 0, bytes(8))
CONTROL: Final = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
UPLOAD: Final = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("few")
    add_model(repository, "identity", builders.identity)
    limits = ("--http-max-connections", str(MOST), "--grpc-max-connections", str(MOST))
    timeouts = ("--http-body-timeout-s=3", "--http-send-timeout-s=3")
    grpc_timeouts = ("--grpc-message-timeout-s=1", "--grpc-send-timeout-s=3")
    rate = ("--http-min-body-bytes-per-s", str(RATE))
    with serving(repository, *SHORT_WARMUP, *limits, *timeouts, *grpc_timeouts, *rate) as server:
        yield server


@contextmanager
def connected(address: str, count: int = MOST) -> Iterator[list[socket.socket]]:
    """Open connections, one after the other."""
    host, port = address.split(":")
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), timeout=LONG_S)) for _ in range(count)]


def ask(connection: socket.socket, request: bytes = LIVE) -> bytes:
    """Return the status line of the response, of which one read returns the rest; empty if the connection is closed."""
    connection.sendall(request)
    return connection.recv(65536)[:12]


def is_served(server: ServerProcess) -> bool:
    with connected(server.http, 1) as (connection,):
        return ask(connection) == b"HTTP/1.1 200"


def test_silent_connections_yield_to_new_ones_before_those_with_requests(server: ServerProcess) -> None:
    with connected(server.http) as (used, first, second):
        assert ask(used) == b"HTTP/1.1 200"
        assert is_served(server)
        assert first.recv(1) == b""
        with connected(server.http, 10 * MOST) as flood:
            assert is_served(server)
            assert second.recv(1) == b""
            assert flood[0].recv(1) == b""
        assert ask(used) == b"HTTP/1.1 200"


def test_connections_with_requests_in_progress_do_not_yield(server: ServerProcess) -> None:
    with busy(server, MOST) as streams:
        with connected(server.http, 1) as (beyond,):
            assert ask(beyond) == b"HTTP/1.1 429"
        reset(streams.pop())
        assert any(is_served(server) for _ in range(1000))  # until the server has noticed the end
        for stream in streams:
            assert stream.recv(1) != b""


@contextmanager
def busy(server: ServerProcess, count: int) -> Iterator[list[socket.socket]]:
    """Open connections with responses that have begun."""
    with connected(server.http, count) as streams:
        for stream in streams:
            assert ask(stream, STREAM) == b"HTTP/1.1 200"
        yield streams
        for stream in streams:
            reset(stream)


def test_idle_connection_yields_before_one_with_an_incomplete_head(server: ServerProcess) -> None:
    with connected(server.http) as (part, silent, used):
        assert ask(used) == b"HTTP/1.1 200"
        part.sendall(PART)
        assert is_served(server)
        assert silent.recv(1) == b""
        assert ask(part, b"\r\n") == b"HTTP/1.1 200"


@pytest.mark.parametrize("request_part", [PART, UPLOAD, CONTROL], ids=["head", "body", "body of a control call"])
def test_slow_request_is_rejected_for_a_new_connection(server: ServerProcess, request_part: bytes) -> None:
    with busy(server, MOST - 1), connected(server.http, 1) as (slow,):
        slow.sendall(request_part)
        until_s = time.monotonic() + LONG_S
        while not is_served(server):  # until it counts as slow
            assert time.monotonic() < until_s
        assert slow.recv(65536).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize("further", [b"", LIVE * 20_000], ids=["alone", "before further requests"])
def test_slowly_read_answer_is_cut_for_a_new_connection(server: ServerProcess, further: bytes) -> None:
    array = np.zeros((500_000, 4), np.float32)  # more than the buffers of the system hold
    entry = {"name": "x", "shape": array.shape, "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    header = f"Inference-Header-Content-Length: {len(text)}"
    with busy(server, MOST - 1), connected(server.http, 1) as (slow,):
        slow.sendall(post("identity", text + array.tobytes(), header))
        received = len(slow.recv(2**16))
        slow.sendall(further)  # more than the server reads before the answer
        since_s = time.monotonic()
        while not is_served(server):  # until it counts as slow
            if received < RATE / 4 * (time.monotonic() - since_s):  # in parts that the caller's system acknowledges
                received += len(slow.recv(2**16))
        with suppress(ConnectionResetError):
            while piece := slow.recv(2**20):  # what the system still holds
                received += len(piece)
        assert 0 < received < array.nbytes


def test_silent_tls_sessions_yield_to_new_ones(tmp_path: Path) -> None:
    secret = Secret(tmp_path)
    limits = ("--http-max-connections", str(MOST))
    client = ssl.create_default_context(cafile=str(secret.ca))
    with (
        serving("--example", *SHORT_WARMUP, *secret.flags, *limits, client=client) as server,
        connected(server.http) as plain,
        ExitStack() as stack,
    ):
        sessions = [stack.enter_context(client.wrap_socket(each, server_hostname="127.0.0.1")) for each in plain]
        assert httpx.get(f"{server.url}/v2/health/live", verify=client, timeout=LONG_S).status_code == 200
        assert sessions[0].recv(1) == b""


def test_idle_grpc_connections_yield_to_new_ones(server: ServerProcess) -> None:
    with connected(server.grpc) as silent:
        for connection in silent[1:]:
            connection.sendall(frames.PREFACE + frames.settings({}))
        with grpc.insecure_channel(server.grpc) as channel:
            live: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE_NAME}/ServerLive")
            live(b"", timeout=LONG_S)
            assert read_all(silent[0]).endswith(frames.goaway(0, ErrorCode.NO_ERROR))
            with connected(server.grpc, 10 * MOST):
                assert read_all(silent[1]).endswith(frames.goaway(0, ErrorCode.NO_ERROR))
                live(b"", timeout=LONG_S)


def test_calls_without_a_message_do_not_hold_all_grpc_connections(server: ServerProcess) -> None:
    with ExitStack() as stack:
        silent = []
        for _ in range(MOST):
            (connection,) = stack.enter_context(connected(server.grpc, 1))
            connection.sendall(beginning_of_call("ServerLive"))
            read_until(connection, PONG)  # the call has begun, so that the next connection cannot replace this one
            silent.append(connection)
        for connection in silent:
            read_until(connection, b"grpc_message_timeout_s")
        with grpc.insecure_channel(server.grpc) as channel:
            live: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE_NAME}/ServerLive")
            live(b"", timeout=LONG_S)


def test_slowly_read_answers_do_not_hold_all_grpc_connections(server: ServerProcess) -> None:
    begin = beginning_of_call("ServerMetadata", {frames.INITIAL_WINDOW_SIZE: 0})
    begin += frames.frame(frames.DATA, frames.END_STREAM, 1, bytes(5))
    with ExitStack() as stack:
        slow = []
        for _ in range(MOST):
            (connection,) = stack.enter_context(connected(server.grpc, 1))
            connection.sendall(begin)
            read_until(connection, PONG)
            slow.append(connection)
        since_s, read_bytes, is_served = time.monotonic(), 0, False
        while not is_served:
            if time.monotonic() - since_s > 0.2 * read_bytes:
                read_bytes += 1
                for connection in slow:
                    connection.sendall(frames.window_update(1, 1))
            with connected(server.grpc, 1) as (beyond,), suppress(ConnectionResetError):
                beyond.sendall(beginning_of_call("ServerLive"))
                is_served = bool(beyond.recv(1))
            assert read_bytes < 100  # of an answer with more bytes


def test_replaced_connections_are_counted_for_both_ports(server: ServerProcess) -> None:
    def counted() -> dict[str, float]:
        return read_metrics(server).by_labels("ortserve_idle_evictions_total", "kind")

    before = counted()
    with connected(server.http, MOST + 1), connected(server.grpc, MOST + 1):
        assert any(len(rises(before, counted())) == 2 for _ in range(1000))  # until the server has accepted all
    assert rises(before, counted()) == {"http_connection", "grpc_connection"}


def rises(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {kind for kind, count in after.items() if count > before.get(kind, 0)}


def test_rejected_connections_are_counted_for_both_ports(server: ServerProcess) -> None:
    rejected = {"name": "ortserve_rejected_requests_total", "model": "", "reason": "overloaded"}
    with busy(server, MOST), connected(server.http, 1) as (beyond,):
        assert ask(beyond) == b"HTTP/1.1 429"
    before = read_metrics(server).value(**rejected)
    with streams(server.grpc), connected(server.grpc, 1) as (beyond,):
        assert read_all(beyond) == b""
    assert read_metrics(server).value(**rejected) == before + 1


def beginning_of_call(method: str, settings: Mapping[int, int] | None = None) -> bytes:
    """The first frames of a client, with a call whose message is missing, and a PING."""
    path = f"/{SERVICE_NAME}/{method}"
    head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    block = Encoder().encode([*head, ("content-type", "application/grpc")])
    head_frame = frames.header_block(1, block, frames.MIN_FRAME_SIZE, is_end=False)
    return frames.PREFACE + frames.settings(settings or {}) + head_frame + frames.frame(frames.PING, 0, 0, bytes(8))


def read_until(connection: socket.socket, text: bytes) -> None:
    received = b""
    while text not in received:
        received += (part := connection.recv(65536))
        assert part, received


@contextmanager
def streams(address: str) -> Iterator[None]:
    """Hold all connections of the gRPC port with calls in progress."""
    calls = []  # a call without a reference is cancelled
    with ExitStack() as stack:
        for _ in range(MOST):
            own = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(address, options=own))
            watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/grpc.health.v1.Health/Watch")
            calls.append(watch(b"", timeout=LONG_S))
            next(calls[-1])
        yield


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))
