"""A FIN over HTTP/1.1 means "no more requests": complete requests are answered in order, then the server closes.

Tested in plain text and over TLS.
"""

import gzip
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from certificates import Secret
from http_wire import Answers, connect, get, is_read, post, reset, wait_until
from models import builders
from servers import (
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    serving,
    starting,
    wait_for_queue,
    wait_for_sample,
)

COUNT: Final = 200_000
DECISIONS: Final = "ortserve_batching_decisions_total"


@pytest.fixture(scope="module", params=["plain", "TLS"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """``slow`` takes about 50 ms; ``wide`` has large request and answer bodies."""
    secret = Secret(tmp_path_factory.mktemp("tls")) if request.param == "TLS" else None
    repository = tmp_path_factory.mktemp("half-closed")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "wide", builders.identity, shape=("batch", COUNT))
    (add_model(repository, "slow", builders.slow, steps=15_000) / "model.yaml").write_text("max_rows: 1\n")
    flags = (*SHORT_WARMUP, *(secret.flags if secret else ()))
    with serving(repository, *flags, client=secret.client_context() if secret else None) as server:
        yield server
        server.stop()
        assert not [line for line in server.lines if " ERROR " in line]


def body(number: float = 1, width: int = 4) -> bytes:
    return json.dumps({"id": "i", "inputs": [json_input("x", np.full((1, width), number, np.float32))]}).encode()


def generate(model: str) -> bytes:
    return post(model, b'{"x": [[1, 2, 3, 4]]}').replace(b"/infer", b"/generate")


WIDE_BODY: Final = body(0.123, COUNT)
INDEX: Final = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
CASES: Final = {
    "infer": (post("identity", body()), [200]),
    "slow": (post("slow", body()), [200]),
    "HTTP/1.0": (post("slow", body(), version="1.0").replace(b"Host: x\r\n", b""), [200]),
    "large body": (post("wide", WIDE_BODY), [200]),
    "compressed body": (post("slow", gzip.compress(body()), "Content-Encoding: gzip"), [200]),
    "compressed answer": (post("wide", WIDE_BODY, "Accept-Encoding: gzip"), [200]),
    "generate": (generate("slow"), [200]),
    "metadata": (get("/v2/models/identity"), [200]),
    "control": (INDEX, [200]),
    "refused": (post("nowhere", body()), [404]),
    "pipelined": (post("slow", body()) + get("/v2") + generate("slow") + post("identity", body()), [200] * 4),
    "body that ends early": (post("identity", body())[:-1], [400]),
    "head that ends early": (post("identity", body())[:30], [400]),
    "large body that ends early": (post("wide", WIDE_BODY)[:-1], [400]),
    "control body that ends early": (INDEX[:-1], [400]),
    "body that ends early behind another": (post("slow", body()) + post("identity", body())[:-1], [200, 400]),
    "no request behind another": (post("slow", body()) + b"no request\r\n\r\n", [200, 400]),
    "refused before its body": (post("identity", body(), "Inference-Header-Content-Length: x")[:-1], [400]),
    "wrong method before its body": (INDEX[:-1].replace(b"/repository/index", b"/models/identity/config"), [405]),
    "no request at all": (b"", []),
}


def end_sending(connection: socket.socket) -> None:
    socket.socket.shutdown(connection, socket.SHUT_WR)  # a TLS socket's own method would discard the session


@pytest.mark.parametrize("is_later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("name", CASES)
def test_requests_before_a_fin_are_answered_in_order(server: ServerProcess, name: str, is_later: bool) -> None:
    sent, statuses = CASES[name]
    with connect(server) as connection:
        connection.sendall(sent)
        if is_later:
            wait_until(lambda: is_read(connection))
        end_sending(connection)
        answers = Answers(connection)
        came = [answers.next() for _ in statuses]
        assert [status for status, *_ in came] == statuses
        assert answers.is_at_end()
        if statuses[-1:] == [400]:
            assert "error" in came[-1][2]


def test_answers_after_a_fin_are_complete_for_a_slow_reader(server: ServerProcess) -> None:
    count = 3  # answers of 2.4 MB exceed the system's buffers, and three requests do not
    with connect(server) as connection:
        connection.sendall(post("wide", body(0.5, COUNT)) * count)
        end_sending(connection)
        answers = Answers(connection)
        for _ in range(count):
            status, _, document = answers.next()
            assert (status, document["outputs"][0]["data"]) == (200, [0.5] * COUNT)
        assert answers.is_at_end()


def test_request_of_a_closed_connection_is_run_and_dropped(server: ServerProcess) -> None:
    """A client that has gone sends the same FIN as one that waits."""
    fds = "process_open_fds"
    before = read_metrics(server).value(fds)
    batches = read_metrics(server).value(DECISIONS, model="slow", version="1", decision="batches")
    with connect(server) as connection:
        connection.sendall(post("slow", body()))
    wait_for_sample(server, DECISIONS, lambda n: n == batches + 1, model="slow", version="1", decision="batches")
    wait_for_sample(server, fds, lambda now: now <= before)


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """``long`` runs longer than a test lasts, so queued requests leave by cancellation or stay for ever."""
    repository = tmp_path_factory.mktemp("long")
    (add_model(repository, "long", builders.slow, steps=30_000_000) / "model.yaml").write_text("warmup_s: 0\n")
    with starting(repository, "--drain-timeout-s", "0.2") as server:
        server.wait_until_loaded()
        with connect(server) as first:
            first.sendall(post("long", body()))
            wait_for_sample(server, DECISIONS, lambda n: n == 1, model="long", version="1", decision="batches")
            yield server


def test_reset_after_a_fin_frees_the_place_in_the_queue(long_server: ServerProcess) -> None:
    with connect(long_server) as connection:
        connection.sendall(post("long", body()))
        wait_for_queue(long_server, "long", 1)
        end_sending(connection)
        wait_until(lambda: is_read(connection))
        assert read_metrics(long_server).value("ortserve_queue_rows", model="long", version="1") == 1
        reset(connection)
        wait_for_sample(long_server, DECISIONS, lambda n: n == 1, model="long", version="1", decision="left")


def test_fin_cancels_when_configured(tmp_path: Path) -> None:
    (add_model(tmp_path, "slow", builders.slow, steps=60_000) / "model.yaml").write_text("warmup_s: 0\n")
    with (
        serving(tmp_path, "--no-http-answer-half-closed") as server,
        connect(server) as first,
        connect(server) as second,
    ):
        first.sendall(post("slow", body()))
        wait_for_sample(server, DECISIONS, lambda n: n == 1, model="slow", version="1", decision="batches")
        second.sendall(post("slow", body()))
        wait_for_queue(server, "slow", 1)
        end_sending(second)
        wait_for_sample(server, DECISIONS, lambda n: n == 1, model="slow", version="1", decision="left")
        assert second.recv(1) == b""
        assert Answers(first).next()[0] == 200


def test_drain_that_aborts_requests_logs_a_warning_only(long_server: ServerProcess) -> None:
    """The last test of its server."""
    sent = [post("long", body()), generate("long"), post("long", body())[:-1], generate("long")[:-1], INDEX[:-1]]
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(long_server)) for _ in sent]
        for connection, request in zip(connections, sent, strict=True):
            connection.sendall(request)
        for connection in connections:
            wait_until(partial(is_read, connection))
        end_sending(connections[0])
        long_server.send(signal.SIGTERM)
        long_server.wait()
    line = long_server.wait_for_line("drain timed out; connections with unanswered requests are closed")
    assert "WARNING ortserve.frontends.http.server" in line
    assert line.endswith(f"protocol=http connections={len(sent) + 1} waited_s=0.2")
    assert not [line for line in long_server.lines if " ERROR " in line or "Traceback" in line]
