"""Inputs made up for warm-up: floats from N(0, 1), integers and booleans 0 or 1, short texts."""

from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature

FREE_DIM: Final = 8
"""Size given to free dimensions other than the batch axis, the same for all since many must agree."""


def synthetic_inputs(signature: ModelSignature, rows: int, seed: int, padding: Padding | None = None) -> Arrays:
    """One array an input, with ``rows`` rows where the model is batched; the same for the same seed.

    Axes that ``padding`` pads are as long as batches will be.
    """
    generator = np.random.default_rng(seed)
    arrays = []
    padded_axes = padding.axes if padding is not None else (None,) * len(signature.inputs)
    for spec, padded in zip(signature.inputs, padded_axes, strict=True):
        shape = [FREE_DIM if dim == -1 else dim for dim in spec.shape]
        if signature.is_batched:
            shape[0] = rows
        if padded is not None:
            shape[padded.axis] = padded.padded_length(FREE_DIM)
        arrays.append(draw(generator, spec.datatype, tuple(shape)))
    return tuple(arrays)


def draw(generator: np.random.Generator, datatype: DataType, shape: tuple[int, ...]) -> np.ndarray:
    """Make up one tensor."""
    if datatype is DataType.BYTES:
        return generator.choice(np.array(["a", "b"], dtype=object), size=shape)
    if datatype.numpy.kind == "f":
        return generator.standard_normal(shape).astype(datatype.numpy)
    return generator.integers(0, 2, size=shape).astype(datatype.numpy)
