"""Memory that outputs are bound to: used again as soon as nobody reads it any more, and never before.

A set is leased by reading it. Answers are views on its memory, and so is whatever is made of them without a copy, such
as what an encoder keeps to write to a socket; each holds a reference to the set's memory. The set is free when no
reference is left but its own. Nobody ends a lease, so nobody can forget to, or do so too early: whatever became of the
callers, cancelled, failed or slow, the memory they can still see is not written to.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.engine.row_layout import RowLayout, address_of, offsets

MAX_SETS: Final = 8
"""Sets of one instance. One is being computed, one encoded; more are needed while the loop is behind."""
MAX_SET_BYTES: Final = 8 * 2**20
"""A larger set is not worth having: what binding saves a run, about 1 µs, is less than 1 % of writing so much."""
_ALIGNMENT: Final = 64  # a cache line, and the widest vector register

Allocate: TypeAlias = Callable[[int], np.ndarray]
"""Makes so many bytes of memory that nobody else has."""


def _allocate(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class OutputBuffers:
    """One set: for each output room for ``rows`` rows. Not for two runs at once."""

    def __init__(self, layouts: Sequence[RowLayout], rows: int, allocate: Allocate = _allocate) -> None:
        # One block for all outputs, so that one look at its references tells about them all. numpy makes it the base
        # of every view, and of views on those. No local variable may refer to it: it would be counted.
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
        """Whether nobody can see the memory. Once true it stays so until ``first_rows`` is called: from any thread."""
        return sys.getrefcount(self._block) == self._own_references

    def first_rows(self, rows: int) -> Arrays:
        """Views of each output's first rows. The set is leased for as long as they or views on them live."""
        return tuple([slab[:rows] for slab in self._slabs])

    def address(self, output: int) -> int:
        """Of an output's first row."""
        return address_of(self._slabs[output])

    def release(self, free: Callable[[np.ndarray], None]) -> None:
        """Hand the memory of a free set back to whom it was allocated from; the set is of no use afterwards."""
        self._slabs = ()
        free(self._block)
        self._block = np.empty(0, np.uint8)


class OutputPool:
    """Sets of one instance, made as they are needed, up to a bound."""

    def __init__(
        self, layouts: Sequence[RowLayout], rows: int, allocate: Allocate = _allocate, *, max_sets: int = MAX_SETS
    ) -> None:
        """``rows`` is the most that a batch may have."""
        self.rows = rows
        self._allocate = allocate
        self._max_sets = max_sets
        self._layouts = tuple(layouts)
        self._sets: list[OutputBuffers] = []

    @property
    def sets(self) -> tuple[OutputBuffers, ...]:
        """All there are, leased and free."""
        return tuple(self._sets)

    def take(self) -> OutputBuffers | None:
        """A free set, the oldest first, so that few are used and stay in the processor's cache; None at the bound."""
        for buffers in self._sets:
            if buffers.is_free:
                return buffers
        if len(self._sets) == self._max_sets:
            return None
        self._sets.append(OutputBuffers(self._layouts, self.rows, self._allocate))
        return self._sets[-1]


def set_nbytes(layouts: Sequence[RowLayout], rows: int) -> int:
    """How much memory a set takes."""
    return offsets(layouts, rows, _ALIGNMENT)[-1]


def can_tell_leases() -> bool:
    """Whether references are counted exactly: by CPython with its lock, under which nobody can make one meanwhile."""
    is_locked = getattr(sys, "_is_gil_enabled", None)
    return sys.implementation.name == "cpython" and (is_locked is None or bool(is_locked()))
