"""Serialized inference messages, decoded to core objects and encoded again."""

import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interpreted import interpreted_only
from ortserve._pb.grpc_service_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from ortserve.codecs import grpc_answer, grpc_infer
from ortserve.codecs.binary_tensor import encode_bytes_elements
from ortserve.codecs.bounds import MAX_TEXT_BYTES, MAX_TEXTS
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.grpc_wire import malformed, split_small_request, varint
from ortserve.core.dtypes import DataType
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError


def request(*inputs: tuple[str, str, list[int]], raw: list[bytes] | None = None) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", raw_input_contents=raw or [])
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message


def typed(datatype: str, shape: list[int], **contents: Sequence[object]) -> ModelInferRequest:
    message = request(("x", datatype, shape))
    message.inputs[0].contents.SetInParent()
    for field, values in contents.items():
        getattr(message.inputs[0].contents, field).extend(values)
    return message


def in_region(parameters: Any, region: str, byte_size: int, *, offset: int = 0) -> None:
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = byte_size
    if offset:
        parameters["shared_memory_offset"].int64_param = offset


def encode_response(response: InferResponse) -> bytes | memoryview:
    return GrpcEncoder().encode(InferRequest("m", "", "", [], [], {}), response)


def decode(message: ModelInferRequest) -> InferRequest:
    return GrpcRequest(message.SerializeToString()).read()


def refusal(message: ModelInferRequest | bytes) -> ServeError:
    with pytest.raises(ServeError) as caught:
        GrpcRequest(message if isinstance(message, bytes) else message.SerializeToString()).read()
    return caught.value


def expect_invalid(message: ModelInferRequest | bytes, text: str) -> None:
    error = refusal(message)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert text in error.message


def sample(datatype: DataType) -> np.ndarray:
    if datatype is DataType.BYTES:
        return np.array([["", "añb"], ["\0", "x" * 300]], dtype=object)
    values = np.arange(4).reshape(2, 2)
    return values.astype(datatype.numpy)


@pytest.mark.parametrize("datatype", DataType)
def test_raw_tensor_of_every_datatype_is_decoded(datatype: DataType) -> None:
    array = sample(datatype)
    raw = bytes(encode_bytes_elements(array)) if datatype is DataType.BYTES else array.tobytes()
    (tensor,) = decode(request(("x", datatype.value, [2, 2]), raw=[raw])).inputs
    assert (tensor.name, tensor.datatype, tensor.array.dtype) == ("x", datatype, datatype.numpy)
    np.testing.assert_array_equal(tensor.array, array)


@pytest.mark.parametrize("datatype", DataType)
def test_answer_of_every_datatype_is_readable_by_protobuf(datatype: DataType) -> None:
    array = sample(datatype)
    message = ModelInferResponse.FromString(
        bytes(
            encode_response(
                InferResponse("m", "3", "id", [Tensor("y", datatype, array), Tensor("z", datatype, array[:0])])
            )
        )
    )
    raw = bytes(encode_bytes_elements(array)) if datatype is DataType.BYTES else array.tobytes()
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "id")
    assert [(o.name, o.datatype, list(o.shape)) for o in message.outputs] == [
        ("y", datatype.value, [2, 2]),
        ("z", datatype.value, [0, 2]),
    ]
    assert list(message.raw_output_contents) == [raw, b""]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 70_000])
def test_length_of_raw_contents_is_coded_as_in_protobuf(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    array = np.frombuffer(data[:size], np.uint8)
    decoded = decode(request(("x", "UINT8", [size]), ("y", "UINT8", [size]), raw=[data[:size], data[:size]]))
    for tensor in decoded.inputs:
        np.testing.assert_array_equal(tensor.array, array)
    encoded = encode_response(InferResponse("m", "1", "", [Tensor("y", DataType.UINT8, array)]))
    message = ModelInferResponse(model_name="m", model_version="1", raw_output_contents=[data[:size]])
    message.outputs.add(name="y", datatype="UINT8", shape=[size])
    assert encoded == message.SerializeToString()


def test_answer_holds_rows_in_order_when_the_array_is_not_contiguous() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    message = ModelInferResponse.FromString(
        bytes(encode_response(InferResponse("m", "1", "", [Tensor("y", DataType.FP32, array)])))
    )
    assert message.raw_output_contents[0] == array.tobytes()


def test_raw_tensor_is_a_view_on_the_request() -> None:
    data = request(("x", "FP32", [2]), raw=[b"\0" * 8]).SerializeToString()
    array = GrpcRequest(data).read().inputs[0].array
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert not array.flags.writeable


def in_reverse(message: ModelInferRequest) -> bytes:
    """The same message with its fields in another order, as another implementation may write it."""
    raw = ModelInferRequest(raw_input_contents=message.raw_input_contents)
    rest = ModelInferRequest.FromString(message.SerializeToString())
    rest.ClearField("raw_input_contents")
    return raw.SerializeToString() + rest.SerializeToString()


def with_raw_contents_at_both_ends(message: ModelInferRequest) -> bytes:
    first, last = (ModelInferRequest(raw_input_contents=[raw]) for raw in message.raw_input_contents)
    rest = ModelInferRequest.FromString(message.SerializeToString())
    rest.ClearField("raw_input_contents")
    return first.SerializeToString() + rest.SerializeToString() + last.SerializeToString()


def with_unknown_field(message: ModelInferRequest) -> bytes:
    return bytes([15 << 3 | 0, 1]) + message.SerializeToString() + bytes([0x82, 0x06, 2, 65, 66])


@pytest.mark.parametrize("spell", [in_reverse, with_raw_contents_at_both_ends, with_unknown_field])
def test_unusual_but_valid_encoding_decodes_the_same(spell: Callable[[ModelInferRequest], bytes]) -> None:
    message = request(("x", "INT32", [1]), ("y", "INT32", [1]), raw=[b"\1\0\0\0", b"\2\0\0\0"])
    decoded = GrpcRequest(spell(message)).read()
    assert [tensor.array.tolist() for tensor in decoded.inputs] == [[1], [2]]


def test_truncated_or_corrupted_request_raises_only_serve_errors() -> None:
    message = request(("x", "INT32", [1]), ("y", "BYTES", [1]), raw=[b"\1\0\0\0", b"\2\0\0\0ab"])
    message.parameters["priority"].int64_param = 1
    message.outputs.add(name="z")
    data = message.SerializeToString()
    variants = [data[:end] for end in range(len(data))]
    variants += [
        data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :] for i in range(len(data)) for flip in (1, 8, 128, 255)
    ]
    kinds: set[ErrorKind | None] = set()
    for variant in variants:
        try:
            GrpcRequest(variant).read()
        except ServeError as error:
            kinds.add(error.kind)
        else:
            kinds.add(None)
    assert kinds == {None, ErrorKind.INVALID_INPUT}


def outcome(data: bytes) -> object:
    """The result of reading a request, in a comparable form."""
    try:
        read = GrpcRequest(data).read()
    except ServeError as error:
        return error.kind, error.message
    tensors = [(t.name, t.datatype, t.array.shape, t.array.tolist()) for t in read.inputs]
    return read.model_name, read.model_version, read.id, tensors, read.outputs, read.parameters, read.regions


NO_REQUEST: Final = "the request is not a valid message of type inference.ModelInferRequest"
TEXTS: Final = st.sampled_from(["", "a", "m" * 130, "ä", "1"])
IDS: Final = st.one_of(TEXTS, st.integers(0, 9).map(str))


def split_by_protobuf(data: bytes) -> tuple[bytes, str, list[memoryview], dict[int, bytes]]:
    """The expected result of ``split_request``, computed with protobuf."""
    try:
        message = ModelInferRequest.FromString(data)
    except DecodeError:
        raise malformed("inference.ModelInferRequest") from None
    contents = {}
    for position, entry in enumerate(message.inputs):
        if entry.HasField("contents"):
            contents[position] = entry.contents.SerializeToString()
            entry.ClearField("contents")
    request_id, raw = message.id, [memoryview(part) for part in message.raw_input_contents]
    message.ClearField("id")
    message.ClearField("raw_input_contents")
    return message.SerializeToString(), request_id, raw, contents


@st.composite
def typed_contents(draw: st.DrawFn) -> InferTensorContents:
    contents = InferTensorContents()
    integers = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 300), max_size=5)
    contents.int_contents.extend(draw(st.just([]) | integers))
    contents.int64_contents.extend(draw(st.just([]) | integers))
    contents.uint64_contents.extend(abs(number) for number in draw(st.just([]) | integers))
    contents.bool_contents.extend(draw(st.just([]) | st.lists(st.booleans(), max_size=3)))
    contents.fp32_contents.extend(draw(st.just([]) | st.lists(st.floats(width=32, allow_nan=False), max_size=3)))
    contents.bytes_contents.extend(draw(st.just([]) | st.lists(st.binary(max_size=3), max_size=3)))
    return contents


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Serialized requests: fields in any order, unknown ones, typed and raw contents; some bytes are wrong."""
    message = ModelInferRequest(model_name=draw(TEXTS), model_version=draw(st.sampled_from(["", "1"])), id=draw(IDS))
    for name in draw(st.sampled_from(["", "x", "xy", "xx"])):
        datatype = draw(st.sampled_from(["UINT8", "INT64", "UINT64", "BOOL", "FP32", "BYTES", "no"]))
        entry = message.inputs.add(name=name, datatype=datatype, shape=[draw(st.integers(0, 3))])
        if draw(st.booleans()):
            entry.contents.CopyFrom(draw(typed_contents()))
        else:
            message.raw_input_contents.append(draw(st.sampled_from([b"\1", b"\2", b"\1\0\0\0a", b""])))
    if draw(st.booleans()):
        message.outputs.add(name="y").parameters["classification"].int64_param = draw(st.integers(0, 2))
    data = message.SerializeToString()
    if draw(st.booleans()):
        more = [ModelInferRequest(id=draw(IDS)).SerializeToString(), b"\xa0\x06\x01", b"\xa2\x06\x02hi"]
        data = b"".join(draw(st.permutations([data, *more])))
    at = draw(st.integers(0, len(data)))
    spoilt = [data[:at], data[:at] + b"\x1a" + data[at + 1 :], data[:at] + b"\xff" + data[at:]]
    return draw(st.sampled_from([data, data, *spoilt]))


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=requests())
def test_decoded_request_equals_that_of_protobuf(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grpc_infer, "split_request", split_by_protobuf)
        expected = outcome(data)
    if expected == (ErrorKind.INVALID_INPUT, NO_REQUEST):
        assert refusal(data).kind is ErrorKind.INVALID_INPUT  # possibly for another of its faults
        return
    assert outcome(data) == expected
    assert outcome(data) == expected  # with its head known
    with monkeypatch.context() as patched:
        patched.setattr(grpc_infer, "split_request", split_small_request)
        assert outcome(data) == expected


UNPACKED = {
    "INT32": (b"\x10\x05\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", [5, -1]),
    "UINT8": (b"\x20\x05\x20\xc8\x01", [5, 200]),
    "BOOL": (b"\x08\x01\x08\x00", [True, False]),
    "FP32": (b"\x35\0\0\x80\x3f\x35\0\0\0\x40", [1.0, 2.0]),
    "FP64": (b"\x39" + struct.pack("<d", 0.5) + b"\x39" + struct.pack("<d", 2), [0.5, 2.0]),
}


@pytest.mark.parametrize(("datatype", "written", "expected"), [(name, *case) for name, case in UNPACKED.items()])
def test_typed_elements_that_are_not_packed_are_read(datatype: str, written: bytes, expected: list[object]) -> None:
    message = request(("x", datatype, [2]))
    message.inputs[0].contents.MergeFromString(written)
    head = message.inputs[0]
    head.ClearField("contents")
    entry = head.SerializeToString() + b"\x2a" + bytes([len(written)]) + written
    data = b"\x0a\x01m\x2a" + bytes([len(entry)]) + entry
    assert GrpcRequest(data).read().inputs[0].array.tolist() == expected


def test_varints_are_read_across_steps() -> None:
    numbers = [-1, 0, 1, 300, 2**40, -(2**63), 2**63 - 1] * 9000
    message = request(("x", "INT64", [len(numbers)]))
    message.inputs[0].contents.int64_contents.extend(numbers)
    assert decode(message).inputs[0].array.tolist() == numbers


EMPTY: Final = b"\x0a\x01m"
PART: Final = {
    "raw contents": b"\x3a\0",
    "inputs": b"\x2a\0",
    "outputs": b"\x32\0",
    "parameters": b"\x22\0",
    "unknown fields": b"\xa2\x06\0",
}


@pytest.mark.parametrize("part", PART)
@pytest.mark.parametrize("order", ["first", "last"])
def test_messages_of_very_many_empty_parts_are_rejected_before_they_are_parsed(part: str, order: str) -> None:
    many = PART[part] * 2_000_000
    began_s = time.thread_time()
    expect_invalid(many + EMPTY if order == "first" else EMPTY + many, "expected at most")
    assert time.thread_time() - began_s < 1.0  # protobuf takes up to 2.6 s


def test_inputs_of_very_many_parts_are_rejected_before_they_are_parsed() -> None:
    for part in (b"\x22\0", b"\x2a\0", b"\x18\1"):  # parameters, contents, dimensions
        entry = part * 1_000_000
        data = EMPTY + b"\x2a" + varint(len(entry)) + entry
        expect_invalid(data, "expected at most")


def test_heads_beyond_the_bound_are_rejected() -> None:
    expect_invalid(
        request(("x" * 70_000, "UINT8", [1]), raw=[b"1"]).SerializeToString(),
        "expected at most 65536 bytes of id, names",
    )


def test_id_that_is_not_text_is_rejected_and_the_last_of_two_wins() -> None:
    head, raw = request(("x", "UINT8", [1])).SerializeToString(), request(raw=[b"1"]).SerializeToString()[3:]
    assert GrpcRequest(head + b"\x1a\1a" + b"\x1a\1b" + raw).read().id == "b"
    expect_invalid(head + b"\x1a\1\xff" + raw, "not a valid message of type inference.ModelInferRequest")


def test_head_is_cached_for_any_id_and_contents() -> None:
    grpc_infer._cached_head.cache_clear()
    for number in range(20):
        message = request(("x", "UINT8", [1]), raw=[bytes([number])])
        message.id = str(number)
        read = decode(message)
        assert (read.id, read.inputs[0].array.tolist()) == (str(number), [number])
    assert grpc_infer._cached_head.cache_info().misses == 1
    large = request(("x" * 1100, "UINT8", [1]), raw=[b"1"])
    decode(large)
    assert grpc_infer._cached_head.cache_info().currsize == 1


@pytest.mark.parametrize("request_id", ["", "a", "ä" * 100])
def test_answers_of_one_shape_name_their_own_request(request_id: str) -> None:
    for shape in ((2,), (3,)):
        response = InferResponse("m", "1", request_id, [Tensor("y", DataType.UINT8, np.zeros(shape, np.uint8))])
        message = ModelInferResponse.FromString(bytes(encode_response(response)))
        assert (message.id, list(message.outputs[0].shape)) == (request_id, list(shape))
        assert message.SerializeToString() == encode_response(response)


def test_garbage_is_rejected_with_the_message_name() -> None:
    expect_invalid(b"\xff" * 40, "not a valid message of type inference.ModelInferRequest")


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-32768, 32767]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, math.inf]),
        ("FP64", "fp64_contents", [0.1, -math.inf]),
        ("BYTES", "bytes_contents", [b"a\0", "ü".encode()]),
    ],
)
def test_typed_contents_of_every_datatype_are_decoded(datatype: str, field: str, values: list[object]) -> None:
    (tensor,) = decode(typed(datatype, [2, 1], **{field: values})).inputs
    expected = [item.decode() if isinstance(item, bytes) else item for item in values]
    assert tensor.array.dtype == tensor.datatype.numpy
    assert tensor.array.shape == (2, 1)
    assert tensor.array.ravel().tolist() == expected


@pytest.mark.parametrize(("dtype", "field"), [(np.float32, "fp32_contents"), (np.float64, "fp64_contents")])
@pytest.mark.parametrize("unknown", [b"", b"\xa2\x06\x03abc", b"\x0d\x01\0\0\0"], ids=["none", "unknown", "other"])
@pytest.mark.parametrize("count", [1, 40, 5000])
def test_typed_floats_equal_the_protobuf_parse(
    dtype: type[np.floating], field: str, unknown: bytes, count: int
) -> None:
    """This also holds with fields that are unknown or have another type."""
    values = np.random.default_rng(count).standard_normal(count).astype(dtype)
    values[0] = math.nan
    message = typed(f"FP{values.itemsize * 8}", [count], **{field: values.tolist()})
    message.inputs[0].contents.MergeFromString(unknown)
    decoded = decode(message).inputs[0].array
    assert decoded.dtype == dtype
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 128),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 32768),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 65536),
    ],
)
def test_typed_value_out_of_range_is_rejected_not_truncated(datatype: str, field: str, value: int) -> None:
    expect_invalid(
        typed(datatype, [2], **{field: [0, value]}),
        f"value {value} of input 'x' for model 'm' is out of the range of {datatype}",
    )


@pytest.mark.parametrize("datatype", DataType)
def test_present_but_empty_contents_are_a_tensor_without_elements(datatype: DataType) -> None:
    (tensor,) = decode(typed(datatype.value, [0, 3])).inputs
    assert tensor.array.shape == (0, 3)
    assert tensor.array.dtype == datatype.numpy


def test_empty_raw_tensor_and_scalar_are_valid() -> None:
    inputs = decode(request(("x", "FP32", [1, 0]), ("y", "INT64", []), raw=[b"", b"\7" + b"\0" * 7])).inputs
    assert inputs[0].array.shape == (1, 0)
    assert inputs[1].array.shape == ()
    assert inputs[1].array == 7


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_raw_only(datatype: str) -> None:
    expect_invalid(
        typed(datatype, [1], fp32_contents=[1.0]),
        "unexpected explicit tensor data for input tensor 'x' for model 'm' "
        f"of type 'FP32', expected datatype '{datatype}'",
    )


def test_typed_contents_in_the_field_of_another_datatype_are_rejected() -> None:
    expect_invalid(
        typed("INT64", [1], int_contents=[1]),
        "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'INT32', expected datatype 'INT64'",
    )


def test_two_typed_fields_are_rejected() -> None:
    expect_invalid(
        typed("INT32", [1], int_contents=[1], uint_contents=[1]),
        "unexpected explicit tensor data for input tensor 'x' for model 'm', binary data was already supplied.",
    )


def test_typed_and_raw_contents_together_are_rejected_even_when_empty() -> None:
    message = request(("x", "INT32", [1]), ("y", "INT32", [1]), raw=[b"\0" * 4])
    message.inputs[1].contents.SetInParent()
    expect_invalid(message, "contents field must not be specified when using raw_input_contents for 'y' for model 'm'")


def test_input_without_data_is_rejected() -> None:
    expect_invalid(
        request(("x", "INT32", [1]), ("y", "INT32", [1]), raw=[b"\0" * 4]),
        "unable to find data for input tensor 'y' for model 'm' in request.",
    )


def test_raw_contents_without_an_input_are_rejected() -> None:
    expect_invalid(
        request(("x", "INT32", [1]), raw=[b"\0" * 4, b"\0" * 4]), "unexpected additional input data for model 'm'"
    )


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [([2, 2], 12, 16), ([1], 8, 4), ([2**62, 4], 0, 2**66), ([2**32, 2**32], 0, 2**66)],
)
def test_raw_bytes_that_do_not_fill_the_shape_are_rejected(shape: list[int], size: int, expected: int) -> None:
    expect_invalid(
        request(("x", "FP32", shape), raw=[b"\0" * size]),
        f"input byte size mismatch for input 'x' for model 'm'. Expected {expected}, got {size}",
    )


def test_typed_elements_that_do_not_fill_the_shape_are_rejected() -> None:
    expect_invalid(
        typed("FP32", [2**40], fp32_contents=[1, 2]),
        f"input byte size mismatch for input 'x' for model 'm'. Expected {2**42}, got 8",
    )
    expect_invalid(
        typed("BYTES", [2], bytes_contents=[b"a"]),
        "expected 2 string elements for inference input 'x' for model 'm', got 1",
    )


def test_impossible_shape_is_rejected() -> None:
    expect_invalid(
        request(("x", "FP32", [0, 2**62, 2**62]), raw=[b""]), "may have at most 1152921504606846975 elements, got [0,"
    )
    expect_invalid(request(("x", "FP32", [1] * 65), raw=[b"\0" * 4]), "may have at most 64 dimensions, got 65")


def test_negative_dimension_is_rejected() -> None:
    expect_invalid(
        request(("x", "FP32", [-2, -2]), raw=[b"\0" * 16]),
        "All input dimensions should be specified for input 'x' for model 'm', got [-2,-2]",
    )


def test_unknown_datatype_is_rejected() -> None:
    expect_invalid(request(("x", "FP8", [1]), raw=[b"\0"]), "unknown datatype 'FP8'")


@pytest.mark.parametrize("raw", [b"\x02\0\0\0\xff\xfe"])
def test_string_elements_that_are_not_text_are_rejected(raw: bytes) -> None:
    expect_invalid(request(("x", "BYTES", [1]), raw=[raw]), "not valid UTF-8")
    expect_invalid(typed("BYTES", [1], bytes_contents=[raw[4:]]), "not valid UTF-8")
    for count in (3, 30_000):  # decoded by protobuf, and in steps
        texts = [b"any"] * count + [raw[4:]]
        expect_invalid(typed("BYTES", [len(texts)], bytes_contents=texts), f"element {count} of inference input 'x'")


@pytest.mark.parametrize("count", [MAX_TEXTS + 1, 2**62])
def test_more_strings_than_the_message_can_hold_are_invalid_not_too_large(count: int) -> None:
    """As in REST: too_large is the kind of a request that contains too much."""
    raw = struct.pack("<I", 1) + b"x"
    for message in (request(("x", "BYTES", [count]), raw=[raw]), typed("BYTES", [count], bytes_contents=[b"x"])):
        error = refusal(message)
        assert error.kind is ErrorKind.INVALID_INPUT
        assert f"expected {count} string elements for inference input 'x'" in error.message
    texts = typed("BYTES", [MAX_TEXTS + 1], bytes_contents=[b""] * (MAX_TEXTS + 1))
    assert refusal(texts).kind is ErrorKind.TOO_LARGE


def test_too_long_string_element_is_rejected() -> None:
    text = b"x" * (MAX_TEXT_BYTES + 1)
    raw = struct.pack("<II", 0, len(text)) + text
    for message in (request(("x", "BYTES", [2]), raw=[raw]), typed("BYTES", [2], bytes_contents=[b"", text])):
        error = refusal(message)
        assert error.kind is ErrorKind.TOO_LARGE
        assert f"string element 1 of inference input 'x': expected at most {MAX_TEXT_BYTES} bytes" in error.message


@pytest.mark.parametrize("is_raw", [False, True])
def test_small_message_with_many_parts_is_decoded_on_a_thread(is_raw: bool) -> None:
    """Decoding thousands of inputs on the event loop would delay all other callers."""

    def inputs(count: int) -> GrpcRequest:
        message = request(*((f"x{index}", "INT8", [1]) for index in range(count)), raw=[b"\1"] * count * is_raw)
        for one in message.inputs if not is_raw else ():
            one.contents.int_contents.append(1)
        return GrpcRequest(message.SerializeToString())

    assert inputs(30).decoding_place() is DecodingPlace.INLINE
    assert inputs(600).decoding_place() is DecodingPlace.THREAD
    assert [tensor.name for tensor in inputs(600).read().inputs] == [f"x{index}" for index in range(600)]


def test_texts_of_a_short_message_are_decoded_within_milliseconds() -> None:
    """The event loop decodes short messages."""
    request = GrpcRequest(typed("BYTES", [30_000], bytes_contents=[b""] * 30_000).SerializeToString())
    assert request.decoding_place() is DecodingPlace.INLINE
    durations = []
    for _ in range(10):
        began = time.thread_time()
        assert request.read().inputs[0].array.tolist() == [""] * 30_000
        durations.append(time.thread_time() - began)
    assert min(durations) < 0.005


def test_duplicate_input_or_output_is_rejected() -> None:
    expect_invalid(
        request(("x", "UINT8", [1]), ("x", "UINT8", [1]), raw=[b"\0", b"\0"]), "input 'x' already exists in request"
    )
    message = request()
    message.outputs.add(name="y")
    message.outputs.add(name="y")
    expect_invalid(message, "output 'y' already exists in request")


def test_envelope_and_requested_outputs_are_decoded() -> None:
    message = request()
    message.id = "17"
    message.model_version = "2"
    message.outputs.add(name="b")
    message.outputs.add(name="a")
    decoded = decode(message)
    assert (decoded.model_name, decoded.model_version, decoded.id) == ("m", "2", "17")
    assert decoded.outputs == [RequestedOutput("b"), RequestedOutput("a")]


def test_version_that_is_not_a_number_is_rejected() -> None:
    for version in ("2nd", "-1", "1.0", "²", "a/b", "x" * 64):
        message = request()
        message.model_version = version
        expect_invalid(
            message, f"failed to get model version from specified version string '{version}' (details: stol)"
        )


def test_parameters_keep_their_types() -> None:
    message = request()
    message.parameters["s"].string_param = ""
    message.parameters["b"].bool_param = False
    message.parameters["i"].int64_param = 0
    message.parameters["d"].double_param = 1.0
    message.parameters["priority"].uint64_param = 2**63
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    parameters = decode(message).parameters
    assert parameters == {
        "s": "",
        "b": False,
        "i": 0,
        "d": 1.0,
        "priority": 2**63,
        "triton_enable_empty_final_response": True,
    }
    assert [type(parameters[key]) for key in "sbid"] == [str, bool, int, float]


def test_reserved_parameter_is_rejected() -> None:
    message = request()
    message.parameters["triton_x"].bool_param = True
    expect_invalid(
        message, "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified"
    )


def test_an_id_of_a_sequence_may_be_unsigned() -> None:
    message = request()
    message.parameters["sequence_id"].uint64_param = 2**64 - 1
    assert decode(message).parameters["sequence_id"] == 2**64 - 1


def test_parameter_of_the_wrong_type_or_without_a_value_is_rejected() -> None:
    message = request()
    message.parameters["sequence_start"].int64_param = 1
    expect_invalid(message, "invalid value type for 'sequence_start' parameter, expected bool_param.")
    message = request()
    message.parameters["sequence_id"].double_param = 1
    expect_invalid(message, "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")
    message = request()
    message.parameters["custom"].SetInParent()
    expect_invalid(message, "invalid value type for 'custom' parameter, expected bool_param or int64_param")


def test_requested_classification_is_decoded() -> None:
    message = request()
    message.outputs.add(name="y").parameters["classification"].int64_param = 3
    message.outputs.add(name="z")
    assert decode(message).outputs == [RequestedOutput("y", classes=3), RequestedOutput("z")]


def test_class_count_that_is_not_a_positive_int64_is_rejected() -> None:
    for value in (0, -1):
        message = request()
        message.outputs.add(name="y").parameters["classification"].int64_param = value
        expect_invalid(
            message, f"invalid value for 'classification' parameter of output 'y', expected 1 or more, got {value}"
        )
    message = request()
    message.outputs.add(name="y").parameters["classification"].string_param = "3"
    expect_invalid(message, "invalid value type for 'classification' parameter, expected int64_param.")


def test_classification_into_shared_memory_is_rejected() -> None:
    message = request()
    output = message.outputs.add(name="y")
    output.parameters["classification"].int64_param = 1
    output.parameters["shared_memory_region"].string_param = "r"
    expect_invalid(message, "Output can't set both 'shared_memory_region' and 'classification': 'y'")


def test_input_in_a_region_leaves_the_raw_contents_to_the_others() -> None:
    message = request(("x", "FP32", [1]), ("y", "BYTES", [2]), ("z", "FP32", [1]), raw=[bytes(4), b"abcd"])
    in_region(message.inputs[1].parameters, "r", 12, offset=4)
    decoded = decode(message)
    assert [tensor.name for tensor in decoded.inputs] == ["x", "z"]
    span = RegionSpan("r", 4, 12)
    assert decoded.regions == RegionUse([RegionInput("y", DataType.BYTES, (2,), span)], {})


def test_output_in_a_region_is_decoded_by_its_name() -> None:
    message = request()
    in_region(message.outputs.add(name="y").parameters, "r", 8)
    message.outputs.add(name="z")
    decoded = decode(message)
    assert decoded.outputs == [RequestedOutput("y"), RequestedOutput("z")]
    assert decoded.regions == RegionUse([], {"y": RegionSpan("r", 0, 8)})


def test_contents_and_a_region_for_one_input_are_rejected() -> None:
    message = typed("FP32", [1], fp32_contents=[1.0])
    in_region(message.inputs[0].parameters, "r", 4)
    expect_invalid(message, "input 'x' for model 'm' has both contents and 'shared_memory_region'")


def test_region_parameters_have_the_types_of_the_protocol() -> None:
    message = request(("x", "FP32", [1]))
    message.inputs[0].parameters["shared_memory_region"].int64_param = 1
    expect_invalid(message, "invalid value type for 'shared_memory_region' parameter, expected string_param.")
    in_region(message.inputs[0].parameters, "r", 4, offset=-1)
    expect_invalid(message, "Unable to parse 'shared_memory_offset': expected an unsigned integer for input 'x'")


def test_placed_output_has_an_empty_entry_among_the_raw_contents() -> None:
    tensors = [Tensor(name, DataType.UINT8, np.zeros(3, np.uint8)) for name in ("a", "b")]
    message = ModelInferResponse.FromString(bytes(encode_response(InferResponse("m", "1", "", tensors, {"a"}))))
    assert [(o.name, list(o.shape), dict(o.parameters)) for o in message.outputs] == [("a", [3], {}), ("b", [3], {})]
    assert list(message.raw_output_contents) == [b"", bytes(3)]


@interpreted_only
def test_answer_over_the_message_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_answer, "MAX_MESSAGE_BYTES", 100)
    response = InferResponse("m", "1", "", [Tensor("y", DataType.UINT8, np.zeros(200, np.uint8))])
    with pytest.raises(ServeError, match="which exceeds gRPC's byte size limit 100"):
        encode_response(response)


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_name_that_is_not_utf8_is_malformed_with_every_implementation_of_protobuf(implementation: str) -> None:
    script = """
from google.protobuf.internal import api_implementation
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.errors import ServeError
try:
    GrpcRequest(bytes([10, 2, 0xC3, 0x28])).read()
except ServeError as error:
    print(api_implementation.Type(), error.kind.value)
"""
    environment = os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == [implementation, "invalid_input"], done.stderr
