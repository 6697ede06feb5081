"""Runs that take too long, or never end: a real server answers, aborts them and keeps serving."""

import re
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton_grpc

from models import builders, costly
from servers import (
    LONG_S,
    ServerProcess,
    add_model,
    decisions,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
    starting_batch,
)

ENDLESS = 2**62
LIMIT = "run_timeout_s: 0.5\n"
LONG_WIDTH = 5_000
"""A width for which the product of ``square_product`` takes seconds."""


def ask(server: ServerProcess, model: str, number: int) -> httpx.Response:
    body = {"inputs": [json_input("x", np.array([number]))]}
    return httpx.post(rest_url(server, model), json=body, timeout=LONG_S)


def add_loop(repository: Path, options: str) -> None:
    folder = add_model(repository, "loop", builders.repeats)
    (folder / "model.yaml").write_text(options)


def test_endless_loop_is_aborted_and_delays_no_other_request(tmp_path: Path) -> None:
    add_loop(tmp_path, LIMIT)
    add_model(tmp_path, "mlp", builders.mlp)
    with serving(tmp_path, "--warmup-s", "0.1") as server, ThreadPoolExecutor(1) as pool:
        endless = pool.submit(ask, server, "loop", ENDLESS)
        answered = 0
        row: dict[str, Any] = {"inputs": [json_input("x", np.zeros((1, 64), np.float32))]}
        with httpx.Client(timeout=LONG_S) as client:
            while not endless.done():
                client.post(rest_url(server, "mlp"), json=row).raise_for_status()
                answered += 1
        assert answered > 5
        refusal = endless.result()
        assert refusal.status_code == 504
        assert re.search(r"a run of model 'loop' was terminated after 0\.\d s: its limit is 0\.5 s", refusal.text)
        assert ask(server, "loop", 3).json()["outputs"][0]["data"] == [3]

        batching = httpx.get(f"{server.url}/v2/models/loop/batching", timeout=LONG_S).json()
        assert "(Loop) is control flow" in batching["off_loop_because"]
        assert batching["decisions"]["inline"] == 0
        assert decisions(server, "mlp")["inline"] > 0
        assert read_metrics(server).value("ortserve_overdue_batches_total", model="loop", outcome="terminated") == 1
        properties = httpx.get(f"{server.url}/v2/models/loop", timeout=LONG_S).json()["properties"]
        assert "(Loop) is control flow" in properties["event_loop"]


def test_aborted_grpc_call_is_deadline_exceeded(tmp_path: Path) -> None:
    add_loop(tmp_path, LIMIT)
    with serving(tmp_path, "--warmup-s", "0.1") as server, triton_grpc.InferenceServerClient(server.grpc) as client:
        number = triton_grpc.InferInput("x", [1], "INT64")
        number.set_data_from_numpy(np.array([ENDLESS]))
        with pytest.raises(Exception, match="its limit is") as caught:
            client.infer("loop", [number])
        assert str(grpc.StatusCode.DEADLINE_EXCEEDED) in str(caught.value)


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_endless_run_is_terminated_when_its_caller_leaves(tmp_path: Path, protocol: str) -> None:
    add_loop(tmp_path, "")
    with serving(tmp_path, "--warmup-s", "0.1") as server:
        leave(server, protocol)
        assert ask(server, "loop", 3).json()["outputs"][0]["data"] == [3]
        overdue = read_metrics(server).by_labels("ortserve_overdue_batches_total", "model", "outcome")
        assert not any(overdue.values())
    assert "all its requests were cancelled; it took 1." in server.output


def leave(server: ServerProcess, protocol: str) -> None:
    """Ask for an endless run. The caller resets its connection, or cancels its call, when the run has begun."""
    if protocol == "gRPC":
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            number = triton_grpc.InferInput("x", [1], "INT64")
            number.set_data_from_numpy(np.array([ENDLESS]))
            with starting_batch(server, "loop"):
                call = client.async_infer("loop", [number], lambda result, error: None)
            call.cancel()
        return
    body = orjson.dumps({"inputs": [json_input("x", np.array([ENDLESS]))]})
    head = f"POST /v2/models/loop/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as connection:
        with starting_batch(server, "loop"):
            connection.sendall(head + body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a FIN


def test_endless_run_ends_with_the_drain(tmp_path: Path) -> None:
    add_loop(tmp_path, "")
    status, log = drained(tmp_path, "loop", "x", ENDLESS)
    assert status == 1
    assert "drain timed out; connections with unanswered requests are closed" in log
    assert "active runs are abandoned" not in log


def test_run_that_cannot_be_terminated_does_not_outlast_the_drain(tmp_path: Path) -> None:
    add_model(tmp_path, "square", costly.square_product)
    status, log = drained(tmp_path, "square", "n", LONG_WIDTH)
    assert status == 1
    assert log.endswith("drain timed out; active runs are abandoned timeout_s=0.5")


def drained(repository: Path, model: str, name: str, number: int) -> tuple[int, str]:
    """Stop a server that runs a long request. Returns its exit status and its log."""
    body = {"inputs": [json_input(name, np.array([number]))]}
    with starting(repository, "--warmup-s", "0.1", "--drain-timeout-s", "0.5") as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_loaded()
        with starting_batch(server, model):
            long = pool.submit(httpx.post, rest_url(server, model), json=body, timeout=LONG_S)
        server.send(signal.SIGTERM)
        status = server.wait()
        assert long.exception() is not None or long.result().status_code >= 500
        return status, server.output
