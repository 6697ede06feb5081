"""Bodies with the bytes of one tensor, whose shape follows from the signature."""

import numpy as np
import pytest

from ortserve.codecs.bounds import INLINE_BYTES, INLINE_FLAG_BYTES
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.validation import check_request, long_raw_growth, read_raw_input


def signature(datatype: DataType, *shape: int, unbatched: bool = False) -> ModelSignature:
    return ModelSignature(
        (TensorSpec("x", datatype, shape),), (TensorSpec("y", datatype, shape),), "reason" if unbatched else ""
    )


def refusal(data: bytes, taken: ModelSignature) -> str:
    with pytest.raises(ServeError) as caught:
        read_raw_input(data, taken, "m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    return caught.value.message


@pytest.mark.parametrize("datatype", [datatype for datatype in DataType if datatype is not DataType.BYTES])
def test_body_is_one_row_of_the_configured_datatype_and_is_not_copied(datatype: DataType) -> None:
    sent = np.arange(2, dtype=np.uint8).astype(datatype.numpy)
    data = sent.tobytes()
    read = read_raw_input(data, signature(datatype, -1, 2), "m")
    assert (read.name, read.datatype) == ("x", datatype)
    assert read.array.tobytes() == data
    assert read.array.shape == (1, 2)
    assert np.shares_memory(read.array, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("shape", "unbatched", "deduced"),
    [
        ((-1, 3), False, (1, 3)),
        ((-1, -1), False, (1, 3)),
        ((-1, 1, -1, 3), False, (1, 1, 1, 3)),
        ((3,), True, (3,)),
        ((-1,), True, (3,)),
        ((-1, 3), True, (1, 3)),
    ],
)
def test_free_dimension_follows_from_the_length_of_the_body(
    shape: tuple[int, ...], unbatched: bool, deduced: tuple[int, ...]
) -> None:
    taken = signature(DataType.INT32, *shape, unbatched=unbatched)
    assert read_raw_input(bytes(12), taken, "m").array.shape == deduced


def test_scalar_is_one_element() -> None:
    assert read_raw_input(bytes(8), signature(DataType.FP64, unbatched=True), "m").array.shape == ()


def test_free_dimension_may_be_empty() -> None:
    assert read_raw_input(b"", signature(DataType.FP32, -1, -1), "m").array.shape == (1, 0)


def test_string_is_the_body_itself() -> None:
    read = read_raw_input("añb\0".encode(), signature(DataType.BYTES, -1, 1), "m")
    assert read.array.tolist() == [["añb\0"]]
    assert read_raw_input(b"", signature(DataType.BYTES, 1, unbatched=True), "m").array.tolist() == [""]


def test_string_that_is_not_utf8_is_rejected() -> None:
    assert "not valid UTF-8" in refusal(b"\xff", signature(DataType.BYTES, -1, 1))


def test_body_without_a_deducible_shape_is_rejected() -> None:
    two = ModelSignature((TensorSpec("a", DataType.FP32, (-1,)), TensorSpec("b", DataType.FP32, (-1,))), ())
    assert refusal(bytes(4), two) == (
        "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration"
    )
    assert refusal(bytes(4), signature(DataType.FP32, -1, -1, -1)) == (
        "The shape of the raw input 'x' can not be deduced because there are more than one variable-sized dimension: "
        "[-1,-1,-1]"
    )
    assert refusal(bytes(5), signature(DataType.FP32, -1, -1)) == (
        "input byte size mismatch for input 'x' for model 'm'. Expected a multiple of 4 for the shape [-1,-1], got 5"
    )
    assert "Expected a multiple of 0" in refusal(bytes(4), signature(DataType.FP32, -1, 0, -1))
    assert refusal(bytes(12), signature(DataType.FP32, -1, 4)) == (
        "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 12"
    )
    assert "the model must have input shape [1], got [-1,2]" in refusal(b"a", signature(DataType.BYTES, -1, 2))


def test_checked_request_has_the_deduced_tensor() -> None:
    request = InferRequest("m", "", "", (), (), {}, binary_output=True, raw_input=bytes(8))
    arrays, rows = check_request(request, signature(DataType.INT32, -1, 2), "m")
    assert [array.shape for array in arrays] == [(1, 2)]
    assert rows == 1


def test_long_texts_and_large_bool_inputs_are_decoded_on_a_thread() -> None:
    texts, flags = signature(DataType.BYTES, -1, 1), signature(DataType.BOOL, -1, -1)
    assert long_raw_growth(bytes(INLINE_BYTES), texts) is None
    assert long_raw_growth(bytes(INLINE_BYTES + 1), texts) == 5 * (INLINE_BYTES + 1)
    assert long_raw_growth(bytes(INLINE_FLAG_BYTES), flags) is None
    assert long_raw_growth(bytes(INLINE_FLAG_BYTES + 1), flags) == 0
    assert long_raw_growth(bytes(INLINE_FLAG_BYTES + 1), signature(DataType.FP32, -1, -1)) is None
