"""A real server detects that a model's rows depend on each other, against its configuration."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest

from encodings_of_requests import Infer, grpc_raw, rest_binary
from models import builders
from servers import LONG_S, ServerProcess, add_model, decisions, read_metrics, serving, triton_clients

CALLERS = 16
BATCHED = "batched: true\nmax_rows: 32\nqueue_delay_s: 0.05\n"
REPORT = "batching stopped: an answer depended on the other requests of its batch"
ROUNDS = 200
"""Maximum rounds until a checked request has a neighbour with larger counts; nearly always the first suffices."""


def counts(rows: int = 1) -> list[np.ndarray]:
    """Requests of counts of very different sizes; alone, each is quantized with its own scale."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, 3 ** (1 + number), (rows, 4)) for number in range(CALLERS)]


def ask(server: ServerProcess, model: str, sent: list[np.ndarray], pool: ThreadPoolExecutor) -> list[np.ndarray]:
    """Send requests concurrently over both protocols. Returns the answers."""
    protocols: list[Infer] = [rest_binary, grpc_raw]
    calls = [pool.submit(protocols[number % 2], server, model, {"x": rows}) for number, rows in enumerate(sent)]
    return [call.result()["y"] for call in calls]


def outcomes(server: ServerProcess, model: str) -> dict[str, float]:
    found = read_metrics(server).by_labels("ortserve_checked_requests_total", "model", "outcome")
    return {key.removeprefix(f"{model} "): value for key, value in found.items() if key.startswith(f"{model} ")}


def are_right(answers: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.allclose(got, wanted, rtol=1e-5) for got, wanted in zip(answers, expected, strict=True))


@pytest.mark.parametrize("instances", [1, 2])
def test_detected_row_dependence_ends_batching(tmp_path: Path, instances: int) -> None:
    folder = add_model(tmp_path, "counts", builders.quantized_counts)
    (folder / "model.yaml").write_text(f"{BATCHED}instances: {instances}\n")
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    sent, pairs = counts(), counts(rows=2)
    expected, expected_pairs = ([session.run(["y"], {"x": rows})[0] for rows in some] for some in (sent, pairs))
    arguments = (tmp_path, "--warmup-s", "0.1", "--model-control-mode", "poll", "--repository-poll-s", "0.05")
    with serving(*arguments) as server, ThreadPoolExecutor(CALLERS) as pool:
        wrong = 0
        for _ in range(ROUNDS):
            wrong += not are_right(ask(server, "counts", sent, pool), expected)
            if "differed" in outcomes(server, "counts"):
                break
        assert wrong
        assert outcomes(server, "counts")["differed"] == 1
        logged = server.wait_for_line(REPORT)
        assert "ERROR" in logged
        assert "difference=\"output 'y': 3 of 3 values differ, by" in logged
        assert "neighbours=" in logged
        assert "of x[1, 4]" in logged
        assert len(logged) < 400

        before = decisions(server, "counts")["batches"]
        for requests, answers in ((sent, expected), (pairs, expected_pairs)):
            for _ in range(3):
                assert are_right(ask(server, "counts", requests, pool), answers)
        assert decisions(server, "counts")["batches"] - before == 6 * CALLERS
        with triton_clients(server) as (client, _):
            batching = client.get_model_metadata("counts")["properties"]["batching"]
            assert client.get_model_config("counts")["max_batch_size"] == 32
        assert batching.startswith("each request runs alone: an answer depended on the other requests of its batch")
        assert sum(REPORT in line for line in server.lines) == 1

        (folder / "model.yaml").write_text(f"{BATCHED}instances: {instances}\nrow_checks: false\n")
        for _ in range(ROUNDS):
            if not are_right(ask(server, "counts", sent, pool), expected):  # loaded again, without checks
                break
        properties = httpx.get(f"{server.url}/v2/models/counts", timeout=LONG_S).json()["properties"]
        assert properties["batching"].startswith("up to 32 rows run together")
        assert outcomes(server, "counts") == {}


def test_proven_model_is_not_checked_unless_configured(tmp_path: Path) -> None:
    for name, says in (("proven", ""), ("checked", "row_checks: true\n")):
        folder = add_model(tmp_path, name, builders.mlp)
        (folder / "model.yaml").write_text(f"max_rows: 32\nqueue_delay_s: 0.05\n{says}")
    rows = [np.full((1, 64), number, np.float32) for number in range(CALLERS)]
    with serving(tmp_path, "--warmup-s", "0.1") as server, ThreadPoolExecutor(CALLERS) as pool:
        for _ in range(ROUNDS):
            ask(server, "proven", rows, pool)
            ask(server, "checked", rows, pool)
            if outcomes(server, "checked"):
                break
        assert outcomes(server, "checked") == {"agreed": 1}
        assert read_metrics(server).value("ortserve_batch_rows_bucket", model="proven", version="1", le="1.0") < CALLERS
        assert 'ortserve_checked_requests_total{model="proven"' not in read_metrics(server).text
