"""A model repository for Triton, served unchanged and queried by Triton's own clients."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from models import builders
from ortserve.core.dtypes import DataType
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    rest_url,
    serving,
    starting,
    starting_batch,
    triton_clients,
    wait_for_queue,
    wire_datatype,
)

SIMPLE = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: true }
instance_group [ { count: 2 kind: KIND_CPU } ]
optimization { graph { level: 1 } input_pinned_memory { enable: true } }
metric_tags { key: "team" value: "vision" }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
model_warmup [{
  name: "zeros and a file"
  batch_size: 4
  inputs { key: "INPUT0" value: { data_type: TYPE_INT32 dims: [ 16 ] zero_data: true } }
  inputs { key: "INPUT1" value: { data_type: TYPE_INT32 dims: [ 16 ] input_data_file: "input1.bin" } }
}]
"""

CLASSIFIER = """
name: "classifier"
platform: "onnxruntime_onnx"
max_batch_size : 0
input [{
  name: "data" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 8, 8 ] reshape { shape: [ 1, 3, 8, 8 ] }
}]
output [{
  name: "scores" data_type: TYPE_FP32 dims: [ 5 ] reshape { shape: [ 1, 5, 1, 1 ] } label_filename: "labels.txt"
}]
"""


def configure(folder: Path, text: str) -> Path:
    (folder / "config.pbtxt").write_text(text)
    return folder


def make_repository(root: Path) -> None:
    simple = configure(add_model(root, "simple", builders.two_outputs), SIMPLE)
    (simple / "warmup").mkdir()
    (simple / "warmup" / "input1.bin").write_bytes(np.arange(64, dtype=np.int32).tobytes())
    classifier = configure(add_model(root, "classifier", builders.image_classifier), CLASSIFIER)
    (classifier / "labels.txt").write_text("\n".join(["cat", "dog", "cow", "hen", "pig"]))
    configure(
        add_model(root, "sum_only", builders.two_outputs),
        'backend: "onnxruntime" max_batch_size: 4 output [{ name: "OUTPUT0" data_type: TYPE_INT32 dims: 16 }]',
    )
    configure(
        add_model(root, "words", builders.identity, datatype=DataType.BYTES, shape=("batch", 1)),
        'max_batch_size: 4 input { name: "x" data_type: TYPE_STRING dims: 1 } '
        'output { name: "y" data_type: TYPE_STRING dims: 1 }',
    )
    configure(
        add_model(root, "sequence_sum", builders.variable_length),
        'max_batch_size: 8 input { name: "x" data_type: TYPE_INT64 dims: -1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 reshape { } }',
    )
    configure(
        add_model(root, "unbatched", builders.unnamed_dims),
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] }',
    )
    configure(
        add_model(root, "sometimes_other", builders.unnamed_dims),
        'max_batch_size: 4 input { name: "x" dims: -1 } output { name: "y" dims: [ 2, 2 ] reshape { shape: 4 } }',
    )
    # A minimal configuration; the server completes it from the model.
    configure(add_model(root, "completed", builders.mlp), 'backend: "onnxruntime"')
    versions = root / "versions"
    for number in (1, 2, 5):
        folder = add_model(root, "versions", builders.identity, version=number)
        (folder / str(number) / "model.onnx").rename(folder / str(number) / "net.onnx")
    configure(versions, 'default_model_filename: "net.onnx" version_policy: { specific { versions: [ 1, 5 ] } }')
    in_folder = configure(add_model(root, "in_folder", builders.identity), "max_batch_size: 2")
    file = in_folder / "1" / "model.onnx"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    (file / "model.onnx").write_bytes(content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("triton")
    make_repository(root)
    with serving(root, *SHORT_WARMUP) as running:
        yield running


def infer(server: ServerProcess, model: str, inputs: dict[str, np.ndarray], version: str = "") -> dict[str, np.ndarray]:
    """Infer over both protocols, which must agree."""
    with triton_clients(server) as clients:
        results = []
        for client, kind in zip(clients, (triton_http, triton_grpc), strict=True):
            tensors = []
            for name, array in inputs.items():
                tensors.append(kind.InferInput(name, list(array.shape), wire_datatype(array)))
                tensors[-1].set_data_from_numpy(array)
            results.append(client.infer(model, tensors, model_version=version))
        metadata = clients[0].get_model_metadata(model)
        answers = [{o["name"]: result.as_numpy(o["name"]) for o in metadata["outputs"]} for result in results]
    for name, array in answers[0].items():
        np.testing.assert_array_equal(array, answers[1][name])
    return answers[0]


def metadata(server: ServerProcess, model: str) -> dict[str, Any]:
    with triton_http.InferenceServerClient(server.http) as client:
        found: dict[str, Any] = client.get_model_metadata(model)
    return found


def shapes(server: ServerProcess, model: str) -> dict[str, list[int]]:
    described = metadata(server, model)
    return {tensor["name"]: tensor["shape"] for tensor in (*described["inputs"], *described["outputs"])}


def test_metric_tags_are_labels_with_an_underscore_as_on_triton(server: ServerProcess) -> None:
    lines = httpx.get(f"http://{server.metrics}/metrics").text.splitlines()
    of_model = [line for line in lines if 'model="simple"' in line]
    assert len(of_model) > 10
    assert [line for line in of_model if '_team="vision"' not in line] == []
    assert [line for line in lines if "_team" in line and 'model="simple"' not in line] == []


def test_model_with_a_batch_answers_as_on_triton(server: ServerProcess) -> None:
    one, other = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), 3, np.int32)
    answer = infer(server, "simple", {"INPUT0": one, "INPUT1": other})
    np.testing.assert_array_equal(answer["OUTPUT0"], one + other)
    np.testing.assert_array_equal(answer["OUTPUT1"], one - other)


def test_metadata_lists_tensors_in_the_configurations_order_with_the_batch_in_front(server: ServerProcess) -> None:
    described = metadata(server, "simple")
    assert described["platform"] == "onnxruntime_onnx"
    assert [tensor["name"] for tensor in described["inputs"]] == ["INPUT1", "INPUT0"]
    assert shapes(server, "simple")["INPUT0"] == [-1, 16]


def test_rows_past_max_batch_size_are_rejected(server: ServerProcess) -> None:
    nine = np.zeros((9, 16), np.int32)
    body = {"inputs": [json_input("INPUT0", nine), json_input("INPUT1", nine)]}
    answer = httpx.post(rest_url(server, "simple"), json=body, timeout=LONG_S)
    assert answer.status_code == 400
    assert "inference request batch-size must be <= 8 for 'simple'" in answer.json()["error"]


def test_reshaped_model_accepts_the_configured_shape(server: ServerProcess) -> None:
    image = np.full((3, 8, 8), 2, np.float32)
    assert shapes(server, "classifier") == {"data": [3, 8, 8], "scores": [5]}
    np.testing.assert_allclose(infer(server, "classifier", {"data": image})["scores"], [2, 3, 4, 5, 6])


def test_reshaped_model_rejects_its_own_shape(server: ServerProcess) -> None:
    own = {"inputs": [json_input("data", np.zeros((1, 3, 8, 8), np.float32))]}
    answer = httpx.post(rest_url(server, "classifier"), json=own, timeout=LONG_S)
    assert answer.status_code == 400
    assert "Expected [3,8,8], got [1,3,8,8]" in answer.json()["error"]


def test_output_of_unconfigured_shape_fails_only_its_request(server: ServerProcess) -> None:
    four, three = (np.ones((1, size), np.float32) for size in (4, 3))
    assert infer(server, "sometimes_other", {"x": four})["y"].shape == (1, 2, 2)
    body = {"inputs": [json_input("x", three)]}
    answer = httpx.post(rest_url(server, "sometimes_other"), json=body, timeout=LONG_S)
    assert answer.status_code == 500
    assert "an output has not the configured shape" in answer.json()["error"]
    assert infer(server, "sometimes_other", {"x": four})["y"].shape == (1, 2, 2)


def test_only_listed_outputs_are_served(server: ServerProcess) -> None:
    one = np.ones((1, 16), np.int32)
    assert infer(server, "sum_only", {"INPUT0": one, "INPUT1": one}).keys() == {"OUTPUT0"}
    with triton_http.InferenceServerClient(server.http) as client:
        tensors = [triton_http.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for tensor in tensors:
            tensor.set_data_from_numpy(one)
        with pytest.raises(triton_http.InferenceServerException, match="unexpected inference output 'OUTPUT1'"):
            client.infer("sum_only", tensors, outputs=[triton_http.InferRequestedOutput("OUTPUT1")])


def test_texts_and_free_dimensions_are_served(server: ServerProcess) -> None:
    words = np.array([[b"one"], [b"zwei"]], dtype=object)
    np.testing.assert_array_equal(infer(server, "words", {"x": words})["y"], words)
    numbers = np.arange(12, dtype=np.int64).reshape(3, 4)
    assert shapes(server, "sequence_sum") == {"x": [-1, -1], "y": [-1, 1]}
    np.testing.assert_array_equal(
        infer(server, "sequence_sum", {"x": numbers})["y"], numbers.sum(axis=1, keepdims=True)
    )


def test_model_without_a_batch_size_but_with_shapes_runs_requests_alone(server: ServerProcess) -> None:
    described = metadata(server, "unbatched")
    assert described["inputs"][0]["shape"] == [-1, 3]
    rows = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(infer(server, "unbatched", {"x": rows})["y"], rows * 2)


def test_configuration_is_completed_from_the_model(server: ServerProcess) -> None:
    assert shapes(server, "completed") == {"x": [-1, 64], "y": [-1, 10]}


def test_listed_versions_are_served_from_the_named_file(server: ServerProcess) -> None:
    assert metadata(server, "versions")["versions"] == ["1", "5"]
    row = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(infer(server, "versions", {"x": row}, "5")["y"], row)


def test_model_file_may_be_a_folder(server: ServerProcess) -> None:
    row = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(infer(server, "in_folder", {"x": row})["y"], row)


def test_fields_without_effect_are_logged_once_per_load(server: ServerProcess) -> None:
    reports = [line for line in server.lines if "option has no effect" in line and "model=simple" in line]
    assert len(reports) == 2
    assert any("dynamic_batching.preserve_ordering: each response is sent when it is ready" in line for line in reports)
    assert any("optimization.input_pinned_memory" in line for line in reports)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("refused")
    for name, text in REFUSED.items():
        configure(add_model(root, name, builders.mlp), text[0])
    (root / "twice" / "model.yaml").write_text("max_rows: 4\n")
    add_model(root, "good", builders.identity)
    with serving(root, *SHORT_WARMUP) as running:
        yield running


REFUSED = {
    "sequences": (
        "sequence_batching { iterative_sequence: true }",
        "config.pbtxt: sequence_batching.iterative_sequence is not supported",
    ),
    "ensemble": ('platform: "ensemble"', "config.pbtxt: ensemble scheduling must be set for ensemble"),
    "decoupled": (
        "model_transaction_policy { decoupled: true }",
        "config.pbtxt: model_transaction_policy.decoupled is not supported: every request has one response",
    ),
    "typo": ("max_batch: 3", 'config.pbtxt: 1:1 : Message type \\"ModelConfig\\" has no field named'),
    "wrong_name": (
        'name: "right_name"',
        "name: expected 'wrong_name', the name of the model's folder, got 'right_name'",
    ),
    "wrong_dims": (
        'max_batch_size: 4 input { name: "x" dims: 32 }',
        "tensor 'x': the model expects shape after the batch dimension ([64]) but the model configuration specifies",
    ),
    "wrong_input": ('input { name: "q" }', "unexpected inference input 'q', allowed inputs are: x"),
    "gpu": ("instance_group { kind: KIND_GPU }", "(instance_group.kind in a config.pbtxt): none of cuda can be used"),
    "twice": ("", "it has both model.yaml and config.pbtxt: expected one of them"),
    "labels": (
        'output { name: "y" label_filename: "labels.txt" }',
        "labels of output 'y': 'labels.txt' cannot be read",
    ),
    "warmup": (
        'model_warmup { name: "w" inputs { key: "x" value { dims: 3 zero_data: true } } }',
        "warm-up sample 'w': input 'x': expected dims like [64], got [3]",
    ),
    "file": ('default_model_filename: "net.onnx"', "version folder 1 has no file net.onnx"),
}


@pytest.mark.parametrize("model", REFUSED)
def test_unservable_configuration_is_rejected_by_field_name(refusals: ServerProcess, model: str) -> None:
    line = refusals.wait_for_line("model cannot be served", f"model={model} ")
    assert REFUSED[model][1] in line


def test_rejected_models_do_not_block_other_models(refusals: ServerProcess) -> None:
    row = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(infer(refusals, "good", {"x": row})["y"], row)


def ask(server: ServerProcess, model: str, **parameters: int) -> tuple[int, str]:
    body = {"inputs": [json_input("x", np.ones((1, 4), np.float32))], "parameters": parameters}
    answer = httpx.post(rest_url(server, model), json=body, timeout=LONG_S)
    return answer.status_code, answer.json().get("error", "")


SLOW = """
max_batch_size: 1
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { max_queue_size: 2 }
  priority_queue_policy { key: 1 value { %s default_timeout_microseconds: 1000 allow_timeout_override: false } }
}
"""


def test_queue_of_a_level_holds_no_more_requests_than_configured(tmp_path: Path) -> None:
    configure(add_model(tmp_path, "slow", builders.slow, steps=200_000), SLOW % "")
    with serving(tmp_path, "--warmup-s", "0") as server, ThreadPoolExecutor(3) as callers:
        with starting_batch(server, "slow"):
            running = [callers.submit(ask, server, "slow")]
        running += [callers.submit(ask, server, "slow") for _ in range(2)]
        wait_for_queue(server, "slow", 2)
        status, error = ask(server, "slow")
        assert status == 429
        assert "Exceeds maximum queue size: 2 requests of its priority level are queued, the limit is 2" in error
        # The other level has a timeout instead of such a bound.
        status, error = ask(server, "slow", priority=1, timeout=60_000_000)
        assert status == 504
        assert "its timeout passed in the queue" in error
        assert [future.result(LONG_S)[0] for future in running] == [200, 200, 200]


def test_delay_policy_delays_late_requests(tmp_path: Path) -> None:
    configure(add_model(tmp_path, "slow", builders.slow, steps=200_000), SLOW % "timeout_action: DELAY")
    answered: list[int] = []
    lock = threading.Lock()

    def call(server: ServerProcess, level: int) -> int:
        status, _ = ask(server, "slow", priority=level)
        with lock:
            answered.append(level)
        return status

    with serving(tmp_path, "--warmup-s", "0") as server, ThreadPoolExecutor(3) as callers:
        with starting_batch(server, "slow"):
            running = [callers.submit(call, server, 2)]
        running.append(callers.submit(call, server, 1))
        wait_for_queue(server, "slow", 1)
        assert [future.result(LONG_S) for future in running] == [200, 200]
    assert answered == [2, 1]


def test_single_file_uses_the_server_options(tmp_path: Path) -> None:
    builders.identity(tmp_path / "bare.onnx")
    with starting(tmp_path, *SHORT_WARMUP) as server:
        server.wait_until_loaded()
        assert "option has no effect" not in server.output
