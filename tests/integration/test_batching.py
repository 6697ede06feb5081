"""Concurrent requests to a real server share batches, and each gets its own rows."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest

from encodings_of_requests import Infer, grpc_raw, rest_binary
from models import builders
from ortserve.engine.process_limits import cpu_budget
from servers import (
    LONG_S,
    SHORT_WARMUP,
    add_model,
    decisions,
    json_input,
    read_metrics,
    rest_url,
    serving,
    wait_for_queue,
)

CALLERS = 16
REQUESTS = 96
MAX_ROWS = 16


def computed_alone(folder: Path, sent: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run ONNX Runtime without the server on all rows at once; these models compute rows independently."""
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    y = session.run(["y"], {"x": np.concatenate(sent)})[0]
    return np.split(y, np.cumsum([len(rows) for rows in sent])[:-1])


@pytest.mark.parametrize(
    "protocols", [[rest_binary], [grpc_raw], [rest_binary, grpc_raw]], ids=["http", "grpc", "both"]
)
def test_concurrent_requests_share_batches_and_get_their_own_rows(tmp_path: Path, protocols: list[Infer]) -> None:
    folder = add_model(tmp_path, "heavy", builders.heavy)
    rng = np.random.default_rng(0)
    sent = [rng.standard_normal((1 + number % 3, 64)).astype(np.float32) for number in range(REQUESTS)]
    expected = computed_alone(folder, sent)

    with serving(tmp_path, "--max-rows", str(MAX_ROWS), "--warmup-s", "0.5") as server:

        def ask(number: int) -> np.ndarray:
            return protocols[number % len(protocols)](server, "heavy", {"x": sent[number]})["y"]

        with ThreadPoolExecutor(CALLERS) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        samples = read_metrics(server)

    for answer, rows in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, rows, rtol=1e-3, atol=1e-4)
    # The check above would not detect swapped rows if all rows were alike.
    assert min(np.abs(expected[0][0] - other[0]).max() for other in expected[1:]) > 1e-2
    labels = {"model": "heavy", "version": "1"}
    batches = samples.value("ortserve_batch_rows_count", **labels)
    assert samples.value("ortserve_batch_rows_sum", **labels) == sum(map(len, sent))
    assert batches < REQUESTS / 2
    assert samples.value("ortserve_batch_rows_bucket", **labels, le=f"{MAX_ROWS}.0") == batches


@pytest.mark.parametrize(
    "options",
    [
        "instances: 2\nintra_op_threads: 1\n",
        "buckets: [4, 16]\n",
        "queue_delay_s: 0.01\npreferred_rows: [4, 8]\nmax_rows: 16\n",
        "instances: 2\nintra_op_threads: 1\nbuckets: [4, 16]\nqueue_delay_s: 0.005\npreferred_rows: [4, 8]\n",
    ],
    ids=["instances", "buckets", "delay", "all"],
)
def test_batching_changes_no_answer(tmp_path: Path, options: str) -> None:
    table = add_model(tmp_path, "poison", builders.poison)
    dense = add_model(tmp_path, "mlp", builders.mlp)
    slow = add_model(tmp_path, "slow", builders.slow, steps=1_500)
    for folder in (table, dense, slow):
        (folder / "model.yaml").write_text(options)
    rng = np.random.default_rng(1)
    sent: dict[str, list[np.ndarray]] = {"poison": [], "mlp": [], "slow": []}
    for number in range(REQUESTS):
        rows = 1 + number % 3
        sent["poison"].append(rng.integers(0, 16, (rows, 4)))
        sent["mlp"].append(rng.standard_normal((rows, 64)).astype(np.float32))
        sent["slow"].append(rng.standard_normal((rows, 4)).astype(np.float32))
    expected = {folder.name: computed_alone(folder, sent[folder.name]) for folder in (table, dense, slow)}
    protocols = [rest_binary, grpc_raw]
    with serving(tmp_path, *SHORT_WARMUP) as server:

        def ask(name: str, number: int) -> np.ndarray:
            return protocols[number % 2](server, name, {"x": sent[name][number]})["y"]

        with ThreadPoolExecutor(CALLERS) as pool:
            calls = {(name, number): pool.submit(ask, name, number) for number in range(REQUESTS) for name in sent}
        samples = read_metrics(server)
        taken = {name: decisions(server, name) for name in sent}

    for (name, number), call in calls.items():
        if name == "mlp":  # the order of its sums depends on the batch size
            np.testing.assert_allclose(call.result(), expected[name][number], atol=1e-5, rtol=0)
        else:
            np.testing.assert_array_equal(call.result(), expected[name][number])
    for name in sent:
        labels = {"model": name, "version": "1"}
        batches = samples.value("ortserve_batch_rows_count", **labels)
        assert samples.value("ortserve_batch_rows_sum", **labels) == sum(map(len, sent[name]))
        assert taken[name]["batches"] == batches
        assert taken[name]["wasted_rows"] == taken[name]["retries"] == 0
        if "instances" not in options or "buckets" in options:
            assert samples.value("ortserve_batch_rows_bucket", **labels, le="16.0") == batches
        if "buckets" in options:
            # Each batch was padded to 4 or 16 rows.
            run = samples.value("ortserve_batch_rows_sum", **labels) + taken[name]["padding_rows"]
            assert taken[name]["padding_rows"] > 0
            assert any(4 * fours + 16 * (batches - fours) == run for fours in range(int(batches) + 1))
        else:
            assert taken[name]["padding_rows"] == 0


def test_preferred_batch_runs_without_the_queue_delay(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "poison", builders.poison)
    (folder / "model.yaml").write_text("queue_delay_s: 60\npreferred_rows: [3, 8]\nmax_rows: 16\n")
    rows = np.arange(8).reshape(8, 1, 1) + np.zeros((8, 1, 4), np.int64)
    with serving(tmp_path, *SHORT_WARMUP) as server, ThreadPoolExecutor(8) as pool:
        first = [pool.submit(grpc_raw, server, "poison", {"x": rows[number]}) for number in range(2)]
        wait_for_queue(server, "poison", 2)
        third = pool.submit(grpc_raw, server, "poison", {"x": rows[2]})
        for number, call in enumerate([*first, third]):
            np.testing.assert_array_equal(call.result()["y"], rows[number] / 2)
        samples = read_metrics(server)
        assert samples.by_labels("ortserve_batch_rows_count", "model") == {"poison": 1}
        assert samples.by_labels("ortserve_batch_rows_sum", "model") == {"poison": 3}
        assert decisions(server, "poison")["delayed"] > 0


@pytest.mark.skipif(cpu_budget() < 2, reason="two runs of one thread each need two processors")
def test_two_instances_run_at_the_same_time(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", builders.slow, steps=90_000)
    (folder / "model.yaml").write_text("instances: 2\nintra_op_threads: 1\nmax_rows: 1\n")
    document = {"inputs": [json_input("x", np.zeros((1, 4), np.float32))]}
    with serving(tmp_path, "--warmup-s", "0") as server, ThreadPoolExecutor(2) as pool:

        def phases_ms(_: int) -> dict[str, float]:
            answer = httpx.post(rest_url(server, "slow"), json=document, timeout=LONG_S).raise_for_status()
            timings = answer.headers["server-timing"].split(", ")
            return {name: float(ms) for name, ms in (phase.split(";dur=") for phase in timings)}

        for phases in pool.map(phases_ms, range(2)):
            assert phases["queue"] < phases["compute"] / 2, "it waited for the other"
        assert decisions(server, "slow")["batches"] == 2


def test_learned_batching_values_agree_with_the_metrics(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=1_500)
    row = np.zeros((1, 4), np.float32)
    with serving(tmp_path, "--warmup-s", "1", "--max-rows", "8") as server:
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(lambda _: rest_binary(server, "slow", {"x": row}), range(REQUESTS)))
        answer = httpx.get(f"http://{server.http}/v2/models/slow/batching", timeout=LONG_S)
        of_version = httpx.get(f"http://{server.http}/v2/models/slow/versions/1/batching", timeout=LONG_S)
        samples = read_metrics(server)
        for path in ("nowhere/batching", "slow/versions/7/batching"):
            assert httpx.get(f"http://{server.http}/v2/models/{path}", timeout=LONG_S).status_code == 404
    learned = answer.json()
    assert (learned["max_rows"], learned["queued_rows"]) == (8, 0)
    assert learned["arrival_rows_per_s"] > 0
    (only,) = learned["classes"]
    assert only["observations"] == learned["decisions"]["batches"] > 0
    assert only["waiting_rows"] == 0
    assert only["b_ms"] > only["a_ms"] >= 0, "this model takes as long however many rows there are"
    assert only["error_ms"] >= 0
    assert set(only["latency_ms"]) >= {"1", "8"}
    assert all(ms > 0 for ms in only["latency_ms"].values())
    assert of_version.json()["classes"] == learned["classes"]
    name = "ortserve_batching_decisions_total"
    for decision, count in learned["decisions"].items():
        assert samples.value(name, model="slow", version="1", decision=decision) == count
    shown = samples.by_labels("ortserve_batch_latency_seconds", "rows")
    assert shown == {rows: pytest.approx(ms / 1000) for rows, ms in only["latency_ms"].items()}
    assert samples.value("ortserve_batch_latency_error_seconds", model="slow", version="1") == pytest.approx(
        only["error_ms"] / 1000
    )
