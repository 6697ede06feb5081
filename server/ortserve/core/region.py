"""Tensors in memory that a caller shares with the server: inputs to read and outputs to write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A part of a registered region. ``offset`` is relative to the region; both numbers are at least 0."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class RegionInput:
    """An input in a region, in the layout of a binary tensor."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    span: RegionSpan


@dataclass(frozen=True, slots=True)
class RegionUse:
    """The tensors of one request in regions: inputs to read, and outputs to write by name."""

    inputs: Sequence[RegionInput]
    outputs: Mapping[str, RegionSpan]


class RegionMemory(Protocol):
    """The memory of a region. Any thread; the owner keeps it open during calls.

    The caller may write, shrink or remove the region at any time, so the methods copy and never return its memory.

    Attributes:
        may_wait: Whether a copy may block; then it must not run on the event loop.
    """

    may_wait: bool

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy. Raises ServeError: invalid_input, if the region has become too small."""
        ...

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy ``data``. Raises ServeError: invalid_input if the region is too small, internal if writing fails."""
        ...

    def close(self) -> None:
        """Release the memory. No other method is called afterwards."""
        ...
