"""Ensembles on both protocols: values, errors, metadata, statistics, queues, deadlines, cancelled calls, sequences."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from encodings_of_requests import Infer, grpc_raw, rest_binary, rest_json, triton_inputs
from models import builders, members, sequences
from models.members import add_ensemble
from ortserve.core.dtypes import DataType
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting_batch,
    triton_clients,
    wait_for_queue,
)

X = np.array([[1, 2]], np.float32)
PROTOCOLS = pytest.mark.parametrize("infer", [rest_binary, grpc_raw])
TWO_STEPS = [("plus", {"a": "x"}, {"b": "t"}), ("double", {"a": "t"}, {"b": "y"})]

PBTXT = """\
platform: "ensemble"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [2] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [2] }]
ensemble_scheduling {
  step [
    { model_name: "double" model_version: -1 input_map { key: "a" value: "t" } output_map { key: "b" value: "y" } },
    { model_name: "plus" model_version: -1 input_map { key: "a" value: "x" } output_map { key: "b" value: "t" } }
  ]
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles")
    add_model(folder, "plus", members.affine, offset=1)
    add_model(folder, "double", members.affine, scale=2)
    add_model(folder, "sums", members.sums)
    add_model(folder, "scaled", members.scaled)
    add_model(folder, "picks", members.picks)
    add_model(folder, "texts", builders.identity, datatype=DataType.BYTES, shape=("batch", 1))
    flat = add_model(folder, "flat", members.affine, scale=10, shape=(2,))
    (flat / "model.yaml").write_text("batched: false\n")
    pbtxt = folder / "pbtxt"
    (pbtxt / "1").mkdir(parents=True)
    (pbtxt / "config.pbtxt").write_text(PBTXT)
    add_ensemble(folder, "chain", ["x"], ["y"], TWO_STEPS)
    add_ensemble(folder, "shows", ["x"], ["y", "t"], TWO_STEPS)
    diamond = [
        ("plus", {"a": "x"}, {"b": "l"}),
        ("double", {"a": "x"}, {"b": "r"}),
        ("sums", {"a": "l", "b": "r"}, {"sum": "s", "difference": "d"}),
    ]
    add_ensemble(folder, "diamond", ["x"], ["s", "d"], diamond)
    nested = [("chain", {"x": "x"}, {"y": "m"}), ("shows", {"x": "m"}, {"t": "y"})]
    add_ensemble(folder, "nested", ["x"], ["y"], nested)
    add_ensemble(folder, "strings", ["x"], ["y"], [("texts", {"x": "x"}, {"y": "y"})])
    optional = add_ensemble(folder, "maybe", ["x", "f"], ["y"], [("scaled", {"a": "x", "factor": "f"}, {"b": "y"})])
    text = (optional / "model.yaml").read_text().replace("f: {}", "f: {optional: true}")
    (optional / "model.yaml").write_text(text)
    add_ensemble(
        folder,
        "mixed",
        ["x"],
        ["y"],
        [("plus", {"a": "x"}, {"b": "t"}), ("flat", {"a": "t"}, {"b": "u"}), ("plus", {"a": "u"}, {"b": "y"})],
        batched="true",
    )
    add_ensemble(folder, "few", ["x"], ["y"], TWO_STEPS, max_rows="2")
    both = [("sums", {"a": "x", "b": "f"}, {"sum": "y"})]
    add_ensemble(folder, "apart", ["x", "f"], ["y"], both, batched="false")
    lacks = add_ensemble(folder, "lacks", ["x", "f"], ["y"], both)
    (lacks / "model.yaml").write_text((lacks / "model.yaml").read_text().replace("f: {}", "f: {optional: true}"))
    spares = add_ensemble(
        folder, "spares", ["x", "f"], ["t", "y"], [("plus", {"a": "x"}, {"b": "t"}), *both], response_cache="true"
    )
    (spares / "model.yaml").write_text((spares / "model.yaml").read_text().replace("f: {}", "f: {optional: true}"))
    add_ensemble(folder, "inner", ["x"], ["y"], [("picks", {"a": "x"}, {"b": "y"})])
    add_ensemble(folder, "outer", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "t"}), ("inner", {"x": "t"}, {"y": "y"})])
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def get(server: ServerProcess, path: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v2/models/{path}", timeout=LONG_S).raise_for_status().json()
    return dict(answer)


def statistics(server: ServerProcess, model: str) -> dict[str, Any]:
    return dict(get(server, f"{model}/stats")["model_stats"][0])


@PROTOCOLS
@pytest.mark.parametrize("model", ["chain", "pbtxt"])
def test_a_chain_computes_one_step_after_the_other(server: ServerProcess, infer: Infer, model: str) -> None:
    assert infer(server, model, {"x": X})["y"].tolist() == [[4, 6]]
    many = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert np.array_equal(infer(server, model, {"x": many})["y"], (many + 1) * 2)


@PROTOCOLS
def test_graphs_of_every_form_give_right_values(server: ServerProcess, infer: Infer) -> None:
    diamond = infer(server, "diamond", {"x": X})
    assert diamond["s"].tolist() == [[4, 7]]
    assert diamond["d"].tolist() == [[0, -1]]
    assert infer(server, "nested", {"x": X})["y"].tolist() == [[5, 7]]
    assert infer(server, "mixed", {"x": X})["y"].tolist() == [[21, 31]]
    texts = np.array([["é bc"], [""]], object)
    answers = infer(server, "strings", {"x": texts})["y"].ravel().tolist()
    assert [text.decode() if isinstance(text, bytes) else text for text in answers] == ["é bc", ""]
    assert infer(server, "chain", {"x": np.empty((0, 2), np.float32)})["y"].shape == (0, 2)


@PROTOCOLS
def test_an_optional_input_may_be_left_out(server: ServerProcess, infer: Infer) -> None:
    assert infer(server, "maybe", {"x": X})["y"].tolist() == [[1, 2]]
    assert infer(server, "maybe", {"x": X, "f": X})["y"].tolist() == [[1, 4]]


def test_a_cached_ensemble_answers_outputs_that_need_no_step_without_its_input(server: ServerProcess) -> None:
    def ask(outputs: list[str], **inputs: np.ndarray) -> Any:
        body = {
            "inputs": [json_input(name, array) for name, array in inputs.items()],
            "outputs": [{"name": name} for name in outputs],
        }
        answer = httpx.post(rest_url(server, "spares"), json=body, timeout=LONG_S).json()
        return answer.get("error") or {output["name"]: output["data"] for output in answer["outputs"]}

    for _ in range(2):
        assert ask(["t"], x=X) == {"t": [2, 3]}
        assert "model 'sums' requires its input 'b'" in ask(["y", "t"], x=X)
        assert ask(["t"], x=X, f=X) == {"t": [2, 3]}
        assert ask(["y"], x=X, f=X) == {"y": [2, 4]}
    cached = statistics(server, "spares")["inference_stats"]
    assert (cached["cache_hit"]["count"], cached["cache_miss"]["count"]) == (3, 5)


@pytest.mark.parametrize(
    ("model", "rows", "text"),
    [
        ("few", {"x": 3}, "inference request batch-size must be <= 2 for 'few', got 3"),
        ("lacks", {"x": 1}, "model 'sums' requires its input 'b', and the request leaves out 'f'"),
        ("apart", {"x": 2, "f": 3}, "input 'b' batch size does not match other inputs for 'sums': expected 2, got 3"),
    ],
)
def test_requests_that_do_not_fit_a_step_are_rejected(
    server: ServerProcess, model: str, rows: dict[str, int], text: str
) -> None:
    inputs = [json_input(name, np.ones((count, 2), np.float32)) for name, count in rows.items()]
    refused = httpx.post(rest_url(server, model), json={"inputs": inputs}, timeout=LONG_S)
    assert refused.status_code == 400
    assert text in refused.json()["error"]
    if model != "few":
        assert f"in ensemble '{model}', " in refused.json()["error"]


def test_the_answer_has_the_requests_id_and_outputs(server: ServerProcess) -> None:
    before = statistics(server, "double")["execution_count"]
    for wanted in (["t"], ["y"], ["t", "y"], ["y", "t"]):
        body = {"id": "7", "inputs": [json_input("x", X)], "outputs": [{"name": name} for name in wanted]}
        answer = httpx.post(rest_url(server, "shows"), json=body, timeout=LONG_S).raise_for_status().json()
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("7", "shows", "1")
        assert [output["name"] for output in answer["outputs"]] == wanted
        values = {output["name"]: output["data"] for output in answer["outputs"]}
        assert values == {name: value for name, value in {"t": [2, 3], "y": [4, 6]}.items() if name in wanted}
    assert statistics(server, "double")["execution_count"] == before + 3  # a request for t alone does not run it
    body = {"inputs": [json_input("x", X)], "outputs": [{"name": "t"}]}
    refused = httpx.post(rest_url(server, "chain"), json=body, timeout=LONG_S)
    assert refused.status_code == 400
    assert "unexpected inference output 't' for model 'chain'" in refused.json()["error"]


def test_errors_of_steps_name_the_ensembles_and_keep_their_status(server: ServerProcess) -> None:
    body = {"inputs": [json_input("x", np.full((1, 2), 99, np.float32))]}
    answer = httpx.post(rest_url(server, "outer"), json=body, timeout=LONG_S)
    direct = httpx.post(rest_url(server, "picks"), json={"inputs": [json_input("a", np.full((1, 2), 99, np.float32))]})
    assert answer.status_code == direct.status_code
    assert "in ensemble 'outer', in ensemble 'inner', " in answer.json()["error"]
    assert "(model 'picks')" in answer.json()["error"]
    with pytest.raises(InferenceServerException) as error:
        grpc_raw(server, "outer", {"x": np.full((1, 2), 99, np.float32)})
    assert "in ensemble 'outer', in ensemble 'inner', " in str(error.value)
    two = {"inputs": [json_input("x", np.ones((2, 2), np.float32))]}
    refused = httpx.post(rest_url(server, "mixed"), json=two, timeout=LONG_S)
    assert refused.status_code == 400
    assert "in ensemble 'mixed', " in refused.json()["error"]
    assert "unexpected shape for input 'a' for model 'flat'. Expected [2], got [2,2]" in refused.json()["error"]


def test_metadata_configuration_and_statistics_are_those_of_an_ensemble(server: ServerProcess) -> None:
    metadata = get(server, "pbtxt")
    assert metadata["platform"] == "ensemble"
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert get(server, "plus")["platform"] == "onnxruntime_onnx"
    for model in ("pbtxt", "chain"):
        config = get(server, f"{model}/config")
        assert (config["platform"], config["backend"], config["instance_group"]) == ("ensemble", "", [])
        assert config["model_transaction_policy"] == {"decoupled": False}
        assert "optimization" not in config
        steps = {step["model_name"]: step for step in config["ensemble_scheduling"]["step"]}
        assert steps["plus"]["input_map"] == {"a": "x"}
        assert steps["double"]["model_version"] == -1
    before, member = statistics(server, "pbtxt"), statistics(server, "plus")
    rest_json(server, "pbtxt", {"x": np.ones((3, 2), np.float32)})
    after = statistics(server, "pbtxt")
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["inference_stats"]["queue"]["ns"] == 0
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert statistics(server, "plus")["inference_count"] == member["inference_count"] + 3


LIMITED = """platform: "ensemble" max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output [ { name: "y" data_type: TYPE_FP32 dims: 4 }, { name: "z" data_type: TYPE_FP32 dims: 4 } ]
ensemble_scheduling { max_inflight_requests: 2
  step { model_name: "beside" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "z" } }
  step { model_name: "slow" model_version: -1 input_map { key: "x" value: "z" } output_map { key: "y" value: "y" } }
}"""


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An ensemble whose first step takes about 200 ms and accepts two queued requests."""
    folder = tmp_path_factory.mktemp("slow")
    slow = add_model(folder, "slow", builders.slow, steps=60_000)
    (slow / "model.yaml").write_text("max_rows: 1\nqueue_policy: {max_requests: 2}\n")
    add_model(folder, "after", builders.identity)
    add_model(folder, "beside", builders.identity)
    steps = [("slow", {"x": "x"}, {"y": "t"}), ("after", {"x": "t"}, {"y": "y"}), ("beside", {"x": "x"}, {"y": "z"})]
    add_ensemble(folder, "e", ["x"], ["y", "z"], steps)
    limited = add_ensemble(folder, "limited", ["x"], ["y", "z"], steps)
    (limited / "model.yaml").unlink()
    (limited / "config.pbtxt").write_text(LIMITED)
    with serving(folder, *SHORT_WARMUP) as server:
        yield server


FOUR = {"inputs": [json_input("x", np.ones((1, 4), np.float32))]}


def test_a_full_queue_of_a_member_rejects_and_nothing_hangs(slow_server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        url = rest_url(slow_server, "e")
        answers = list(pool.map(lambda _: httpx.post(url, json=FOUR, timeout=LONG_S), range(8)))
    rejected = [answer.json()["error"] for answer in answers if answer.status_code != 200]
    assert 0 < len(rejected) < 8
    assert all("in ensemble 'e', " in error and "'slow'" in error for error in rejected)
    assert {answer.status_code for answer in answers} <= {200, 503, 429}


def test_requests_wait_before_the_queue_of_a_member_is_full_if_the_ensemble_limits_them(
    slow_server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(5) as pool:
        url = rest_url(slow_server, "limited")
        answers = list(pool.map(lambda _: httpx.post(url, json=FOUR, timeout=LONG_S), range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert get(slow_server, "limited/config")["ensemble_scheduling"]["max_inflight_requests"] == 2
    assert httpx.post(rest_url(slow_server, "e"), json=FOUR, timeout=LONG_S).status_code == 200


@contextmanager
def busy(server: ServerProcess) -> Iterator[None]:
    """Keep the slow model busy: at first one request runs and another waits."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(httpx.post, rest_url(server, "slow"), json=FOUR, timeout=LONG_S) for _ in range(2)]
        wait_for_queue(server, "slow", 1)
        yield
        assert [call.result().status_code for call in calls] == [200, 200]


def test_deadlines_and_queue_timeouts_hold_for_the_steps(slow_server: ServerProcess) -> None:
    url = rest_url(slow_server, "e")
    before = statistics(slow_server, "after")["inference_count"]
    with busy(slow_server):
        late = httpx.post(url, json=FOUR | {"parameters": {"timeout": 1000}}, timeout=LONG_S)
    assert late.status_code in (503, 504)
    assert "in ensemble 'e', " in late.json()["error"]
    inputs = triton_inputs(triton_grpc, {"x": np.ones((1, 4), np.float32)})
    with (
        busy(slow_server),
        triton_clients(slow_server) as (_, grpc),
        pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"),
    ):
        grpc.infer("e", inputs, client_timeout=0.02)
    assert httpx.post(url, json=FOUR, timeout=LONG_S).status_code == 200
    assert statistics(slow_server, "after")["inference_count"] == before + 1  # late requests are not counted


def test_a_cancelled_request_starts_no_further_step(slow_server: ServerProcess) -> None:
    before = statistics(slow_server, "after")["inference_count"]
    inputs = triton_inputs(triton_grpc, {"x": np.ones((1, 4), np.float32)})
    with busy(slow_server), triton_clients(slow_server) as (_, grpc):
        call = grpc.async_infer("e", inputs, lambda result, error: None)
        assert grpc.is_server_live()  # on the same connection, so that the request has arrived
        call.cancel()
    assert httpx.post(rest_url(slow_server, "e"), json=FOUR, timeout=LONG_S).status_code == 200
    assert statistics(slow_server, "after")["inference_count"] == before + 1
    requests = read_metrics(slow_server).by_labels(
        "ortserve_request_duration_seconds_count", "model", "protocol", "outcome"
    )
    assert requests["slow ensemble cancelled"] >= 1
    assert requests["e grpc cancelled"] >= 1
    assert requests["after ensemble ok"] >= 1


def test_a_sequence_through_an_ensemble_and_directly_has_one_state(tmp_path: Path) -> None:
    (add_model(tmp_path, "adds", sequences.two_states) / "model.yaml").write_text(
        "sequences: {max_idle_s: 30, states: [{input: a_in, output: z_out}, {input: b_in, output: a_out}]}\n"
    )
    with serving(tmp_path, *SHORT_WARMUP) as server:
        found = httpx.get(f"{server.url}/v2/models/adds", timeout=LONG_S).json()
    (given,), made = found["inputs"], [spec["name"] for spec in found["outputs"]]
    steps = [("adds", {given["name"]: "x"}, {name: name for name in made})]
    add_ensemble(tmp_path, "through", ["x"], made, steps)
    halves = [("adds", {given["name"]: "x"}, {made[0]: made[0]}), ("through", {"x": "x"}, {made[1]: made[1]})]
    add_ensemble(tmp_path, "twice", ["x"], made[:2], halves)
    row = np.ones([abs(size) for size in given["shape"]], DataType(given["datatype"]).numpy)

    def ask(server: ServerProcess, model: str, name: str, **flags: bool) -> httpx.Response:
        body = {"inputs": [json_input(name, row)], "parameters": {"sequence_id": 9, **flags}}
        return httpx.post(rest_url(server, model), json=body, timeout=LONG_S)

    def outputs(answer: httpx.Response) -> dict[str, Any]:
        return {one["name"]: one["data"] for one in answer.raise_for_status().json()["outputs"]}

    with serving(tmp_path, *SHORT_WARMUP) as server:
        refused = ask(server, "through", "x")
        assert refused.status_code == 400
        assert refused.json()["error"].startswith(
            "in ensemble 'through', inference request for sequence 9 to model 'adds' "
        )
        alone = [outputs(ask(server, "adds", given["name"], sequence_start=n == 0)) for n in range(3)]
        mixed = [
            outputs(ask(server, "through", "x", sequence_start=True)),
            outputs(ask(server, "adds", given["name"])),
            outputs(ask(server, "through", "x", sequence_end=True)),
        ]
        assert mixed == alone
        assert mixed[0] != mixed[1] != mixed[2]
        assert ask(server, "adds", given["name"]).status_code == 400
        warning = server.wait_for_line(
            "an ensemble mixes states model=twice", "several steps continue the states of 'adds'"
        )
        assert [line for line in server.lines if "mixes states" in line] == [warning]


def test_requests_of_a_sequence_do_not_run_without_a_cancelled_one(tmp_path: Path) -> None:
    """Cancel in a step before the model with the sequence, and while the request waits for an earlier one."""
    add_model(tmp_path, "passes", sequences.slow, steps=150_000)
    (add_model(tmp_path, "adds", sequences.slow, steps=10) / "model.yaml").write_text(
        "sequences: {max_idle_s: 30, states: [{input: STATE, output: NEXT}]}\n"
    )
    steps = [("passes", {"INPUT": "x", "STATE": "zero"}, {"TOTAL": "t"}), ("adds", {"INPUT": "t"}, {"TOTAL": "total"})]
    add_ensemble(tmp_path, "through", ["x", "zero"], ["total"], steps)
    outcomes: Queue[tuple[int, Any]] = Queue()

    def send(client: Any, value: int, start: bool = False) -> Any:
        arrays = {"x": np.array([[value]], np.int32), "zero": np.zeros((1, 1), np.int32)}
        return client.async_infer(
            "through",
            triton_inputs(triton_grpc, arrays),
            callback=lambda result, error: outcomes.put((value, error or int(result.as_numpy("total")[0, 0]))),
            sequence_id=7,
            sequence_start=start,
        )

    with serving(tmp_path, *SHORT_WARMUP) as server, triton_clients(server) as (_, client):
        for values, cancelled in (((2, 4), 2), ((10, 20, 40), 20)):
            send(client, 1, start=True)
            assert outcomes.get(timeout=LONG_S) == (1, 1)
            with starting_batch(server, "passes"):
                call = send(client, values[0])
            if values[0] != cancelled:
                call = send(client, cancelled)
                assert client.is_server_live()  # on the same connection, so that the request has arrived
            call.cancel()
            send(client, values[-1])  # on the same connection, so that it arrives later
            found = dict([outcomes.get(timeout=LONG_S) for _ in values])
            assert "must specify the START flag" in str(found[values[-1]])
            assert found.get(10) in (None, 11)
