"""Which inputs and outputs a model file declares without any shape, and what it says of their dimensions.

ONNX Runtime's Python API shows such a tensor as one without axes, and takes any shape for it. The file tells them
apart: it is one protobuf message, of which no more than the graph's interface is looked at here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.model_file import fields, messages, read_model, text, varint

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
_TYPE_SEQUENCE: Final = 4
_TYPE_OPTIONAL: Final = 9
_SEQUENCE_ELEMENT: Final = 1
_OPTIONAL_ELEMENT: Final = 1
_TENSOR_SHAPE: Final = 2
_SHAPE_DIM: Final = 1
_DIM_LENGTH: Final = 1
_DIM_NAME: Final = 2
_DIM_DENOTATION: Final = 3


@dataclass(frozen=True, slots=True)
class Dimension:
    """One of a graph's input or output, as the file declares it.

    Attributes:
        axis: Which it is.
        length: -1 where it is free: of an input, each request has its own.
        name: Empty where it has none.
        denotation: What it is for, such as ``DATA_BATCH``; empty where that is not said, which is usual.
    """

    axis: int
    length: int
    name: str = ""
    denotation: str = ""

    @property
    def is_free(self) -> bool:
        return self.length == -1


def names_without_shape(path: Path) -> frozenset[str]:
    """Names of graph inputs and outputs, tensors or optional ones, that are declared without a shape.

    Blocks on the file; weights in it are skipped, not read. Empty for a file in another format.
    """
    return frozenset(read_model(path, _names))


def input_dimensions(path: Path) -> list[Dimension]:
    """Those of all graph inputs that have a shape. Blocks on the file. Empty for a file in another format."""
    return read_model(path, _dimensions)


def sequence_dimensions(path: Path) -> dict[str, list[Dimension]]:
    """Those of the tensors in each graph output that is a sequence of tensors of a declared shape. Blocks on the file.

    Empty for a file in another format.
    """
    return dict(read_model(path, _sequences))


def external_files(path: Path) -> frozenset[str]:
    """Files that initializers of the graph lie in, by their paths from its folder. Blocks on the file."""
    return frozenset(read_model(path, _locations))


def _dimensions(model: memoryview) -> Iterator[Dimension]:
    path = (_MODEL_GRAPH, _GRAPH_INPUT, _VALUE_TYPE, _TYPE_TENSOR, _TENSOR_SHAPE)
    for shape in _inner(model, (0, len(model)), path):
        yield from _of_shape(model, *shape)


def _sequences(model: memoryview) -> Iterator[tuple[str, list[Dimension]]]:
    path = (_VALUE_TYPE, _TYPE_SEQUENCE, _SEQUENCE_ELEMENT, _TYPE_TENSOR, _TENSOR_SHAPE)
    for value in _inner(model, (0, len(model)), (_MODEL_GRAPH, _GRAPH_OUTPUT)):
        for shape in _inner(model, value, path):
            yield text(model, *value, _VALUE_NAME), list(_of_shape(model, *shape))


def _inner(model: memoryview, span: tuple[int, int], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The messages at the end of a path of field numbers."""
    spans = [span]
    for number in numbers:
        spans = [inner for span in spans for inner in messages(model, *span, number)]
    return spans


def _of_shape(model: memoryview, start: int, end: int) -> Iterator[Dimension]:
    for axis, dimension in enumerate(messages(model, start, end, _SHAPE_DIM)):
        lengths = [varint(model, span[0])[0] for number, _, span in fields(model, *dimension) if number == _DIM_LENGTH]
        name, denotation = (text(model, *dimension, number) for number in (_DIM_NAME, _DIM_DENOTATION))
        # Some exporters write -1 for a free dimension, which has all of its 64 bits set.
        length = next((length for length in lengths if length < 2**63), -1)
        yield Dimension(axis, length, name, denotation)


def _locations(model: memoryview) -> Iterator[str]:
    for span in _inner(model, (0, len(model)), (_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_EXTERNAL)):
        if text(model, *span, _ENTRY_KEY) == "location":
            yield text(model, *span, _ENTRY_VALUE)


def _names(model: memoryview) -> Iterator[str]:
    for start, end in messages(model, 0, len(model), _MODEL_GRAPH):
        for field in (_GRAPH_INPUT, _GRAPH_OUTPUT):
            for value in messages(model, start, end, field):
                if _has_no_shape(model, *value):
                    for name in messages(model, *value, _VALUE_NAME):
                        yield bytes(model[slice(*name)]).decode()


def _has_no_shape(data: memoryview, start: int, end: int) -> bool:
    for kind in messages(data, start, end, _VALUE_TYPE):
        tensors = list(messages(data, *kind, _TYPE_TENSOR))
        for optional in messages(data, *kind, _TYPE_OPTIONAL):
            for element in messages(data, *optional, _OPTIONAL_ELEMENT):
                tensors += messages(data, *element, _TYPE_TENSOR)
        return any(not list(messages(data, *tensor, _TENSOR_SHAPE)) for tensor in tensors)
    return False
