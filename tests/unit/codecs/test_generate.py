"""The generate extension: the keys of one JSON object are inputs, those of the answer are outputs."""

import json
from typing import Any

import numpy as np
import pytest

from ortserve.codecs.generate import GenerateEncoder, decode_generate_request, encode_generate_response
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError

INPUTS = (
    TensorSpec("text", DataType.BYTES, (-1, 1)),
    TensorSpec("row", DataType.FP32, (-1, 4)),
    TensorSpec("number", DataType.INT64, ()),
    TensorSpec("rows", DataType.INT32, (-1,)),
)


def decode(document: object, *, is_stream: bool = False) -> InferRequest:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate_request(body, "m", "", INPUTS, is_stream=is_stream)


def refusal(document: object, *, is_stream: bool = False) -> ServeError:
    with pytest.raises(ServeError) as caught:
        decode(document, is_stream=is_stream)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "shape"),
    [
        ("text", "hi", (1, 1)),
        ("text", ["hi"], (1, 1)),
        ("text", [["hi"], ["you"]], (2, 1)),
        ("text", ["hi", "you"], (2, 1)),  # a column
        ("text", [], (0, 1)),
        ("row", [1, 2, 3, 4], (1, 4)),
        ("row", [[1, 2, 3, 4], [5, 6, 7, 8]], (2, 4)),
        ("row", 1.5, (1, 1)),  # the signature rejects it later
        ("number", 7, ()),
        ("number", [7], ()),
        ("rows", 7, (1,)),
        ("rows", [7, 8], (2,)),
        ("rows", [], (0,)),
    ],
)
def test_key_that_is_an_input_becomes_its_tensor(name: str, value: Any, shape: tuple[int, ...]) -> None:
    (tensor,) = decode({name: value}).inputs
    spec = next(spec for spec in INPUTS if spec.name == name)
    assert (tensor.name, tensor.datatype, tensor.array.dtype) == (name, spec.datatype, spec.datatype.numpy)
    assert tensor.array.shape == shape
    assert tensor.array.ravel().tolist() == np.array(value, dtype=object).ravel().tolist()


@pytest.mark.parametrize(
    ("least_axes", "value", "shape"),
    [
        (0, 7, ()),
        (0, [7], (1,)),
        (0, [[1, 2], [3, 4]], (2, 2)),
        (2, 7, (1, 1)),
        (2, [7, 8], (1, 2)),
        (2, [[[7]]], (1, 1, 1)),
    ],
)
def test_input_without_a_declared_shape_takes_the_shape_of_its_array(
    least_axes: int, value: Any, shape: tuple[int, ...]
) -> None:
    spec = TensorSpec("x", DataType.FP32, (), batch_axis=None, has_any_shape=True, least_axes=least_axes)
    (tensor,) = decode_generate_request(json.dumps({"x": value}).encode(), "m", "", [spec], is_stream=False).inputs
    assert tensor.array.shape == shape
    assert tensor.array.ravel().tolist() == np.array(value).ravel().tolist()


def test_envelope_and_parameters_arrive_from_both_places() -> None:
    request = decode({"number": 1, "id": "x", "priority": 1, "parameters": {"timeout": 9, "sequence_id": 0}})
    assert (request.model_name, request.model_version, request.id) == ("m", "", "x")
    assert request.parameters == {"priority": 1, "timeout": 9, "sequence_id": 0}
    assert request.outputs == ()


def test_inputs_are_found_among_the_parameters_as_well() -> None:
    request = decode({"number": 1, "text": None, "parameters": {"text": "hi", "rows": [7, 8], "level": 3}})
    assert [(tensor.name, tensor.array.tolist()) for tensor in request.inputs] == [
        ("number", 1),
        ("text", [["hi"]]),
        ("rows", [7, 8]),
    ]
    assert request.parameters == {"level": 3}


def test_key_that_is_no_input_is_a_parameter() -> None:
    request = decode({"text": "hi", "mode": "fast", "parameters": {"level": 3, "is_new": True}})
    assert request.parameters == {"mode": "fast", "level": 3, "is_new": True}


def test_keys_that_are_null_count_as_absent() -> None:
    request = decode(
        {"number": 1, "text": None, "id": None, "max_tokens": None, "parameters": {"stop": None, "a": None}}
    )
    assert [tensor.name for tensor in request.inputs] == ["number"]
    assert (request.id, request.parameters) == ("", {})
    assert decode({"number": 1, "parameters": None}).parameters == {}
    assert decode({"number": 1, "timeout": 5, "parameters": {"timeout": None}}).parameters == {"timeout": 5}


def test_input_named_like_a_parameter_stays_an_input() -> None:
    spec = TensorSpec("id", DataType.INT64, ())
    request = decode_generate_request(b'{"id": 5}', "m", "", [spec], is_stream=False)
    assert request.inputs[0].array == 5
    assert request.id == ""


@pytest.mark.parametrize("where", [lambda key, value: {key: value}, lambda key, value: {"parameters": {key: value}}])
@pytest.mark.parametrize(("key", "value"), [("max_tokens", 5), ("temperature", 0.5), ("stop", ["a"])])
def test_sampling_parameters_are_unsupported(where: Any, key: str, value: object) -> None:
    error = refusal({"text": "hi"} | where(key, value))
    assert error.kind is ErrorKind.UNSUPPORTED
    assert error.message == (
        f"parameter '{key}' is not supported: it is not an input of model 'm', "
        "and ONNX models have no sampling parameters"
    )


def test_stream_parameter_is_accepted_only_where_supported() -> None:
    assert decode({"text": "hi", "stream": False}).parameters == {}
    assert decode({"text": "hi", "stream": True}, is_stream=True).parameters == {}
    assert decode({"text": "hi", "stream": False}, is_stream=True).parameters == {}
    assert refusal({"text": "hi", "stream": True}).kind is ErrorKind.UNSUPPORTED
    assert refusal({"text": "hi", "stream": 1}, is_stream=True).kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"{", "failed to parse the request JSON buffer"),
        ([], "expected an object"),
        (
            {"txet": ["hi"]},
            "parameter, or an input of model 'm', which takes 'text', 'row', 'number', 'rows', got an array",
        ),
        ({"parameters": {"txet": ["hi"]}}, "Unable to parse 'txet': expected a string, number or boolean parameter"),
        ({"text": "hi", "triton_x": 1}, "parameter keys starting with 'triton_' are reserved for Triton usage"),
        ({"id": 5}, "Unable to parse 'id': expected a string"),
        ({"id": "a" * 65_537}, "request: expected at most 65536 characters of id, got 65537"),
        ({"parameters": 5}, "Unable to parse 'parameters': expected an object"),
        ({"number": 1, "parameters": {"number": 1}}, "input 'number' already exists in request"),
        ({"priority": [1]}, "Unable to parse 'priority': expected a string, number or boolean"),
        ({"row": [[[1, 2, 3, 4]]]}, "unexpected shape for input 'row' for model 'm'. Expected [-1,4], got [1,1,4]"),
        ({"row": [[1, 2], [3]]}, "Shape does not match true shape"),
        ({"number": [1, 2]}, "unexpected shape for input 'number' for model 'm'. Expected [], got [2]"),
        ({"number": "1"}, "expected integers for INT64, got a string"),
        ({"number": [None]}, "got null"),
        ({"text": 5}, "expected strings for BYTES"),
    ],
)
def test_malformed_body_is_rejected_and_named(document: object, text: str) -> None:
    error = refusal(document)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert text in error.message


def test_empty_body_is_an_empty_object() -> None:
    assert decode(b"").inputs == []


def test_outputs_of_one_element_are_bare_and_others_flat() -> None:
    response = InferResponse(
        "m",
        "3",
        "x",
        [
            Tensor("text", DataType.BYTES, np.array([["hí"]], object)),
            Tensor("score", DataType.FP32, np.array([[np.float32(0.1)]])),
            Tensor("many", DataType.INT64, np.array([[1, 2], [3, 4]])),
            Tensor("count", DataType.INT64, np.array([7], np.longlong)),  # ONNX Runtime's type for INT64
            Tensor("none", DataType.FP64, np.empty((1, 0))),
            Tensor("half", DataType.BF16, np.array([0x3F80], np.uint16)),
            Tensor("yes", DataType.BOOL, np.array(True)),
        ],
    )
    assert encode_generate_response(response) == (
        '{"id":"x","model_name":"m","model_version":"3","text":"hí","score":0.1,"many":[1,2,3,4],"count":7,"none":[],"half":1.0,'
        '"yes":true}'.encode()
    )


def test_event_is_one_line_and_a_blank_line() -> None:
    response = InferResponse("m", "1", "", [Tensor("y", DataType.BYTES, np.array(["a\nb"], object))])
    events = GenerateEncoder(is_stream=True).encode(InferRequest("m", "", "", (), (), {}), response)
    assert events == b'data: {"model_name":"m","model_version":"1","y":"a\\nb"}\n\n'


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.FP32, DataType.FP64])
def test_number_has_the_fewest_digits_of_its_type_or_is_a_token(datatype: DataType) -> None:
    outputs = [
        Tensor(name, datatype, np.array([value], datatype.numpy))
        for name, value in {"tenth": 0.1, "nan": np.nan, "inf": np.inf, "low": -np.inf}.items()
    ]
    text = encode_generate_response(InferResponse("m", "1", "", outputs[:1]))
    assert text == b'{"model_name":"m","model_version":"1","tenth":0.1}'
    text = encode_generate_response(InferResponse("m", "1", "", outputs))
    assert text == b'{"model_name":"m","model_version":"1","tenth":0.1,"nan":NaN,"inf":Infinity,"low":-Infinity}'


def test_non_finite_number_is_written_as_token_alone_or_in_a_list() -> None:
    outputs = [Tensor(str(n), DataType.FP32, np.full(n, np.nan, np.float32)) for n in (1, 2)]
    text = encode_generate_response(InferResponse("m", "1", "", outputs))
    assert text == b'{"model_name":"m","model_version":"1","1":NaN,"2":[NaN,NaN]}'
