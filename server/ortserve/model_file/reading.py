"""Reads a model file into its record: graphs, nodes, attributes, functions, and declared inputs and outputs."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.model_file.graph import (
    UNREADABLE,
    Attribute,
    Declared,
    Dims,
    Function,
    Graph,
    Model,
    Node,
    Reference,
    Skipped,
    Tensor,
    in_order,
)
from ortserve.model_file.protobuf import LENGTH_DELIMITED, TextReader, fields, integers, reading_message, signed, varint
from ortserve.model_file.tensors import TensorReader
from ortserve.paths import is_file

MAX_NODES: Final = 50_000
"""Maximum number of nodes for analyses. The record still has all nodes of a larger graph."""
_DEEPEST: Final = 12
"""Maximum depth of graphs inside each other for analyses."""
_MAX_LIST_BYTES: Final = 1 << 20
"""Maximum size of a list attribute for analyses."""
_ENSEMBLES: Final = frozenset(
    {"SVMClassifier", "SVMRegressor", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"}
)
"""Operators whose weights are lists among the attributes, with up to millions of elements."""
_ENSEMBLE_LABELS: Final = "classlabels_"

_Field: TypeAlias = tuple[int, int, tuple[int, int]]
"""Number, wire type and span of the value of a field."""

# Fields with the value of an attribute. The kind of an attribute (AttributeType) is the number of its field, less one.
_FLOAT, _INT, _STRING, _TENSOR, _GRAPH, _FLOATS, _INTS, _STRINGS = range(2, 10)
_DEFAULTS: Final[dict[int, int | float | str]] = {_FLOAT: 0.0, _INT: 0, _STRING: ""}


def read_model(path: Path) -> Model:
    """Read a model file. Returns ``UNREADABLE`` for a file in another format. Blocks on the file.

    Raises:
        ServeError: overloaded, if there is too little memory.
    """
    try:
        with reading_message(path) as data:
            return parse_model(data)
    except (OSError, ValueError, IndexError, struct.error):
        return UNREADABLE


def model_nbytes(path: Path, model: Model) -> int:
    """Bytes of a model file and its external files. A session needs about this much memory or more.

    Files that are missing, such as those of a version that is being removed, or cannot be read count as empty: opening
    a session names them.
    """
    nbytes = 0
    for file in (path, *(path.parent / name for name in model.external_files)):
        with suppress(OSError):
            nbytes += file.stat().st_size if is_file(file) else 0
    return nbytes


def parse_model(data: memoryview) -> Model:
    """Read a serialized ModelProto.

    Raises:
        ValueError: The bytes are not an ONNX model.
        IndexError: The bytes are not an ONNX model.
        struct.error: The bytes are not an ONNX model.
    """
    return _Reader(data).model()


class _Reader:
    """Reads one message. Field numbers are those of onnx.proto (github.com/onnx/onnx)."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._nodes = 0
        self._texts = TextReader(data)
        self._text = self._texts.read
        self._tensors = TensorReader(data, self._texts)
        self._too_large = ""

    def model(self) -> Model:
        graphs: list[Graph] = []
        opsets: dict[str, int] = {}
        functions: dict[tuple[str, str, str], Function] = {}
        for number, wire_type, (start, end) in fields(self._data, 0, len(self._data)):
            if wire_type != LENGTH_DELIMITED:
                continue
            if number == 7:
                graphs.append(self._graph(start, end, 0))
            elif number == 8:
                self._opset(start, end, opsets)
            elif number == 25:
                key, function = self._function(start, end)
                functions[key] = function
        if len(graphs) != 1 or not opsets:
            raise ValueError("not an ONNX model")
        if self._nodes > MAX_NODES:
            self._too_large = f"the graph has more than {MAX_NODES} nodes"
        return Model(
            graphs[0],
            opsets,
            functions,
            self._tensors.external_files,
            too_large=self._too_large,
            has_invalid_names=self._texts.has_invalid,
        )

    def _opset(self, start: int, end: int, opsets: dict[str, int]) -> None:
        domain, version = "", 1
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                domain = _domain(self._text(begin, after))
            elif number == 2:
                version = varint(self._data, begin)[0]
        opsets[domain] = version

    def _function(self, start: int, end: int) -> tuple[tuple[str, str, str], Function]:
        name = domain = overload = ""
        inputs: list[str] = []
        outputs: list[str] = []
        nodes: list[Node] = []
        defaults: dict[str, Attribute] = {}
        opsets: dict[str, int] = {}
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                name = self._text(begin, after)
            elif number == 4:
                inputs.append(self._text(begin, after))
            elif number == 5:
                outputs.append(self._text(begin, after))
            elif number == 7:
                nodes.append(self._node(begin, after, 1))
            elif number == 9:
                self._opset(begin, after, opsets)
            elif number == 10:
                domain = _domain(self._text(begin, after))
            elif number == 11:
                key, value = self._attribute(begin, after, 1)
                defaults[key] = value
            elif number == 13:
                overload = self._text(begin, after)
        return (domain, name, overload), Function(in_order(nodes), tuple(inputs), tuple(outputs), defaults, opsets)

    def _graph(self, start: int, end: int, depth: int) -> Graph:
        if depth > _DEEPEST:
            self._too_large = f"graphs are nested more than {_DEEPEST} deep"
            return Graph()
        nodes: list[Node] = []
        constants: dict[str, Tensor] = {}
        inputs: list[Declared] = []
        outputs: list[Declared] = []
        inner_dims: dict[str, Dims] = {}
        for number, wire_type, (begin, after) in fields(self._data, start, end):
            if wire_type != LENGTH_DELIMITED:
                continue
            if number == 1:
                nodes.append(self._node(begin, after, depth))
            elif number == 5:
                name, tensor = self._tensors.tensor(begin, after)
                constants[name] = tensor
            elif number == 11:
                inputs.append(self._declared(begin, after))
            elif number == 12:
                outputs.append(self._declared(begin, after))
            elif number == 13:
                inner = self._declared(begin, after)
                if any(size is not None for size in inner.dims or ()):
                    inner_dims[inner.name] = inner.dims or ()
            elif number == 15:  # a sparse tensor, of which only the dense shape is needed
                name, tensor = self._tensors.sparse(begin, after)
                constants[name] = tensor
        return Graph(in_order(nodes), constants, tuple(inputs), tuple(outputs), inner_dims)

    def _node(self, start: int, end: int, depth: int) -> Node:
        self._nodes += 1
        op = domain = name = overload = ""
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Attribute] = {}
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                inputs.append(self._text(begin, after))
            elif number == 2:
                outputs.append(self._text(begin, after))
            elif number == 3:
                name = self._text(begin, after)
            elif number == 4:
                op = self._text(begin, after)
            elif number == 5:
                key, value = self._attribute(begin, after, depth, skips_lists=op in _ENSEMBLES)
                attributes[key] = value
            elif number == 7:
                domain = _domain(self._text(begin, after))
            elif number == 8:
                overload = self._text(begin, after)
        return Node(op, domain, name, tuple(inputs), tuple(outputs), attributes, overload)

    def _attribute(self, start: int, end: int, depth: int, *, skips_lists: bool = False) -> tuple[str, Attribute]:
        data = self._data
        name = ""
        kind = 0
        reference = ""
        single: Attribute = None
        many: list[int | float | str] = []
        for number, wire_type, (begin, after) in _unmerged(fields(data, start, end), _TENSOR, _GRAPH):
            if number == 1:
                name = self._text(begin, after)
            elif number == 20:
                kind = varint(data, begin)[0]
            elif number == 21:
                reference = self._text(begin, after)
            elif _FLOAT <= number <= _STRINGS:
                kind = kind or number - 1
                if number == _FLOAT:
                    single = struct.unpack("<f", data[begin:after])[0]
                elif number == _INT:
                    single = signed(varint(data, begin)[0])
                elif number == _STRING:
                    single = bytes(data[begin:after]).decode(errors="backslashreplace")
                elif number == _TENSOR:
                    single = self._tensors.tensor(begin, after)[1]
                elif number == _GRAPH:
                    single = self._graph(begin, after, depth + 1)
                elif skips_lists and not name.startswith(_ENSEMBLE_LABELS):
                    return name, Skipped()
                elif after - begin > _MAX_LIST_BYTES:
                    self._too_large = f"attribute '{name}' is longer than {_MAX_LIST_BYTES} bytes"
                    return name, Skipped()
                elif number == _FLOATS:
                    many += [each[0] for each in struct.iter_unpack("<f", data[begin:after])]
                elif number == _INTS:
                    many += integers(data, wire_type, begin, after)
                else:
                    many.append(bytes(data[begin:after]).decode(errors="backslashreplace"))
        if reference:
            return name, Reference(reference)
        if kind + 1 in (_FLOATS, _INTS, _STRINGS):
            return name, tuple(many)
        if single is None:  # messages omit default values
            return name, _DEFAULTS.get(kind + 1)
        return name, single

    def _declared(self, start: int, end: int) -> Declared:
        declared = Declared("", 0, None, is_tensor=False)
        for number, _, (begin, after) in _unmerged(fields(self._data, start, end), 2):
            if number == 1:
                declared = replace(declared, name=self._text(begin, after))
            elif number == 2:
                declared = self._with_type(declared, begin, after)
        return declared

    def _with_type(self, declared: Declared, start: int, end: int) -> Declared:
        for kind, _, (begin, after) in list(_unmerged(fields(self._data, start, end), 1)):
            if kind == 1:
                dtype, dims, denotations = self._tensor_type(begin, after)
                return replace(
                    declared,
                    dtype=dtype,
                    dims=dims,
                    is_tensor=True,
                    denotations=denotations,
                    lacks_shape=dims is None,
                )
            if kind in (4, 9):  # a sequence or an optional, both with the type of the element in field 1
                for number, _, element in fields(self._data, begin, after):
                    if number == 1:
                        return self._with_element(declared, *element, is_sequence=kind == 4)
        return declared

    def _with_element(self, declared: Declared, start: int, end: int, *, is_sequence: bool) -> Declared:
        for kind, _, (begin, after) in fields(self._data, start, end):
            if kind == 1:
                dims = self._tensor_type(begin, after)[1]
                if is_sequence:
                    return replace(declared, element_dims=dims)
                return replace(declared, lacks_shape=dims is None)
            if kind == 5:
                return replace(declared, is_map_sequence=is_sequence)
        return declared

    def _tensor_type(self, start: int, end: int) -> tuple[int, Dims | None, tuple[str, ...]]:
        """Element type, shape, and the denotation of each axis."""
        dtype = 0
        axes: list[tuple[int | str | None, str]] | None = None
        for number, _, (begin, after) in _unmerged(fields(self._data, start, end), 2):
            if number == 1:
                dtype = varint(self._data, begin)[0]
            elif number == 2:
                axes = list(self._axes(begin, after))
        if axes is None:
            return dtype, None, ()
        return dtype, tuple(size for size, _ in axes), tuple(denotation for _, denotation in axes)

    def _axes(self, start: int, end: int) -> Iterator[tuple[int | str | None, str]]:
        """Size and denotation of each axis."""
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                size: int | str | None = None
                denotation = ""
                for part, _, (at, part_end) in fields(self._data, begin, after):
                    if part == 1:
                        length = signed(varint(self._data, at)[0])
                        size = length if length >= 0 else None  # some exporters write -1 for a free size
                    elif part == 2:
                        size = self._text(at, part_end) or None
                    elif part == 3:
                        denotation = self._text(at, part_end)
                yield size, denotation


def _unmerged(parts: Iterator[_Field], *messages: int) -> Iterator[_Field]:
    """Yield the fields of a message.

    Raises:
        ValueError: One of these fields occurs twice. ONNX Runtime merges the two messages, for example two graphs.
    """
    seen: set[int] = set()
    for part in parts:
        if part[0] in messages:
            if part[0] in seen:
                raise ValueError("a message is in two parts")
            seen.add(part[0])
        yield part


def _domain(name: str) -> str:
    """The domain of an operator. The two names of ONNX's own domain become an empty text."""
    return "" if name == "ai.onnx" else name
