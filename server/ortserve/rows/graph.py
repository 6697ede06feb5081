"""What a model file says: graphs, nodes, attributes, constants and functions. ``reading`` makes them."""

from collections.abc import Iterator, Mapping, Sequence
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


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes so that each comes after those whose outputs it reads. ONNX Runtime sorts them, too.

    Nodes of a cycle are left out.
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    needs = [{makers[name] for name in _names_read(node) if name in makers} for node in nodes]
    if all(maker < index for index, needed in enumerate(needs) for maker in needed):
        return tuple(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for index, needed in enumerate(needs):
        for maker in needed:
            readers[maker].append(index)
    left = [len(needed) for needed in needs]
    ready = [index for index, count in enumerate(left) if not count]
    for index in ready:  # grows
        for reader in readers[index]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return tuple(nodes[index] for index in ready)


def _names_read(node: Node) -> Iterator[str]:
    """The names that a node reads, also in its graphs."""
    yield from node.inputs
    for value in node.attributes.values():
        if isinstance(value, Graph):
            for inner in value.nodes:
                yield from _names_read(inner)
            yield from (output.name for output in value.outputs)
