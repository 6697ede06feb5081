"""Tensors that a caller leaves in, or wants written to, memory that it shares with the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A part of a registered region; ``offset``, from the region's own beginning, and ``byte_size`` are at least 0."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class RegionInput:
    """An input whose bytes lie in a region, in the layout of a binary tensor."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    span: RegionSpan


@dataclass(frozen=True, slots=True)
class RegionUse:
    """What of one request lies in regions: inputs to be read, and by its name each output that is to be written."""

    inputs: Sequence[RegionInput]
    outputs: Mapping[str, RegionSpan]


class RegionMemory(Protocol):
    """The bytes of a region, wherever they lie. Any thread; its owner sees to it that it is open meanwhile.

    The caller on the other side may write, shrink or remove it at any moment, so nothing here hands out its memory.

    Attributes:
        may_wait: Whether a copy may wait for something first, so that none is made on the event loop.
    """

    may_wait: bool

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy. Raises ServeError: invalid_input, when it is no longer that large."""
        ...

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raises ServeError: invalid_input, when it is no longer that large; internal, when it cannot be written."""
        ...

    def close(self) -> None:
        """Let go of it; nothing else is called afterwards."""
        ...
