"""Which inputs and outputs a model file declares without any shape, and what it says of their dimensions.

ONNX Runtime's Python API shows such a tensor as one without axes, and takes any shape for it. The file tells them
apart: it is one protobuf message, of which no more than the graph's interface is looked at here.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

# Field numbers of onnx.proto (github.com/onnx/onnx).
_MODEL_GRAPH: Final = 7
_GRAPH_INITIALIZER: Final = 5
_TENSOR_EXTERNAL: Final = 13
_ENTRY_KEY: Final = 1
_ENTRY_VALUE: Final = 2
_GRAPH_INPUT: Final = 11
_GRAPH_OUTPUT: Final = 12
_VALUE_NAME: Final = 1
_VALUE_TYPE: Final = 2
_TYPE_TENSOR: Final = 1
_TYPE_OPTIONAL: Final = 9
_OPTIONAL_ELEMENT: Final = 1
_TENSOR_SHAPE: Final = 2
_SHAPE_DIM: Final = 1
_DIM_LENGTH: Final = 1
_DIM_NAME: Final = 2
_DIM_DENOTATION: Final = 3

# Wire types (protobuf.dev/programming-guides/encoding).
_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH_DELIMITED: Final = 2
_FIXED32: Final = 5


@dataclass(frozen=True, slots=True)
class Dimension:
    """One of a graph input's, as the file declares it.

    Attributes:
        axis: Which it is.
        is_free: Whether requests say how long it is.
        name: Empty where it has none.
        denotation: What it is for, such as ``DATA_BATCH``; empty where that is not said, which is usual.
    """

    axis: int
    is_free: bool
    name: str = ""
    denotation: str = ""


def names_without_shape(path: Path) -> frozenset[str]:
    """Names of graph inputs and outputs, tensors or optional ones, that are declared without a shape.

    Blocks on the file; weights in it are skipped, not read. Empty for a file in another format.
    """
    return frozenset(_found(path, _names))


def input_dimensions(path: Path) -> list[Dimension]:
    """Those of all graph inputs that have a shape. Blocks on the file. Empty for a file in another format."""
    return _found(path, _dimensions)


def external_files(path: Path) -> frozenset[str]:
    """Files that initializers of the graph lie in, by their paths from its folder. Blocks on the file."""
    return frozenset(_found(path, _locations))


def _found(path: Path, find: Callable[[memoryview], Iterator[T]]) -> list[T]:
    """All that ``find`` yields of a file's content; nothing where it is no model."""
    if not path.is_file():  # a pipe is read but once, and not by us
        return []
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                return list(find(view))
            finally:
                view.release()
    except (OSError, ValueError, IndexError):  # unreadable, empty, or no protobuf message
        return []


def _dimensions(model: memoryview) -> Iterator[Dimension]:
    spans = [(0, len(model))]
    for number in (_MODEL_GRAPH, _GRAPH_INPUT, _VALUE_TYPE, _TYPE_TENSOR, _TENSOR_SHAPE):
        spans = [inner for span in spans for inner in _messages(model, *span, number)]
    for span in spans:
        for axis, dimension in enumerate(_messages(model, *span, _SHAPE_DIM)):
            lengths = [
                _varint(model, span[0])[0] for number, _, span in _fields(model, *dimension) if number == _DIM_LENGTH
            ]
            name, denotation = (_text(model, *dimension, number) for number in (_DIM_NAME, _DIM_DENOTATION))
            # Some exporters say -1 for free, which has all of its 64 bits set.
            yield Dimension(axis, not any(length < 2**63 for length in lengths), name, denotation)


def _locations(model: memoryview) -> Iterator[str]:
    spans = [(0, len(model))]
    for number in (_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_EXTERNAL):
        spans = [inner for span in spans for inner in _messages(model, *span, number)]
    for span in spans:
        if _text(model, *span, _ENTRY_KEY) == "location":
            yield _text(model, *span, _ENTRY_VALUE)


def _text(data: memoryview, start: int, end: int, number: int) -> str:
    return "".join(bytes(data[slice(*span)]).decode() for span in _messages(data, start, end, number))


def _names(model: memoryview) -> Iterator[str]:
    for start, end in _messages(model, 0, len(model), _MODEL_GRAPH):
        for field in (_GRAPH_INPUT, _GRAPH_OUTPUT):
            for value in _messages(model, start, end, field):
                if _has_no_shape(model, *value):
                    for name in _messages(model, *value, _VALUE_NAME):
                        yield bytes(model[slice(*name)]).decode()


def _has_no_shape(data: memoryview, start: int, end: int) -> bool:
    for kind in _messages(data, start, end, _VALUE_TYPE):
        tensors = list(_messages(data, *kind, _TYPE_TENSOR))
        for optional in _messages(data, *kind, _TYPE_OPTIONAL):
            for element in _messages(data, *optional, _OPTIONAL_ELEMENT):
                tensors += _messages(data, *element, _TYPE_TENSOR)
        return any(not list(_messages(data, *tensor, _TENSOR_SHAPE)) for tensor in tensors)
    return False


def _messages(data: memoryview, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Where the length-delimited fields of a number begin and end, in the message from ``start`` to ``end``.

    Raises:
        ValueError: It is no such message.
        IndexError: Likewise.
    """
    for found, wire_type, span in _fields(data, start, end):
        if found == number and wire_type == _LENGTH_DELIMITED:
            yield span


def _fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Number and wire type of each field of a message, and where its value begins and ends.

    Raises:
        ValueError: It is no message.
        IndexError: Likewise.
    """
    while start < end:
        tag, start = _varint(data, start)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size, start = _varint(data, start)
            after = start + size
        elif wire_type == _VARINT:
            _, after = _varint(data, start)
        elif wire_type in (_FIXED64, _FIXED32):
            after = start + (8 if wire_type == _FIXED64 else 4)
        else:
            raise ValueError("no protobuf message")
        yield tag >> 3, wire_type, (start, after)
        start = after
    if start != end:
        raise ValueError("no protobuf message")


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("no protobuf message")
