"""Replaces nodes that ONNX Runtime 1.31.1 computes wrongly, or with which a request could end the process.

- **Divisions of integers.** The smallest INT32 or INT64 divided by -1 is a processor fault: a request with these values
  would end the server, and so would the load of a model with such constants. Where the divisor is -1, the new nodes
  negate the dividend, which leaves the smallest number unchanged.
- **Gather of texts.** Only the first text of each slice that an index selects is copied; the others stay empty.
  GatherND copies all of them.

All other results stay the same. A node of a function stays as it is if calls of the function give it values of
different types, or before operator set 9.
"""

from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from ortserve.engine.corrections.checked_node import FindTensors
from ortserve.model_file.editing import (
    GRAPH_NODE,
    Edits,
    Rewired,
    function_scope,
    inner_scope,
    write_constant,
    write_node,
)
from ortserve.model_file.graph import (
    INT32,
    INT64,
    STRING,
    Function,
    Graph,
    Model,
    Node,
    Tensor,
    all_graphs,
    all_nodes,
    names_read,
)
from ortserve.rows import Value, find_sizes

_MIN_OPSETS: Final = {"Div": 7, "Gather": 12, "Mod": 10}
"""The operators, with the first operator set in which divisions broadcast, or that has GatherND with ``batch_dims``."""
_WHERE_SET: Final = 9
"""The first operator set with Where."""
_SMALLEST: Final = {INT32: -(1 << 31), INT64: -(1 << 63)}
"""Element types whose division can fault, and their smallest numbers. Smaller types are divided as INT32, in which
their quotient cannot overflow."""
_SIZES: Final = frozenset({"Shape", "Size"})
"""Operators whose results are never negative."""
_MAKES_TEXTS: Final = "ai.onnx.ml"
"""The domain whose operators may make texts of numbers, such as LabelEncoder."""
_INDICES: Final = frozenset({"ArgMax", "ArgMin", "NonZero"}) | _SIZES
_OF_FIRST_OPERAND: Final = """
    Abs Add BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Clip Compress Concat CumSum Div Expand Flatten Gather
    GatherElements GatherND Identity Max Min Mod Mul Neg Pad Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Relu
    Reshape ReverseSequence ScatterElements ScatterND Sign Slice Split Squeeze StringConcat StringNormalizer Sub Sum
    Tile TopK Transpose Trilu Unique Unsqueeze
"""
_TYPED_BY: Final = {"OneHot": 2, "Where": 1} | dict.fromkeys(_OF_FIRST_OPERAND.split(), 0)
"""Operators whose results have the type of an operand, with the operand's index."""


def replacement_edits(model: Model, find_tensors: FindTensors | None = None) -> Edits:
    """The edits that replace such nodes of the main graph, of the graphs of If, Loop and Scan, and of functions.

    ``find_tensors`` is called for element types and numbers of axes that nodes do not show.
    """
    replaced = _Replaced(model, find_tensors or cache(lambda: find_sizes(model).tensors))
    replaced.visit(model.graph, "", _Known().inside(model.graph, is_requested=True, is_sized=False))
    return replaced.edits_of_all()


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known about tensors, by name, as far as it follows from inputs, constants and nodes of ONNX.

    Attributes:
        types: Element types; 0 if unknown.
        constants: The constants.
        requested: Whether a tensor depends on the values of a request.
        sized: Whether it depends on sizes of tensors.
    """

    types: MutableMapping[str, int] = field(default_factory=dict)
    constants: MutableMapping[str, Tensor] = field(default_factory=dict)
    requested: MutableMapping[str, bool] = field(default_factory=dict)
    sized: MutableMapping[str, bool] = field(default_factory=dict)

    def inside(self, graph: Graph, *, is_requested: bool, is_sized: bool) -> "_Known":
        """The same inside a graph, whose constants and inputs hide tensors outside. The flags are of its inputs."""
        inputs = {declared.name: declared.dtype if declared.is_tensor else 0 for declared in graph.inputs}
        fixed = dict.fromkeys(graph.constants, False)
        return _Known(
            ChainMap({name: tensor.dtype for name, tensor in graph.constants.items()} | inputs, self.types),
            ChainMap({**graph.constants}, self.constants),
            ChainMap(fixed | dict.fromkeys(inputs, is_requested), self.requested),
            ChainMap(fixed | dict.fromkeys(inputs, is_sized), self.sized),
        )


class _Replaced:
    """The edits, graph by graph."""

    def __init__(self, model: Model, find_tensors: FindTensors) -> None:
        self.edits: dict[tuple[int, str], bytes | Rewired] = {}
        self._find_tensors = find_tensors
        self._opset = model.opsets.get("", 0)
        self._has_texts = _has_texts(model)
        self._functions = model.functions
        self._called: dict[tuple[str, tuple[int, ...], bool, bool], tuple[int, ...]] = {}
        """The types of the results of functions, by scope, types of the operands, and what they depend on."""

    def edits_of_all(self) -> Edits:
        """The edits, without those of functions that are called with operands of different types."""
        calls = {(scope, types) for scope, types, *_ in self._called}
        several = tuple(scope for scope, count in Counter(scope for scope, _ in calls).items() if count > 1)
        return {key: edit for key, edit in self.edits.items() if not key[1].startswith(several)}

    def visit(self, graph: Graph, scope: str, known: _Known) -> None:
        """Find the nodes to replace in a graph and in those of its nodes.

        ``scope`` is the beginning of the names of its nodes in ``edits``; ``known`` is extended by its tensors.
        """
        types, requested, sized = known.types, known.requested, known.sized
        for node in graph.nodes:
            types.update(_types_of(node, types))
            value = node.attributes.get("value")
            if node.op == "Constant" and isinstance(value, Tensor):
                known.constants.update(dict.fromkeys(node.outputs, value))
            depends = node.op not in _SIZES and any(requested.get(name) for name in names_read(node))
            requested.update(dict.fromkeys(node.outputs, depends))
            is_sized = node.op in _SIZES or any(sized.get(name) for name in names_read(node))
            sized.update(dict.fromkeys(node.outputs, is_sized))
            for name, inner in node.attributes.items():
                if isinstance(inner, Graph):
                    within = known.inside(inner, is_requested=depends, is_sized=is_sized)
                    self.visit(inner, inner_scope(scope, node, name), within)
            if function := self._functions.get((node.domain, node.op, node.overload)):
                types.update(self._call(function, node, known, is_requested=depends, is_sized=is_sized))
            if node.domain or len(node.inputs) != 2 or not node.outputs:
                continue
            if self._opset < _MIN_OPSETS.get(node.op, self._opset + 1):
                continue
            nodes: Iterable[bytes] = ()
            if node.op == "Gather":
                nodes = self._whole_slices(graph, node, types)
            # ONNX Runtime divides constants at the load. Quotients of sizes, which are not negative, stay as they are.
            elif depends or not is_sized or node.inputs[1] in known.constants:
                nodes = self._division(graph, node, known)
            if replacement := b"".join(nodes):
                self.edits[GRAPH_NODE, scope + node.outputs[0]] = replacement

    def _call(
        self, function: Function, node: Node, known: _Known, *, is_requested: bool, is_sized: bool
    ) -> dict[str, int]:
        """Find the nodes to replace in a function that a node calls. Returns the types of the node's outputs."""
        given = tuple(known.types.get(name, 0) for name in node.inputs)
        scope = function_scope(node.domain, node.op, node.overload)
        call = scope, given, is_requested, is_sized
        if call not in self._called:
            self._called[call] = ()  # a function that calls itself gets no types of its results
            types = dict(zip(function.inputs, given, strict=False))
            inner = _Known(types, {}, dict.fromkeys(types, is_requested), dict.fromkeys(types, is_sized))
            opset = self._opset
            own = function.opsets.get("", opset)
            # The nodes need to be valid in both. ONNX Runtime rejects functions with constant integers before Where.
            self._opset = min(opset, own) if own >= _WHERE_SET else 0
            self.visit(Graph(function.nodes), scope, inner)
            self._opset = opset
            self._called[call] = tuple(types.get(name, 0) for name in function.outputs)
        return dict(zip(node.outputs, self._called[call], strict=False))

    def _value(self, graph: Graph, name: str) -> Value | None:
        return self._find_tensors().get(id(graph), {}).get(name)

    def _division(self, graph: Graph, node: Node, known: _Known) -> Iterable[bytes]:
        """The nodes in place of a division that can fault."""
        dividend, divisor = node.inputs
        dtype = known.types.get(dividend) or known.types.get(divisor)
        if not dtype:
            values = self._value(graph, dividend), self._value(graph, divisor)
            dtype = next((value.dtype for value in values if value is not None and value.dtype), 0)
        if dtype not in _SMALLEST:
            return ()

        def may_contain(name: str, number: int) -> bool:
            constant = None if known.requested.get(name) else known.constants.get(name)
            return constant is None or constant.elements is None or number in constant.elements

        can_fault = may_contain(dividend, _SMALLEST[dtype]) and may_contain(divisor, -1)
        if not can_fault:
            return ()
        return _without_fault(node, dtype) if self._opset >= _WHERE_SET else _without_where(node, dtype)

    def _whole_slices(self, graph: Graph, node: Node, types: Mapping[str, int]) -> Iterable[bytes]:
        """The nodes in place of a Gather of texts whose slices may have more than one text."""
        source = node.inputs[0]
        dtype, axis = types.get(source), node.attributes.get("axis", 0)
        if not self._has_texts or dtype not in (STRING, 0, None) or not isinstance(axis, int):
            return ()
        value = self._value(graph, source)
        if (dtype or (value.dtype if value is not None else 0)) != STRING:
            return ()
        rank = len(value.dims) if value is not None and value.dims is not None else None
        if axis < 0 and rank is not None:
            axis += rank
        return _as_gather_nd(node, axis) if axis >= 0 and axis + 1 != rank else ()


def _has_texts(model: Model) -> bool:
    """Whether an input, a constant or an operator of the model may have texts."""
    given = any(declared.dtype == STRING for declared in model.graph.inputs)
    nodes = (node.domain == _MAKES_TEXTS or node.attributes.get("to") == STRING for node in all_nodes(model))
    known = (tensor.dtype == STRING for graph in all_graphs(model) for tensor in graph.constants.values())
    return given or any(nodes) or any(known)


def _types_of(node: Node, types: Mapping[str, int]) -> dict[str, int]:
    """The element types of a node's outputs; 0 for an unknown type."""
    found = dict.fromkeys(node.outputs, 0)
    dtype = _type_of(node, types)
    if dtype is not None:
        found |= dict.fromkeys(node.outputs if node.op == "Split" else node.outputs[:1], dtype)
    if node.op == "TopK":
        found |= dict.fromkeys(node.outputs[1:], INT64)
    return found


def _type_of(node: Node, types: Mapping[str, int]) -> int | None:
    """The type of a node's first output; None if it is unknown."""
    if node.domain:
        return None
    if node.op in _INDICES:
        return INT64
    if node.op == "Cast":
        to = node.attributes.get("to")
        return to if isinstance(to, int) else None
    if node.op in ("Constant", "ConstantOfShape"):
        value = node.attributes.get("value")
        return value.dtype if isinstance(value, Tensor) else None
    at = _TYPED_BY.get(node.op, len(node.inputs))
    return types.get(node.inputs[at]) if at < len(node.inputs) else None


def _without_fault(node: Node, dtype: int) -> Iterable[bytes]:
    dividend, divisor = node.inputs
    output = node.outputs[0]
    one, minus_one, is_minus_one, safe, quotient, opposite = (
        f"{output}/{name}" for name in ("one", "minus_one", "is_minus_one", "safe", "quotient", "opposite")
    )
    yield write_constant(one, dtype, 1)
    yield write_constant(minus_one, dtype, -1)
    yield write_node("Equal", "", [divisor, minus_one], is_minus_one)
    yield write_node("Where", "", [is_minus_one, one, divisor], safe)
    if node.op == "Mod":  # the remainder is 0 for both divisors, 1 and -1
        fmod = 1 if node.attributes.get("fmod") else 0
        yield write_node("Mod", "", [dividend, safe], output, attributes={"fmod": fmod})
        return
    yield write_node("Div", "", [dividend, safe], quotient)
    yield write_node("Neg", "", [dividend], opposite)
    yield write_node("Where", "", [is_minus_one, opposite, quotient], output)


def _without_where(node: Node, dtype: int) -> Iterable[bytes]:
    """The nodes in place of a Div: ``a / (b + 2 * m) * (1 - 2 * m)``, where ``m`` is 1 if ``b`` is -1, and 0 if not."""
    dividend, divisor = node.inputs
    output = node.outputs[0]
    one, two, minus_one, is_minus_one, flag, twice, safe, quotient, sign = (
        f"{output}/{name}"
        for name in ("one", "two", "minus_one", "is_minus_one", "flag", "twice", "safe", "quotient", "sign")
    )
    for name, number in ((one, 1), (two, 2), (minus_one, -1)):
        yield write_constant(name, dtype, number)
    yield write_node("Equal", "", [divisor, minus_one], is_minus_one)
    yield write_node("Cast", "", [is_minus_one], flag, attributes={"to": dtype})
    yield write_node("Mul", "", [flag, two], twice)
    yield write_node("Add", "", [divisor, twice], safe)
    yield write_node("Div", "", [dividend, safe], quotient)
    yield write_node("Sub", "", [one, twice], sign)
    yield write_node("Mul", "", [quotient, sign], output)


def _as_gather_nd(node: Node, axis: int) -> Iterator[bytes]:
    """The indices with a last axis of 1, repeated for all elements of the axes before ``axis``."""
    source, given = node.inputs
    output = node.outputs[0]
    indices, one, shape, column_shape, column = (
        f"{output}/{name}" for name in ("indices", "one", "shape", "column_shape", "column")
    )
    yield write_node("Cast", "", [given], indices, attributes={"to": INT64})
    yield write_constant(one, INT64, 1, is_list=True)
    yield write_node("Shape", "", [indices], shape)
    yield write_node("Concat", "", [shape, one], column_shape, attributes={"axis": 0})
    yield write_node("Reshape", "", [indices, column_shape], column)
    if axis:
        start, end, source_shape, before, repeated_shape, repeated = (
            f"{output}/{name}" for name in ("start", "end", "source_shape", "before", "repeated_shape", "repeated")
        )
        yield write_constant(start, INT64, 0, is_list=True)
        yield write_constant(end, INT64, axis, is_list=True)
        yield write_node("Shape", "", [source], source_shape)
        yield write_node("Slice", "", [source_shape, start, end], before)
        yield write_node("Concat", "", [before, column_shape], repeated_shape, attributes={"axis": 0})
        yield write_node("Expand", "", [column, repeated_shape], repeated)
        column = repeated
    yield write_node("GatherND", "", [source, column], output, attributes={"batch_dims": axis})
