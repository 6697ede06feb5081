"""Replaces divisions of integers in models, so that no request can end the process.

The smallest INT32 or INT64 divided by -1 is a processor fault, which ONNX Runtime 1.31.1 does not prevent: a request
with these values would end the server. So this module replaces such divisions in the serialized model before a session
is opened, as ``zip_maps`` replaces ZipMap. Where the divisor is -1, the new nodes negate the dividend, which leaves the
smallest number unchanged. All other results stay the same.
"""

from collections.abc import Iterable
from typing import Final

from ortserve.model_file.editing import GRAPH_NODE, Edits, write_constant, write_node
from ortserve.model_file.graph import INT32, INT64, Graph, Model, Node, Tensor, names_read

_MIN_OPSET: Final = 9
"""Earlier operator sets have no operator Where."""
_DIVISIONS: Final = frozenset({"Div", "Mod"})
_FAULTING: Final = frozenset({INT32, INT64})
"""Element types whose division can fault. Smaller types are divided as INT32, in which their quotient cannot
overflow."""
_SIZES: Final = frozenset({"Shape", "Size"})
"""Operators whose results are never negative."""
_INDICES: Final = frozenset({"ArgMax", "ArgMin", "NonZero"}) | _SIZES
_OF_FIRST_OPERAND: Final = """
    Abs Add BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Clip Compress Concat CumSum Div Expand Flatten Gather
    GatherElements GatherND Identity Max Min Mod Mul Neg Pad Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Relu
    Reshape ReverseSequence ScatterElements ScatterND Sign Slice Split Squeeze StringConcat StringNormalizer Sub Sum
    Tile TopK Transpose Trilu Unique Unsqueeze
"""
_TYPED_BY: Final = {"OneHot": 2, "Where": 1} | dict.fromkeys(_OF_FIRST_OPERAND.split(), 0)
"""Operators whose results have the type of an operand, with the operand's index."""


def division_edits(model: Model) -> Edits:
    """The edits that replace the divisions of the main graph whose operands depend on the values of a request."""
    graph = model.graph
    divides = any(node.op in _DIVISIONS and not node.domain for node in graph.nodes)
    if not divides or model.opsets.get("", 0) < _MIN_OPSET:
        return {}
    types = element_types(graph)
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
        if dtype not in _FAULTING:
            continue
        if dividend in requested and (divisor in requested or _may_be_minus_one(graph, divisor)):
            edits[GRAPH_NODE, node.outputs[0]] = b"".join(_without_fault(node, dtype))
    return edits


def element_types(graph: Graph) -> dict[str, int]:
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


def _may_be_minus_one(graph: Graph, name: str) -> bool:
    """Whether a divisor that does not depend on requests may contain -1."""
    known = graph.constants.get(name)
    if known is None:
        made = next((node for node in graph.nodes if name in node.outputs), None)
        value = made.attributes.get("value") if made is not None and made.op == "Constant" else None
        known = value if isinstance(value, Tensor) else None
    return known is None or known.elements is None or -1 in known.elements


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
