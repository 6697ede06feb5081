"""Replaces nodes that ONNX Runtime 1.31.1 computes wrongly, or with which a request could end the process.

- **Divisions of integers.** The smallest INT32 or INT64 divided by -1 is a processor fault: a request with these values
  would end the server. Where the divisor is -1, the new nodes negate the dividend, which leaves the smallest number
  unchanged.
- **Gather of texts.** Only the first text of each slice that an index selects is copied; the others stay empty.
  GatherND copies all of them.

All other results stay the same.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from ortserve.model_file.editing import GRAPH_NODE, Edits, write_constant, write_node
from ortserve.model_file.graph import INT32, INT64, STRING, Graph, Model, Node, Tensor, names_read
from ortserve.rows import find_sizes

_MIN_OPSET_OF_DIVISIONS: Final = 9
"""Earlier operator sets have no operator Where."""
_MIN_OPSET_OF_GATHERS: Final = 12
"""Before it GatherND has no ``batch_dims``."""
_DIVISIONS: Final = frozenset({"Div", "Mod"})
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


def replacement_edits(model: Model) -> Edits:
    """The edits that replace such nodes of the main graph."""
    return {**_division_edits(model), **_gather_edits(model)}


def _division_edits(model: Model) -> Edits:
    """The edits that replace the divisions whose operands depend on the values of a request."""
    graph = model.graph
    divides = any(node.op in _DIVISIONS and not node.domain for node in graph.nodes)
    if not divides or model.opsets.get("", 0) < _MIN_OPSET_OF_DIVISIONS:
        return {}
    types = _element_types(graph)
    requested = {declared.name for declared in graph.inputs}
    edits = {}
    for node in graph.nodes:
        if node.op in _SIZES or requested.isdisjoint(names_read(node)):
            continue
        requested.update(node.outputs)
        if node.op not in _DIVISIONS or node.domain or len(node.inputs) != 2 or not node.outputs:
            continue
        dividend, divisor = node.inputs
        dtype = types.get(dividend)
        if dtype not in _SMALLEST:
            continue
        can_fault = (dividend in requested or _may_contain(graph, dividend, _SMALLEST[dtype])) and (
            divisor in requested or _may_contain(graph, divisor, -1)
        )
        if can_fault:
            edits[GRAPH_NODE, node.outputs[0]] = b"".join(_without_fault(node, dtype))
    return edits


def _element_types(graph: Graph) -> dict[str, int]:
    """The element types of tensors, as far as they follow from inputs, constants and nodes of ONNX."""
    types = {declared.name: declared.dtype for declared in graph.inputs if declared.is_tensor}
    types |= {name: tensor.dtype for name, tensor in graph.constants.items()}
    for node in graph.nodes:
        dtype = _type_of(node, types)
        if dtype is not None:
            types |= dict.fromkeys(node.outputs if node.op == "Split" else node.outputs[:1], dtype)
        if node.op == "TopK":
            types |= dict.fromkeys(node.outputs[1:], INT64)
    return types


def _type_of(node: Node, types: dict[str, int]) -> int | None:
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


def _may_contain(graph: Graph, name: str, number: int) -> bool:
    """Whether an operand that does not depend on the values of requests may contain a number."""
    known = graph.constants.get(name)
    if known is None:
        made = next((node for node in graph.nodes if name in node.outputs), None)
        value = made.attributes.get("value") if made is not None and made.op == "Constant" else None
        known = value if isinstance(value, Tensor) else None
    return known is None or known.elements is None or number in known.elements


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


def _gather_edits(model: Model) -> Edits:
    """The edits that replace each Gather of texts whose slices may have more than one text."""
    graph = model.graph
    gathers = [node for node in graph.nodes if node.op == "Gather" and not node.domain and len(node.inputs) == 2]
    if not gathers or model.opsets.get("", 0) < _MIN_OPSET_OF_GATHERS:
        return {}
    types = _element_types(graph)
    if STRING not in types.values() and not any(node.domain == _MAKES_TEXTS for node in graph.nodes):
        return {}
    known = find_sizes(model).tensors.get(id(graph), {})
    edits = {}
    for node in gathers:
        value = known.get(node.inputs[0])
        dtype = types.get(node.inputs[0], value.dtype if value is not None else 0)
        rank = len(value.dims) if value is not None and value.dims is not None else None
        axis = node.attributes.get("axis", 0)
        if dtype != STRING or not node.outputs or not isinstance(axis, int):
            continue
        if axis < 0 and rank is not None:
            axis += rank
        if axis >= 0 and axis + 1 != rank:
            edits[GRAPH_NODE, node.outputs[0]] = b"".join(_as_gather_nd(node, axis))
    return edits


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
