"""Bodies that are received in place, without a copy: over HTTP, over TLS, and in gRPC messages."""

import contextlib
import gzip
import json
import random
import socket
import ssl
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http

from certificates import Secret
from http_wire import Answers, connect, is_read, post, wait_until
from models import builders
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving

LIMIT: Final = 64 * 1024 * 1024
"""Limit of one body, and of all held bytes."""
NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
SIZES: Final = (65_000, 66_000, 300_000, 5_000_000)
"""Bytes of a tensor: below and above the threshold for receiving in place, and large enough for several reads."""


@pytest.fixture(scope="module", params=["plain", "TLS"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def secret(way: str, tmp_path_factory: pytest.TempPathFactory) -> Secret | None:
    return Secret(tmp_path_factory.mktemp("tls")) if way == "TLS" else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, in which ``wide`` returns its input."""
    repository = tmp_path_factory.mktemp("large")
    add_model(repository, "wide", builders.identity, shape=("batch", "width"))
    return repository


@contextlib.contextmanager
def large_serving(folder: Path, secret: Secret | None, *more: str) -> Iterator[ServerProcess]:
    flags = [*SHORT_WARMUP, "--max-body-bytes", str(LIMIT), "--max-inflight-bytes", str(LIMIT), *more]
    flags += secret.flags if secret else ()
    with serving(folder, *flags, client=secret.client_context() if secret else None) as server:
        yield server


@pytest.fixture(scope="module")
def server(folder: Path, secret: Secret | None) -> Iterator[ServerProcess]:
    with large_serving(folder, secret) as server:
        yield server


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


def tensor(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).random((1, nbytes // 4), np.float32)


def binary(array: np.ndarray, *headers: str, encoding: str = "") -> bytes:
    """A binary request for ``array`` with a binary answer."""
    given = triton_http.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)
    body, size = triton_http.InferenceServerClient.generate_request_body([given])
    if encoding:
        body = gzip.compress(body, 1)
        headers = (*headers, f"Content-Encoding: {encoding}")
    return post("wide", body, f"Inference-Header-Content-Length: {size}", *headers)


def values(answer: tuple[int, Mapping[str, str], bytes]) -> np.ndarray:
    """The tensor of a binary answer."""
    status, headers, body = answer
    assert status == 200, body
    size = int(headers["inference-header-content-length"])
    array: np.ndarray = triton_http.InferenceServerClient.parse_response_body(body, header_length=size).as_numpy("y")
    return array


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("most", [20_000, 10_000_000])
def test_body_cut_anywhere_leaves_its_tensor_and_neighbours_intact(
    connection: socket.socket, nbytes: int, most: int
) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    arrays = [tensor(400), tensor(nbytes), tensor(800), tensor(nbytes + 400), tensor(1200)]
    sent = b"".join(map(binary, arrays))
    cuts = random.Random(nbytes + most)
    answers = Answers(connection)
    position, piece = 0, b""
    connection.setblocking(False)
    while position < len(sent):
        piece = piece or sent[position : position + cuts.randint(1, most)]
        with contextlib.suppress(*NOT_NOW):
            count = connection.send(piece)
            position, piece = position + count, piece[count:]
            if cuts.random() < 0.02:
                any(is_read(connection) for _ in range(20))  # then the server has read that piece alone
        with contextlib.suppress(*NOT_NOW):  # otherwise each end would wait for the other to read
            answers.receive()
    connection.settimeout(LONG_S)
    for array in arrays:
        assert np.array_equal(values(answers.next()), array)


def test_large_bodies_of_every_form_are_decoded(connection: socket.socket) -> None:
    array = tensor(400_000)
    answers = Answers(connection)
    connection.sendall(binary(array, encoding="gzip"))
    assert np.array_equal(values(answers.next()), array)
    connection.sendall(post("wide", array.tobytes(), "Inference-Header-Content-Length: 0"))
    assert np.array_equal(values(answers.next()), array)
    short = tensor(40_000)
    text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": short.shape, "data": short.tolist()}]})
    connection.sendall(post("wide", text.encode()))
    status, _, document = answers.next()
    assert (status, np.float32(document["outputs"][0]["data"]).tolist()) == (200, short[0].tolist())
    connection.sendall(post("wide", text.encode()[:-200]))
    status, _, document = answers.next()
    assert (status, "failed to parse" in document["error"]) == (400, True)
    connection.sendall(binary(array))
    assert np.array_equal(values(answers.next()), array)


def test_large_body_is_sent_after_100_continue(connection: socket.socket) -> None:
    array = tensor(1_000_000)
    head, _, body = binary(array, "Expect: 100-continue").partition(b"\r\n\r\n")
    answers = Answers(connection)
    connection.sendall(head + b"\r\n\r\n")
    assert answers.next()[0] == 100
    connection.sendall(body)
    assert np.array_equal(values(answers.next()), array)


def test_slow_large_body_is_rejected(folder: Path, secret: Secret | None) -> None:
    with (
        large_serving(folder, secret, "--http-body-timeout-s", "0.5") as server,
        connect(server) as connection,
    ):
        connection.sendall(binary(tensor(8_000_000))[:2_000_000])
        answers = Answers(connection)
        status, headers, document = answers.next()
        assert (status, headers["connection"]) == (408, "close")
        assert "http_body_timeout_s" in document["error"]
        assert not holds(server, 1)
        assert answers.is_at_end()


def test_disconnect_within_a_large_body_releases_its_memory(server: ServerProcess) -> None:
    for sent in (1, 100_000, 3_000_000):
        with connect(server) as leaver:
            request = binary(tensor(20_000_000))
            leaver.sendall(request[: 400 + sent])
            wait_until(partial(has_taken, server, [leaver]))
            wait_until(partial(holds, server, sent))
        wait_until(lambda: not holds(server, 1))


def test_announced_but_unsent_body_uses_little_memory(server: ServerProcess) -> None:
    process = psutil.Process(server.pid)
    head = binary(tensor(20_000_000)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    with connect(server) as warm:
        warm.sendall(head + bytes(100_000))
        wait_until(partial(is_read, warm))
    before = process.memory_info().rss
    sent = 1_200_000
    connections = [connect(server) for _ in range(30)]
    try:
        for connection in connections:
            connection.sendall(head + bytes(sent))
        wait_until(lambda: has_taken(server, connections))
        wait_until(lambda: holds(server, 30 * sent))
        assert not holds(server, 30 * sent + 1), "announced bytes count"
        assert process.memory_info().rss - before < 30 * 3 * sent
    finally:
        for connection in connections:
            connection.close()


def test_large_bodies_count_as_received_and_are_rejected_at_the_limit(server: ServerProcess) -> None:
    request = binary(tensor(60_000_000))
    with connect(server) as first, connect(server) as second:
        first.sendall(request[:55_000_000])
        wait_until(lambda: is_read(first))
        second.settimeout(LONG_S)
        with contextlib.suppress(ConnectionError):  # the server rejects the body before its end
            second.sendall(request)
        status, _, document = Answers(second).next()
        assert status == 429
        assert "max_inflight_bytes" in document["error"]
        first.sendall(request[55_000_000:])
        assert values(Answers(first).next()).nbytes == 60_000_000


@pytest.mark.parametrize("nbytes", [*SIZES, 30_000_000])
def test_grpc_messages_of_any_size_are_received(server: ServerProcess, secret: Secret | None, nbytes: int) -> None:
    array = tensor(nbytes)
    authority = str(secret.ca) if secret else None
    with triton_grpc.InferenceServerClient(server.grpc, ssl=secret is not None, root_certificates=authority) as client:
        given = triton_grpc.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)
        for _ in range(3):
            answer = client.infer("wide", [given], client_timeout=LONG_S).as_numpy("y")
            assert np.array_equal(answer, array)


def has_taken(server: ServerProcess, connections: list[socket.socket]) -> bool:
    """Whether the server has read all bytes and its loop sleeps: with TLS, bytes that were read are decrypted later.

    A call of ``holds`` before that reserves memory for a moment, for lack of which other requests may be rejected.
    """
    return all(map(is_read, connections)) and psutil.Process(server.pid).status() == psutil.STATUS_SLEEPING


def holds(server: ServerProcess, nbytes: int) -> bool:
    """Whether the server holds at least ``nbytes`` of requests: it then rejects one that is a byte too large."""
    with connect(server) as asking:
        length = LIMIT - nbytes + 1
        lines = ("POST /v2/models/wide/infer HTTP/1.1", "Host: x", f"Content-Length: {length}", "Expect: 100-continue")
        asking.sendall("\r\n".join((*lines, "\r\n")).encode())
        return Answers(asking).next()[0] == 429
