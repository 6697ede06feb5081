"""The ``data`` arrays of REST JSON: nested or flat lists of numbers, booleans or strings.

Nothing is cast silently: a fraction for an integer tensor, a number beyond the datatype's range, a boolean, a string or
null where a number belongs are all refused, although numpy would take them.
"""

import struct
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np

from ortserve.codecs.bounds import INLINE_ELEMENTS
from ortserve.codecs.bytes_elements import check_text_count, object_array
from ortserve.codecs.json_text import LongArray, write_array
from ortserve.codecs.shape_bounds import MAX_DIMS
from ortserve.core.bfloat16 import narrow, widen
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input

_NUMBERS: Final = frozenset((int, float))
_WANTED: Final = {"f": "numbers", "i": "integers", "u": "integers", "b": "booleans (true, false, 0 or 1)"}


def decode_json_data(data: list[Any], datatype: DataType, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Make the tensor of ``shape`` from ``data``, whose elements are taken in row-major order whatever their nesting.

    Returns:
        A new, contiguous array of ``datatype.numpy``.

    Raises:
        ServeError: invalid_input, naming the input, what was expected and what came.
    """
    elements, types = _flatten(data, shape, name)
    if len(elements) != prod(shape):
        raise _count_error(name, shape, f"{len(elements)} elements")
    if not elements:
        return np.empty(shape, datatype.numpy)
    if datatype is DataType.BYTES:
        check_text_count(len(elements), name)
        return _texts(elements, types, shape, name)
    return _numbers(elements, types, datatype, name).reshape(shape)


def encode_json_data(array: np.ndarray, datatype: DataType) -> np.ndarray | list[Any] | LongArray:
    """Give what orjson and json can write as a flat list; long arrays are written at once, step by step."""
    flat = array.ravel()
    elements = flat.tolist() if datatype is DataType.BYTES else widen(flat) if datatype is DataType.BF16 else flat
    return write_array(elements) if array.size > INLINE_ELEMENTS else elements


def _flatten(data: list[Any], shape: tuple[int, ...], name: str) -> tuple[list[Any], set[type]]:
    """The elements of nested lists and their types.

    By hand, because numpy makes one type of them all: numbers of booleans beside numbers, and of numbers beside a text
    as many texts of its length, so that a body of 100 kB could ask for gigabytes.
    """
    types = set(map(type, data))
    depth = 1
    while list in types:
        depth += 1
        if len(types) > 1 or len(set(map(len, data))) > 1:
            raise _count_error(name, shape, "ragged lists")
        if depth > MAX_DIMS:
            raise _count_error(name, shape, f"lists nested deeper than {MAX_DIMS}")
        data = list(chain.from_iterable(data))
        types = set(map(type, data))
    return data, types


def _numbers(elements: list[Any], types: set[type], datatype: DataType, name: str) -> np.ndarray:
    target = datatype.numpy
    if datatype is DataType.BF16:
        if types <= _NUMBERS:
            return _bfloat16_bits(_floats(elements, DataType.FP32, name), name)
    elif target.kind == "f":
        if types <= _NUMBERS:
            return _floats(elements, datatype, name)
    elif target.kind in "iu":
        if types == {int}:
            try:
                return np.array(elements, target)
            except OverflowError:
                low, high = min(elements), max(elements)
                came = str(low if low < np.iinfo(target).min else high)
                raise _type_error(name, datatype, came) from None
    elif types == {bool} or (types <= {bool, int} and set(elements) <= {0, 1}):
        return np.array(elements, target)
    raise _type_error(name, datatype, _first_odd(elements, datatype))


def _floats(elements: list[Any], datatype: DataType, name: str) -> np.ndarray:
    try:
        if datatype is DataType.FP32:  # in less than half the time that numpy takes, by way of FP64
            array = np.empty(len(elements), np.float32)
            struct.pack_into(f"={len(elements)}f", array.data, 0, *elements)
            return array
        with np.errstate(over="raise"):
            return np.array(elements, np.float64).astype(datatype.numpy, copy=False)
    except (FloatingPointError, OverflowError, struct.error):
        raise _range_error(name, datatype) from None


def _bfloat16_bits(array: np.ndarray, name: str) -> np.ndarray:
    bits = narrow(array)
    if (np.isfinite(array) & ((bits & 0x7FFF) == 0x7F80)).any():
        raise _range_error(name, DataType.BF16)
    return bits


def _texts(elements: list[Any], types: set[type], shape: tuple[int, ...], name: str) -> np.ndarray:
    if types != {str}:
        odd = next(element for element in elements if type(element) is not str)
        raise invalid_input(f"Unable to parse 'data' of input '{name}': expected strings for BYTES, got {_spell(odd)}")
    try:
        "".join(elements).encode()
    except UnicodeEncodeError:  # a lone surrogate escape: json.loads lets it through, orjson does not
        raise invalid_input(f"Unable to parse 'data' of input '{name}': a string is not valid Unicode") from None
    return object_array(elements, shape)


def _first_odd(elements: list[Any], datatype: DataType) -> str:
    kind = "f" if datatype is DataType.BF16 else datatype.numpy.kind
    wanted = {"f": (int, float), "b": (bool,)}.get(kind, (int,))
    odd = next(e for e in elements if type(e) not in wanted and not (kind == "b" and type(e) is int and e in (0, 1)))
    return _spell(odd)


def _spell(element: object) -> str:
    if type(element) in (int, float):
        return repr(element)
    return {bool: "a boolean", str: "a string", dict: "an object"}.get(type(element), "null")


def _type_error(name: str, datatype: DataType, came: str) -> ServeError:
    wanted = _WANTED["f" if datatype is DataType.BF16 else datatype.numpy.kind]
    return invalid_input(
        f"Unable to parse 'data' of input '{name}': expected {wanted} for {datatype.value}, got {came}"
    )


def _range_error(name: str, datatype: DataType) -> ServeError:
    return _type_error(name, datatype, "a number beyond its range")


def _count_error(name: str, shape: tuple[int, ...], came: str) -> ServeError:
    return invalid_input(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field: "
        f"input '{name}' of shape {format_shape(shape)} takes {prod(shape)} elements, got {came}"
    )
