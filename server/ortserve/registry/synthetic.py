"""Inputs made up for warm-up: floats from N(0, 1), integers and booleans 0 or 1, short texts."""

from typing import Final

import numpy as np

from ortserve.core.absent import absent
from ortserve.core.batch import Arrays
from ortserve.core.bfloat16 import narrow
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature

FREE_DIM: Final = 8
"""Size given to free dimensions other than the batch axis, the same for all since many must agree."""
LARGER_FREE_DIMS: Final = (32, 224)
"""Tried one after the other where the model refuses that: networks for images halve theirs some five times, and 224 is
what many were made for."""
MOST_ELEMENTS: Final = 2**20
"""Of an input's row whose free dimensions are larger: three or four of them make a row that fills the memory."""


# In turns for the rows, of different numbers of words: what splits them up shows whether it pads to the longest row.
_TEXTS: Final = np.array(["a", "b c d"], object)


def synthetic_inputs(
    signature: ModelSignature,
    rows: int,
    seed: int | None,
    padding: Padding | None = None,
    *,
    brings_optional: bool = False,
    free_dim: int = FREE_DIM,
) -> Arrays:
    """One array an input, with ``rows`` rows where the model is batched; the same for the same seed.

    Args:
        signature: What the model takes.
        rows: Of a batch.
        seed: None for zeros (and texts all alike): what data decides the shape of is smallest for them.
        padding: Axes that it pads are as long as batches will be.
        brings_optional: Whether optional inputs are there, too, or absent. Those that are the same for all rows are
            absent in any case: the requests that bring them are not batched.
        free_dim: Size of free dimensions.
    """
    generator = None if seed is None else np.random.default_rng(seed)
    arrays = []
    padded_axes = padding.axes if padding is not None else (None,) * len(signature.inputs)
    for spec, padded in zip(signature.inputs, padded_axes, strict=True):
        if spec.is_whole or (spec.is_optional and not brings_optional):
            arrays.append(absent(rows if signature.is_batched else 1))
            continue
        shape = [free_dim if dim == -1 else dim for dim in spec.shape]
        if signature.is_batched:
            shape[0] = rows
        if padded is not None:
            shape[padded.axis] = padded.padded_length(free_dim)
        arrays.append(draw(generator, spec.datatype, tuple(shape)))
    return tuple(arrays)


def draw(generator: np.random.Generator | None, datatype: DataType, shape: tuple[int, ...]) -> np.ndarray:
    """Make up one tensor; zeros, or texts all alike, without a generator."""
    if generator is None:
        return np.full(shape, "a" if datatype is DataType.BYTES else 0, datatype.numpy)
    if datatype is DataType.BYTES:
        rows = np.resize(_TEXTS, shape[0] if shape else 1)
        return np.broadcast_to(rows.reshape(shape[:1] + (1,) * (len(shape) - 1)), shape).copy()
    if datatype is DataType.BF16:
        return narrow(generator.standard_normal(shape, np.float32))
    if datatype.numpy.kind == "f":
        return np.asarray(generator.standard_normal(shape)).astype(datatype.numpy)
    return np.asarray(generator.integers(0, 2, size=shape)).astype(datatype.numpy)
