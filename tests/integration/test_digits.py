"""The example classifier end to end: real images reach the stated accuracy."""

import re
from collections.abc import Callable
from typing import TypeAlias

import httpx
import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from ortserve.example import repository_path
from servers import LONG_S, ServerProcess, json_input, rest_url

DIGITS = repository_path() / "digits"
ROWS_A_REQUEST = 7  # does not divide 450: the last request is shorter than the others

Predict: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Returns probabilities and labels for images."""


@pytest.fixture(scope="module")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """The images FP32 [450, 1, 8, 8] that are not in the model's training data, and their labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = data.images.astype(np.float32)[:, np.newaxis]
    _, held_out_images, _, held_out_labels = train_test_split(
        images, data.target, test_size=0.25, random_state=0, stratify=data.target
    )
    return held_out_images, held_out_labels


@pytest.fixture(scope="module")
def promised_accuracy() -> float:
    stated = re.search(r"Held-out accuracy: ([\d.]+)", (DIGITS / "README.md").read_text())
    assert stated is not None
    return float(stated[1])


@pytest.fixture(params=["triton_http", "triton_grpc", "rest_json"])
def predict(request: pytest.FixtureRequest, example_server: ServerProcess) -> Predict:
    by_name: dict[str, Callable[[ServerProcess], Predict]] = {
        "triton_http": _triton_http,
        "triton_grpc": _triton_grpc,
        "rest_json": _rest_json,
    }
    return by_name[request.param](example_server)


def test_held_out_digits_reach_the_stated_accuracy(
    predict: Predict, held_out: tuple[np.ndarray, np.ndarray], promised_accuracy: float
) -> None:
    images, labels = held_out
    assert len(images) == 450
    session = onnxruntime.InferenceSession(DIGITS / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    expected_probabilities, expected_labels = session.run(["probabilities", "label"], {"image": images})

    answers = [predict(images[first : first + ROWS_A_REQUEST]) for first in range(0, len(images), ROWS_A_REQUEST)]

    probabilities = np.concatenate([answer[0] for answer in answers])
    predicted = np.concatenate([answer[1] for answer in answers])
    assert np.abs(probabilities - expected_probabilities).max() <= 1e-5
    np.testing.assert_array_equal(predicted, expected_labels)
    accuracy = float((predicted == labels).mean())
    assert round(accuracy, 4) == promised_accuracy
    assert accuracy > 0.97


def _triton_http(server: ServerProcess) -> Predict:
    def predict(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        image = triton_http.InferInput("image", images.shape, "FP32")
        image.set_data_from_numpy(images)
        with triton_http.InferenceServerClient(server.http) as client:
            answer = client.infer("digits", [image])
        return answer.as_numpy("probabilities"), answer.as_numpy("label")

    return predict


def _triton_grpc(server: ServerProcess) -> Predict:
    def predict(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        image = triton_grpc.InferInput("image", images.shape, "FP32")
        image.set_data_from_numpy(images)
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            answer = client.infer("digits", [image])
        return answer.as_numpy("probabilities"), answer.as_numpy("label")

    return predict


def _rest_json(server: ServerProcess) -> Predict:
    def predict(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answer = httpx.post(rest_url(server, "digits"), json={"inputs": [json_input("image", images)]}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        outputs = {output["name"]: output for output in answer.json()["outputs"]}
        probabilities, label = outputs["probabilities"], outputs["label"]
        assert (probabilities["datatype"], label["datatype"]) == ("FP32", "INT64")
        return (
            np.array(probabilities["data"], np.float32).reshape(probabilities["shape"]),
            np.array(label["data"], np.int64).reshape(label["shape"]),
        )

    return predict
