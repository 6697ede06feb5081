"""Inputs made up for warm-up: floats from N(0, 1), integers and booleans 0 or 1, short texts."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.conversion import repeated
from ortserve.core.dtypes import DataType, narrow
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent
from ortserve.rows import sum_terms

FREE_DIM: Final = 8
"""Size given to free dimensions other than the batch axis, the same for all since many must agree."""
LARGER_FREE_DIMS: Final = (32, 224)
"""Tried one after the other where the model refuses that: networks for images halve theirs some five times, and 224 is
what many were made for."""
MOST_ELEMENTS: Final = 2**20
"""Of an input's row whose free dimensions are larger: three or four of them make a row that fills the memory."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far drawn numbers lie apart: integers from 0 to below ``below``, floats from N(0, ``scale``²)."""

    below: int = 2
    scale: float = 1.0


USUAL: Final = Spread()
ZEROS: Final = Spread(1, 0.0)
"""And texts all alike: what data decides the shape of is smallest for them."""

# In turns for the rows, of different numbers of words: what splits them up shows whether it pads to the longest row.
_TEXTS: Final = np.array(["a", "b c d"], object)


def synthetic_inputs(
    signature: ModelSignature,
    rows: int,
    seed: int,
    padding: Padding | None = None,
    *,
    brings_optional: bool = False,
    free_dim: int = FREE_DIM,
    ones: Collection[str] = (),
    spread: Spread = USUAL,
) -> Arrays:
    """One array an input, as batches hold them, with ``rows`` rows where the model is batched; the same for one seed.

    Args:
        signature: What the model takes.
        rows: Of a batch.
        seed: Of the numbers.
        padding: Axes that it pads are as long as batches will be.
        brings_optional: Whether optional inputs are there, too, or absent. Those that are the same for all rows are
            absent in any case: the requests that bring them are not batched.
        free_dim: Size of free dimensions.
        ones: Names of those that have size 1 instead; ``""`` for first ones without a name.
        spread: Of the numbers.
    """
    generator = np.random.default_rng(seed)
    arrays = []
    padded_axes = padding.axes if padding is not None else (None,) * len(signature.inputs)
    for spec, padded in zip(signature.inputs, padded_axes, strict=True):
        is_whole = signature.is_batched and spec.batch_axis is None
        if spec.is_optional and (is_whole or not brings_optional):
            arrays.append(absent(rows if signature.is_batched else 1))
            continue
        shape = row_sizes(spec, free_dim, ones)
        if signature.is_batched and not is_whole:
            shape = (rows, *shape)
        if padded is not None:
            length = padded.padded_length(free_dim)
            shape = (*shape[: padded.axis], length, *shape[padded.axis + 1 :])
        array = draw(generator, spec.datatype, shape, spread)
        arrays.append(repeated(array, rows) if is_whole else array)
    return tuple(arrays)


def row_sizes(spec: TensorSpec, free_dim: int, ones: Collection[str] = ()) -> tuple[int, ...]:
    """The shape of a row whose free dimensions have this size, sums of them the sum, and those named in ``ones`` 1."""

    def size(name: str) -> int:
        terms = sum_terms(name)
        if terms:
            return sum(term if isinstance(term, int) else size(term) for term in terms)
        return 1 if name in ones else free_dim

    sizes = []
    for axis, (dim, name) in enumerate(zip_longest(spec.shape, spec.dim_names, fillvalue="")):
        if axis == spec.batch_axis:
            continue
        is_known = dim != -1
        sizes.append(int(dim) if is_known else size(str(name)) if name or axis == 0 else free_dim)
    return tuple(sizes)


def first_dimensions(signature: ModelSignature) -> frozenset[str]:
    """Names of free first dimensions of the inputs of a model that is not batched."""
    if signature.is_batched:
        return frozenset()
    return frozenset(spec.dim_names[0] for spec in signature.inputs if spec.dim_names and spec.shape[0] == -1)


def draw(
    generator: np.random.Generator, datatype: DataType, shape: tuple[int, ...], spread: Spread = USUAL
) -> np.ndarray:
    """Make up one tensor. Integers of a small type stay within it, and texts are of two kinds in turns."""
    if datatype is DataType.BYTES:
        texts = _TEXTS if spread != ZEROS else _TEXTS[:1]
        rows = np.resize(texts, shape[0] if shape else 1)
        return np.broadcast_to(rows.reshape(shape[:1] + (1,) * (len(shape) - 1)), shape).copy()
    if datatype is DataType.BF16:
        return narrow(generator.standard_normal(shape, np.float32) * np.float32(spread.scale) + 0)
    if datatype.numpy.kind == "f":
        return np.asarray(generator.standard_normal(shape) * spread.scale + 0).astype(datatype.numpy)
    most = 1 if datatype is DataType.BOOL else int(np.iinfo(datatype.numpy).max)
    return np.asarray(generator.integers(0, min(spread.below, most + 1), size=shape)).astype(datatype.numpy)
