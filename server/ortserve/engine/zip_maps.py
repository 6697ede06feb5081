"""ZipMap's maps as tensors: the model is opened with its class scores as an output, one column for each class.

ONNX Runtime hands out a sequence of maps as a list of dictionaries, which it makes row by row with the interpreter lock
held. So ZipMap is replaced in the serialized model before a session is made of it; the file stays as it is. ``session``
opens the result, the loader reads classes.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.model_file import LENGTH_DELIMITED, VARINT, fields, messages, read_model, text, varint

Classes: TypeAlias = tuple[int, ...] | tuple[str, ...]
"""The keys of the maps, in the order of the columns."""

_DOMAIN: Final = "ai.onnx.ml"

# Field numbers of onnx.proto (github.com/onnx/onnx).
_MODEL_GRAPH: Final = 7
_GRAPH_NODE: Final = 1
_GRAPH_OUTPUT: Final = 12
_GRAPH_VALUE: Final = 13
_VALUE_NAME: Final = 1
_VALUE_TYPE: Final = 2
_TYPE_TENSOR: Final = 1
_TYPE_SEQUENCE: Final = 4
_TYPE_MAP: Final = 5
_SEQUENCE_ELEMENT: Final = 1
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
_ATTRIBUTE_GRAPH: Final = 6
_ATTRIBUTE_FLOATS: Final = 7
_ATTRIBUTE_INTS: Final = 8
_ATTRIBUTE_STRINGS: Final = 9
_ATTRIBUTE_KIND: Final = 20
_FLOAT: Final = 1
"""The element type (TensorProto.DataType)."""
_KIND_FLOATS: Final = 6
_KIND_INTS: Final = 7


@dataclass(frozen=True, slots=True)
class _ZipMap:
    """A node whose output is an output of the graph, and goes nowhere else."""

    scores: str
    output: str
    classes: Classes


def read_classes(path: Path) -> dict[str, Classes]:
    """The classes of each output that is a sequence of maps in the file, and a tensor in a session. Blocks on the file.

    Empty where the file has no such output, or is in another format.
    """
    found = read_model(path, lambda model: iter(_find(model).values()))
    return {zip_map.output: zip_map.classes for zip_map in found}


def with_score_tensors(path: Path) -> bytes | None:
    """The serialized model with a tensor in place of each such output; None where it has none. Blocks on the file.

    The tensor is FP32 ``[-1, classes]`` and has the output's name. Nodes of ``ai.onnx.ml`` take ZipMap's place, so that
    the same execution provider runs them: Scaler fails, as ZipMap does, where there are not as many scores as classes,
    and FeatureVectorizer makes a matrix of the scores of a single row without an axis. Neither changes a score.
    """
    edited = read_model(path, _edit)
    return edited[0] if edited else None


def _edit(model: memoryview) -> Iterator[bytes]:
    zip_maps = _find(model)
    if not zip_maps:
        return
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, _, (start, end) in fields(model, 0, len(model)):
        if number == _MODEL_GRAPH:
            graph = list(_edit_graph(model, start, end, zip_maps))
            parts += [_tag(_MODEL_GRAPH), _varint(sum(map(len, graph))), *graph]
        else:
            parts.append(model[kept:end])
        kept = end
    yield b"".join(parts)


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
            yield _message(_GRAPH_OUTPUT, _declaration(zip_map))
        kept = span[1]


def _name(model: memoryview, number: int, span: tuple[int, int]) -> str:
    """What a field of a graph declares or computes first; empty for weights and the like."""
    if number not in (_GRAPH_NODE, _GRAPH_OUTPUT, _GRAPH_VALUE):
        return ""
    return next(_texts(model, *span, _NODE_OUTPUT if number == _GRAPH_NODE else _VALUE_NAME), "")


def _find(model: memoryview) -> dict[str, _ZipMap]:
    """By output."""
    graphs = list(messages(model, 0, len(model), _MODEL_GRAPH))
    if len(graphs) != 1:
        return {}
    outputs = {
        text(model, *value, _VALUE_NAME)
        for value in messages(model, *graphs[0], _GRAPH_OUTPUT)
        if _is_sequence_of_maps(model, *value)
    }
    if not outputs:
        return {}
    nodes = list(messages(model, *graphs[0], _GRAPH_NODE))
    found = {zip_map.output: zip_map for node in nodes for zip_map in _read(model, *node) if zip_map.output in outputs}
    for node in nodes:
        for name in _inputs(model, *node):
            found.pop(name, None)
    return found


def _is_sequence_of_maps(model: memoryview, start: int, end: int) -> bool:
    spans = [(start, end)]
    for number in (_VALUE_TYPE, _TYPE_SEQUENCE, _SEQUENCE_ELEMENT, _TYPE_MAP):
        spans = [inner for span in spans for inner in messages(model, *span, number)]
    return bool(spans)


def _read(model: memoryview, start: int, end: int) -> Iterator[_ZipMap]:
    """The node, if it is a ZipMap with classes."""
    if text(model, start, end, _NODE_OPERATOR) != "ZipMap" or text(model, start, end, _NODE_DOMAIN) != _DOMAIN:
        return
    classes: dict[str, Classes] = {}
    for attribute in messages(model, start, end, _NODE_ATTRIBUTE):
        if texts := tuple(_texts(model, *attribute, _ATTRIBUTE_STRINGS)):
            classes[text(model, *attribute, _ATTRIBUTE_NAME)] = texts
        elif numbers := tuple(_integers(model, *attribute)):
            classes[text(model, *attribute, _ATTRIBUTE_NAME)] = numbers
    keys = classes.get("classlabels_strings") or classes.get("classlabels_int64s")
    inputs, outputs = (list(_texts(model, start, end, number)) for number in (_NODE_INPUT, _NODE_OUTPUT))
    if keys and len(inputs) == len(outputs) == 1:
        yield _ZipMap(inputs[0], outputs[0], keys)


def _inputs(model: memoryview, start: int, end: int) -> Iterator[str]:
    """What a node reads, and what those in its graphs read."""
    yield from _texts(model, start, end, _NODE_INPUT)
    for attribute in messages(model, start, end, _NODE_ATTRIBUTE):
        for number, _, span in fields(model, *attribute):
            if number == _ATTRIBUTE_GRAPH:
                for node in messages(model, *span, _GRAPH_NODE):
                    yield from _inputs(model, *node)
            elif number > _ATTRIBUTE_GRAPH:
                break  # a list, which may hold millions of numbers, each a field


def _texts(model: memoryview, start: int, end: int, number: int) -> Iterator[str]:
    for span in messages(model, start, end, number):
        yield bytes(model[slice(*span)]).decode("utf-8", "backslashreplace")


def _integers(model: memoryview, start: int, end: int) -> Iterator[int]:
    """Those of an attribute, one a field or packed into one."""
    for number, _, (begin, after) in fields(model, start, end):
        if number > _ATTRIBUTE_INTS:
            return
        while number == _ATTRIBUTE_INTS and begin < after:
            value, begin = varint(model, begin)
            yield value - (1 << 64) if value >= 1 << 63 else value


def _nodes(zip_map: _ZipMap) -> Iterator[bytes]:
    count = len(zip_map.classes)
    checked = f"{zip_map.output}/checked"
    scale = [
        _attribute(name, _message(_ATTRIBUTE_FLOATS, struct.pack("<f", value) * count), _KIND_FLOATS)
        for name, value in (("offset", 0.0), ("scale", 1.0))
    ]
    width = _attribute("inputdimensions", _tag(_ATTRIBUTE_INTS, is_number=True) + _varint(count), _KIND_INTS)
    yield _node("Scaler", zip_map.scores, checked, *scale)
    yield _node("FeatureVectorizer", checked, zip_map.output, width)


def _node(operator: str, source: str, target: str, *attributes: bytes) -> bytes:
    names = ((_NODE_INPUT, source), (_NODE_OUTPUT, target), (_NODE_OPERATOR, operator), (_NODE_DOMAIN, _DOMAIN))
    fields_of_names = b"".join(_message(number, name.encode()) for number, name in names)
    return _message(_GRAPH_NODE, fields_of_names + b"".join(attributes))


def _attribute(name: str, values: bytes, kind: int) -> bytes:
    kind_field = _tag(_ATTRIBUTE_KIND, is_number=True) + _varint(kind)
    return _message(_NODE_ATTRIBUTE, _message(_ATTRIBUTE_NAME, name.encode()) + values + kind_field)


def _declaration(zip_map: _ZipMap) -> bytes:
    length = _tag(_DIM_LENGTH, is_number=True) + _varint(len(zip_map.classes))
    shape = _message(_SHAPE_DIM, b"") + _message(_SHAPE_DIM, length)
    tensor = _tag(_TENSOR_TYPE, is_number=True) + _varint(_FLOAT) + _message(_TENSOR_SHAPE, shape)
    return _message(_VALUE_NAME, zip_map.output.encode()) + _message(_VALUE_TYPE, _message(_TYPE_TENSOR, tensor))


def _message(number: int, content: bytes) -> bytes:
    return _tag(number) + _varint(len(content)) + content


def _tag(number: int, *, is_number: bool = False) -> bytes:
    return _varint(number << 3 | (VARINT if is_number else LENGTH_DELIMITED))


def _varint(value: int) -> bytes:
    spelled = bytearray()
    while value >= 0x80:
        spelled.append(value & 0x7F | 0x80)
        value >>= 7
    spelled.append(value)
    return bytes(spelled)
