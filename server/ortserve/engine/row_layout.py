"""Where the tensors of a batch lie in one block of memory: one behind the other, each with room for all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from ortserve.core.batch import Batch
from ortserve.core.signature import ModelSignature


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What one row of a tensor holds."""

    dtype: np.dtype
    item: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.item)


def input_layouts(signature: ModelSignature) -> list[RowLayout]:
    """A row of each input of a batched model."""
    return [RowLayout(spec.datatype.numpy, spec.shape[1:]) for spec in signature.inputs]


def layouts_of(arrays: Sequence[np.ndarray]) -> list[RowLayout]:
    """A row of each array."""
    return [RowLayout(array.dtype, array.shape[1:]) for array in arrays]


def offsets(layouts: Sequence[RowLayout], rows: int, alignment: int) -> list[int]:
    """In bytes, where each tensor begins, and where the last ends: one more than there are tensors."""
    return list(accumulate((-(-layout.nbytes * rows // alignment) * alignment for layout in layouts), initial=0))


def fits(batch: Batch, layouts: Sequence[RowLayout]) -> bool:
    """Whether a batch's arrays are of these rows. The model may be one that is fed any number of rows as 1."""
    for arrays, layout in zip(batch.parts, layouts, strict=True):
        first = arrays[0]
        if first.dtype != layout.dtype or first.shape[1:] != layout.item:
            return False
        if len(arrays) == 1 and len(first) != batch.rows:
            return False
    return True


def address_of(array: np.ndarray) -> int:
    """Where its first element is."""
    return int(array.__array_interface__["data"][0])
