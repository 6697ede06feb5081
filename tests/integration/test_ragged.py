"""Ragged batches: requests of different shapes are joined, with batch inputs and outputs of Triton's configuration."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from models import ragged
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, rest_url, serving, triton_clients

KINDS = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "X" }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_FP32 source_input: "X" }
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "STARTS" data_type: TYPE_INT32 source_input: "X"
}
batch_input { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "LARGEST" data_type: TYPE_INT32 source_input: "X" }
batch_input { kind: BATCH_ITEM_SHAPE target_name: "SHAPE" data_type: TYPE_INT32 source_input: "X" }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "FLAT" data_type: TYPE_FP32 source_input: "X" }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "DOUBLE" source_input: "X" }
dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 60000000 }
"""

SCATTER = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "Y" data_type: TYPE_FP32 dims: -1 }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "Y" source_input: "X" }
dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }
"""

PLAIN_WORDS = """
batched: true
max_rows: 8
inputs: {X: {ragged: true}}
batch_outputs: {Y: X}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("ragged")
    for name, build, file, text in (
        ("kinds", ragged.kinds, "config.pbtxt", KINDS),
        ("scatter", ragged.double, "config.pbtxt", SCATTER),
        ("words", ragged.double, "model.yaml", PLAIN_WORDS),
    ):
        (add_model(root, name, build) / file).write_text(text)
    with serving(root, *SHORT_WARMUP) as running:
        yield running


def ask_together(server: ServerProcess, model: str, requests: list[np.ndarray]) -> list[triton_grpc.InferResult]:
    """Send requests that the model's configuration runs in one batch; a deadline would end their wait."""
    with triton_clients(server) as (_, client), ThreadPoolExecutor(len(requests)) as threads:

        def ask(array: np.ndarray) -> triton_grpc.InferResult:
            tensor = triton_grpc.InferInput("X", list(array.shape), "FP32")
            tensor.set_data_from_numpy(array)
            return client.infer(model, [tensor])

        return list(threads.map(ask, requests))


def batches(server: ServerProcess, model: str) -> dict[int, int]:
    """The number of executed batches, by rows."""
    with triton_clients(server) as (client, _):
        found = client.get_inference_statistics(model)["model_stats"][0]["batch_stats"]
    return {each["batch_size"]: each["compute_infer"]["count"] for each in found}


def test_each_kind_of_batch_input_describes_the_requests_of_a_batch(server: ServerProcess) -> None:
    lengths = (3, 6, 1)
    arrays = [np.arange(length, dtype=np.float32).reshape(1, length) + length for length in lengths]
    answers = ask_together(server, "kinds", arrays)
    assert batches(server, "kinds")[3] == 1, "the requests must have shared a batch"
    ends = sorted(float(answer.as_numpy("ENDED").item()) for answer in answers)
    order = sorted(range(3), key=lambda index: float(answers[index].as_numpy("ENDED").item()))
    assert ends == list(np.cumsum([lengths[index] for index in order]))
    for array, length, answer in zip(arrays, lengths, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("DOUBLE"), array * 2)
        assert answer.as_numpy("SUM").tolist() == [array.sum()]
        assert answer.as_numpy("COUNTED").tolist() == [length]
        assert answer.as_numpy("MOST").tolist() == [6]
        assert answer.as_numpy("SHAPED").tolist() == [[length]]
        assert answer.as_numpy("FLATTENED").tolist() == [length]


def test_scattered_output_has_the_shape_of_each_requests_input(server: ServerProcess) -> None:
    arrays = [np.random.default_rng(rows).random((rows, width), np.float32) for rows, width in ((1, 3), (2, 3), (1, 1))]
    for array, answer in zip(arrays, ask_together(server, "scatter", arrays), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("Y"), array * 2)
    assert batches(server, "scatter")[4] == 1


def test_the_metadata_claim_no_trial_of_rows(server: ServerProcess) -> None:
    """A trial would say nothing, because all requests of a batch are joined."""
    described = httpx.get(f"{server.url}/v2/models/scatter", timeout=LONG_S).json()["properties"]["batching"]
    assert described.startswith("up to 8 rows run together, configured; not tried; the requests of a batch are joined")


def test_clients_see_neither_batch_inputs_nor_the_models_own_shapes(server: ServerProcess) -> None:
    with triton_clients(server) as (client, _):
        described = client.get_model_metadata("kinds")
        config = client.get_model_config("kinds")
        assert client.get_model_config("words")["input"][0]["allow_ragged_batch"] is True
        assert client.get_model_config("words")["batch_output"] == [
            {"target_name": ["Y"], "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "source_input": ["X"]}
        ]
    assert described["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, -1]}]
    assert described["outputs"][0] == {"name": "DOUBLE", "datatype": "FP32", "shape": [-1, -1]}
    assert [each["kind"] for each in config["batch_input"]][:2] == [
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
    ]
    assert config["input"][0]["allow_ragged_batch"] is True


def test_batch_input_of_a_client_is_rejected(server: ServerProcess) -> None:
    body = {
        "inputs": [
            {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1]},
            {"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [1]},
        ]
    }
    answer = httpx.post(rest_url(server, "kinds"), json=body, timeout=LONG_S)
    assert answer.status_code == 400
    assert "unexpected inference input 'COUNT'" in answer.json()["error"]


def test_output_with_other_rows_than_the_request_fails_with_both(server: ServerProcess) -> None:
    """Three rows of one request count as one request of the model, whose sums are per request."""
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [3, 2], "data": [1] * 6}]}
    answer = httpx.post(rest_url(server, "kinds"), json=body, timeout=LONG_S)
    assert answer.status_code == 500
    assert answer.json()["error"].endswith("output 'SUM': expected 3 rows, one per row of its batch, got shape [1]")


def test_model_yaml_says_the_same_in_plain_words(server: ServerProcess) -> None:
    arrays = [np.ones((1, 2), np.float32), np.ones((2, 5), np.float32)]
    for array, answer in zip(arrays, ask_together(server, "words", arrays), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("Y"), array * 2)
