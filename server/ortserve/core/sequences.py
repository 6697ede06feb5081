"""Outputs that are sequences of tensors, answered as one tensor with a new leading axis.

Tensors of different shapes make no tensor. The run has succeeded nonetheless, and a request may ask for other outputs
only, so an array of a type that no tensor has takes the output's place, and the service reports the error.
"""

from collections.abc import Sequence

import numpy as np

from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import format_shape


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
