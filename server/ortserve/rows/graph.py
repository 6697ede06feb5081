"""What a model file says: graphs, nodes, attributes, constants and functions. ``reading`` makes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.rows.symbols import Constant

FLOAT: Final = 1
UINT8: Final = 2
INT8: Final = 3
INT32: Final = 6
INT64: Final = 7
STRING: Final = 8
BOOL: Final = 9
DOUBLE: Final = 11
INTEGERS: Final = frozenset({2, 3, 4, 5, 6, 7, 12, 13, 21, 22})
"""Element types (``TensorProto.DataType``)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A constant. ``elements`` are there for small ones of numbers only; ``dims`` are None where they are not known."""

    dtype: int
    dims: tuple[int, ...] | None
    elements: tuple[Constant, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """An attribute of a node in a function, which has the value of the function's attribute of this name."""

    name: str


Attribute: TypeAlias = "int | float | str | Tensor | Graph | Reference | tuple[int | float | str, ...] | None"
"""The value of an attribute; None for one of a kind that no rule reads."""


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    overload: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """An input or output of a graph.

    Attributes:
        dims: Sizes that are fixed, names of those that are not, None for those without a name. None where no shape is
            declared, or where it is no tensor.
        is_tensor: Whether it is a plain tensor.
    """

    name: str
    dtype: int
    dims: tuple[int | str | None, ...] | None
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]


@dataclass(frozen=True, slots=True)
class Function:
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    defaults: Mapping[str, Attribute]
    opsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Model:
    graph: Graph
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str, str], Function]
