"""Tensors as raw bytes."""

from typing import Any

import numpy as np
import pytest

from ortserve.codecs.binary_tensor import decode_binary_tensor, encode_binary_tensor
from ortserve.core.dtypes import DataType
from ortserve.errors import ErrorKind, ServeError

FIXED = [datatype for datatype in DataType if datatype is not DataType.BYTES]

# Two elements each, spelled by hand: little-endian.
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
def test_tensor_is_a_read_only_view_wherever_in_the_body_it_begins(datatype: DataType, offset: int) -> None:
    values, text = GOLDEN[datatype]
    body = b"x" * offset + bytes.fromhex(text)
    decoded = decode_binary_tensor(memoryview(body)[offset:], datatype, (1, 2), "x", "m")
    np.testing.assert_array_equal(decoded, np.array([values], datatype.numpy))
    assert np.shares_memory(decoded, np.frombuffer(body, np.uint8))
    assert not decoded.flags.writeable


def test_contiguous_array_is_not_copied_and_any_other_is_put_in_order() -> None:
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
def test_wrong_number_of_bytes_is_refused(datatype: DataType, change: int) -> None:
    expected = 6 * datatype.itemsize
    with pytest.raises(ServeError) as caught:
        decode_binary_tensor(b"\0" * (expected + change), datatype, (2, 3), "x", "m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        f"input byte size mismatch for input 'x' for model 'm'. Expected {expected}, got {expected + change}"
    )


def test_huge_shape_is_refused_by_the_size_of_the_data() -> None:
    with pytest.raises(ServeError, match=f"Expected {2**80 * 4}, got 4"):
        decode_binary_tensor(b"\0" * 4, DataType.FP32, (2**40, 2**40), "x", "m")


def test_truth_value_that_is_neither_0_nor_1_is_refused() -> None:
    with pytest.raises(ServeError, match="input 'x' for model 'm' has BOOL elements other than 0 and 1"):
        decode_binary_tensor(b"\0\1\2", DataType.BOOL, (3,), "x", "m")
