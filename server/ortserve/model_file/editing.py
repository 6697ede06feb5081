"""Writes serialized models, and replaces nodes and declarations in them before a session opens them.

The files of edited models do not change. Fields that are not replaced are copied without decoding them.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from ortserve.model_file.graph import FLOAT, INT32, INT64, Node
from ortserve.model_file.protobuf import (
    fields,
    reading_message,
    write_float,
    write_message,
    write_number,
    write_tag,
    write_varint,
)

# Field numbers of onnx.proto (github.com/onnx/onnx), for the fields that this module edits.
_MODEL_IR_VERSION: Final = 1
_MODEL_GRAPH: Final = 7
_MODEL_OPSET: Final = 8
_MODEL_FUNCTION: Final = 25
_FUNCTION_KEY: Final = (10, 1, 13)
_FUNCTION_NODE: Final = 7
GRAPH_NODE: Final = 1
GRAPH_INPUT: Final = 11
GRAPH_OUTPUT: Final = 12
GRAPH_VALUE: Final = 13
_EDITABLE: Final = (GRAPH_NODE, GRAPH_INPUT, GRAPH_OUTPUT, GRAPH_VALUE)
_VALUE_NAME: Final = 1
_VALUE_TYPE: Final = 2
_TYPE_TENSOR: Final = 1
_TENSOR_TYPE: Final = 1
_TENSOR_SHAPE: Final = 2
_SHAPE_DIM: Final = 1
_DIM_LENGTH: Final = 1
_NODE_INPUT: Final = 1
_NODE_OUTPUT: Final = 2
_NODE_NAME: Final = 3
_NODE_OPERATOR: Final = 4
_NODE_ATTRIBUTE: Final = 5
_NODE_DOMAIN: Final = 7
_ATTRIBUTE_NAME: Final = 1
_ATTRIBUTE_FLOAT: Final = 2
_ATTRIBUTE_INT: Final = 3
_ATTRIBUTE_STRING: Final = 4
_ATTRIBUTE_TENSOR: Final = 5
_ATTRIBUTE_GRAPH: Final = 6
_ATTRIBUTE_FLOATS: Final = 7
_ATTRIBUTE_INTS: Final = 8
_ATTRIBUTE_KIND: Final = 20
_CONSTANT_DIMS: Final = 1
_CONSTANT_TYPE: Final = 2
_CONSTANT_DATA: Final = 9
_SCOPE: Final = "\0"
_FORMATS: Final = {FLOAT: "f", INT32: "i", INT64: "q"}
_OPSET_DOMAIN: Final = 1
_OPSET_VERSION: Final = 2
_ENTRY_KEY: Final = 1
_ENTRY_VALUE: Final = 2
_PATH_OF_FILES: Final = (_MODEL_GRAPH, 5, 13)
"""The fields that lead to the external data of a graph's initializers. ONNX Runtime follows no links for others."""

AttributeValue: TypeAlias = int | float | str | bytes | Sequence[int] | Sequence[float]
"""A value of an attribute: an INT64, FP32 or text, a serialized tensor, or a list of one type of numbers."""


@dataclass(frozen=True, slots=True)
class Rewired:
    """A node that keeps its operator and attributes, but gets other names of its tensors.

    Attributes:
        inputs: The new names of its inputs.
        outputs: The new names of its outputs.
        before: Serialized nodes in front of the node.
        after: Serialized nodes behind it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: bytes = b""
    after: bytes = b""


Edits: TypeAlias = Mapping[tuple[int, str], bytes | Rewired]
"""Replacements of fields of the graph, by field number and name. A node has the name of ``first_output``.
The name begins with ``inner_scope`` in the graph of a node, such as a branch of If, and with ``function_scope`` in a
function of the model."""


def inner_scope(scope: str, node: Node, attribute: str) -> str:
    """The beginning of names in a graph that is an attribute of a node; ``scope`` is that of the node."""
    return f"{scope}{first_output(node)}{_SCOPE}{attribute}{_SCOPE}"


def function_scope(domain: str, name: str, overload: str) -> str:
    """The beginning of names in a function of the model."""
    return _SCOPE + "".join(each + _SCOPE for each in (domain, name, overload))


def first_output(node: Node) -> str:
    """The name of the first output that is not left out; empty if there is none."""
    return next(filter(None, node.outputs), "")


def edited_model(path: Path, edits: Edits, opset: int = 0, files: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The serialized model with these edits. Blocks on the file.

    Args:
        path: The file of the model.
        edits: The replacements.
        opset: The version of ONNX's own operators to import; 0 if the model imports them already.
        files: New names of external files, by the names that the model has for them.
    """
    with reading_message(path) as data:
        edited = _edit(data, edits, _write_opset(opset) if opset else b"")
    return bytes(_rename_files(memoryview(edited), files)) if files else edited


def write_model(graph: bytes, opset: int, ir_version: int) -> bytes:
    """Serialize a model with only ONNX's own operators; ``graph`` holds the serialized fields of its graph."""
    return write_number(_MODEL_IR_VERSION, ir_version) + write_message(_MODEL_GRAPH, graph) + _write_opset(opset)


def _write_opset(version: int) -> bytes:
    """The import of ONNX's own operators."""
    return write_message(_MODEL_OPSET, write_message(_OPSET_DOMAIN, b"") + write_number(_OPSET_VERSION, version))


def write_node(
    operator: str,
    domain: str,
    sources: Sequence[str],
    *targets: str,
    attributes: Mapping[str, AttributeValue] = MappingProxyType({}),
    name: str = "",
) -> bytes:
    """Serialize a node."""
    names = [(_NODE_INPUT, source) for source in sources] + [(_NODE_OUTPUT, target) for target in targets]
    names += (_NODE_NAME, name), (_NODE_OPERATOR, operator), (_NODE_DOMAIN, domain)
    named = b"".join(write_message(number, text.encode()) for number, text in names)
    given = b"".join(write_message(_NODE_ATTRIBUTE, _write_attribute(*each)) for each in attributes.items())
    return write_message(GRAPH_NODE, named + given)


def _write_attribute(name: str, value: AttributeValue) -> bytes:
    if isinstance(value, bytes):
        field, content = _ATTRIBUTE_TENSOR, write_message(_ATTRIBUTE_TENSOR, value)
    elif isinstance(value, str):
        field, content = _ATTRIBUTE_STRING, write_message(_ATTRIBUTE_STRING, value.encode())
    elif isinstance(value, int):
        field, content = _ATTRIBUTE_INT, write_number(_ATTRIBUTE_INT, value % 2**64)
    elif isinstance(value, float):
        field, content = _ATTRIBUTE_FLOAT, write_float(_ATTRIBUTE_FLOAT, value)
    elif all(isinstance(number, int) for number in value):
        field = _ATTRIBUTE_INTS
        content = b"".join(write_number(_ATTRIBUTE_INTS, int(number) % 2**64) for number in value)
    else:
        field = _ATTRIBUTE_FLOATS
        content = write_message(_ATTRIBUTE_FLOATS, struct.pack(f"<{len(value)}f", *value))
    kind = write_number(_ATTRIBUTE_KIND, field - 1)  # types of attributes are numbered as their fields, less one
    return write_message(_ATTRIBUTE_NAME, name.encode()) + content + kind


def write_constant(name: str, dtype: int, *values: float, is_list: bool = False) -> bytes:
    """Serialize a node with a constant of FP32, INT32 or INT64: a scalar, or a list."""
    data = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
    dims = write_number(_CONSTANT_DIMS, len(values)) if is_list else b""
    tensor = dims + write_number(_CONSTANT_TYPE, dtype) + write_message(_CONSTANT_DATA, data)
    return write_node("Constant", "", [], name, attributes={"value": tensor})


def write_tensor(number: int, name: str, dtype: int, dims: Sequence[int | None]) -> bytes:
    """Serialize the declaration of a tensor, with ``number`` ``GRAPH_INPUT`` or ``GRAPH_OUTPUT``. None: a free size."""
    sizes = (b"" if dim is None else write_number(_DIM_LENGTH, dim) for dim in dims)
    shape = b"".join(write_message(_SHAPE_DIM, size) for size in sizes)
    tensor = write_number(_TENSOR_TYPE, dtype) + write_message(_TENSOR_SHAPE, shape)
    kind = write_message(_VALUE_TYPE, write_message(_TYPE_TENSOR, tensor))
    return write_message(number, write_message(_VALUE_NAME, name.encode()) + kind)


def _edit(model: memoryview, edits: Edits, opset: bytes) -> bytes:
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, _, (start, end) in fields(model, 0, len(model)):
        if number == _MODEL_GRAPH:
            graph = list(_edit_graph(model, start, end, edits))
            parts += [write_tag(_MODEL_GRAPH), write_varint(sum(map(len, graph))), *graph]
        elif number == _MODEL_FUNCTION:
            parts.append(write_message(_MODEL_FUNCTION, _edit_function(model[start:end], edits)))
        else:
            parts.append(model[kept:end])
        kept = end
    return b"".join((*parts, opset))


def _edit_function(function: memoryview, edits: Edits) -> bytes:
    """A function with edits of its nodes, which are edited as those of a graph."""
    found = {number: span for number, _, span in fields(function, 0, len(function)) if number in _FUNCTION_KEY}
    scope = function_scope(*(_text(function, found.get(number, (0, 0))) for number in _FUNCTION_KEY))
    if not any(name.startswith(scope) for _, name in edits):
        return bytes(function)
    nodes: list[bytes] = []
    parts: list[bytes | memoryview] = []
    kept = 0
    for number, _, (start, end) in fields(function, 0, len(function)):
        if number == _FUNCTION_NODE:
            nodes.append(write_message(GRAPH_NODE, bytes(function[start:end])))
        else:
            parts.append(function[kept:end])
        kept = end
    graph = memoryview(b"".join(nodes))
    edited = memoryview(b"".join(_edit_graph(graph, 0, len(graph), edits, scope)))
    spans = (slice(*span) for _, _, span in fields(edited, 0, len(edited)))
    return b"".join((*parts, *(write_message(_FUNCTION_NODE, bytes(edited[span])) for span in spans)))


def _rename_files(
    message: memoryview, files: Mapping[str, str], path: Sequence[int] = _PATH_OF_FILES
) -> bytes | memoryview:
    """The message with other names of external files; the message itself if it has none of these names."""
    if not path:
        texts = {number: _text(message, span) for number, _, span in fields(message, 0, len(message))}
        new = files.get(texts.get(_ENTRY_VALUE, "")) if texts.get(_ENTRY_KEY) == "location" else None
        if new is None:
            return message
        return write_message(_ENTRY_KEY, b"location") + write_message(_ENTRY_VALUE, os.fsencode(new))
    parts: list[bytes | memoryview] = []
    kept = before = 0
    for number, _, (start, end) in fields(message, 0, len(message)):
        if number == path[0]:
            renamed = _rename_files(old := message[start:end], files, path[1:])
            if renamed is not old:
                parts += [message[kept:before], write_tag(number), write_varint(len(renamed)), renamed]
                kept = end
        before = end
    return b"".join((*parts, message[kept:])) if parts else message


def _edit_graph(model: memoryview, start: int, end: int, edits: Edits, scope: str = "") -> Iterator[bytes | memoryview]:
    around = {name[:end] for _, name in edits for end, letter in enumerate(name) if letter == _SCOPE}
    kept = start
    for number, _, span in fields(model, start, end):
        name = scope + _name(model, span, number) if number in _EDITABLE else ""
        replacement = edits.get((number, name)) if number in _EDITABLE else None
        if isinstance(replacement, Rewired):
            yield from (replacement.before, _edit_node(model, span, edits, name, replacement), replacement.after)
        elif replacement is None and number == GRAPH_NODE and name in around:
            yield _edit_node(model, span, edits, name)
        else:
            yield model[kept : span[1]] if replacement is None else replacement
        kept = span[1]


def _edit_node(
    model: memoryview, span: tuple[int, int], edits: Edits, scope: str, rewired: Rewired | None = None
) -> bytes:
    parts = []
    if rewired is not None:
        names = [(_NODE_INPUT, name) for name in rewired.inputs] + [(_NODE_OUTPUT, name) for name in rewired.outputs]
        parts = [write_message(number, name.encode()) for number, name in names]
    kept = span[0]
    for number, _, field in fields(model, *span):
        if number == _NODE_ATTRIBUTE:
            parts.append(write_message(_NODE_ATTRIBUTE, _edit_attribute(model, field, edits, scope)))
        elif rewired is None or number not in (_NODE_INPUT, _NODE_OUTPUT):
            parts.append(bytes(model[kept : field[1]]))
        kept = field[1]
    return write_message(GRAPH_NODE, b"".join(parts))


def _edit_attribute(model: memoryview, span: tuple[int, int], edits: Edits, scope: str) -> bytes:
    named = [value for number, _, value in fields(model, *span) if number == _ATTRIBUTE_NAME]
    inner = f"{scope}{_SCOPE}{_text(model, named[0]) if named else ''}{_SCOPE}"
    parts = []
    kept = span[0]
    for number, _, field in fields(model, *span):
        if number == _ATTRIBUTE_GRAPH:
            parts.append(write_message(_ATTRIBUTE_GRAPH, b"".join(_edit_graph(model, *field, edits, inner))))
        else:
            parts.append(bytes(model[kept : field[1]]))
        kept = field[1]
    return b"".join(parts)


def _text(model: memoryview, span: tuple[int, int]) -> str:
    return bytes(model[slice(*span)]).decode("utf-8", "backslashreplace")


def _name(model: memoryview, span: tuple[int, int], number: int) -> str:
    """The name of the value that a field of a graph declares, or of a node's first output that is not left out."""
    wanted = _NODE_OUTPUT if number == GRAPH_NODE else _VALUE_NAME
    names = (value for found, _, value in fields(model, *span) if found == wanted and value[0] < value[1])
    return next((_text(model, name) for name in names), "")
