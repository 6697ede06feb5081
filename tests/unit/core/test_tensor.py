"""Placeholders for missing tensors, the comparison of two answers, and limits of shapes."""

import ml_dtypes
import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.tensor import MAX_DIMS, absent, agree, describe_difference, is_absent, shape_fault


@pytest.mark.parametrize("datatype", DataType)
def test_no_tensor_is_taken_for_an_absent_one(datatype: DataType) -> None:
    assert not is_absent(np.zeros(3, datatype.numpy))


def test_bits_of_other_libraries_are_no_absence() -> None:
    assert not is_absent(np.zeros(3, ml_dtypes.bfloat16).view(np.uint16))


def test_rows_can_be_cut_and_joined_without_anything_in_them() -> None:
    nothing = absent(5)
    assert is_absent(nothing)
    assert is_absent(nothing[1:3])
    joined = np.empty(4, nothing.dtype)
    np.concatenate([nothing[:1], absent(3)], out=joined)
    assert is_absent(joined)
    assert len(joined) == 4


ONE, TWO = np.array([0x3F80], np.uint16), np.array([0x4000], np.uint16)
"""The BF16 bit patterns of 1 and 2."""


def fp32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("one", "other", "are_same", "are_same_scaled"),
    [
        (fp32(100, 90, 1e-4), fp32(100, 90, 2e-4), False, True),  # a sum that nearly cancels
        (fp32(100, 90, 1e-4), fp32(100, 90, 0.2), False, False),
        (fp32(100, 90), fp32(100, 91), False, False),
        # Values of a mask are not a scale for the values beside them.
        (fp32(1, 2, 3, -3.4e38), fp32(1, 2, 3.1, -3.4e38), False, False),
        (fp32(1, 2, 3, -np.inf), fp32(1, 2, 3.1, -np.inf), False, False),
        (fp32(np.inf, np.nan), fp32(np.inf, np.nan), True, True),
        (fp32(np.inf, 1), fp32(np.nan, 1), False, False),
        (fp32(), fp32(), True, True),
    ],
)
def test_values_near_zero_may_differ_by_a_share_of_those_beside_them(
    one: np.ndarray, other: np.ndarray, are_same: bool, are_same_scaled: bool
) -> None:
    assert agree(one, other, DataType.FP32) is are_same
    assert agree(one, other, DataType.FP32, is_scaled=True) is are_same_scaled


def test_integers_and_texts_are_equal_or_differ() -> None:
    assert not agree(np.array([1_000_000]), np.array([1_000_001]), DataType.INT64, is_scaled=True)
    assert not agree(np.array(["a"], object), np.array(["b"], object), DataType.BYTES, is_scaled=True)


@pytest.mark.parametrize(
    ("one", "other", "datatype", "difference"),
    [
        (fp32(1, 2, 3), fp32(1, 2.5, 3), DataType.FP32, "1 of 3 values differ, by 5.0e-01 at most"),
        (fp32(np.nan, np.inf, 1), fp32(np.nan, 1, 2), DataType.FP32, "2 of 3 values differ, by 1.0e+00 at most"),
        (fp32(np.inf), fp32(-np.inf), DataType.FP32, "1 of 1 values differ, by 0.0e+00 at most"),
        (np.array([7, 8]), np.array([7, 5]), DataType.INT64, "1 of 2 values differ, by 3.0e+00 at most"),
        (np.array([2**62]), np.array([2**62 + 1]), DataType.INT64, "1 of 1 values differ, by 0.0e+00 at most"),
        (ONE, TWO, DataType.BF16, "1 of 1 values differ, by 1.0e+00 at most"),
        (np.array(["secret", "b"], object), np.array(["c", "b"], object), DataType.BYTES, "1 of 2 values differ"),
        (np.array([True, False]), np.array([False, False]), DataType.BOOL, "1 of 2 values differ"),
    ],
)
def test_difference_names_no_value(one: np.ndarray, other: np.ndarray, datatype: DataType, difference: str) -> None:
    assert describe_difference(one, other, datatype) == difference


@pytest.mark.parametrize("shape", [[], [0], [1] * 64, [0] * 64, [2**60 - 1], [0, 2**59], [2**30, 2**29, 0]])
def test_largest_shapes_of_the_widest_elements_are_accepted(shape: list[int]) -> None:
    assert shape_fault(shape) is None
    if 0 in shape:
        assert np.empty(shape, np.float64).shape == tuple(shape)


@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**29], [0, 2**60], [2**62, 0, 2**62]])
def test_too_many_elements_are_rejected_even_beside_a_zero(shape: list[int]) -> None:
    text = ",".join(map(str, shape))
    assert shape_fault(shape) == f"at most {2**60 - 1} elements, got [{text}]"
    with pytest.raises(ValueError, match=r"too (big|large)"):
        np.empty(shape, np.float64)


def test_too_many_dimensions_are_rejected_before_their_product_is_computed() -> None:
    assert shape_fault([2**62] * 1_000_000) == f"at most {MAX_DIMS} dimensions, got 1000000"
    with pytest.raises(ValueError, match="maximum supported dimension"):
        np.empty([1] * (MAX_DIMS + 1))
