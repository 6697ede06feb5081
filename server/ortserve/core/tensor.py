"""Tensors: values with a name and a datatype, limits of shapes, placeholders for missing tensors, and the comparison of
two answers.

A placeholder is an array of numpy's void type, which no tensor has. It stands for an optional input that a request
omits, or for an output whose sequence of tensors cannot be stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from ortserve.core.dtypes import DataType, widen
from ortserve.core.signature import TensorSpec


@dataclass(slots=True, init=False)
class Tensor:
    """A tensor. ``array`` has its full shape and the element type ``datatype.numpy``.

    ``array`` may be a read-only, unaligned view on a request's body or a slice of a batch's output: never write to it.
    """

    name: Final[str]
    datatype: Final[DataType]
    array: Final[np.ndarray]

    def __init__(self, name: str, datatype: DataType, array: np.ndarray) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array


MAX_DIMS: Final = 64
"""Maximum rank of a tensor in numpy."""

_MAX_ELEMENTS: Final = (2**63 - 1) // 8
"""Maximum number of elements of a tensor, so that sizes fit in 63 bits for 8-byte elements."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Return the end of an error message if ``shape`` exceeds a limit; otherwise None.

    Dimensions are not negative. Call this before an array is created. Dimensions of 0 are ignored, because numpy limits
    the product of the other ones.
    """
    if len(shape) > MAX_DIMS:  # checked first, because the product of very many dimensions is slow
        return f"at most {MAX_DIMS} dimensions, got {len(shape)}"
    if prod(filter(None, shape) if 0 in shape else shape) > _MAX_ELEMENTS:
        return f"at most {_MAX_ELEMENTS} elements, got {format_shape(tuple(shape))}"
    return None


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape as in error messages: ``[-1,16]``."""
    return "[" + ",".join(map(str, shape)) + "]"


def fits_shape(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether sizes match a declared shape, in which -1 stands for any size."""
    return len(sizes) == len(shape) and all(want in (-1, got) for want, got in zip(shape, sizes, strict=True))


_NOTHING: Final = np.dtype("V1")


def absent(rows: int) -> np.ndarray:
    """The placeholder of an omitted optional input, of shape ``(rows,)``.

    It has one element per row, so that code that slices, counts and gathers rows handles it like any input. Only the
    code that chooses the shape class and the code that passes arrays to the model distinguish it.
    """
    return np.empty(rows, _NOTHING)


def is_absent(array: np.ndarray) -> bool:
    """Whether the array is the placeholder of an omitted input."""
    return array.dtype.kind == "V"


def stack(tensors: Sequence[np.ndarray], spec: TensorSpec) -> np.ndarray:
    """Stack the tensors of a sequence along a new leading axis.

    Tensors of different shapes cannot be stacked. The run has succeeded nevertheless, and a request may want other
    outputs only, so a placeholder with the error is returned, which the service reports if the output is requested.

    Args:
        tensors: The sequence, as ONNX Runtime returns it.
        spec: The spec of the output.

    Returns:
        An array of shape ``(len(tensors), *shape)``, or a placeholder (see ``why_not_stacked``). An empty sequence
        gives a leading 0 and the declared shape, with 0 for free dimensions.
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
    """The error in a placeholder of ``stack``; empty for a tensor."""
    return array.tobytes().decode() if array.dtype.kind == "V" else ""


# Kernels may sum in another order for another batch size, so floats differ in their last bits.
TOLERANCES: Final = {
    DataType.BF16: (5e-2, 1e-2),
    DataType.FP16: (1e-2, 1e-3),
    DataType.FP32: (1e-3, 1e-5),
    DataType.FP64: (1e-6, 1e-9),
}
"""Relative and absolute tolerance, by floating-point datatype."""


_COARSE: Final = 1e-2
"""Relative tolerance on GPUs: to a value, and to the root mean square of the answer."""


def agree(
    one: np.ndarray, other: np.ndarray, datatype: DataType, *, is_coarse: bool = False, is_scaled: bool = False
) -> bool:
    """Whether two arrays of the same shape hold the same answer. Floats may differ by the tolerance of the datatype.

    ``is_coarse`` is for GPUs. They may compute with fewer bits than the datatype has (TF32 has ten bits of FP32's 23)
    and use other kernels for other batch sizes, so values near zero may differ by a share of larger values beside them.
    ``is_scaled`` is for unlimited numbers of comparisons, some of which meet sums that nearly cancel. Values near zero
    may then differ by the relative tolerance of the median magnitude, which mask values cannot raise.
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
    """Describe the difference of two arrays of one shape: number of different elements, and their largest distance.

    The text contains no element.
    """
    if datatype in (DataType.BYTES, DataType.BOOL):
        return f"{np.count_nonzero(one != other)} of {one.size} values differ"
    left, right = as_float64(one, datatype), as_float64(other, datatype)
    with np.errstate(invalid="ignore"):  # the difference of two infinities is NaN and ignored
        distance = np.abs(left - right)
    is_float = datatype in TOLERANCES
    count = np.count_nonzero((left != right) & ~(np.isnan(left) & np.isnan(right)) if is_float else one != other)
    most = float(np.max(distance, initial=0.0, where=np.isfinite(distance)))
    return f"{count} of {one.size} values differ, by {most:.1e} at most"


def zeros(shape: tuple[int, ...], datatype: DataType) -> np.ndarray:
    """A tensor of zeros, or of empty texts."""
    return np.full(shape, "", object) if datatype is DataType.BYTES else np.zeros(shape, datatype.numpy)


def as_numbers(array: np.ndarray, datatype: DataType) -> np.ndarray:
    """The elements of a tensor as numpy can compare them: BF16, whose arrays hold bits, as FP32."""
    return widen(array) if datatype is DataType.BF16 else array


def as_float64(array: np.ndarray, datatype: DataType) -> np.ndarray:
    """The values of a tensor of floats, as FP64."""
    return as_numbers(array, datatype).astype(np.float64)
