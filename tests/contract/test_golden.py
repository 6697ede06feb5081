"""Frozen requests are decoded as before, and answers are the frozen ones to the byte."""

import json
from typing import Any

import numpy as np
import pytest

import golden_bytes
import wire
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.rest import RestRequest
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor

SAMPLES = wire.samples()
PAGE: dict[str, dict[str, dict[str, Any]]] = json.loads(golden_bytes.PAGE.read_text())


def test_every_datatype_and_odd_shape_is_recorded() -> None:
    assert list(PAGE) == list(SAMPLES)
    assert {datatype for datatype, _ in SAMPLES.values()} == set(DataType)


@pytest.mark.parametrize("name", PAGE)
def test_frozen_request_is_decoded_as_before(name: str) -> None:
    datatype, array = SAMPLES[name]
    for codec, spelled in PAGE[name]["requests"].items():
        body = golden_bytes.read(spelled)
        if codec.startswith("rest"):
            request = RestRequest(body.data, body.json_size, "m", "3").read()
        else:
            request = GrpcRequest(body.data).read()
        (tensor,) = request.inputs
        assert (request.model_name, request.model_version, request.id) == ("m", "3", "7")
        assert request.outputs == [RequestedOutput("y"), RequestedOutput("z", classes=2)]
        assert request.parameters == {"own": "x", "priority": 1}
        assert (tensor.name, tensor.datatype, tensor.array.shape) == ("x", datatype, array.shape)
        assert wire.raw_bytes(datatype, tensor.array) == wire.raw_bytes(datatype, array)


@pytest.mark.parametrize("name", PAGE)
def test_answer_equals_the_recorded_bytes(name: str) -> None:
    datatype, array = SAMPLES[name]
    response = InferResponse("m", "3", "7", [Tensor("y", datatype, np.ascontiguousarray(array).reshape(array.shape))])
    assert {codec: golden_bytes.spell(body) for codec, body in golden_bytes.answers(response).items()} == PAGE[name][
        "answers"
    ]
