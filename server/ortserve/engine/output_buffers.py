"""Layouts of rows in memory, and output buffers that are reused once no answer refers to them.

References are the leases of a set of buffers. Answers are views of the set's memory, and so are all objects made from
them without a copy, such as data that a socket still has to send. Each view holds a reference to the memory. The set is
free when only its own reference is left. No code ends a lease, so a lease never ends too early or too late: as long as
a cancelled, failed or slow request can read the memory, no run writes to it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.batch import Arrays, Batch
from ortserve.core.signature import ModelSignature

MAX_SETS: Final = 8
"""Maximum number of sets of one instance. One is computed while another is encoded; a delayed event loop needs more."""
MAX_SET_BYTES: Final = 8 * 2**20
"""Maximum size of one set. Binding saves about 1 µs per run, less than 1 % of the time to write a larger set."""
_ALIGNMENT: Final = 64  # bytes of a cache line, and of the widest vector register

Allocate: TypeAlias = Callable[[int], np.ndarray]
"""Allocates a number of bytes, as an array of UINT8."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Dtype and shape of one row of a tensor."""

    dtype: np.dtype
    item: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.item)


def input_layouts(signature: ModelSignature) -> list[RowLayout]:
    """The row layouts of the inputs of a batched model."""
    return [RowLayout(spec.datatype.numpy, spec.shape[1:]) for spec in signature.inputs]


def layouts_of(arrays: Sequence[np.ndarray]) -> list[RowLayout]:
    """The row layouts of arrays."""
    return [RowLayout(array.dtype, array.shape[1:]) for array in arrays]


def offsets(layouts: Sequence[RowLayout], rows: int, alignment: int) -> list[int]:
    """Byte offsets of tensors in a block of memory with ``rows`` rows of each, followed by the size of the block."""
    return list(accumulate((-(-layout.nbytes * rows // alignment) * alignment for layout in layouts), initial=0))


def fits(batch: Batch, layouts: Sequence[RowLayout]) -> bool:
    """Whether the arrays of a batch have rows of these layouts.

    A request to a model without a batch axis counts as one row, whatever its length. It fits only with length 1.
    """
    for arrays, layout in zip(batch.parts, layouts, strict=True):
        first = arrays[0]
        if first.dtype != layout.dtype or first.shape[1:] != layout.item:
            return False
        if len(arrays) == 1 and len(first) != batch.rows:
            return False
    return True


def address_of(array: np.ndarray) -> int:
    """The address of the first element."""
    return int(array.__array_interface__["data"][0])


def _allocate(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class OutputBuffers:
    """One set: memory for ``rows`` rows of each output. Not for concurrent runs."""

    def __init__(self, layouts: Sequence[RowLayout], rows: int, allocate: Allocate = _allocate) -> None:
        # One block holds all outputs, so that one reference count covers them. numpy makes it the base of every view,
        # and of views of views. No local variable may refer to it, because the reference would be counted.
        self.nbytes: Final = _ALIGNMENT + set_nbytes(layouts, rows)
        self._block = allocate(self.nbytes)
        first = -address_of(self._block) % _ALIGNMENT
        self._slabs = tuple(
            [
                self._block[first + start :][: layout.nbytes * rows].view(layout.dtype).reshape(rows, *layout.item)
                for layout, start in zip(layouts, offsets(layouts, rows, _ALIGNMENT), strict=False)
            ]
        )
        self._own_references = sys.getrefcount(self._block)

    @property
    def is_free(self) -> bool:
        """Whether no view of the memory exists. Once true, it stays true until ``first_rows``. Thread-safe."""
        return sys.getrefcount(self._block) == self._own_references

    def first_rows(self, rows: int) -> Arrays:
        """Views of each output's first rows. The set is leased while these views, or views of them, exist."""
        return tuple([slab[:rows] for slab in self._slabs])

    def address(self, output: int) -> int:
        """The address of an output's first row."""
        return address_of(self._slabs[output])

    def release(self, free: Callable[[np.ndarray], None]) -> None:
        """Free the memory of a free set with ``free``. The set cannot be used afterwards."""
        self._slabs = ()
        free(self._block)
        self._block = np.empty(0, np.uint8)


class OutputPool:
    """The sets of one instance, allocated on demand up to a maximum."""

    def __init__(
        self, layouts: Sequence[RowLayout], rows: int, allocate: Allocate = _allocate, *, max_sets: int = MAX_SETS
    ) -> None:
        """Allocate nothing yet. ``rows`` is the size of the largest batch."""
        self.rows = rows
        self._allocate = allocate
        self._max_sets = max_sets
        self._layouts = tuple(layouts)
        self._sets: list[OutputBuffers] = []

    @property
    def sets(self) -> tuple[OutputBuffers, ...]:
        """All sets, leased and free."""
        return tuple(self._sets)

    def take(self) -> OutputBuffers | None:
        """Take the first free set, so that few sets are used and stay in the processor's cache.

        Returns None if the maximum is reached and all sets are leased.
        """
        for buffers in self._sets:
            if buffers.is_free:
                return buffers
        if len(self._sets) == self._max_sets:
            return None
        self._sets.append(OutputBuffers(self._layouts, self.rows, self._allocate))
        return self._sets[-1]


def set_nbytes(layouts: Sequence[RowLayout], rows: int) -> int:
    """The size of a set in bytes."""
    return offsets(layouts, rows, _ALIGNMENT)[-1]


def can_tell_leases() -> bool:
    """Whether references are counted exactly: only CPython with its interpreter lock does so."""
    is_locked = getattr(sys, "_is_gil_enabled", None)
    return sys.implementation.name == "cpython" and (is_locked is None or bool(is_locked()))
