"""Tensors: values with a name and a datatype, placeholders for missing tensors, and the comparison of two answers.

A placeholder is an array of numpy's void type, which no tensor has. It stands for an optional input that a request
omits, or for an output whose sequence of tensors cannot be stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ortserve.core.dtypes import DataType, widen
from ortserve.core.signature import TensorSpec


@dataclass(slots=True, init=False)
class Tensor:
    """``array`` has the tensor's full shape and the element type ``datatype.numpy``.

    It may be a read-only, unaligned view on the request's body or a slice of a batch's output: never write to it.
    """

    name: Final[str]
    datatype: Final[DataType]
    array: Final[np.ndarray]

    def __init__(self, name: str, datatype: DataType, array: np.ndarray) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array


def format_shape(shape: tuple[int, ...]) -> str:
    """Spell a shape the way error messages do: ``[-1,16]``."""
    return "[" + ",".join(map(str, shape)) + "]"


_NOTHING: Final = np.dtype("V1")


def absent(rows: int) -> np.ndarray:
    """What stands for an input that is not there, shape ``(rows,)``."""
    return np.empty(rows, _NOTHING)


def is_absent(array: np.ndarray) -> bool:
    """Whether the array only stands for an input that is not there."""
    return array.dtype.kind == "V"


def stack(tensors: Sequence[np.ndarray], spec: TensorSpec) -> np.ndarray:
    """Stack the tensors of a sequence.

    Args:
        tensors: As ONNX Runtime hands them out.
        spec: Of the output.

    Returns:
        An array of shape ``(len(tensors), *shape)``, or one of which ``why_not_stacked`` tells. An empty sequence has
        the declared shape behind the leading 0, and free dimensions of 0.
    """
    if not tensors:
        return np.empty((0, *[max(size, 0) for size in spec.shape[1:]]), spec.datatype.numpy)
    arrays = [np.asarray(tensor, spec.datatype.numpy) for tensor in tensors]
    first = arrays[0].shape
    for array in arrays:
        if array.shape != first:
            shapes = f"{format_shape(first)} and {format_shape(array.shape)}"
            why = f"its {len(arrays)} tensors have different shapes, {shapes}"
            return np.frombuffer(why.encode(), f"V{len(why)}")
    return np.stack(arrays)


def why_not_stacked(array: np.ndarray) -> str:
    """Why ``stack`` made no tensor; empty where it did."""
    return array.tobytes().decode() if array.dtype.kind == "V" else ""


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
