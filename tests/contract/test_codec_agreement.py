"""A request and an answer are the same in every encoding, for every datatype."""

from dataclasses import replace

import numpy as np
import pytest

import wire
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.rest import RestEncoder, RestRequest
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor

SAMPLES = wire.samples()


def requests(datatype: DataType, array: np.ndarray) -> list[InferRequest]:
    """The same request as each codec decodes it."""
    bodies = (wire.rest_json_request(datatype, array), wire.rest_binary_request(datatype, array))
    messages = (wire.grpc_raw_request(datatype, array), wire.grpc_typed_request(datatype, array))
    return [
        *(RestRequest(body.data, body.json_size, "m", "3").read() for body in bodies),
        *(GrpcRequest(message.data).read() for message in messages if message is not None),
    ]


@pytest.mark.parametrize("name", SAMPLES)
def test_request_is_the_same_in_every_encoding(name: str) -> None:
    datatype, array = SAMPLES[name]
    decoded = requests(datatype, array)
    assert len(decoded) == (3 if datatype in (DataType.FP16, DataType.BF16) else 4)
    for request in decoded:
        assert replace(request, inputs=()) == InferRequest(
            "m",
            "3",
            "7",
            (),
            [RequestedOutput("y"), RequestedOutput("z", classes=2)],
            {"own": "x", "priority": 1},
        )
        (tensor,) = request.inputs
        assert (tensor.name, tensor.datatype) == ("x", datatype)
        assert (tensor.array.dtype, tensor.array.shape) == (datatype.numpy, array.shape)
        assert wire.raw_bytes(datatype, tensor.array) == wire.raw_bytes(datatype, array)  # to the bit: NaN, -0.0


@pytest.mark.parametrize("name", SAMPLES)
def test_answer_is_the_same_in_every_encoding(name: str) -> None:
    datatype, array = SAMPLES[name]
    response = InferResponse("m", "3", "7", [Tensor("y", datatype, array)])
    expected = wire.as_client_sees(datatype, array)
    for is_binary in (False, True):
        request = InferRequest("m", "", "7", [], [RequestedOutput("y", is_binary)], {})
        encoded = RestEncoder().encode(request, response)
        came, document = wire.read_rest_answer(wire.Body(bytes(encoded.body), encoded.json_size))
        assert (document["model_name"], document["model_version"], document["id"]) == ("m", "3", "7")
        assert document["outputs"][0]["shape"] == list(array.shape)
        if datatype not in (DataType.FP16, DataType.BF16) or encoded.json_size is not None:
            expect_same(came, expected)
        else:  # tritonclient accepts half precision in binary data only
            numbers = np.array(document["outputs"][0]["data"], expected.dtype).reshape(array.shape)
            expect_same(numbers, expected)
    came, message = wire.read_grpc_answer(bytes(GrpcEncoder().encode(request, response)))
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "7")
    assert len(message.raw_output_contents) == len(message.outputs) == 1
    assert not message.outputs[0].HasField("contents")
    expect_same(came, expected)


def expect_same(came: np.ndarray, expected: np.ndarray) -> None:
    assert came.shape == expected.shape
    if expected.dtype.kind == "O":
        texts = [element if isinstance(element, bytes) else element.encode() for element in came.ravel()]
        assert texts == expected.ravel().tolist()
    else:
        if came.dtype.name == "bfloat16":  # tritonclient returns bfloat16 if ml_dtypes is installed
            came = came.astype(np.float32)
        assert came.dtype == expected.dtype
        assert came.tobytes() == expected.tobytes()
