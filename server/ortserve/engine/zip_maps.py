"""Opening models with ZipMap so that the maps become a tensor of class scores, with one column for each class.

ONNX Runtime returns a sequence of maps as a list of dictionaries, which it builds row by row under the interpreter
lock. So this module replaces ZipMap in the serialized model before a session is made. It does not change the file.
``session`` opens the result, and the loader reads the classes.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.model_file.graph import FLOAT, Model, Node, names_read
from ortserve.model_file.protobuf import fields, mapped_file, write_message, write_number, write_tag, write_varint

Classes: TypeAlias = tuple[int | float | str, ...]
"""The keys of the maps, in the order of the columns."""

_DOMAIN: Final = "ai.onnx.ml"

# Field numbers of onnx.proto (github.com/onnx/onnx), for the fields that this module edits.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE: Final = 1
_GRAPH_OUTPUT: Final = 12
_GRAPH_VALUE: Final = 13
_VALUE_NAME: Final = 1
_VALUE_TYPE: Final = 2
_TYPE_TENSOR: Final = 1
_TENSOR_TYPE: Final = 1
_TENSOR_SHAPE: Final = 2
_SHAPE_DIM: Final = 1
_DIM_LENGTH: Final = 1
_NODE_INPUT: Final = 1
_NODE_OUTPUT: Final = 2
_NODE_OPERATOR: Final = 4
_NODE_ATTRIBUTE: Final = 5
_NODE_DOMAIN: Final = 7
_ATTRIBUTE_NAME: Final = 1
_ATTRIBUTE_FLOATS: Final = 7
_ATTRIBUTE_INTS: Final = 8
_ATTRIBUTE_KIND: Final = 20
_KIND_FLOATS: Final = 6
_KIND_INTS: Final = 7


@dataclass(frozen=True, slots=True)
class _ZipMap:
    """A ZipMap whose output is an output of the graph that no node reads."""

    scores: str
    output: str
    classes: Classes


def read_classes(model: Model) -> dict[str, Classes]:
    """The classes of each output that is a sequence of maps in the file, and a tensor in a session."""
    return {zip_map.output: zip_map.classes for zip_map in _find(model).values()}


def with_score_tensors(path: Path, model: Model) -> bytes | None:
    """The serialized model with a tensor in place of each such output; None if it has none. Blocks on the file.

    The tensor is FP32 ``[-1, classes]`` and has the output's name. Nodes of ``ai.onnx.ml`` replace ZipMap, so that the
    same execution provider runs them. Scaler fails, as ZipMap does, if the number of scores is not that of the classes.
    FeatureVectorizer makes a matrix from the scores of a single row without an axis. Neither changes a score.
    """
    zip_maps = _find(model)
    if not zip_maps:
        return None
    with mapped_file(path) as data:
        return _edit(data, zip_maps)


def _find(model: Model) -> dict[str, _ZipMap]:
    """The nodes to replace, by output."""
    outputs = {declared.name for declared in model.graph.outputs if declared.is_map_sequence}
    if not outputs:
        return {}
    found = {
        zip_map.output: zip_map
        for node in model.graph.nodes
        if (zip_map := _zip_map(node)) is not None and zip_map.output in outputs
    }
    for node in model.graph.nodes:
        for name in names_read(node):
            found.pop(name, None)
    return found


def _zip_map(node: Node) -> _ZipMap | None:
    """The node, if it is a ZipMap with classes."""
    if node.op != "ZipMap" or node.domain != _DOMAIN or not len(node.inputs) == len(node.outputs) == 1:
        return None
    classes = node.attributes.get("classlabels_strings") or node.attributes.get("classlabels_int64s")
    return _ZipMap(node.inputs[0], node.outputs[0], classes) if isinstance(classes, tuple) else None


def _edit(model: memoryview, zip_maps: Mapping[str, _ZipMap]) -> bytes:
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, _, (start, end) in fields(model, 0, len(model)):
        if number == _MODEL_GRAPH:
            graph = list(_edit_graph(model, start, end, zip_maps))
            parts += [write_tag(_MODEL_GRAPH), write_varint(sum(map(len, graph))), *graph]
        else:
            parts.append(model[kept:end])
        kept = end
    return b"".join(parts)


def _edit_graph(
    model: memoryview, start: int, end: int, zip_maps: Mapping[str, _ZipMap]
) -> Iterator[bytes | memoryview]:
    kept = start
    for number, _, span in fields(model, start, end):
        zip_map = zip_maps.get(_name(model, number, span))
        if zip_map is None:
            yield model[kept : span[1]]
        elif number == _GRAPH_NODE:
            yield from _nodes(zip_map)
        elif number == _GRAPH_OUTPUT:
            yield write_message(_GRAPH_OUTPUT, _declaration(zip_map))
        kept = span[1]


def _name(model: memoryview, number: int, span: tuple[int, int]) -> str:
    """The value that a field of a graph declares, or computes as its first output; empty for weights and the like."""
    if number not in (_GRAPH_NODE, _GRAPH_OUTPUT, _GRAPH_VALUE):
        return ""
    wanted = _NODE_OUTPUT if number == _GRAPH_NODE else _VALUE_NAME
    names = (value for found, _, value in fields(model, *span) if found == wanted)
    return next((bytes(model[slice(*name)]).decode("utf-8", "backslashreplace") for name in names), "")


def _nodes(zip_map: _ZipMap) -> Iterator[bytes]:
    count = len(zip_map.classes)
    checked = f"{zip_map.output}/checked"
    scale = [
        _attribute(name, write_message(_ATTRIBUTE_FLOATS, struct.pack("<f", value) * count), _KIND_FLOATS)
        for name, value in (("offset", 0.0), ("scale", 1.0))
    ]
    width = _attribute("inputdimensions", write_number(_ATTRIBUTE_INTS, count), _KIND_INTS)
    yield _node("Scaler", zip_map.scores, checked, *scale)
    yield _node("FeatureVectorizer", checked, zip_map.output, width)


def _node(operator: str, source: str, target: str, *attributes: bytes) -> bytes:
    names = ((_NODE_INPUT, source), (_NODE_OUTPUT, target), (_NODE_OPERATOR, operator), (_NODE_DOMAIN, _DOMAIN))
    fields_of_names = b"".join(write_message(number, name.encode()) for number, name in names)
    return write_message(_GRAPH_NODE, fields_of_names + b"".join(attributes))


def _attribute(name: str, values: bytes, kind: int) -> bytes:
    kind_field = write_number(_ATTRIBUTE_KIND, kind)
    return write_message(_NODE_ATTRIBUTE, write_message(_ATTRIBUTE_NAME, name.encode()) + values + kind_field)


def _declaration(zip_map: _ZipMap) -> bytes:
    length = write_number(_DIM_LENGTH, len(zip_map.classes))
    shape = write_message(_SHAPE_DIM, b"") + write_message(_SHAPE_DIM, length)
    tensor = write_number(_TENSOR_TYPE, FLOAT) + write_message(_TENSOR_SHAPE, shape)
    kind = write_message(_VALUE_TYPE, write_message(_TYPE_TENSOR, tensor))
    return write_message(_VALUE_NAME, zip_map.output.encode()) + kind
