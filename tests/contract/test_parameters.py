"""Request parameters, known and unknown, over both protocols."""

from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from encodings_of_requests import triton_inputs
from servers import LONG_S, ServerProcess, json_input, rest_url, triton_clients

ROW = np.arange(3, dtype=np.float32).reshape(1, 3)


def post(server: ServerProcess, parameters: Any) -> httpx.Response:
    document = {"inputs": [json_input("x", ROW)], "parameters": parameters}
    return httpx.post(rest_url(server, "echo"), json=document, timeout=LONG_S)


def test_unknown_parameters_are_neither_rejected_nor_returned(server: ServerProcess) -> None:
    own: dict[str, Any] = {"own": "x", "n": 1, "f": 1.5, "b": True}
    answer = post(server, own)
    assert answer.status_code == 200
    assert set(answer.json()) == {"model_name", "model_version", "outputs"}
    with triton_clients(server) as (http, grpc_client):
        http.infer("echo", triton_inputs(triton_http, {"x": ROW}), parameters=own)
        result = grpc_client.infer("echo", triton_inputs(triton_grpc, {"x": ROW}), parameters=own)
        assert dict(result.get_response().parameters) == {}


def test_nulls_that_libraries_write_for_fields_without_value_count_as_absent(server: ServerProcess) -> None:
    """MLServer's ``InferenceRequest.json()`` writes all of these, as do Jackson and System.Text.Json by default."""
    entry = json_input("x", ROW) | {"parameters": {"content_type": "np", "headers": None}}
    for outputs in (None, [{"name": "y", "parameters": None}], [{"name": "y", "parameters": {"content_type": None}}]):
        document = {"id": None, "parameters": None, "inputs": [entry], "outputs": outputs}
        answer = httpx.post(rest_url(server, "echo"), json=document, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        assert "id" not in answer.json()


def test_scheduling_parameters_of_clients_are_accepted(server: ServerProcess) -> None:
    with triton_clients(server) as (http, grpc_client):
        for library, client in ((triton_http, http), (triton_grpc, grpc_client)):
            client.infer("echo", triton_inputs(library, {"x": ROW}), priority=1, timeout=5_000_000)


def test_models_without_sequences_ignore_ids_on_both_protocols(server: ServerProcess) -> None:
    with triton_clients(server) as (http, grpc_client):
        for library, client in ((triton_http, http), (triton_grpc, grpc_client)):
            for sequence_id in (7, "seven"):
                client.infer("echo", triton_inputs(library, {"x": ROW}), sequence_id=sequence_id, sequence_start=True)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"triton_own": 1}, "parameter keys starting with 'triton_' are reserved"),
        ({"own": {"nested": 1}}, "own"),
        ({"own": [None]}, "own"),
        ({"priority": -1}, "priority"),
        ({"timeout": "soon"}, "timeout"),
        ({"binary_data_output": 1}, "binary_data_output"),
        ({"sequence_id": -1}, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_start": 1}, "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
        ({"sequence_end": "true"}, "Unable to parse 'sequence_end': attempt to access JSON non-boolean as boolean"),
        ([], "parameters"),
    ],
)
def test_invalid_parameter_is_400_and_named(server: ServerProcess, parameters: Any, text: str) -> None:
    answer = post(server, parameters)
    assert answer.status_code == 400
    assert text in answer.json()["error"]


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_reserved_parameter_of_a_tensor_is_rejected_on_both_protocols(server: ServerProcess, where: str) -> None:
    text = (
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified: 'triton_own'"
    )
    document: dict[str, Any] = {"inputs": [json_input("x", ROW)], "outputs": [{"name": "y"}]}
    document[where][0]["parameters"] = {"triton_own": 1}
    answer = httpx.post(rest_url(server, "echo"), json=document, timeout=LONG_S)
    assert (answer.status_code, answer.json()["error"]) == (400, text)
    message = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[ROW.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
    message.outputs.add(name="y")
    getattr(message, where)[0].parameters["triton_own"].int64_param = 1
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=LONG_S)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize("columns", [3, 40_000], ids=["short body", "body that another process reads"])
def test_error_of_a_parameter_names_the_request_of_a_known_model(server: ServerProcess, columns: int) -> None:
    row = np.zeros((1, columns), np.float32)
    document = {"id": "7", "inputs": [json_input("x", row)], "parameters": {"priority": -1}}
    for model, status, text in (
        ("echo", 400, "[request id: 7] parameter 'priority': expected an unsigned integer, got -1"),
        ("nowhere", 404, "Request for unknown model: 'nowhere' is not found"),
    ):
        answer = httpx.post(rest_url(server, model), json=document, timeout=LONG_S)
        assert (answer.status_code, answer.json()["error"]) == (status, text)
