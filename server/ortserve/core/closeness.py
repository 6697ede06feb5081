"""When two answers count as the same although their floats differ in the last bits."""

from typing import Final

import numpy as np

from ortserve.core.bfloat16 import widen
from ortserve.core.dtypes import DataType

# Kernels choose another order of summation for another batch size, so floats differ in their last bits.
TOLERANCES: Final = {
    DataType.BF16: (5e-2, 1e-2),
    DataType.FP16: (1e-2, 1e-3),
    DataType.FP32: (1e-3, 1e-5),
    DataType.FP64: (1e-6, 1e-9),
}
"""Relative and absolute, of the datatypes that have one."""


_COARSE: Final = 1e-2
"""Relative to a value, and to what values of the answer usually are."""


def agree(one: np.ndarray, other: np.ndarray, datatype: DataType, *, is_coarse: bool = False) -> bool:
    """Whether two arrays of one shape hold the same answer: equal, for floats within the tolerance of the datatype.

    ``is_coarse`` is for GPUs, which may compute with less than the datatype promises (TF32 has ten bits of FP32's 23),
    and by other kernels for other batch sizes: values near zero then differ by a share of the larger ones beside them.
    """
    tolerance = TOLERANCES.get(datatype)
    if tolerance is None:
        return bool(np.array_equal(one, other))
    relative, absolute = tolerance
    left, right = as_float64(one, datatype), as_float64(other, datatype)
    if is_coarse:
        finite = right[np.isfinite(right)]
        usual = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
        relative, absolute = max(relative, _COARSE), max(absolute, _COARSE * usual)
    return bool(np.allclose(left, right, rtol=relative, atol=absolute, equal_nan=True))


def as_float64(array: np.ndarray, datatype: DataType) -> np.ndarray:
    """The values of a tensor of floats."""
    return (widen(array) if datatype is DataType.BF16 else array).astype(np.float64)
