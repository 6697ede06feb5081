"""The record of a model file: graphs, nodes, attributes, constants and functions. ``reading`` creates it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Final, TypeAlias

FLOAT: Final = 1
UINT8: Final = 2
INT8: Final = 3
INT32: Final = 6
INT64: Final = 7
STRING: Final = 8
BOOL: Final = 9
FLOAT16: Final = 10
DOUBLE: Final = 11
UINT32: Final = 12
UINT64: Final = 13
BFLOAT16: Final = 16
INTEGERS: Final = frozenset({2, 3, 4, 5, 6, 7, 12, 13, 21, 22})
"""The element types of integers. These constants are numbers of ``TensorProto.DataType``."""
ELEMENT_TYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("float", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 0), 9: ("bool", 8), 10: ("float16", 16), 11: ("double", 64), 12: ("uint32", 32),
    13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16), 17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8), 19: ("float8e5m2", 8), 20: ("float8e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4e2m1", 4), 24: ("float8e8m0", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""Name and number of bits of each element type. Strings have no fixed size."""

Rational: TypeAlias = int | Fraction
"""A number in a model file; whole numbers are ``int``."""

Dims: TypeAlias = tuple[int | str | None, ...]
"""A declared shape: the number of a fixed size, the name of a free size, None for a free size without a name."""


def rational(value: Rational) -> Rational:
    """A number as a ``Rational``: a whole fraction becomes an integer."""
    # ``Fraction`` has an abstract base class, for which isinstance is slow.
    return value.numerator if type(value) is Fraction and value.denominator == 1 else value


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in the file (ONNX's ``TensorProto``): an initializer, or the value of an attribute.

    Only small tensors of numbers have ``elements``; ``dims`` is None if the shape is unknown.
    """

    dtype: int
    dims: tuple[int, ...] | None
    elements: tuple[Rational, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a function's attribute of this name, whose value an attribute of a node in the function takes."""

    name: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A long list that no analysis needs, such as the nodes of a tree ensemble."""


Attribute: TypeAlias = "int | float | str | Tensor | Graph | Reference | Skipped | tuple[int | float | str, ...] | None"
"""The value of an attribute; None for kinds that no analysis reads."""


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
        dims: The declared shape of a plain tensor; None for other types, and without a declared shape.
        is_tensor: Whether the type is a plain tensor.
        denotations: The purpose of each axis in ``dims``, such as ``DATA_BATCH``; usually empty texts.
        lacks_shape: Whether a plain or optional tensor is declared without a shape.
        element_dims: The declared shape of the tensors in a sequence; None for other types, and without a shape.
        is_map_sequence: Whether the type is a sequence of maps.
    """

    name: str
    dtype: int
    dims: Dims | None
    is_tensor: bool
    denotations: tuple[str, ...] = ()
    lacks_shape: bool = False
    element_dims: Dims | None = None
    is_map_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph. Each node comes after the nodes whose outputs it reads.

    Attributes:
        inner_dims: The declared shapes of results of nodes, as far as a size is fixed or has a name (``value_info``).
    """

    nodes: tuple[Node, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()
    inner_dims: Mapping[str, Dims] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    defaults: Mapping[str, Attribute]
    opsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file with weights beside the model: the minimum size that it must have, and the tensor that needs it."""

    nbytes: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Model:
    """The record of a file.

    Attributes:
        graph: The main graph.
        opsets: Versions of operator sets by domain.
        functions: The model's own functions by domain, name and overload.
        external_files: Files with weights, by path relative to the model's folder.
        is_readable: Whether the file is an ONNX model. If not, the graph is empty.
        too_large: The reason why the graph is too large for analyses; empty if it is not.
        has_invalid_names: Whether a name is not valid UTF-8. The record has its invalid bytes escaped.
    """

    graph: Graph
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str, str], Function] = field(default_factory=dict)
    external_files: Mapping[str, ExternalFile] = field(default_factory=dict)
    is_readable: bool = True
    too_large: str = ""
    has_invalid_names: bool = False


UNREADABLE: Final = Model(Graph(), {}, is_readable=False)
"""The record of a file in another format, or of no file."""


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sort nodes so that each comes after the nodes whose outputs it reads, as ONNX Runtime does.

    Nodes of a cycle, and nodes that depend on them, are left out.
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    needs = [{makers[name] for name in names_read(node) if name in makers} for node in nodes]
    if all(maker < index for index, needed in enumerate(needs) for maker in needed):
        return tuple(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for index, needed in enumerate(needs):
        for maker in needed:
            readers[maker].append(index)
    left = [len(needed) for needed in needs]
    ready = [index for index, count in enumerate(left) if not count]
    for index in ready:  # the loop appends to ``ready``
        for reader in readers[index]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return tuple(nodes[index] for index in ready)


def all_graphs(model: Model) -> Iterator[Graph]:
    """Yield the main graph, and all graphs that are attributes of nodes."""
    pending = [model.graph, *(graph for function in model.functions.values() for graph in graphs_of(function.nodes))]
    while pending:
        graph = pending.pop()
        yield graph
        pending += graphs_of(graph.nodes)


def all_nodes(model: Model) -> Iterator[Node]:
    """Yield the nodes of all graphs and functions."""
    for graph in all_graphs(model):
        yield from graph.nodes
    for function in model.functions.values():
        yield from function.nodes


def makers_of(nodes: Iterable[Node]) -> dict[str, Node]:
    """The nodes that make tensors, by the tensor's name. Outputs that are left out have an empty name."""
    return {name: node for node in nodes for name in node.outputs}


def graphs_of(nodes: Iterable[Node]) -> Iterator[Graph]:
    """The graphs that are attributes of these nodes, without graphs nested in them."""
    return (value for node in nodes for value in node.attributes.values() if isinstance(value, Graph))


def names_read(node: Node) -> Iterator[str]:
    """Yield the names that a node reads, including those that its graphs read from outside.

    A graph may give names of the outer graph to its own tensors, even those of its node's outputs.
    """
    yield from node.inputs
    for graph in graphs_of([node]):
        own = {*graph.constants, *(given.name for given in graph.inputs)}
        own.update(name for inner in graph.nodes for name in inner.outputs)
        read = chain.from_iterable(map(names_read, graph.nodes))
        yield from (name for name in (*read, *(output.name for output in graph.outputs)) if name not in own)


def is_plain_product(equation: str) -> bool:
    """Whether an equation of Einsum is a product of matrices as MatMul computes it."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "".join(sorted(letter for letter in set(terms) - {","} if terms.count(letter) == 1))
    first, _, second = terms.partition(",")
    batch, summed = first[:-2], first[-1:]
    return second[:-1] == batch + summed and result == first[:-1] + second[-1:]
