"""Tensors as raw bytes, BYTES elements, and positions in shared memory."""

import contextlib
import struct
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.binary_tensor import (
    decode_binary_tensor,
    decode_bytes_elements,
    encode_binary_tensor,
    encode_bytes_elements,
    read_span,
)
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionSpan
from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, ServeError

FIXED = [datatype for datatype in DataType if datatype is not DataType.BYTES]

# Two elements each, written by hand: little-endian.
GOLDEN: dict[DataType, tuple[list[Any], str]] = {
    DataType.BOOL: ([True, False], "01 00"),
    DataType.UINT8: ([1, 255], "01 ff"),
    DataType.UINT16: ([1, 65534], "0100 feff"),
    DataType.UINT32: ([1, 2**32 - 2], "01000000 feffffff"),
    DataType.UINT64: ([1, 2**64 - 2], "0100000000000000 feffffffffffffff"),
    DataType.INT8: ([1, -2], "01 fe"),
    DataType.INT16: ([1, -2], "0100 feff"),
    DataType.INT32: ([1, -2], "01000000 feffffff"),
    DataType.INT64: ([1, -2], "0100000000000000 feffffffffffffff"),
    DataType.FP16: ([1.0, -2.0], "003c 00c0"),
    DataType.BF16: ([0x3F80, 0xC000], "803f 00c0"),
    DataType.FP32: ([1.0, -2.0], "0000803f 000000c0"),
    DataType.FP64: ([1.0, -2.0], "000000000000f03f 00000000000000c0"),
}


@pytest.mark.parametrize("datatype", FIXED)
def test_bytes_are_little_endian_and_without_padding(datatype: DataType) -> None:
    values, text = GOLDEN[datatype]
    array = np.array(values, datatype.numpy)
    data = bytes.fromhex(text)
    assert bytes(encode_binary_tensor(array, datatype)) == data
    decoded = decode_binary_tensor(data, datatype, (2,), "x", "m")
    assert decoded.dtype == datatype.numpy
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("datatype", FIXED)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tensor_at_any_offset_is_a_read_only_view(datatype: DataType, offset: int) -> None:
    values, text = GOLDEN[datatype]
    body = b"x" * offset + bytes.fromhex(text)
    decoded = decode_binary_tensor(memoryview(body)[offset:], datatype, (1, 2), "x", "m")
    np.testing.assert_array_equal(decoded, np.array([values], datatype.numpy))
    assert np.shares_memory(decoded, np.frombuffer(body, np.uint8))
    assert not decoded.flags.writeable


def test_contiguous_array_is_not_copied_and_others_are_made_contiguous() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert np.shares_memory(np.frombuffer(encode_binary_tensor(array, DataType.INT16), np.uint8), array)
    assert bytes(encode_binary_tensor(array.T, DataType.INT16)) == array.T.tobytes()
    assert bytes(encode_binary_tensor(array[:, 1:2], DataType.INT16)) == bytes([1, 0, 4, 0])


@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize("shape", [(0,), (1, 0), (0, 2**20)])
def test_tensor_without_elements_has_no_bytes(datatype: DataType, shape: tuple[int, ...]) -> None:
    decoded = decode_binary_tensor(b"", datatype, shape, "x", "m")
    assert decoded.shape == shape
    assert decoded.dtype == datatype.numpy
    assert len(encode_binary_tensor(decoded, datatype)) == 0


@pytest.mark.parametrize("datatype", FIXED)
def test_scalar_is_one_element(datatype: DataType) -> None:
    values, text = GOLDEN[datatype]
    data = bytes.fromhex(text)[: datatype.itemsize]
    decoded = decode_binary_tensor(data, datatype, (), "x", "m")
    assert decoded.shape == ()
    assert decoded.item() == values[0]
    assert bytes(encode_binary_tensor(decoded, datatype)) == data


@pytest.mark.parametrize("datatype", FIXED)
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_number_of_bytes_is_rejected(datatype: DataType, change: int) -> None:
    expected = 6 * datatype.itemsize
    with pytest.raises(ServeError) as caught:
        decode_binary_tensor(b"\0" * (expected + change), datatype, (2, 3), "x", "m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        f"input byte size mismatch for input 'x' for model 'm'. Expected {expected}, got {expected + change}"
    )


def test_huge_shape_is_rejected_by_the_size_of_the_data() -> None:
    with pytest.raises(ServeError, match=f"Expected {2**80 * 4}, got 4"):
        decode_binary_tensor(b"\0" * 4, DataType.FP32, (2**40, 2**40), "x", "m")


def test_bool_that_is_neither_0_nor_1_is_rejected() -> None:
    with pytest.raises(ServeError, match="input 'x' for model 'm' has BOOL elements other than 0 and 1"):
        decode_binary_tensor(b"\0\1\2", DataType.BOOL, (3,), "x", "m")


def spell(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def expect_invalid(data: bytes, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        decode_bytes_elements(data, shape, "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == text


@given(st.lists(st.text(), max_size=20))
def test_strings_survive_a_round_trip(texts: list[str]) -> None:
    array = np.array([*texts, None], object)[:-1]
    data = encode_bytes_elements(array)
    assert data == spell(*(text.encode() for text in texts))
    decoded = decode_bytes_elements(data, (len(texts),), "x")
    assert decoded.dtype == object
    assert decoded.tolist() == texts
    assert all(type(element) is str for element in decoded)


@given(st.binary(max_size=40), st.integers(0, 4))
def test_any_bytes_are_decoded_or_rejected(data: bytes, count: int) -> None:
    with contextlib.suppress(ServeError):
        decoded = decode_bytes_elements(data, (count,), "x")
        assert encode_bytes_elements(decoded) == data


def test_elements_are_in_row_major_order_and_may_be_views_of_a_body() -> None:
    data = memoryview(b"body" + spell(b"a", b"", "ü".encode(), b"d\0d"))[4:]
    assert decode_bytes_elements(data, (2, 2), "x").tolist() == [["a", ""], ["ü", "d\0d"]]


def test_strided_array_is_encoded_in_row_major_order() -> None:
    array = np.array([["a", "b"], ["c", "d"]], object)
    assert encode_bytes_elements(array.T) == spell(b"a", b"c", b"b", b"d")


@pytest.mark.parametrize("texts", [["", "ä" * 700_000, "x" * 300_000, "😀" * 1_500_000, "b"], ["ab"] * 3000])
def test_long_and_many_texts_are_written_in_steps_to_lent_memory(texts: list[str]) -> None:
    array, memory = np.array(texts, object), LargeMemory()
    data = encode_bytes_elements(array, memory)
    assert memory.kept_bytes >= len(data)
    assert data == spell(*[text.encode() for text in texts])
    assert decode_bytes_elements(data, array.shape, "x").tolist() == texts


def test_fault_in_a_long_text_is_named_with_its_position() -> None:
    data = spell(b"a", "ä".encode() * 1_000_000 + b"\xff")
    with pytest.raises(ServeError, match=r"string element 1 of inference input 'x' .* at byte 2000000\)"):
        decode_bytes_elements(data, (2,), "x")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_elements_are_no_bytes(shape: tuple[int, ...]) -> None:
    assert decode_bytes_elements(b"", shape, "x").shape == shape
    assert encode_bytes_elements(np.empty(shape, object)) == b""


def test_text_scalar_is_one_element() -> None:
    decoded = decode_bytes_elements(spell(b"one"), (), "x")
    assert decoded.shape == ()
    assert decoded.item() == "one"


def test_wrong_number_of_elements_is_rejected() -> None:
    expect_invalid(spell(b"a"), (2,), "expected 2 string elements for inference input 'x', got 5 bytes")
    expect_invalid(spell(b"aaaa"), (2,), "expected 2 string elements for inference input 'x', got 1")
    expect_invalid(spell(b"a", b"b", b"c"), (2,), "expected 2 string elements for inference input 'x', got more")
    expect_invalid(spell(b"a"), (0,), "expected 0 string elements for inference input 'x', got more")


def test_broken_lengths_are_rejected() -> None:
    expect_invalid(spell(b"a") + b"\1\0", (1,), "incomplete string length indicator for inference input 'x' at byte 5")
    expect_invalid(
        struct.pack("<I", 9) + b"abc",
        (1,),
        "string element 0 of inference input 'x' has length 9, but only 3 bytes are left",
    )
    expect_invalid(
        spell(b"a") + b"\xff\xff\xff\xff",
        (2,),
        "string element 1 of inference input 'x' has length 4294967295, but only 0 bytes are left",
    )


def test_huge_text_shape_is_rejected_by_the_size_of_the_data() -> None:
    expect_invalid(b"", (2**31, 2**29), f"expected {2**60} string elements for inference input 'x', got 0 bytes")


def test_first_fault_is_reported_even_in_an_excess_element() -> None:
    bad = "is not valid UTF-8 (invalid start byte at byte 1); ONNX string tensors hold text"
    expect_invalid(spell(b"a", b"b\xff", b"\xff"), (3,), f"string element 1 of inference input 'x' {bad}")
    expect_invalid(spell(b"a", b"b\xff"), (1,), f"string element 1 of inference input 'x' {bad}")
    expect_invalid(
        spell(b"a", b"bcd")[:-1],
        (1,),
        "string element 1 of inference input 'x' has length 3, but only 2 bytes are left",
    )
    # cut within a character: the error is the length, not the text
    cut = spell(b"a", "ü".encode())[:-1]
    expect_invalid(cut, (2,), "string element 1 of inference input 'x' has length 2, but only 1 bytes are left")


def test_bytes_after_the_last_element_are_rejected() -> None:
    two = spell(b"a", b"b")
    for rest in (b"\0", b"\0\0", b"\0\0\0"):
        expect_invalid(two + rest, (2,), "incomplete string length indicator for inference input 'x' at byte 10")
    expect_invalid(two + b"\0\0\0\0", (2,), "expected 2 string elements for inference input 'x', got more")


@pytest.mark.parametrize("element", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_bytes_that_are_not_utf8_are_rejected_and_named(element: bytes) -> None:
    with pytest.raises(ServeError) as caught:
        decode_bytes_elements(spell(b"good", element), (2,), "x")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith("string element 1 of inference input 'x' is not valid UTF-8 (")


GIVEN: Final[dict[str, Parameter]] = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def test_missing_offset_is_zero() -> None:
    assert read_span(GIVEN, "input 'x'") == RegionSpan("r", 0, 8)
    assert read_span(GIVEN | {"shared_memory_offset": 3}, "input 'x'") == RegionSpan("r", 3, 8)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"shared_memory_region": 1}, "Unable to parse 'shared_memory_region': expected a string for input 'x', got 1"),
        ({"shared_memory_byte_size": "8"}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_byte_size": -8}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_byte_size": True}, "'shared_memory_byte_size': expected an unsigned integer for input 'x'"),
        ({"shared_memory_offset": 1.0}, "'shared_memory_offset': expected an unsigned integer for input 'x', got 1.0"),
    ],
)
def test_value_of_another_type_is_rejected(changed: dict[str, Parameter], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read_span(GIVEN | changed, "input 'x'")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert text in caught.value.message


def test_region_without_a_size_is_rejected() -> None:
    with pytest.raises(ServeError, match="output 'y': 'shared_memory_region' also needs 'shared_memory_byte_size'"):
        read_span({"shared_memory_region": "r"}, "output 'y'")
