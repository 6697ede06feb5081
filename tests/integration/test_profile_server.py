"""Profiles of a running server: answers stay correct, and every limit has a clear error."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pytest

from held_files import held_file
from models import builders
from ortserve.cli.main import run_tool
from servers import LONG_S, LOOK_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for build in (builders.mlp, builders.repeats):
        add_model(folder, build.__name__, build)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    flags = ("--profiling", "--model-control-mode", "explicit", "--load-model", "*", *SHORT_WARMUP)
    with serving(repository, *flags) as server:
        yield server


def ask(client: httpx.Client, server: ServerProcess, model: str, array: np.ndarray) -> Any:
    answer = client.post(rest_url(server, model), json={"inputs": [json_input("x", array)]})
    return answer.raise_for_status().json()["outputs"][0]["data"]


@contextmanager
def load(server: ServerProcess, model: str, array: np.ndarray) -> Iterator[list[Any]]:
    """Call a model continuously until the block ends. Yields the answers."""
    answers: list[Any] = []
    is_over = Event()

    def call() -> None:
        with httpx.Client(timeout=LONG_S) as client:
            while not is_over.is_set():
                answers.append(ask(client, server, model, array))
                is_over.wait(LOOK_S)

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(call) for _ in range(2)]
        try:
            yield answers
        finally:
            is_over.set()
        for caller in callers:
            caller.result(LONG_S)


def post(server: ServerProcess, model: str, **document: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v2/models/{model}/profile", json=document, timeout=LONG_S)


def begin_profile(pool: ThreadPoolExecutor, server: ServerProcess, model: str) -> "Future[httpx.Response]":
    """Start a profile that waits for requests; it has started once another profile is a conflict."""
    first = pool.submit(post, server, model, requests=1, timeout_s=LONG_S)
    while post(server, model, timeout_s=0.001).status_code != 409:
        assert not first.done() or first.result().status_code == 409
        if first.done():  # the probe was first
            first = pool.submit(post, server, model, requests=1, timeout_s=LONG_S)
        time.sleep(LOOK_S)
    return first


def test_batches_are_profiled_while_their_answers_stay_right(
    server: ServerProcess, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    path = repository / "mlp" / "1" / "model.onnx"
    expected = ort.InferenceSession(path).run(None, {"x": array})[0].ravel()
    trace = tmp_path / "trace.json"
    with load(server, "mlp", array) as answers:
        assert run_tool("profile", [server.url, "mlp", "--requests", "40", "--trace", str(trace), "--json"]) == 0
        during = len(answers)
    assert during >= 40, "its own requests, and those that came while it ran"
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)

    result = json.loads(capsys.readouterr().out)
    assert 40 <= result["server"]["requests"] <= 41
    assert result["server"]["ended_because"] == ""
    assert result["profile"]["rows"] * result["server"]["batches"] == pytest.approx(3 * result["server"]["requests"])
    assert run_tool("profile", [str(repository / "mlp"), "--runs", "3", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    names = {(node["name"], node["op"]) for node in result["profile"]["nodes"]}
    assert names == {(node["name"], node["op"]) for node in alone["profile"]["nodes"]}, "the same options"
    events = json.loads(trace.read_text())
    runs = sum(event["name"] == "model_run" for event in events)
    assert runs == result["server"]["batches"] + 1, "the serving session has no part in it"


def test_samples_are_sent_where_no_requests_come(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.ones((4, 64), np.float32))
    arguments = [server.url, "mlp", "--requests", "10", "--inputs", str(data), "--rows", "2", "--json"]
    assert run_tool("profile", arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert json.loads(shown.out)["profile"]["rows"] == 2
    np.savez(data, y=np.ones((4, 64), np.float32))
    assert run_tool("profile", arguments) == 2
    assert "array 'y' is not an input of the model" in capsys.readouterr().err


def test_waiting_for_requests_is_reported(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("profile", [server.url, "mlp", "--timeout", "1.5"]) == 1
    waiting, problem = capsys.readouterr().err.splitlines()
    assert waiting == "ortserve profile: waiting for 100 requests to mlp, for at most 1.5 s (--inputs sends requests)"
    assert "1.5 s passed" in problem


def test_loops_are_bounded_by_their_events(server: ServerProcess) -> None:
    with load(server, "repeats", np.array([1_000])):
        answer = post(server, "repeats", requests=30)
    assert answer.status_code == 200, answer.text
    assert "limit of 60000 events" in answer.json()["ended_because"]
    assert len(answer.json()["trace"]) < 60_000

    with load(server, "repeats", np.array([11_000])):
        answer = post(server, "repeats", requests=1)
    assert answer.status_code == 400
    assert "events: expected at most 30000" in answer.text


def test_only_one_profile_runs_at_a_time(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin_profile(pool, server, "mlp")
        second = post(server, "mlp")
        assert (second.status_code, "is already being profiled" in second.text) == (409, True)
        with httpx.Client(timeout=LONG_S) as client:
            ask(client, server, "mlp", np.zeros((1, 64), np.float32))
        assert len(first.result(LONG_S).json()["batches"]) == 1


def test_unload_ends_a_profile(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = begin_profile(pool, server, "mlp")
        for action in ("unload", "load"):
            url = f"{server.url}/v2/repository/models/mlp/{action}"
            assert httpx.post(url, timeout=LONG_S).status_code == 200
        answer = first.result(LONG_S)
    assert (answer.status_code, "was unloaded or replaced" in answer.text) == (503, True)


def test_caller_that_leaves_makes_room_for_the_next(server: ServerProcess) -> None:
    with socket.create_connection(server.http.split(":")) as caller:  # type: ignore[arg-type]
        caller.sendall(
            b"POST /v2/models/mlp/profile HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\n\r\n" + b'{"timeout_s": 60}'
        )
        while post(server, "mlp", timeout_s=0.001).status_code != 409:
            time.sleep(LOOK_S)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # disconnects with a reset
    end_s = time.monotonic() + LONG_S
    while post(server, "mlp", timeout_s=0.001).status_code == 409:
        assert time.monotonic() < end_s, "the profile of a caller that left goes on"
        time.sleep(LOOK_S)


def test_files_that_changed_are_not_profiled(server: ServerProcess, repository: Path) -> None:
    path = repository / "mlp" / "1" / "model.onnx"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    try:
        with load(server, "mlp", np.zeros((1, 64), np.float32)):
            answer = post(server, "mlp", requests=1)
    finally:
        httpx.post(f"{server.url}/v2/repository/models/mlp/load", timeout=LONG_S).raise_for_status()
    assert (answer.status_code, "has changed since its load" in answer.text) == (409, True)


@pytest.mark.parametrize(
    ("model", "document", "status", "text"),
    [
        ("mlp", {"requests": 0}, 400, "expected 1 to 1000"),
        ("mlp", {"requests": 1001}, 400, "expected 1 to 1000"),
        ("mlp", {"requests": "many"}, 400, "unsigned integer"),
        ("mlp", {"timeout_s": 0}, 400, "above 0 to 300"),
        ("mlp", {"timeout_s": 301}, 400, "above 0 to 300"),
        ("mlp", {"timeout_s": "long"}, 400, "expected a number"),
        ("mlp", {"timeout_s": 0.01}, 504, "0.01 s passed"),
        ("none", {}, 404, "none"),
        ("mlp/versions/7", {}, 404, "7"),
    ],
)
def test_call_that_cannot_be_served_says_why(
    server: ServerProcess, model: str, document: dict[str, Any], status: int, text: str
) -> None:
    answer = post(server, model, **document)
    assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_profiling_needs_the_option_and_a_control_key(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {group: tmp_path / group for group in ("control", "metadata")}
    for group, file in keys.items():
        file.write_text(f"key-of-{group}-with-some-length\n")
    flags = [part for group, file in keys.items() for part in (f"--{group}-keys-file", str(file))]
    with serving(repository, *SHORT_WARMUP, *flags) as server:
        cases: tuple[tuple[Path | None, str], ...] = (
            (None, "status 401: calls of the group 'control' need a key"),
            (keys["metadata"], "status 403: calls of the group 'control' need a key"),
            (keys["control"], "status 501: profiling is off: it requires a server that is started with --profiling"),
        )
        for key_file, problem in cases:
            arguments = [server.url, "mlp", *([] if key_file is None else ["--key-file", str(key_file)])]
            assert run_tool("profile", arguments) == 1
            shown = capsys.readouterr()
            assert shown.out == ""
            assert problem in shown.err
            assert shown.err.count("\n") == 1


def test_server_of_another_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        assert run_tool("profile", [f"http://127.0.0.1:{other.server_port}", "mlp"]) == 1
        other.shutdown()
    assert "expected a server of the Open Inference Protocol v2, got status 501" in capsys.readouterr().err


def test_port_of_grpc_is_refused_with_the_url_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("profile", ["grpc://127.0.0.1:8001", "mlp"]) == 2
    assert "expected the server's HTTP port, such as http://127.0.0.1:8000, got gRPC" in capsys.readouterr().err


def test_stop_of_the_server_ends_a_profile(repository: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with serving(repository, *SHORT_WARMUP, "--profiling") as server:
            first = begin_profile(pool, server, "mlp")
        answer = first.result(LONG_S)
    assert (answer.status_code, "the server is stopping" in answer.text) == (503, True)
    assert "drain timed out" not in server.output


def test_stop_of_the_server_waits_for_no_session_of_a_profile(tmp_path: Path) -> None:
    file = add_model(tmp_path, "mlp", builders.mlp) / "1" / "model.onnx"
    flags = ("--profiling", "--drain-timeout-s", "1", *SHORT_WARMUP)
    with ThreadPoolExecutor(1) as pool, serving(tmp_path, *flags) as server, held_file(file) as held:
        first = begin_profile(pool, server, "mlp")
        with httpx.Client(timeout=LONG_S) as client:
            ask(client, server, "mlp", np.zeros((1, 64), np.float32))
        asyncio.run(asyncio.wait_for(held.wait(), LONG_S))
        server.stop()
        answer = first.result(LONG_S)
    assert (answer.status_code, "the server is stopping" in answer.text) == (503, True)
