"""Runs that take too long, or never end: a real server answers, aborts them and keeps serving."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from models import builders
from servers import LONG_S, ServerProcess, add_model, decisions, json_input, read_metrics, rest_url, serving, starting

ENDLESS = 2**62
LIMIT = "run_timeout_s: 0.5\n"


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


def test_endless_run_does_not_outlast_the_drain(tmp_path: Path) -> None:
    add_loop(tmp_path, "")
    with starting(tmp_path, "--warmup-s", "0.1", "--drain-timeout-s", "0.5") as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_loaded()
        endless = pool.submit(ask, server, "loop", ENDLESS)
        while decisions(server, "loop")["batches"] == 0:
            pass
        server.send(signal.SIGTERM)
        assert server.wait() == 1, server.output
        assert endless.exception() is not None or endless.result().status_code >= 500
