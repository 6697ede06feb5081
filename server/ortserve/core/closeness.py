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


def agree(
    one: np.ndarray, other: np.ndarray, datatype: DataType, *, is_coarse: bool = False, is_scaled: bool = False
) -> bool:
    """Whether two arrays of one shape hold the same answer: equal, for floats within the tolerance of the datatype.

    ``is_coarse`` is for GPUs, which may compute with less than the datatype promises (TF32 has ten bits of FP32's 23),
    and by other kernels for other batch sizes: values near zero then differ by a share of the larger ones beside them.
    ``is_scaled`` is for comparisons without an end, which sooner or later meet the sum that nearly cancels: values near
    zero may differ by the relative tolerance of the median magnitude beside them, which no mask value can raise.
    """
    tolerance = TOLERANCES.get(datatype)
    if tolerance is None:
        return bool(np.array_equal(one, other))
    relative, absolute = tolerance
    left, right = as_float64(one, datatype), as_float64(other, datatype)
    if np.allclose(left, right, rtol=relative, atol=absolute, equal_nan=True):
        return True
    if not is_coarse and not is_scaled:
        return False
    finite = right[np.isfinite(right)]
    if is_scaled and finite.size:
        absolute = max(absolute, relative * float(np.median(np.abs(finite))))
    if is_coarse:
        usual = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
        relative, absolute = max(relative, _COARSE), max(absolute, _COARSE * usual)
    return bool(np.allclose(left, right, rtol=relative, atol=absolute, equal_nan=True))


def describe_difference(one: np.ndarray, other: np.ndarray, datatype: DataType) -> str:
    """How far two arrays of one shape are from each other: how many elements differ, and by how much numbers do.

    No element itself is named.
    """
    if datatype in (DataType.BYTES, DataType.BOOL):
        return f"{np.count_nonzero(one != other)} of {one.size} values differ"
    left, right = as_float64(one, datatype), as_float64(other, datatype)
    with np.errstate(invalid="ignore"):  # the difference of two infinities, which is left out
        distance = np.abs(left - right)
    is_float = datatype in TOLERANCES
    count = np.count_nonzero((left != right) & ~(np.isnan(left) & np.isnan(right)) if is_float else one != other)
    most = float(np.max(distance, initial=0.0, where=np.isfinite(distance)))
    return f"{count} of {one.size} values differ, by {most:.1e} at most"


def as_float64(array: np.ndarray, datatype: DataType) -> np.ndarray:
    """The values of a tensor of floats."""
    return (widen(array) if datatype is DataType.BF16 else array).astype(np.float64)
