"""Outputs requested as classes, with the largest elements, over both protocols and in both forms of an answer."""

from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from servers import LONG_S, ServerProcess, json_input, rest_url, triton_clients

SCORES = np.array([[0.5, 200, -1], [7, 7, 8]], np.float32)
LARGEST = [["200.000000:1", "0.500000:0"], ["8.000000:2", "7.000000:0"]]


def by_client(server: ServerProcess, library: Any, classes: int, **form: bool) -> np.ndarray:
    with triton_clients(server) as (http, grpc):
        client = http if library is triton_http else grpc
        result = client.infer(
            "echo",
            triton_inputs(library, {"x": SCORES}),
            outputs=[library.InferRequestedOutput("y", class_count=classes, **form)],
        )
    texts: np.ndarray = np.char.decode(result.as_numpy("y").astype(bytes))
    return texts


def test_unmodified_clients_get_the_same_classes_in_every_form(server: ServerProcess) -> None:
    for texts in (
        by_client(server, triton_http, 2, binary_data=True),
        by_client(server, triton_http, 2, binary_data=False),
        by_client(server, triton_grpc, 2),
    ):
        assert texts.tolist() == LARGEST


def test_json_answer_is_a_bytes_tensor_of_the_classes(server: ServerProcess) -> None:
    document = {
        "inputs": [json_input("x", SCORES)],
        "outputs": [{"name": "y", "parameters": {"classification": 9}}],
    }
    answer = httpx.post(rest_url(server, "echo"), json=document, timeout=LONG_S).json()
    assert answer["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [2, 3],
            "data": [
                *("200.000000:1", "0.500000:0", "-1.000000:2"),
                *("8.000000:2", "7.000000:0", "7.000000:1"),
            ],
        }
    ]


def test_output_without_an_order_is_rejected_by_its_type(server: ServerProcess) -> None:
    text = np.array([["a"]], object)
    with triton_clients(server) as (http, grpc):
        for library, client in ((triton_http, http), (triton_grpc, grpc)):
            with pytest.raises(InferenceServerException, match="unsupported type 'BYTES'") as caught:
                client.infer(
                    "echo_text",
                    triton_inputs(library, {"x": text}),
                    outputs=[library.InferRequestedOutput("y", class_count=1)],
                )
            assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_all_classes_of_all_rows_are_returned(server: ServerProcess) -> None:
    rows = np.random.default_rng(0).permutation(200_000).reshape(8, -1).astype(np.float32)
    with triton_http.InferenceServerClient(server.http) as client:
        result = client.infer(
            "echo",
            triton_inputs(triton_http, {"x": rows}),
            outputs=[triton_http.InferRequestedOutput("y", class_count=3)],
        )
    indices = [[int(text.split(b":")[1]) for text in row] for row in result.as_numpy("y")]
    assert indices == np.argsort(-rows, axis=1)[:, :3].tolist()
