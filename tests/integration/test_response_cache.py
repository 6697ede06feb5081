"""Requests equal to earlier ones are answered without a run, on both protocols, and never from another load."""

import math
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from encodings_of_requests import Infer, grpc_raw, rest_binary, triton_inputs
from models import builders, members
from servers import LONG_S, ServerProcess, add_model, json_input, read_metrics, rest_url, serving, triton_clients

ROW = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
PROTOCOLS = pytest.mark.parametrize("infer", [rest_binary, grpc_raw])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    for name in ("plain", "http", "grpc", "together", "shapes", "empty"):
        model = add_model(folder, name, builders.mlp)
        (model / "model.yaml").write_text(f"response_cache: {'false' if name == 'plain' else 'true'}\n")
    (add_model(folder, "outputs", builders.two_outputs) / "model.yaml").write_text("response_cache: true\n")
    (add_model(folder, "slow", builders.slow) / "model.yaml").write_text("response_cache: true\nwarmup_s: 0.1\n")
    delayed = add_model(folder, "delayed", builders.poison)
    (delayed / "model.yaml").write_text("response_cache: true\nqueue_delay_s: 1\n")
    for name, is_cached in (("endless", "true"), ("member", "false")):
        endless = add_model(folder, name, builders.repeats)
        (endless / "model.yaml").write_text(f"response_cache: {is_cached}\nrun_timeout_s: 1\n")
    steps = [("member", {"x": "x"}, {"y": "y"})]
    members.add_ensemble(folder, "ensemble", ["x"], ["y"], steps, response_cache="true")
    (add_model(folder, "refuses", builders.poison) / "model.yaml").write_text("response_cache: true\n")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository, "--warmup-s", "0.1") as server:
        yield server


def statistics(server: ServerProcess, model: str) -> dict[str, Any]:
    (found,) = httpx.get(f"{server.url}/v2/models/{model}/stats", timeout=LONG_S).json()["model_stats"]
    return dict(found)


def counts(server: ServerProcess, model: str) -> tuple[int, int]:
    """Hits and misses from the statistics."""
    parts = statistics(server, model)["inference_stats"]
    return parts["cache_hit"]["count"], parts["cache_miss"]["count"]


def ones_for(spec: dict[str, Any]) -> np.ndarray:
    """Ones in the shape and datatype of an input in the metadata, with sizes of 1 for free dimensions."""
    datatypes = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
    return np.ones([abs(size) for size in spec["shape"]], datatypes[spec["datatype"]])


@pytest.mark.parametrize(("model", "infer"), [("http", rest_binary), ("grpc", grpc_raw)])
def test_a_repeated_request_is_a_hit(server: ServerProcess, model: str, infer: Infer) -> None:
    first = infer(server, model, {"x": ROW})
    second = infer(server, model, {"x": ROW})

    assert np.array_equal(first["y"], second["y"])
    assert counts(server, model) == (1, 1)
    found = statistics(server, model)
    assert (found["inference_count"], found["execution_count"]) == (1, 1)
    assert found["inference_stats"]["success"]["count"] == 2
    assert found["inference_stats"]["compute_infer"]["count"] == 1
    metrics = read_metrics(server)
    results = metrics.by_labels("ortserve_response_cache_requests_total", "model", "result")
    assert (results[f"{model} hit"], results[f"{model} miss"]) == (1, 1)
    assert metrics.value("nv_cache_num_hits_per_model", model=model, version="1") == 1
    assert metrics.value("ortserve_response_cache_bytes") > 500


def test_hits_of_requests_without_rows_do_not_lower_the_inference_count(server: ServerProcess) -> None:
    rest_binary(server, "empty", {"x": ROW})
    for _ in range(3):
        assert rest_binary(server, "empty", {"x": ROW[:0]})["y"].shape == (0, 10)
    assert counts(server, "empty") == (2, 2)
    assert statistics(server, "empty")["inference_count"] == 1
    assert statistics(server, "empty")["inference_stats"]["compute_infer"]["count"] == 2


@PROTOCOLS
def test_models_without_the_option_run_every_request(server: ServerProcess, infer: Infer) -> None:
    before = statistics(server, "plain")["execution_count"]
    for _ in range(3):
        infer(server, "plain", {"x": ROW})
    assert statistics(server, "plain")["execution_count"] == before + 3
    assert counts(server, "plain") == (0, 0)


def test_both_protocols_share_entries_and_shapes_do_not(server: ServerProcess) -> None:
    one = rest_binary(server, "shapes", {"x": ROW})["y"]
    two = grpc_raw(server, "shapes", {"x": np.concatenate([ROW, ROW])})["y"]
    again = grpc_raw(server, "shapes", {"x": ROW})["y"]
    assert two.shape == (2, 10)
    assert np.array_equal(one, again)
    assert counts(server, "shapes") == (1, 2)


def test_each_request_gets_its_own_id_and_outputs(server: ServerProcess) -> None:
    url = rest_url(server, "outputs")
    metadata = httpx.get(f"{server.url}/v2/models/outputs", timeout=LONG_S).json()
    tensors = [json_input(spec["name"], ones_for(spec)) for spec in metadata["inputs"]]
    names = [spec["name"] for spec in metadata["outputs"]]
    for number, wanted in enumerate([names[:1], names[1:], names, names[::-1]]):
        body = {"id": str(number), "inputs": tensors, "outputs": [{"name": name} for name in wanted]}
        answer = httpx.post(url, json=body, timeout=LONG_S).raise_for_status().json()
        assert answer["id"] == str(number)
        assert {output["name"] for output in answer["outputs"]} == set(wanted)
    assert counts(server, "outputs") == (3, 1)


def test_equal_requests_at_one_time_run_once(server: ServerProcess) -> None:
    before = statistics(server, "slow")["execution_count"]
    (spec,) = httpx.get(f"{server.url}/v2/models/slow", timeout=LONG_S).json()["inputs"]
    row = ones_for(spec)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit((rest_binary, grpc_raw)[n % 2], server, "slow", {spec["name"]: row}) for n in range(8)]
        answers = [call.result() for call in calls]
    for answer in answers[1:]:
        assert all(np.array_equal(answer[name], answers[0][name]) for name in answer)
    assert statistics(server, "slow")["execution_count"] == before + 1
    assert counts(server, "slow") == (7, 1)


def test_failed_runs_are_not_kept(server: ServerProcess) -> None:
    (spec,) = httpx.get(f"{server.url}/v2/models/refuses", timeout=LONG_S).json()["inputs"]
    body = {"inputs": [json_input(spec["name"], 99999 * ones_for(spec))]}
    answers = [httpx.post(rest_url(server, "refuses"), json=body, timeout=LONG_S) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert counts(server, "refuses") == (0, 2)


def test_requests_that_shared_a_failed_run_do_not_count_as_rejected(server: ServerProcess) -> None:
    body = {"inputs": [json_input("x", np.full((1, 4), builders.POISON))]}
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(httpx.post, rest_url(server, "delayed"), json=body, timeout=LONG_S) for _ in range(4)]
        assert [call.result().status_code for call in calls] == [400] * 4
    metrics = read_metrics(server)
    assert metrics.by_labels("ortserve_batching_decisions_total", "model", "decision")["delayed batches"] == 1
    failed = metrics.by_labels("ortserve_request_duration_seconds_count", "model", "outcome")
    assert failed["delayed rejected_by_model"] == 4
    rejected = metrics.by_labels("ortserve_rejected_requests_total", "model", "reason")
    assert not [labels for labels in rejected if labels.startswith("delayed")]


@pytest.mark.parametrize(("model", "run"), [("endless", "endless"), ("ensemble", "member")])
def test_requests_that_shared_a_run_over_its_time_limit_fail_with_it(
    server: ServerProcess, model: str, run: str
) -> None:
    body = {"inputs": [json_input("x", np.array([2**62]))]}
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(httpx.post, rest_url(server, model), json=body, timeout=LONG_S) for _ in range(3)]
        answers = [call.result() for call in calls]
    assert [answer.status_code for answer in answers] == [504] * 3
    assert all("its limit is 1 s" in answer.text for answer in answers)
    assert read_metrics(server).value("ortserve_overdue_batches_total", model=run, outcome="terminated") == 1


def test_the_configuration_shows_the_cache(server: ServerProcess) -> None:
    with triton_clients(server) as (http, grpc):
        assert http.get_model_config("http")["response_cache"] == {"enable": True}
        assert grpc.get_model_config("http", as_json=True)["config"]["response_cache"] == {"enable": True}
        assert not http.get_model_config("plain").get("response_cache", {}).get("enable")


def test_a_server_without_memory_for_it_runs_every_request(tmp_path: Path) -> None:
    (add_model(tmp_path, "m", builders.mlp) / "model.yaml").write_text("response_cache: true\n")
    with serving(tmp_path, "--warmup-s", "0", "--cache-bytes", "0") as server:
        for _ in range(2):
            rest_binary(server, "m", {"x": ROW})
        assert statistics(server, "m")["execution_count"] == 2
        server.wait_for_line("option has no effect", "cache_bytes")


def test_triton_configurations_switch_it_on(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", builders.mlp)
    (folder / "config.pbtxt").write_text("max_batch_size: 8\nresponse_cache { enable: true }\n")
    with serving(tmp_path, "--warmup-s", "0") as server:
        for _ in range(2):
            grpc_raw(server, "m", {"x": ROW})
        assert counts(server, "m") == (1, 1)


def test_no_answer_of_an_earlier_load_under_reloads(tmp_path: Path) -> None:
    """Callers repeat one request while the weights of its version change; answers follow the order of the loads."""
    folder = add_model(tmp_path, "m", builders.mlp, seed=0)
    (folder / "model.yaml").write_text("response_cache: true\nwarmup_s: 0\n")
    loads = 4
    with serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "m") as server:
        expected = [rest_binary(server, "m", {"x": ROW})["y"]]
        ended = threading.Event()

        def repeat(infer: Infer) -> list[np.ndarray]:
            answers = []
            while not ended.is_set():
                answers.append(infer(server, "m", {"x": ROW})["y"])
            return answers

        with ThreadPoolExecutor(4) as pool, triton_clients(server) as (http, _):
            calls = [pool.submit(repeat, infer) for infer in (rest_binary, grpc_raw, rest_binary, grpc_raw)]
            try:
                for seed in range(1, loads):
                    builders.mlp(folder / "1" / "model.onnx", seed=seed)
                    http.load_model("m")
                    expected.append(rest_binary(server, "m", {"x": ROW})["y"])
            finally:
                ended.set()
            histories = [call.result() for call in calls]
    for history in histories:
        found = [next(n for n, wanted in enumerate(expected) if np.array_equal(answer, wanted)) for answer in history]
        assert found == sorted(found)
        assert len(set(found)) > 1


class Timeline:
    """Valid values over time, as a caller sees them: a change takes effect at some time during its call."""

    def __init__(self, first: int) -> None:
        self._changes = [(-math.inf, -math.inf, first)]

    @contextmanager
    def change(self, value: int) -> Iterator[None]:
        began = time.monotonic()
        self._changes.append((began, math.inf, value))
        yield
        self._changes[-1] = (began, time.monotonic(), value)

    def during(self, began: float, ended: float) -> set[int]:
        """The values that may have been valid at some time in the interval."""
        replaced = [*(change[1] for change in self._changes[1:]), math.inf]
        return {
            value
            for (since, _, value), until in zip(self._changes, replaced, strict=True)
            if since <= ended and began <= until
        }


def test_answers_are_of_loads_that_may_answer_under_reloads_labels_and_rollouts(tmp_path: Path) -> None:
    """The value of an answer identifies the load and version that computed it; callers repeat few requests."""
    versions, rng = (1, 2, 3), random.Random(0)
    for version in versions:
        folder = add_model(tmp_path, "m", members.affine, version=version, offset=10 * version)
    options = "{response_cache: true, warmup_s: 0, version_policy: {all: true}, labels: {stable: 1}}"
    (folder / "model.yaml").write_text(options)
    loads = {version: Timeline(10 * version) for version in versions}
    stable, candidate = Timeline(1), Timeline(0)
    ended = threading.Event()

    def ask(server: ServerProcess, number: int) -> list[tuple[str, float, float, int, int]]:
        answers: list[tuple[str, float, float, int, int]] = []
        while not ended.is_set():
            row, asked = np.full((1, 2), len(answers) % 2, np.float32), ("", "stable", "2")[len(answers) % 3]
            began = time.monotonic()
            if number % 2:
                body = {"inputs": [json_input("a", row)]}
                answer = httpx.post(rest_url(server, "m", asked), json=body, timeout=LONG_S).raise_for_status().json()
                version, value = answer["model_version"], answer["outputs"][0]["data"][0]
            else:
                result = grpc.infer("m", triton_inputs(triton_grpc, {"a": row}), model_version=asked)
                version, value = result.get_response().model_version, result.as_numpy("b")[0, 0]
            answers.append((asked, began, time.monotonic(), int(version), round(value - row[0, 0])))
        return answers

    with (
        serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "m") as server,
        triton_clients(server) as (_, grpc),
        httpx.Client(base_url=server.url, timeout=LONG_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        calls = [pool.submit(ask, server, number) for number in range(4)]
        try:
            for offset in range(40, 440, 10):
                version = rng.choice(versions)
                match rng.choice(("reload", "label", "canary", "end")):
                    case "reload":
                        with loads[version].change(offset):
                            members.affine(tmp_path / "m" / str(version) / "model.onnx", offset=offset)
                            client.post("/v2/repository/models/m/load").raise_for_status()
                    case "label":
                        with stable.change(version):
                            client.put("/v2/models/m/labels", json={"labels": {"stable": version}}).raise_for_status()
                    case "canary" if version not in stable.during(math.inf, math.inf):
                        with candidate.change(version):
                            rollout = {"candidate": version, "mode": "canary", "share": 0.5}
                            client.put("/v2/models/m/rollout", json=rollout).raise_for_status()
                    case "end" if candidate.during(math.inf, math.inf) != {0}:
                        with candidate.change(0):
                            client.delete("/v2/models/m/rollout").raise_for_status()
        finally:
            ended.set()
        answers = [answer for call in calls for answer in call.result()]
        assert read_metrics(server).by_labels("ortserve_response_cache_requests_total", "result")["hit"] > 0
    for asked, began, until, version, offset in answers:
        legal = {2} if asked == "2" else stable.during(began, until) | candidate.during(began, until)
        assert version in legal, (asked, began, until)
        assert offset in loads[version].during(began, until), (version, began, until)
    assert len({version for _, _, _, version, _ in answers}) > 1
