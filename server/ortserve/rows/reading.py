"""From a model file to a graph. Weights are not read: only small constants of numbers keep their elements."""

import struct
from collections.abc import Iterator
from fractions import Fraction
from math import isfinite, prod
from pathlib import Path
from typing import Final

from ortserve.model_file import LENGTH_DELIMITED, fields, read_model, varint
from ortserve.rows.graph import Attribute, Declared, Function, Graph, Model, Node, Reference, Tensor, in_order
from ortserve.rows.symbols import Constant, constant

MOST_ELEMENTS: Final = 4096
"""Elements of a constant that are kept; also of an attribute."""
MOST_FLOATS: Final = 16
"""Elements of a constant of floating-point numbers that are kept: they are scales and bounds, not weights."""
MOST_NODES: Final = 50_000
_DEEPEST: Final = 12
_LONGEST_LIST: Final = 1 << 20

# By element type: the format of one element in raw data, and the field that has it otherwise.
_FORMATS: Final = {
    1: "f", 2: "B", 3: "b", 4: "H", 5: "h", 6: "i", 7: "q", 9: "?", 10: "e", 11: "d", 12: "I", 13: "Q",
}  # fmt: skip
_TYPED_FIELDS: Final = {1: 4, 11: 10, 7: 7, 12: 11, 13: 11}  # float, double, int64, uint64_data; else int32_data
_INT32_DATA: Final = 5
_RAW_DATA: Final = 9
_FLOATS: Final = frozenset({1, 10, 11})

# Kinds of attributes (AttributeProto.AttributeType).
_KIND_FLOAT, _KIND_INT, _KIND_STRING, _KIND_TENSOR, _KIND_GRAPH = 1, 2, 3, 4, 5
_KIND_FLOATS, _KIND_INTS, _KIND_STRINGS = 6, 7, 8
_DEFAULTS: Final[dict[int, int | float | str]] = {_KIND_FLOAT: 0.0, _KIND_INT: 0, _KIND_STRING: ""}
_KIND_OF_FIELD: Final = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8}


class TooLargeError(ValueError):
    """The model has more nodes, or deeper graphs, than are analysed."""


def read_graph(path: Path) -> Model | None:
    """The graph of a model file; None where it cannot be read. Blocks on the file; skips its weights.

    Raises:
        TooLargeError: It has more nodes than are analysed.
    """
    failure: list[TooLargeError] = []

    def find(data: memoryview) -> Iterator[Model]:
        try:
            yield parse_model(data)
        except TooLargeError as too_large:  # a ValueError, which read_model takes for no model
            failure.append(too_large)

    found = read_model(path, find)
    if failure:
        raise failure[0]
    return found[0] if found else None


def parse_model(data: memoryview) -> Model:
    """The graph in a serialized ModelProto.

    Raises:
        ValueError: It is no model, or, as ``TooLargeError``, it is too large.
        IndexError: It is no model.
    """
    return _Reader(data).model()


class _Reader:
    """Reads one message; positions are those in its bytes. Field numbers are those of onnx.proto."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._nodes_left = MOST_NODES

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
            raise ValueError("no model")
        return Model(graphs[0], opsets, functions)

    def _text(self, start: int, end: int) -> str:
        return str(self._data[start:end], "utf-8")

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
            raise TooLargeError(f"graphs are nested more than {_DEEPEST} deep")
        nodes: list[Node] = []
        constants: dict[str, Tensor] = {}
        inputs: list[Declared] = []
        outputs: list[Declared] = []
        for number, wire_type, (begin, after) in fields(self._data, start, end):
            if wire_type != LENGTH_DELIMITED:
                continue
            if number == 1:
                nodes.append(self._node(begin, after, depth))
            elif number == 5:
                name, tensor = self._tensor(begin, after)
                constants[name] = tensor
            elif number == 11:
                inputs.append(self._declared(begin, after))
            elif number == 12:
                outputs.append(self._declared(begin, after))
            elif number == 15:  # sparse: the dense shape is enough
                name, tensor = self._sparse(begin, after)
                constants[name] = tensor
        return Graph(in_order(nodes), constants, tuple(inputs), tuple(outputs))

    def _node(self, start: int, end: int, depth: int) -> Node:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise TooLargeError(f"the graph has more than {MOST_NODES} nodes")
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
                key, value = self._attribute(begin, after, depth)
                attributes[key] = value
            elif number == 7:
                domain = _domain(self._text(begin, after))
            elif number == 8:
                overload = self._text(begin, after)
        return Node(op, domain, name, tuple(inputs), tuple(outputs), attributes, overload)

    def _attribute(self, start: int, end: int, depth: int) -> tuple[str, Attribute]:
        data = self._data
        name = ""
        kind = 0
        reference = ""
        single: Attribute = None
        many: list[int | float | str] = []
        for number, wire_type, (begin, after) in fields(data, start, end):
            if number == 1:
                name = self._text(begin, after)
            elif number == 20:
                kind = varint(data, begin)[0]
            elif number == 21:
                reference = self._text(begin, after)
            elif number in _KIND_OF_FIELD:
                kind = kind or _KIND_OF_FIELD[number]
                if number == 2:
                    single = struct.unpack("<f", data[begin:after])[0]
                elif number == 3:
                    single = _signed(varint(data, begin)[0])
                elif number == 4:
                    single = bytes(data[begin:after]).decode(errors="replace")
                elif number == 5:
                    single = self._tensor(begin, after)[1]
                elif number == 6:
                    single = self._graph(begin, after, depth + 1)
                elif after - begin > _LONGEST_LIST:
                    raise TooLargeError(f"attribute '{name}' is longer than {_LONGEST_LIST} bytes")
                elif number == 7:
                    many += [each[0] for each in struct.iter_unpack("<f", data[begin:after])]
                elif number == 8:
                    many += (
                        _integers(data, begin, after)
                        if wire_type == LENGTH_DELIMITED
                        else [_signed(varint(data, begin)[0])]
                    )
                else:
                    many.append(bytes(data[begin:after]).decode(errors="replace"))
        if reference:
            return name, Reference(reference)
        if kind in (_KIND_FLOATS, _KIND_INTS, _KIND_STRINGS):
            return name, tuple(many)
        if single is None:  # a default value is not in the message
            return name, _DEFAULTS.get(kind)
        return name, single

    def _sparse(self, start: int, end: int) -> tuple[str, Tensor]:
        name, dtype = "", 0
        dims: list[int] = []
        for number, wire_type, (begin, after) in fields(self._data, start, end):
            if number == 1:
                name, tensor = self._tensor(begin, after)
                dtype = tensor.dtype
            elif number == 3:
                dims += (
                    _integers(self._data, begin, after)
                    if wire_type == LENGTH_DELIMITED
                    else [varint(self._data, begin)[0]]
                )
        return name, Tensor(dtype, tuple(dims))

    def _tensor(self, start: int, end: int) -> tuple[str, Tensor]:
        data = self._data
        name = ""
        dtype = 0
        dims: list[int] = []
        content: dict[int, list[tuple[int, int, int]]] = {}
        for number, wire_type, (begin, after) in fields(data, start, end):
            if number == 1:
                dims += _integers(data, begin, after) if wire_type == LENGTH_DELIMITED else [varint(data, begin)[0]]
            elif number == 2:
                dtype = varint(data, begin)[0]
            elif number == 8:
                name = self._text(begin, after)
            elif number in (4, 5, 7, 9, 10, 11):
                content.setdefault(number, []).append((wire_type, begin, after))
                if len(content[number]) > MOST_ELEMENTS:
                    content[number].pop()
        count = prod(dims)
        elements = None
        if dtype in _FORMATS and 0 <= count <= (MOST_FLOATS if dtype in _FLOATS else MOST_ELEMENTS):
            elements = self._elements(dtype, count, content)
        return name, Tensor(dtype, tuple(dims), elements)

    def _elements(
        self, dtype: int, count: int, content: dict[int, list[tuple[int, int, int]]]
    ) -> tuple[Constant, ...] | None:
        """The elements of a small tensor; None where they are not in the file, or not finite."""
        data = self._data
        form = _FORMATS[dtype]
        found: list[int | float] = []
        if raw := content.get(_RAW_DATA):
            _, begin, after = raw[-1]
            if after - begin != count * struct.calcsize(f"<{form}"):
                return None
            found = list(struct.unpack(f"<{count}{form}", data[begin:after]))
        else:
            number = _TYPED_FIELDS.get(dtype, _INT32_DATA)
            for wire_type, begin, after in content.get(number, []):
                if dtype in (1, 11):
                    found += [each[0] for each in struct.iter_unpack(f"<{form}", data[begin:after])]
                elif wire_type == LENGTH_DELIMITED:
                    found += _integers(data, begin, after)
                else:
                    found.append(_signed(varint(data, begin)[0]))
            if dtype == 10:  # bits of half floats
                found = [struct.unpack("<e", struct.pack("<H", int(bits) & 0xFFFF))[0] for bits in found]
        if len(found) != count or not all(map(isfinite, found)):
            return None
        return tuple(
            int(each) if isinstance(each, int) or each.is_integer() else constant(Fraction(each)) for each in found
        )

    def _declared(self, start: int, end: int) -> Declared:
        name = ""
        dtype = 0
        dims: tuple[int | str | None, ...] | None = None
        is_tensor = False
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                name = self._text(begin, after)
            elif number == 2:
                for kind, _, (tensor, tensor_end) in fields(self._data, begin, after):
                    if kind == 1:
                        is_tensor = True
                        for part, _, (at, part_end) in fields(self._data, tensor, tensor_end):
                            if part == 1:
                                dtype = varint(self._data, at)[0]
                            elif part == 2:
                                dims = tuple(self._dims(at, part_end))
        return Declared(name, dtype, dims, is_tensor)

    def _dims(self, start: int, end: int) -> Iterator[int | str | None]:
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                size: int | str | None = None
                for part, _, (at, part_end) in fields(self._data, begin, after):
                    if part == 1:
                        length = _signed(varint(self._data, at)[0])
                        size = length if length >= 0 else None  # some exporters say -1 for free
                    elif part == 2:
                        size = self._text(at, part_end) or None
                yield size


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _integers(data: memoryview, start: int, end: int) -> list[int]:
    found: list[int] = []
    while start < end:
        value, start = varint(data, start)
        found.append(_signed(value))
    return found
