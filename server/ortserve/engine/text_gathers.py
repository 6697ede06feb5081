"""Opening models so that Gather returns whole slices of texts.

Gather of ONNX Runtime 1.31.1 copies only the first text of each slice that an index selects; the others stay empty.
GatherND copies all of them, so this module replaces such nodes in the serialized model before a session is made, as
``divisions`` does.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from ortserve.engine.divisions import element_types
from ortserve.model_file.editing import GRAPH_NODE, Edits, write_constant, write_node
from ortserve.model_file.graph import INT64, STRING, Dims, Graph, Model, Node

_MIN_OPSET: Final = 12
"""Before it GatherND has no ``batch_dims``."""


def text_gather_edits(model: Model) -> Edits:
    """The edits that replace each Gather of texts in the main graph whose slices may have more than one text."""
    graph = model.graph
    gathers = [node for node in graph.nodes if node.op == "Gather" and not node.domain and len(node.inputs) == 2]
    if not gathers or model.opsets.get("", 0) < _MIN_OPSET:
        return {}
    types, dims = element_types(graph), _dims(graph)
    edits = {}
    for node in gathers:
        if types.get(node.inputs[0]) == STRING and node.outputs:
            axis, known = node.attributes.get("axis", 0), dims.get(node.inputs[0])
            if isinstance(axis, int) and axis < 0 and known is not None:
                axis += len(known)
            is_last = axis == -1 or (known is not None and axis == len(known) - 1)
            if isinstance(axis, int) and axis >= 0 and not is_last:
                edits[GRAPH_NODE, node.outputs[0]] = b"".join(_as_gather_nd(node, axis))
    return edits


def _dims(graph: Graph) -> Mapping[str, Dims]:
    known = {declared.name: declared.dims for declared in graph.inputs if declared.dims is not None}
    return known | {name: tensor.dims for name, tensor in graph.constants.items() if tensor.dims is not None}


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
