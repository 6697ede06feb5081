"""Finds patterns of nodes by following the values of a graph. Pure.

Each function gets the ``Wiring`` of one graph, usually an optimized one, and returns one node per occurrence of its
pattern.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.model_file.graph import Graph, Node
from ortserve.tools.inspect.placement import ValueType

_CONV: Final = frozenset(
    {
        *("Conv", "ConvTranspose", "QLinearConv", "ConvInteger", "BatchNormalization"),
        *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
    }
)
_ELEMENTWISE: Final = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Elu"),
        *("Cast", "Identity", "Pad", "QuantizeLinear", "DequantizeLinear"),
    }
)
_MOVES: Final = frozenset(
    {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Expand", "Flatten", "Gather", "Tile"}
)
_AROUND_SOFTMAX: Final = _ELEMENTWISE | _MOVES | {"Where", "Max", "Min", "Dropout"}
_MATMUL: Final = frozenset({"MatMul", "FusedMatMul", "Einsum"})
_PROJECTION: Final = frozenset({"MatMul", "Gemm", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"})
_FARTHEST: Final = 10
"""Limit of the steps between the multiplications of an attention and its Softmax."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A graph with the node that computes each value, the nodes that read it, and the names of constants."""

    graph: Graph
    constants: frozenset[str]
    makers: Mapping[str, Node]
    readers: Mapping[str, Sequence[Node]]

    @staticmethod
    def of(graph: Graph) -> "Wiring":
        """The wiring of a graph."""
        makers = {name: node for node in graph.nodes for name in node.outputs if name}
        constants = graph.constants.keys() | {name for name, node in makers.items() if node.op == "Constant"}
        readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        return Wiring(graph, frozenset(constants), makers, readers)

    def before(self, node: Node) -> list[Node]:
        """The nodes whose results a node reads."""
        return [self.makers[name] for name in node.inputs if name in self.makers]

    def after(self, node: Node) -> list[Node]:
        """The nodes that read results of a node."""
        return [reader for name in node.outputs for reader in self.readers.get(name, ()) if name]

    def computed(self, node: Node) -> list[str]:
        """The inputs of a node that are not constants."""
        return [name for name in node.inputs if name and name not in self.constants]


def attentions(wiring: Wiring) -> Iterator[tuple[Node, Node]]:
    """Each Softmax between two products of computed matrices, with the second product. Masks and scales are skipped."""
    for node in wiring.graph.nodes:
        if node.op in ("Softmax", "BiasSoftmax"):
            sides = [_nearest(step, node, _MATMUL, _AROUND_SOFTMAX) for step in (wiring.before, wiring.after)]
            first, second = ([one for one in side if len(wiring.computed(one)) >= 2] for side in sides)
            if first and second:
                yield node, second[0]


def heads_and_width(wiring: Wiring, product: Node, values: Mapping[str, ValueType]) -> tuple[int, int] | None:
    """The number of heads of an attention, and their total width. None if shapes do not determine them.

    Args:
        wiring: The wiring of the graph.
        product: The second product of the attention, which computes the results of each head.
        values: Element types and sizes of values.
    """
    for projection in _nearest(wiring.after, product, _PROJECTION, _ELEMENTWISE | _MOVES):
        mixed = values.get(product.outputs[0])
        weights = [values[name].dims for name in projection.inputs[1:2] if name in values]
        if mixed and mixed.dims and mixed.dims[-1] and weights and weights[0]:
            width = weights[0][0]
            return width // mixed.dims[-1], width
    return None


def norms(wiring: Wiring) -> Iterator[tuple[str, Node]]:
    """``layer_norm`` and ``rms_norm`` in pieces: x, centred or not, divided by its root mean square."""
    for root in wiring.graph.nodes:
        chain = _chain(wiring, root, "Sqrt", "Add", "ReduceMean", "Pow Mul")
        last = _first(wiring.after(root), "Div Reciprocal Mul")
        if chain and last is not None and (chain[-1].op == "Pow" or len(set(chain[-1].inputs)) == 1):
            yield "layer_norm" if _chain(wiring, chain[-1], "Pow Mul", "Sub", "ReduceMean") else "rms_norm", last


def gelus(wiring: Wiring) -> Iterator[tuple[str, Node]]:
    """``gelu`` in pieces: a value times its error function, or times the approximation of this by Tanh."""
    for node in wiring.graph.nodes:
        plus = _first(wiring.after(node), "Add") if node.op in ("Erf", "Tanh") else None
        if plus is None or len(wiring.computed(plus)) != 1 or _first(wiring.after(plus), "Mul") is None:
            continue
        scaled = _chain(wiring, node, node.op, "Div Mul")
        cubic = _chain(wiring, node, node.op, "Div Mul", "Add")
        if (node.op == "Erf" and scaled) or (cubic and len(wiring.computed(cubic[-1])) == 2):
            yield "gelu", node


def layout_transposes(wiring: Wiring) -> Iterator[Node]:
    """Transposes between channels first and last, with only elementwise operators between them and a convolution."""
    for node in wiring.graph.nodes:
        order = node.attributes.get("perm")
        if node.op != "Transpose" or not isinstance(order, tuple) or len(order) < 3 or order[0] != 0:
            continue
        is_layout = order[1] == len(order) - 1 or order[-1] == 1
        if is_layout and any(_nearest(step, node, _CONV, _ELEMENTWISE) for step in (wiring.before, wiring.after)):
            yield node


def casts_back(wiring: Wiring, values: Mapping[str, ValueType]) -> Iterator[Node]:
    """Casts that undo another Cast. Between the two are only operators that move elements."""
    for node in wiring.graph.nodes:
        made = wiring.makers.get(node.inputs[0]) if node.op == "Cast" else None
        while made is not None and made.op in _MOVES:
            made = wiring.makers.get(made.inputs[0])
        source = made is not None and made.op == "Cast" and values.get(made.inputs[0])
        if source and source.dtype == node.attributes.get("to"):
            yield node


def shape_nodes(wiring: Wiring) -> Iterator[Node]:
    """Nodes that compute shapes: they read only constants and values computed from Shape."""
    shapes: set[str] = set()
    for node in wiring.graph.nodes:
        read = wiring.computed(node)
        if node.op in ("Shape", "Size") or (read and shapes.issuperset(read)):
            shapes.update(node.outputs)
            yield node


def _first(nodes: Sequence[Node], operators: str) -> Node | None:
    return next((node for node in nodes if node.op in operators.split()), None)


def _chain(wiring: Wiring, last: Node, *operators: str) -> list[Node]:
    """A node and its predecessors, one of each group of operators in turn; empty if there is no such chain."""
    chain: list[Node] = []
    nodes = [last]
    for wanted in operators:
        node = _first(nodes, wanted)
        if node is None:
            return []
        chain.append(node)
        nodes = wiring.before(node)
    return chain


def _nearest(
    step: Callable[[Node], Sequence[Node]], start: Node, goals: frozenset[str], through: frozenset[str]
) -> list[Node]:
    """The nearest nodes whose operator is in ``goals``, reached over nodes whose operator is in ``through``."""
    found: list[Node] = []
    seen, level = {id(start)}, [start]
    for _ in range(_FARTHEST):
        nearby = {id(node): node for at in level for node in step(at) if id(node) not in seen}
        seen |= nearby.keys()
        found += [node for node in nearby.values() if node.op in goals]
        level = [node for node in nearby.values() if node.op in through]
    return found
