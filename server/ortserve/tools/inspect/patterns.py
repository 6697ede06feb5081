"""Patterns of nodes in a graph, found by walking from value to value. Pure.

Each function gets the ``Wiring`` of one graph, usually as ONNX Runtime optimized it, and returns the nodes by which it
recognizes the pattern: one node per occurrence.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ortserve.model_file.graph import BOOL, DOUBLE, INT64, Graph, Node, Tensor

_CONV: Final = frozenset(
    {
        *("Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv", "QLinearConv", "ConvInteger"),
        *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "BatchNormalization"),
        *("ReorderInput", "ReorderOutput"),
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
_BEFORE_SOFTMAX: Final = _ELEMENTWISE | _MOVES | {"Where", "Max", "Min"}
_MATMUL: Final = frozenset({"MatMul", "FusedMatMul", "TransposeMatMul", "Einsum"})
_BOOLEANS: Final = frozenset(
    {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
)
_INTEGERS: Final = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
_FARTHEST: Final = 10
"""Nodes between the multiplications of an attention and its Softmax."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A graph with the maker and the readers of each value."""

    graph: Graph
    makers: dict[str, Node]
    readers: dict[str, list[Node]]

    @staticmethod
    def of(graph: Graph) -> "Wiring":
        """The wiring of a graph."""
        makers: dict[str, Node] = {}
        readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            makers.update((name, node) for name in node.outputs if name)
            for name in node.inputs:
                if name:
                    readers.setdefault(name, []).append(node)
        return Wiring(graph, makers, readers)

    def maker(self, node: Node, index: int, *operators: str) -> Node | None:
        """The node that makes an input, if it is one of these operators; any if none are given."""
        made = self.makers.get(node.inputs[index]) if index < len(node.inputs) else None
        return made if made is not None and (not operators or made.op in operators) else None

    def reader(self, node: Node, *operators: str) -> Node | None:
        """A node of one of these operators that reads the first output."""
        found = self.readers.get(node.outputs[0], []) if node.outputs else []
        return next((reader for reader in found if reader.op in operators), None)

    def is_constant(self, name: str) -> bool:
        """Whether a value is part of the model."""
        maker = self.makers.get(name)
        return name in self.graph.constants or (maker is not None and maker.op == "Constant")

    def computed(self, node: Node) -> list[str]:
        """The inputs of a node that are not part of the model."""
        return [name for name in node.inputs if name and not self.is_constant(name)]

    def why_shared(self, inner: list[Node], last: Node) -> str:
        """Which value between these nodes is needed elsewhere, so that no fusion may remove it; empty if none is."""
        outputs = {declared.name for declared in self.graph.outputs}
        own = {id(node) for node in (*inner, last)}
        for node in inner:
            for name in node.outputs:
                if name in outputs:
                    return f"'{name}' within it is an output of the model"
                for reader in self.readers.get(name, []):
                    if id(reader) not in own:
                        return f"'{name}' within it is read by {reader.op} '{reader.name or reader.outputs[0]}', too"
        return ""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence of a pattern: the node that names it, and why no fusion may take it, as far as known."""

    node: Node
    because: str = ""


def attentions(wiring: Wiring) -> Iterator[Occurrence]:
    """Softmax between two multiplications of computed matrices, also over masks, scales and shapes."""
    for node in wiring.graph.nodes:
        if node.op in ("Softmax", "BiasSoftmax"):
            before = next(iter(_upwards(wiring, node, _MATMUL, _BEFORE_SOFTMAX)), None)
            after = next(iter(_downwards(wiring, node, _MATMUL, _BEFORE_SOFTMAX | {"Dropout"})), None)
            if before is not None and after is not None:
                outputs = {declared.name for declared in wiring.graph.outputs}
                leaves = node.outputs[0] in outputs
                yield Occurrence(node, f"'{node.outputs[0]}' within it is an output of the model" if leaves else "")


def attention_heads(wiring: Wiring, softmax: Node) -> tuple[int, int] | None:
    """The number of heads of an attention and the width of all, from the Reshape of its query; None if free."""
    for product in _upwards(wiring, softmax, _MATMUL, _BEFORE_SOFTMAX):
        for reshape in _upwards(wiring, product, frozenset({"Reshape"}), _ELEMENTWISE | {"Transpose"}):
            joined = wiring.maker(reshape, 1, "Concat")
            parts = joined.inputs if joined is not None else reshape.inputs[1:2]
            sizes = [size for part in parts for size in _value(wiring, part) or (0,)]
            if len(sizes) != 4:
                continue
            heads, size = int(sizes[2]), int(sizes[3])
            width = heads * size if heads > 0 and size > 0 else _projected_width(wiring, reshape)
            if width and max(heads, size) > 0:
                return (heads if heads > 0 else width // size), width
    return None


def _projected_width(wiring: Wiring, reshape: Node) -> int:
    """The width of the multiplication by a constant before a Reshape; 0 if there is none."""
    for product in _upwards(wiring, reshape, frozenset({"MatMul", "Gemm"}), frozenset({"Add"})):
        for name in product.inputs[1:2]:
            tensor = wiring.graph.constants.get(name)
            if tensor is not None and tensor.dims:
                return tensor.dims[-1]
    return 0


def norms(wiring: Wiring) -> Iterator[tuple[str, Occurrence]]:
    """``layer_norm`` and ``rms_norm`` in pieces: x, centred or not, over the root of the mean of its squares."""
    for root in wiring.graph.nodes:
        if root.op != "Sqrt":
            continue
        add = wiring.maker(root, 0, "Add")
        mean = add and next((made for index in (0, 1) if (made := wiring.maker(add, index, "ReduceMean"))), None)
        square = mean and wiring.maker(mean, 0, "Pow", "Mul")
        if add is None or mean is None or square is None:
            continue
        if square.op == "Mul" and len(set(square.inputs)) > 1:
            continue
        if square.op == "Pow" and _value(wiring, square.inputs[1]) not in ((2,), None):
            continue
        last = wiring.reader(root, "Div", "Reciprocal", "Mul")
        if last is None:
            continue
        centred = wiring.maker(square, 0, "Sub")
        if centred is not None and wiring.maker(centred, 1, "ReduceMean") is not None:
            inner = [centred, square, mean, add, root]
            yield "layer_norm", Occurrence(last, wiring.why_shared(inner, last))
        else:
            yield "rms_norm", Occurrence(last, wiring.why_shared([square, mean, add, root], last))


def gelus(wiring: Wiring) -> Iterator[Occurrence]:
    """GELU in pieces: a value times its error function, or the approximation of that by Tanh."""
    for node in wiring.graph.nodes:
        plus = wiring.reader(node, "Add") if node.op in ("Erf", "Tanh") else None
        product = plus and wiring.reader(plus, "Mul")
        scaled = wiring.maker(node, 0, "Div", "Mul")
        if plus is None or product is None or scaled is None or len(wiring.computed(plus)) != 1:
            continue
        if node.op == "Tanh":
            cubic = next((made for i in range(len(scaled.inputs)) if (made := wiring.maker(scaled, i, "Add"))), None)
            if cubic is None or len(wiring.computed(cubic)) != 2:
                continue
        yield Occurrence(node, wiring.why_shared([scaled, node, plus], product))


def layout_transposes(wiring: Wiring) -> Iterator[Occurrence]:
    """Transposes between channels first and channels last, beside convolutions or only elementwise operators away."""
    for node in wiring.graph.nodes:
        order = node.attributes.get("perm")
        if node.op != "Transpose" or not isinstance(order, tuple) or len(order) < 3 or order[0] != 0:
            continue
        last = len(order) - 1
        if order[1] != last and order[last] != 1:
            continue
        near = [*_upwards(wiring, node, _CONV, _ELEMENTWISE), *_downwards(wiring, node, _CONV, _ELEMENTWISE)]
        if near:
            yield Occurrence(node)


def casts_back(wiring: Wiring) -> Iterator[Occurrence]:
    """Casts that undo another one: nothing but movements of elements is between them."""
    types = element_types(wiring)
    for node in wiring.graph.nodes:
        if node.op != "Cast":
            continue
        name = node.inputs[0]
        for _ in range(_FARTHEST):
            made = wiring.makers.get(name)
            if made is None:
                break
            if made.op == "Cast":
                if types.get(made.inputs[0]) == node.attributes.get("to"):
                    yield Occurrence(node)
                break
            if made.op not in _MOVES:
                break
            name = made.inputs[0]


def element_types(wiring: Wiring) -> dict[str, int]:
    """Element types of values, as far as they follow from those of inputs and constants."""
    graph = wiring.graph
    types = {name: tensor.dtype for name, tensor in graph.constants.items()}
    types.update((declared.name, declared.dtype) for declared in graph.inputs if declared.is_tensor)
    for node in graph.nodes:
        to, value = node.attributes.get("to"), node.attributes.get("value")
        if node.op == "Cast" and isinstance(to, int):
            made = to
        elif isinstance(value, Tensor) and node.op in ("Constant", "ConstantOfShape"):
            made = value.dtype
        elif node.op in _BOOLEANS or node.op in _INTEGERS:
            made = BOOL if node.op in _BOOLEANS else INT64
        else:
            data = node.inputs[1:] if node.op in ("Where", "DequantizeLinear") else node.inputs
            known = next((name for name in data if name in types), "")
            if not known or node.domain == "ai.onnx.ml" or node.op.startswith(("Quantize", "QLinear", "Dynamic")):
                continue
            made = types[known]
        types.update((name, made) for name in node.outputs[:1])
    return types


def double_nodes(wiring: Wiring) -> list[Node]:
    """Nodes that compute in double precision."""
    types = element_types(wiring)
    return [
        node
        for node in wiring.graph.nodes
        if node.op not in ("Cast", "Constant", "Identity")
        and any(types.get(name) == DOUBLE for name in (*node.outputs, *node.inputs) if name)
    ]


def shape_nodes(wiring: Wiring) -> list[Node]:
    """Nodes that compute shapes: whatever reads only results of Shape, and constants."""
    found: list[Node] = []
    shapes: set[str] = set()
    for node in wiring.graph.nodes:
        read = wiring.computed(node)
        if node.op in ("Shape", "Size") or (read and shapes.issuperset(read)):
            found.append(node)
            shapes.update(node.outputs)
    return found


def _upwards(wiring: Wiring, node: Node, goals: frozenset[str], through: frozenset[str]) -> list[Node]:
    """The nearest nodes of some operators before a node, through others. Multiplications need two computed inputs."""

    def before(at: Node) -> Iterable[Node]:
        return (wiring.makers[name] for name in at.inputs if name in wiring.makers)

    return _search(wiring, node, goals, through, before)


def _downwards(wiring: Wiring, node: Node, goals: frozenset[str], through: frozenset[str]) -> list[Node]:
    """The same after a node."""

    def after(at: Node) -> Iterable[Node]:
        return (reader for name in at.outputs for reader in wiring.readers.get(name, ()))

    return _search(wiring, node, goals, through, after)


def _search(
    wiring: Wiring,
    node: Node,
    goals: frozenset[str],
    through: frozenset[str],
    step: Callable[[Node], Iterable[Node]],
) -> list[Node]:
    found: list[Node] = []
    seen = {id(node)}
    level = [node]
    for _ in range(_FARTHEST):
        nearby = list({id(other): other for at in level for other in step(at) if id(other) not in seen}.values())
        seen.update(map(id, nearby))
        level = []
        for other in nearby:
            if other.op in goals and (goals is not _MATMUL or len(wiring.computed(other)) >= 2):
                found.append(other)
            elif other.op in through:
                level.append(other)
    return found


def _value(wiring: Wiring, name: str) -> tuple[int | float, ...] | None:
    """The elements of a small constant."""
    tensor = wiring.graph.constants.get(name)
    maker = wiring.makers.get(name)
    if tensor is None and maker is not None and maker.op == "Constant":
        value = maker.attributes.get("value")
        tensor = value if isinstance(value, Tensor) else None
    return None if tensor is None or tensor.elements is None else tuple(float(each) for each in tensor.elements)
