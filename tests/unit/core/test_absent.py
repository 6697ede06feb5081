"""What stands for an input that is not there."""

import ml_dtypes
import numpy as np
import pytest

from ortserve.core.absent import absent, is_absent
from ortserve.core.dtypes import DataType


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
