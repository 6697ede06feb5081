"""Reads the constants of a model file: the element types, shapes and small contents of tensors. Weights are skipped."""

import struct
from fractions import Fraction
from math import isfinite, prod
from typing import Final

from ortserve.model_file.graph import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    UINT8,
    UINT32,
    UINT64,
    ExternalFile,
    Rational,
    Tensor,
    rational,
)
from ortserve.model_file.protobuf import TextReader, fields, integers, varint

MAX_ELEMENTS: Final = 4096
"""Maximum number of elements that the record stores for a constant of integers."""
MAX_FLOATS: Final = 16
"""Maximum number of elements that the record stores for a constant of floats. Larger ones are weights, not scales or
bounds."""

_FORMATS: Final = {
    FLOAT: "f", UINT8: "B", INT8: "b", 4: "H", 5: "h", INT32: "i", INT64: "q", BOOL: "?", FLOAT16: "e", DOUBLE: "d",
    UINT32: "I", UINT64: "Q",
}  # fmt: skip
"""The format of one element in raw data, by element type."""
_FLOATS: Final = frozenset({FLOAT, FLOAT16, DOUBLE})
_RAW_DATA: Final = 9
"""The field with raw data. Without raw data, the elements are in one of the following fields."""
_FLOAT_DATA: Final = 4
_INT32_DATA: Final = 5
_INT64_DATA: Final = 7
_DOUBLE_DATA: Final = 10
_UINT64_DATA: Final = 11
_DATA_FIELDS: Final = {
    FLOAT: _FLOAT_DATA, DOUBLE: _DOUBLE_DATA, INT64: _INT64_DATA, UINT32: _UINT64_DATA, UINT64: _UINT64_DATA,
}  # fmt: skip
"""The field of elements by their type; ``_INT32_DATA`` for all other types."""
_CONTENT: Final = frozenset({_RAW_DATA, _INT32_DATA, *_DATA_FIELDS.values()})


class TensorReader:
    """Reads the tensors of one message. Field numbers are those of onnx.proto (github.com/onnx/onnx)."""

    def __init__(self, data: memoryview, texts: TextReader) -> None:
        """``texts`` must read the texts of ``data``."""
        self._data = data
        self._text = texts.read
        self.external_files: Final[dict[str, ExternalFile]] = {}
        """The external files of the tensors that were read so far, by location."""

    def sparse(self, start: int, end: int) -> tuple[str, Tensor]:
        name, dtype = "", 0
        dims: list[int] = []
        for number, wire_type, (begin, after) in fields(self._data, start, end):
            if number == 1:
                name, tensor = self.tensor(begin, after)
                dtype = tensor.dtype
            elif number == 3:
                dims += integers(self._data, wire_type, begin, after)
        return name, Tensor(dtype, tuple(dims))

    def tensor(self, start: int, end: int) -> tuple[str, Tensor]:
        data = self._data
        name = ""
        dtype = 0
        dims: list[int] = []
        content: dict[int, list[tuple[int, int, int]]] = {}
        external: dict[str, str] = {}
        is_external = False
        for number, wire_type, (begin, after) in fields(data, start, end):
            if number == 1:
                dims += integers(data, wire_type, begin, after)
            elif number == 2:
                dtype = varint(data, begin)[0]
            elif number == 8:
                name = self._text(begin, after)
            elif number == 13:
                self._external_entry(begin, after, external)
            elif number == 14:
                is_external = varint(data, begin)[0] == 1
            elif number in _CONTENT:
                content.setdefault(number, []).append((wire_type, begin, after))
                if len(content[number]) > MAX_ELEMENTS:
                    content[number].pop()
        if external:
            self._external_file(name, external)
        count = prod(dims)
        elements = None
        # ONNX Runtime reads the external file even if the model file has elements, too.
        if not is_external and dtype in _FORMATS and 0 <= count <= (MAX_FLOATS if dtype in _FLOATS else MAX_ELEMENTS):
            elements = self._elements(dtype, count, content)
        return name, Tensor(dtype, tuple(dims), elements)

    def _elements(
        self, dtype: int, count: int, content: dict[int, list[tuple[int, int, int]]]
    ) -> tuple[Rational, ...] | None:
        """The elements of a small tensor; None if the file does not hold them, or if some are not finite."""
        data = self._data
        form = _FORMATS[dtype]
        found: list[int | float] = []
        if raw := content.get(_RAW_DATA):
            _, begin, after = raw[-1]
            if after - begin != count * struct.calcsize(f"<{form}"):
                return None
            found = list(struct.unpack(f"<{count}{form}", data[begin:after]))
        else:
            number = _DATA_FIELDS.get(dtype, _INT32_DATA)
            for wire_type, begin, after in content.get(number, []):
                if dtype in (FLOAT, DOUBLE):
                    found += [each[0] for each in struct.iter_unpack(f"<{form}", data[begin:after])]
                else:
                    found += integers(data, wire_type, begin, after)
            if number in (_INT32_DATA, _UINT64_DATA):  # smaller types are the last bits; FP16 is stored as its bits
                found = [_last_bits(int(each), form) for each in found]
        if len(found) != count or not all(map(isfinite, found)):
            return None
        return tuple(
            int(each) if isinstance(each, int) or each.is_integer() else rational(Fraction(each)) for each in found
        )

    def _external_entry(self, start: int, end: int, entries: dict[str, str]) -> None:
        key = value = ""
        for number, _, (begin, after) in fields(self._data, start, end):
            if number == 1:
                key = self._text(begin, after)
            elif number == 2:
                value = self._text(begin, after)
        entries[key] = value

    def _external_file(self, name: str, entries: dict[str, str]) -> None:
        location, parts = entries.get("location"), (entries.get("offset", "0"), entries.get("length", "0"))
        if location is None:
            return
        nbytes = sum(int(part) for part in parts if part.isdecimal())
        known = self.external_files.get(location)
        if known is None or known.nbytes < nbytes:
            self.external_files[location] = ExternalFile(nbytes, name)


def _last_bits(number: int, form: str) -> int | float:
    """An element from an integer of 32 or 64 bits, of which ONNX Runtime drops the bits that the type does not have."""
    if form == "?":
        return int(number & 0xFFFFFFFF != 0)
    element: int | float = struct.unpack_from(f"<{form}", struct.pack("<Q", number & 0xFFFFFFFFFFFFFFFF))[0]
    return element
