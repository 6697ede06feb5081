"""REST bodies: a JSON document, and the binary tensors after it."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.rest import EncodedResponse, RestEncoder, RestRequest
from ortserve.core.dtypes import DataType
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError


def decode(document: object, *tails: bytes, version: str = "") -> InferRequest:
    """Decode a document with its binary tensors."""
    head = document if isinstance(document, bytes) else orjson.dumps(document)
    return RestRequest(head + b"".join(tails), len(head) if tails else None, "m", version).read()


def refusal(document: object, *tails: bytes) -> ServeError:
    with pytest.raises(ServeError) as caught:
        decode(document, *tails)
    return caught.value


def expect_invalid(document: object, *tails: bytes, text: str) -> None:
    error = refusal(document, *tails)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message == text


def entry(**changes: object) -> dict[str, object]:
    """A valid input with changed keys; keys with None are omitted."""
    whole: dict[str, object] = {"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes}
    return {key: value for key, value in whole.items() if value is not None}


def binary(size: object, **changes: object) -> dict[str, object]:
    return entry(data=None, parameters={"binary_data_size": size}, **changes)


INT32S = struct.pack("<2i", 1, 2)
ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)


# --- valid requests


def test_input_in_a_region_leaves_the_binary_tail_to_the_others() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 12, "shared_memory_offset": 4}
    in_region = entry(name="y", data=None, datatype="BYTES", parameters=region)
    request = decode({"inputs": [binary(8), in_region, binary(8, name="z")]}, INT32S, INT32S)
    assert [tensor.name for tensor in request.inputs] == ["x", "z"]
    assert request.regions == RegionUse([RegionInput("y", DataType.BYTES, (2,), RegionSpan("r", 4, 12))], {})


def test_data_that_is_null_counts_as_absent() -> None:
    """KServe's client sends it beside the size of an empty binary tensor."""
    empty = {**binary(0, shape=[0, 2]), "data": None}
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    in_region = {**entry(name="y", parameters=region), "data": None}
    request = decode({"inputs": [empty, in_region]})
    assert [tensor.array.shape for tensor in request.inputs] == [(0, 2)]
    assert request.regions == RegionUse([RegionInput("y", DataType.INT32, (2,), RegionSpan("r", 0, 8))], {})
    expect_invalid({"inputs": [{**entry(), "data": None}]}, text=ONE_SOURCE + "But no field is set for input 'x'")


def test_fields_that_are_null_count_as_absent() -> None:
    nulls = {"content_type": None, "binary_data": None, "shared_memory_region": None, "classification": None}
    fields = {"id": None, "parameters": {"binary_data_output": None, "priority": None}}
    inputs = [{**entry(), "parameters": {**nulls, "binary_data_size": None}}]
    request = decode({**fields, "inputs": inputs, "outputs": [{"name": "y", "parameters": nulls}]})
    assert (request.id, request.parameters, request.regions) == ("", {}, None)
    assert request.outputs == [RequestedOutput("y", binary=False)]
    without = decode({**fields, "parameters": None, "inputs": [entry()], "outputs": None})
    assert (without.parameters, without.outputs) == ({}, [])


def test_output_in_a_region_is_decoded_by_its_name() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "binary_data": False}
    outputs = [{"name": "y", "parameters": region}, {"name": "z"}]
    request = decode({"inputs": [], "outputs": outputs})
    assert request.outputs == [RequestedOutput("y"), RequestedOutput("z")]
    assert request.regions == RegionUse([], {"y": RegionSpan("r", 0, 8)})


def test_regions_are_none_without_region_parameters() -> None:
    assert decode({"inputs": [entry()], "outputs": [{"name": "y"}]}).regions is None


def test_smallest_request_is_decoded() -> None:
    request = decode({"inputs": [entry()]}, version="3")
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "")
    assert (request.outputs, request.parameters, request.binary_output) == ([], {}, False)
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype) == ("x", DataType.INT32)
    assert tensor.array.tolist() == [1, 2]


def test_request_with_every_field_is_decoded() -> None:
    request = decode(
        {
            "id": "42",
            "parameters": {"priority": 1, "ratio": 0.5, "tag": "a", "flag": True, "binary_data_output": True},
            "inputs": [entry(), entry(name="y", shape=[1, 1], datatype="BYTES", data=[["a"]])],
            "outputs": [
                {"name": "o1"},
                {"name": "o2", "parameters": {"binary_data": False, "other": 1}},
                {"name": "o3", "parameters": {"binary_data": True}},
            ],
            "unknown key": [1],
        }
    )
    assert request.id == "42"
    assert request.parameters == {"priority": 1, "ratio": 0.5, "tag": "a", "flag": True}
    assert request.binary_output is True
    assert list(request.outputs) == [RequestedOutput("o1", True), RequestedOutput("o2"), RequestedOutput("o3", True)]
    assert request.inputs[1].array.tolist() == [["a"]]


@pytest.mark.parametrize(
    ("by_default", "of_output", "expected"),
    [(None, None, False), (None, True, True), (False, True, True), (True, None, True), (True, False, False)],
)
def test_output_format_overrides_the_request_format(
    by_default: bool | None, of_output: bool | None, expected: bool
) -> None:
    document: dict[str, Any] = {"inputs": [], "outputs": [{"name": "y"}]}
    if by_default is not None:
        document["parameters"] = {"binary_data_output": by_default}
    if of_output is not None:
        document["outputs"][0]["parameters"] = {"binary_data": of_output}
    assert decode(document).outputs[0].binary is expected


@pytest.mark.parametrize("outputs", [[], None])
def test_no_listed_outputs_means_all_in_the_request_format(outputs: list[Any] | None) -> None:
    request = decode({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert request.outputs == []
    assert request.binary_output is True


def test_empty_id_counts_as_absent() -> None:
    assert decode({"id": "", "inputs": []}).id == ""


def test_binary_tensors_follow_the_order_of_the_inputs() -> None:
    text = struct.pack("<I", 3) + b"abc"
    request = decode(
        {
            "inputs": [
                binary(8),
                entry(name="j"),
                binary(7, name="b", shape=[1], datatype="BYTES"),
                binary(0, name="e", shape=[1, 0], datatype="FP32"),
                binary(2, name="h", shape=[1], datatype="FP16"),
            ]
        },
        INT32S,
        text,
        b"\x00\x3c",
    )
    assert [tensor.name for tensor in request.inputs] == ["x", "j", "b", "e", "h"]
    assert [tensor.array.tolist() for tensor in request.inputs] == [[1, 2], [1, 2], ["abc"], [[]], [1.0]]


def test_header_without_binary_tensors_is_valid() -> None:
    body = orjson.dumps({"inputs": [entry()]})
    assert RestRequest(body, len(body), "m", "").read().inputs[0].array.tolist() == [1, 2]


@pytest.mark.parametrize("datatype", [datatype for datatype in DataType if datatype is not DataType.BYTES])
def test_every_datatype_is_decoded_from_binary_and_json(datatype: DataType) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(datatype.numpy)
    data = array.tolist()
    if datatype is DataType.BF16:
        array = np.array([[0, 0x3F80, 0x3F80], [0x3F80, 0, 0x3F80]], np.uint16)
        data = [[0, 1, 1], [1, 0, 1]]
    head = {"name": "x", "shape": [2, 3], "datatype": datatype.value}
    raw = array.tobytes()
    (from_binary,) = decode({"inputs": [head | {"parameters": {"binary_data_size": len(raw)}}]}, raw).inputs
    (from_json,) = decode({"inputs": [head | {"data": data}]}).inputs
    for tensor in (from_binary, from_json):
        assert tensor.datatype is datatype
        assert tensor.array.dtype == datatype.numpy
        np.testing.assert_array_equal(tensor.array, array)


def test_tokens_for_non_finite_numbers_are_read() -> None:
    body = b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,1.5]}]}'
    np.testing.assert_array_equal(decode(body).inputs[0].array, np.array([np.nan, np.inf, -np.inf, 1.5], np.float32))


def test_tokens_are_not_integers() -> None:
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT32","data":[NaN]}]}'
    expect_invalid(body, text="Unable to parse 'data' of input 'x': expected integers for INT32, got nan")


def test_oversized_number_is_rejected_beside_a_token() -> None:
    for data in ("1e400", "1e400,NaN"):
        body = b'{"inputs":[{"name":"x","shape":[%d],"datatype":"FP64","data":[%s]}]}' % (
            data.count(",") + 1,
            data.encode(),
        )
        error = refusal(body)
        assert error.kind is ErrorKind.INVALID_INPUT
        assert error.message.startswith("failed to parse the request JSON buffer: ")


# --- invalid requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"inputs":[}',
        b'{"inputs":[]} trailing',
        b"\xff\xfe{}",
        b'{"inputs":[NaN',
        b'{"id":"Infinity",}',
        b"[" * 100_000,
        b"[" * 100_000 + b"NaN" + b"]" * 100_000,
        b'{"inputs":[{"name":"\\ud800"}]}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_body_that_is_not_json_is_rejected_with_the_position(body: bytes) -> None:
    error = refusal(body)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message.startswith("failed to parse the request JSON buffer: ")
    assert error.message.rsplit(" ", 1)[1].isdigit()


PARSE = [
    (b"[]", "Unable to parse 'request': expected an object, got an array"),
    (b"null", "Unable to parse 'request': expected an object, got nothing"),
    (b"3", "Unable to parse 'request': expected an object, got 3"),
    ({}, "Unable to parse 'inputs': expected an array, got nothing"),
    ({"inputs": None}, "Unable to parse 'inputs': expected an array, got nothing"),
    ({"inputs": {}}, "Unable to parse 'inputs': expected an array, got an object"),
    ({"inputs": [1]}, "Unable to parse 'inputs': expected an array of objects, got 1"),
    ({"inputs": [[]]}, "Unable to parse 'inputs': expected an array of objects, got an array"),
    ({"inputs": [], "id": 1}, "Unable to parse 'id': expected a string, got 1"),
    ({"inputs": [], "parameters": []}, "Unable to parse 'parameters': expected an object, got an array"),
    (
        {"inputs": [], "parameters": {"k": [1]}},
        "Unable to parse 'k': expected a string, number or boolean parameter, got an array",
    ),
    (
        {"inputs": [], "parameters": {"binary_data_output": 1}},
        "Unable to parse 'binary_data_output': expected a boolean, got 1",
    ),
    (
        {"inputs": [], "parameters": {"triton_x": 1}},
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified: 'triton_x'",
    ),
    ({"inputs": [], "outputs": {}}, "Unable to parse 'outputs': expected an array, got an object"),
    ({"inputs": [], "outputs": ["y"]}, "Unable to parse 'outputs': expected an array of objects, got a string"),
    ({"inputs": [], "outputs": [{}]}, "Unable to parse 'name': expected a string in each of 'outputs', got nothing"),
    ({"inputs": [], "outputs": [{"name": "y"}, {"name": "y"}]}, "output 'y' already exists in request"),
    (
        {"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]},
        "Unable to parse 'binary_data': expected a boolean for output 'y', got a string",
    ),
    ({"inputs": [entry(name=None)]}, "Unable to parse 'name': expected a string in each of 'inputs', got nothing"),
    ({"inputs": [entry(name=3)]}, "Unable to parse 'name': expected a string in each of 'inputs', got 3"),
    ({"inputs": [entry(), entry()]}, "input 'x' already exists in request"),
    ({"inputs": [entry(shape=None)]}, "Unable to parse 'shape': expected an array for input 'x', got nothing"),
    ({"inputs": [entry(shape=2)]}, "Unable to parse 'shape': expected an array for input 'x', got 2"),
    ({"inputs": [entry(datatype=None)]}, "Unable to parse 'datatype': expected a string for input 'x', got nothing"),
    (
        {"inputs": [entry(datatype="int32")]},
        (
            "Unable to parse 'datatype' of input 'x': unknown datatype 'int32': expected one of BOOL, UINT8, UINT16, "
            "UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, BF16, FP32, FP64, BYTES"
        ),
    ),
    ({"inputs": [entry(datatype=[])]}, "Unable to parse 'datatype': expected a string for input 'x', got an array"),
    ({"inputs": [entry(parameters=7)]}, "Unable to parse 'parameters': expected an object, got 7"),
    ({"inputs": [entry(data=5)]}, "Unable to parse 'data': expected an array for input 'x', got 5"),
    ({"inputs": [entry(data="12")]}, "Unable to parse 'data': expected an array for input 'x', got a string"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "text"), PARSE, ids=[text[:60] for _, text in PARSE])
def test_value_of_the_wrong_type_is_rejected_and_named(document: object, text: str) -> None:
    expect_invalid(document, text=text)


@pytest.mark.parametrize("dim", [-1, 1.5, 2.0, True, "2", None, [2], 1e300])
def test_dimension_that_is_not_an_unsigned_integer_is_rejected(dim: object) -> None:
    expect_invalid(
        {"inputs": [entry(shape=[1, dim])]},
        text="Unable to parse 'shape' of input 'x': attempt to access JSON non-unsigned-integer as unsigned-integer: "
        f"{dim!r}",
    )


@pytest.mark.parametrize("shape", [[2**62], [2**32, 2**32], [2**21] * 3, [2**63, 0], [0, 2**40, 2**40]])
@pytest.mark.parametrize("form", [entry, lambda **changes: binary(8, **changes)], ids=["json", "binary"])
def test_shape_with_too_many_elements_is_rejected(form: Any, shape: list[int]) -> None:
    expect_invalid(
        {"inputs": [form(shape=shape)]},
        text="Unable to parse 'shape' of input 'x': at most 1152921504606846975 elements, got "
        f"{str(shape).replace(' ', '')}",
    )


def test_long_id_is_rejected_because_its_answer_would_repeat_it() -> None:
    document = {"id": "x" * 65_536, "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
    assert len(RestRequest(json.dumps(document).encode(), None, "m", "").read().id) == 65_536
    document["id"] = "x" * 65_537
    with pytest.raises(ServeError, match="request: expected at most 65536 characters of id, got 65537"):
        RestRequest(json.dumps(document).encode(), None, "m", "").read()


def test_shape_of_too_many_dimensions_is_rejected_before_multiplication() -> None:
    # Multiplying these first would take minutes.
    expect_invalid(
        {"inputs": [entry(shape=[2**62] * 500_000)]},
        text="Unable to parse 'shape' of input 'x': at most 64 dimensions, got 500000",
    )
    assert decode({"inputs": [entry(shape=[1] * 63 + [2])]}).inputs[0].array.ndim == 64


@pytest.mark.parametrize(
    ("form", "came"),
    [
        (entry(data=None), "But no field is set for input 'x'"),
        (entry(data=None, parameters={}), "But no field is set for input 'x'"),
        (
            entry(parameters={"binary_data_size": 8}),
            "But set 'data' 'binary_data_size' for input 'x'",
        ),
        (
            entry(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8}),
            "But set 'data' 'shared_memory_region' for input 'x'",
        ),
        (
            entry(
                data=None,
                parameters={"binary_data_size": 0, "shared_memory_region": "r", "shared_memory_byte_size": 8},
            ),
            "But set 'binary_data_size' 'shared_memory_region' for input 'x'",
        ),
    ],
)
def test_input_has_exactly_one_source(form: dict[str, object], came: str) -> None:
    expect_invalid({"inputs": [form]}, text=ONE_SOURCE + came)


def test_output_is_either_binary_or_in_a_region() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "binary_data": True}
    expect_invalid(
        {"inputs": [], "outputs": [{"name": "y", "parameters": region}]},
        text="output 'y': 'binary_data' and 'shared_memory_region' exclude each other",
    )


@pytest.mark.parametrize("size", [-1, 1.5, "8", True])
def test_binary_size_that_is_not_an_unsigned_integer_is_rejected(size: object) -> None:
    came = "a string" if isinstance(size, str) else "a boolean" if size is True else repr(size)
    expect_invalid(
        {"inputs": [binary(size)]},
        INT32S,
        text=f"Unable to parse 'binary_data_size': expected an unsigned integer for input 'x', got {came}",
    )


def test_binary_sizes_must_add_up() -> None:
    two = {"inputs": [binary(8), binary(8, name="y")]}
    expect_invalid(
        two, INT32S, INT32S[:5], text="unexpected size for input 'y', expecting 3 additional bytes for model 'm'"
    )
    expect_invalid(
        {"inputs": [binary(8)]}, text="unexpected size for input 'x', expecting 8 additional bytes for model 'm'"
    )
    expect_invalid(
        two,
        INT32S * 2,
        b"!",
        text="unexpected additional input data for model 'm': 1 bytes belong to no input",
    )
    expect_invalid(
        {"inputs": [entry()]}, b"!", text="unexpected additional input data for model 'm': 1 bytes belong to no input"
    )
    expect_invalid(
        {"inputs": [binary(7)]},
        INT32S[:7],
        text="input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7",
    )
    expect_invalid(
        {"id": "me", "inputs": [binary(7)]},
        INT32S[:7],
        text="input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7",
    )


def test_strings_that_are_not_utf8_are_rejected() -> None:
    error = refusal({"inputs": [binary(5, shape=[1], datatype="BYTES")]}, struct.pack("<I", 1) + b"\xff")
    assert error.kind is ErrorKind.INVALID_INPUT
    begin = "string element 0 of inference input 'x' is not valid UTF-8"
    assert error.message.startswith(begin)


@pytest.mark.parametrize("json_size", [3, 10**18])
def test_header_larger_than_the_body_is_rejected(json_size: int) -> None:
    with pytest.raises(ServeError) as caught:
        RestRequest(b"{}", json_size, "m", "").read()
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == f"inference header size should be in range (0, 2), got: {json_size}"


def test_header_that_ends_inside_the_json_is_rejected() -> None:
    body = orjson.dumps({"inputs": []})
    with pytest.raises(ServeError, match="failed to parse the request JSON buffer"):
        RestRequest(body, len(body) - 1, "m", "").read()


def test_raw_body_is_kept_until_the_signature_is_known() -> None:
    for body in (INT32S, b"", b"{"):
        raw = RestRequest(body, 0, "m", "2").read()
        assert raw == InferRequest("m", "2", "", (), (), {}, binary_output=True, raw_input=body)
        assert raw.raw_input is body


def test_requested_classification_is_decoded() -> None:
    outputs = [{"name": "y", "parameters": {"classification": 3, "binary_data": True}}, {"name": "z"}]
    assert decode({"inputs": [], "outputs": outputs}).outputs == [RequestedOutput("y", True, 3), RequestedOutput("z")]


@pytest.mark.parametrize("odd", [0, -1, 1.0, True, "3"])
def test_class_count_that_is_not_a_positive_integer_is_rejected(odd: object) -> None:
    error = refusal({"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": odd}}]})
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message.startswith(
        "Unable to parse 'classification': expected an unsigned integer above 0 for output 'y', got "
    )


def test_classification_into_shared_memory_is_rejected() -> None:
    parameters = {"classification": 1, "shared_memory_region": "r", "shared_memory_byte_size": 8}
    expect_invalid(
        {"inputs": [], "outputs": [{"name": "y", "parameters": parameters}]},
        text="Output can't set both 'shared_memory_region' and 'classification': 'y'",
    )


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "y"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON_VALUES,
        "datatype": st.sampled_from([datatype.value for datatype in DataType]) | JSON_VALUES,
        "data": st.lists(st.integers(-1, 300) | st.floats(allow_nan=False) | st.booleans() | st.text(), max_size=4)
        | JSON_VALUES,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9) | JSON_VALUES}) | JSON_VALUES,
    },
)


@given(
    st.fixed_dictionaries(
        {"inputs": st.lists(ENTRIES, max_size=3) | JSON_VALUES},
        optional={"outputs": st.lists(ENTRIES, max_size=2) | JSON_VALUES, "id": JSON_VALUES, "parameters": JSON_VALUES},
    ),
    st.binary(max_size=12),
)
def test_any_document_is_decoded_or_rejected(document: dict[str, Any], tail: bytes) -> None:
    refused: ServeError | None = None
    inputs: Sequence[Tensor] = []
    try:
        inputs = decode(json.dumps(document).encode(), tail).inputs
    except ServeError as error:
        refused = error
    assert refused is None or refused.kind in (ErrorKind.INVALID_INPUT, ErrorKind.UNSUPPORTED)
    for tensor, given_entry in zip(inputs, [] if refused else document["inputs"], strict=True):
        assert list(tensor.array.shape) == given_entry["shape"]
        assert tensor.array.dtype == tensor.datatype.numpy


# --- responses


def request(*outputs: RequestedOutput, binary_output: bool = False) -> InferRequest:
    return InferRequest("m", "", "", [], outputs, {}, binary_output)


def response(*tensors: Tensor, request_id: str = "") -> InferResponse:
    return InferResponse("m", "7", request_id, tensors)


FP32 = Tensor("y", DataType.FP32, np.array([[1, 0.1], [-2.5, 256.5]], np.float32))
TEXT = Tensor("t", DataType.BYTES, np.array(["a", 'ü"'], object))


def test_placed_output_has_neither_data_nor_parameters() -> None:
    answer = InferResponse("m", "7", "", [FP32, TEXT], {"y"})
    encoded = RestEncoder().encode(request(binary_output=True), answer)
    assert encoded.json_size is not None
    first, second = orjson.loads(bytes(encoded.body)[: encoded.json_size])["outputs"]
    assert first == {"name": "y", "datatype": "FP32", "shape": [2, 2]}
    assert second["parameters"] == {"binary_data_size": 12}
    assert encoded.body[encoded.json_size :] == b'\x01\0\0\0a\x03\0\0\0\xc3\xbc"'


def test_json_answer_has_the_expected_bytes() -> None:
    encoded = RestEncoder().encode(request(), response(FP32, TEXT, request_id="42"))
    assert encoded == EncodedResponse(
        b'{"model_name":"m","model_version":"7","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[2,2],"data":[1.0,0.1,-2.5,256.5]},'
        b'{"name":"t","datatype":"BYTES","shape":[2],"data":["a","\xc3\xbc\\""]}],"id":"42"}',
        None,
    )


def test_binary_answer_has_the_expected_bytes() -> None:
    encoded = RestEncoder().encode(request(binary_output=True), response(FP32, TEXT))
    head = (
        b'{"model_name":"m","model_version":"7","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[2,2],"parameters":{"binary_data_size":16}},'
        b'{"name":"t","datatype":"BYTES","shape":[2],"parameters":{"binary_data_size":12}}]}'
    )
    tail = bytes.fromhex("0000803f cdcccc3d 000020c0 00408043 01000000 61 03000000 c3bc22".replace(" ", ""))
    assert encoded == EncodedResponse(head + tail, len(head))


def test_each_output_has_its_requested_format() -> None:
    encoded = RestEncoder().encode(request(RequestedOutput("y", True), RequestedOutput("t")), response(FP32, TEXT))
    assert encoded.json_size is not None
    document = json.loads(bytes(encoded.body)[: encoded.json_size])
    assert document["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
        {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", 'ü"']},
    ]
    assert encoded.body[encoded.json_size :] == FP32.array.tobytes()


def test_binary_answer_without_bytes_is_plain_json() -> None:
    empty = Tensor("y", DataType.FP32, np.zeros((2, 0), np.float32))
    encoded = RestEncoder().encode(request(binary_output=True), response(empty))
    assert encoded.json_size is None
    assert json.loads(bytes(encoded.body))["outputs"][0] == {
        "name": "y",
        "datatype": "FP32",
        "shape": [2, 0],
        "parameters": {"binary_data_size": 0},
    }


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64])
def test_non_finite_numbers_are_written_as_tokens_among_others(datatype: DataType) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 0.1, 3.0], np.float32)
    if datatype is DataType.BF16:
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    else:
        array = (
            array.astype(np.float64).astype(datatype.numpy)
            if datatype is not DataType.FP64
            else np.array([np.nan, np.inf, -np.inf, 0.1, 3.0])
        )
    numbers = Tensor("n", DataType.INT64, np.array([2**62]))
    encoded = RestEncoder().encode(request(), response(Tensor("y", datatype, array), TEXT, numbers))
    tenth = {DataType.FP16: "0.099975586", DataType.BF16: "0.099609375", DataType.FP32: "0.1", DataType.FP64: "0.1"}[
        datatype
    ]
    assert f'"data":[NaN,Infinity,-Infinity,{tenth},3.0]'.encode() in encoded.body
    assert b'"data":["a","\xc3\xbc\\""]' in encoded.body
    assert b'"data":[4611686018427387904]' in encoded.body


def test_string_null_or_nan_stays_a_string() -> None:
    tensor = Tensor("t", DataType.BYTES, np.array(["null", "NaN"], object))
    encoded = RestEncoder().encode(request(), response(FP32, tensor))
    assert b'"data":["null","NaN"]' in encoded.body
    assert b'"data":[1.0,0.1,-2.5,256.5]' in encoded.body


@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (0, 3), (), (4,)])
def test_answer_of_every_datatype_decodes_as_a_request(
    datatype: DataType, is_binary: bool, shape: tuple[int, ...]
) -> None:
    if datatype is DataType.BYTES:
        array = np.array(["", "a", "ü", "\0"], object)
    elif datatype is DataType.BF16:
        array = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    else:
        array = np.array([0, 1, 1, 0]).astype(datatype.numpy)
    array = array[: int(np.prod(shape))].reshape(shape)
    encoded = RestEncoder().encode(request(binary_output=is_binary), response(Tensor("y", datatype, array)))
    size = len(encoded.body) if encoded.json_size is None else encoded.json_size
    document = json.loads(bytes(encoded.body)[:size])  # not orjson, which rejects infinities
    assert document["outputs"][0]["shape"] == list(shape)
    document["inputs"] = document.pop("outputs")
    (tensor,) = (
        RestRequest(json.dumps(document).encode() + encoded.body[size:], len(json.dumps(document)), "m", "")
        .read()
        .inputs
    )
    np.testing.assert_array_equal(tensor.array, array)


def test_rows_sliced_from_a_batch_are_encoded_in_both_formats() -> None:
    batch = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensor = Tensor("y", DataType.FP32, batch[1:3])
    assert json.loads(bytes(RestEncoder().encode(request(), response(tensor)).body))["outputs"][0]["data"] == [
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    encoded = RestEncoder().encode(request(binary_output=True), response(tensor))
    assert encoded.body[encoded.json_size :] == batch[1:3].tobytes()
