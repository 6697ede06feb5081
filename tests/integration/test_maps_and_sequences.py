"""Map and sequence outputs through a real server, compared with ONNX Runtime's own outputs."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import ENCODINGS, Infer, grpc_raw, rest_binary, triton_inputs
from models import builders, interfaces
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving, triton_clients

IN_EVERY_ENCODING = pytest.mark.parametrize("infer", ENCODINGS, ids=lambda infer: infer.__name__)

CLASSES: dict[str, tuple[int, ...] | tuple[str, ...]] = {
    "two_numbers": (0, 1),
    "many_numbers": (7, -2, 2**40),
    "two_texts": ("no", "yes"),
    "many_texts": ("cat", "öl", "dog"),
}
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("maps")
    for name, classes in CLASSES.items():
        add_model(repository, name, interfaces.zipmap_classifier, classes=classes)
        add_model(repository, f"{name}_tree", interfaces.zipmap_classifier, classes=classes, is_tree=True)
    named = add_model(repository, "named", interfaces.zipmap_classifier)
    (named / "model.yaml").write_text("outputs: {probabilities: {labels: [cold, warm]}}\n")
    add_model(repository, "equal", interfaces.split_sequence)
    add_model(repository, "unequal", interfaces.split_sequence, lengths=(1, 3))
    add_model(repository, "none", interfaces.empty_sequence)
    add_model(repository, "texts", interfaces.text_sequence)
    add_model(repository, "construct", builders.sequence_output)
    by_row = add_model(repository, "by_row", builders.sequence_output)
    (by_row / "model.yaml").write_text("inputs: {x: {batch_axis: 0}}\noutputs: {y: {batch_axis: 1}}\n")
    without = add_model(repository, "without", interfaces.split_sequence)
    (without / "model.yaml").write_text("served_outputs: [y]\n")
    untold = add_model(repository, "untold", builders.sequence_output)
    (untold / "model.yaml").write_text("batched: true\n")
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def metadata(server: ServerProcess, model: str) -> dict[str, Any]:
    answer = httpx.get(f"http://{server.http}/v2/models/{model}", timeout=LONG_S).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


@IN_EVERY_ENCODING
@pytest.mark.parametrize("kind", ["", "_tree"], ids=["linear", "tree"])
@pytest.mark.parametrize("name", CLASSES)
def test_probabilities_are_those_of_onnx_runtimes_maps(
    server: ServerProcess, infer: Infer, name: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    classes = CLASSES[name]
    path = interfaces.zipmap_classifier(tmp_path_factory.mktemp("plain") / "model.onnx", classes, is_tree=bool(kind))
    x = np.random.default_rng(1).normal(size=(5, len(classes))).astype(np.float32)
    label, maps = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    answer = infer(server, f"{name}{kind}", {"x": x})
    assert list(answer) == ["label", "probabilities"]
    assert answer["label"].tolist() == label.tolist()
    np.testing.assert_allclose(answer["probabilities"], [[row[key] for key in classes] for row in maps], rtol=1e-6)


@pytest.mark.parametrize("name", CLASSES)
def test_metadata_has_the_tensor_and_its_classes(server: ServerProcess, name: str) -> None:
    classes = CLASSES[name]
    described = metadata(server, name)
    assert described["outputs"][1] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(classes)]}
    assert json.loads(described["properties"]["classes"]) == {"probabilities": list(classes)}
    assert "rows run together, proven: " in described["properties"]["batching"]
    assert "not_served" not in described["properties"]
    with triton_clients(server) as (_, rpc):
        output = rpc.get_model_metadata(name).outputs[1]
    assert (output.name, output.datatype, list(output.shape)) == ("probabilities", "FP32", [-1, len(classes)])


@pytest.mark.parametrize(
    ("model", "count", "texts"),
    [("two_numbers", 2, ["1", "0"]), ("many_texts", 3, ["dog", "öl"]), ("named", 2, ["warm", "cold"])],
)
def test_classification_names_the_classes(server: ServerProcess, model: str, count: int, texts: list[str]) -> None:
    x = {"x": np.arange(count, dtype=np.float32)[None]}
    with triton_clients(server) as (http, rpc):
        for library, client in ((triton_http, http), (triton_grpc, rpc)):
            asked = [library.InferRequestedOutput("probabilities", class_count=2)]
            answer = client.infer(model, triton_inputs(library, x), outputs=asked).as_numpy("probabilities")
            assert [entry.decode().split(":")[2] for entry in answer[0]] == texts


def test_concurrent_classifications_share_batches_and_get_their_own_rows(server: ServerProcess) -> None:
    rows = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)

    def ask(row: np.ndarray) -> np.ndarray:
        return grpc_raw(server, "many_numbers", {"x": row[None]})["probabilities"]

    with ThreadPoolExecutor(16) as callers:
        answers = np.concatenate(list(callers.map(ask, rows)))
    softmax = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(answers, softmax, rtol=1e-5)
    together = rest_binary(server, "many_numbers", {"x": rows})["probabilities"]
    np.testing.assert_allclose(together, answers, rtol=1e-6)


@IN_EVERY_ENCODING
def test_tensors_of_one_shape_are_stacked(server: ServerProcess, infer: Infer) -> None:
    answer = infer(server, "equal", {"x": X})
    np.testing.assert_array_equal(answer["parts"], [X[:, :2], X[:, 2:]])
    np.testing.assert_array_equal(answer["y"], X)
    np.testing.assert_array_equal(infer(server, "construct", {"x": X})["y"], [X, X])
    assert infer(server, "none", {"x": X})["none"].shape == (0, 2, 0)
    texts = infer(server, "texts", {"x": np.array(["a", "öl"], object)})
    assert texts["y"].tolist() == [["a", "öl"]] * 2
    assert texts["parts"].tolist() == ["a", "öl"]


def test_sequence_outputs_are_listed_and_run_unbatched(server: ServerProcess) -> None:
    described = metadata(server, "construct")
    assert described["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1, 4]}]
    assert described["properties"]["sequences"] == "'y'"
    assert described["properties"]["batching"] == "not batched because output 'y' is a sequence of tensors"


def test_ragged_sequence_output_is_rejected_by_name_unless_not_requested(
    server: ServerProcess,
) -> None:
    with triton_clients(server) as (http, rpc):
        for library, client, status in ((triton_http, http, "501"), (triton_grpc, rpc, "StatusCode.UNIMPLEMENTED")):
            given = triton_inputs(library, {"x": X})
            why = r"'parts' of model 'unequal' is a sequence .* have different shapes, \[2,1\] and \[2,3\]"
            for asked in (None, [library.InferRequestedOutput(name) for name in ("y", "parts")]):
                with pytest.raises(InferenceServerException, match=why) as e:
                    client.infer("unequal", given, outputs=asked)
                assert e.value.status() == status
            with pytest.raises(InferenceServerException, match=why):
                client.infer("unequal", given, outputs=[library.InferRequestedOutput("parts", class_count=1)])
            answer = client.infer("unequal", given, outputs=[library.InferRequestedOutput("y")])
            np.testing.assert_array_equal(answer.as_numpy("y"), X)


def test_configured_axis_of_stacked_tensors_is_batched(server: ServerProcess) -> None:
    assert "rows: on axis 1 of 'y'" in metadata(server, "by_row")["properties"]["batching"]
    rows = np.random.default_rng(3).normal(size=(32, 4)).astype(np.float32)
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda row: rest_binary(server, "by_row", {"x": row[None]})["y"], rows))
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer, [row[None], row[None]])


def test_excluded_sequence_leaves_other_outputs_batched(server: ServerProcess) -> None:
    described = metadata(server, "without")
    assert [output["name"] for output in described["outputs"]] == ["y"]
    assert described["properties"]["batching"].startswith("up to ")
    np.testing.assert_array_equal(rest_binary(server, "without", {"x": X})["y"], X)


def test_sequence_is_not_batched_by_its_length(server: ServerProcess) -> None:
    answer = httpx.get(f"http://{server.http}/v2/models/untold", timeout=LONG_S)
    assert answer.status_code == 503
    assert "says that the model is batched, but output 'y' is a sequence of tensors" in answer.json()["error"]
