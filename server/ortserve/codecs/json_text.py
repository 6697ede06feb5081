"""JSON of REST: documents, the ``data`` arrays of tensors, and the parameters of control calls.

Triton and its clients write the bare tokens ``NaN``, ``Infinity`` and ``-Infinity``. orjson reads and writes everything
else, many times faster than the json module, which only reads documents with such tokens.

No element of a tensor is cast silently: a fraction for an integer tensor, a number beyond the datatype's range, and a
boolean, string or null in place of a number are rejected, although numpy would accept them.
"""

import base64
import binascii
import json
import math
import struct
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from ortserve.codecs.binary_tensor import check_text_count, object_array
from ortserve.codecs.bounds import INLINE_ELEMENTS, MAX_DIMS
from ortserve.core.dtypes import DataType, narrow, widen
from ortserve.core.large_memory import LargeMemory
from ortserve.core.tensor import Tensor, format_shape
from ortserve.errors import ServeError, invalid_input

_TOKENS: Final = np.array([b"NaN", b"Infinity", b"-Infinity"], object)
"""By the sign of what they stand for."""

_PLACE: Final = b"\1"
_STEP: Final = 4096
"""Elements that are written at a time, in about 0.2 ms."""


def parse_json(text: bytes | memoryview) -> Any:
    """Read a document.

    Raises:
        ServeError: invalid_input, with the reason and the place.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason = f"{error.msg} at {error.pos}"
    raw = bytes(text)
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            document = json.loads(raw, parse_float=_finite)
            if b"\\u" in raw:  # it takes half a surrogate pair for a character, which nothing can be made of any more
                json.dumps(document, ensure_ascii=False).encode()
            return document
        except (ValueError, RecursionError):
            pass
    raise invalid_input(f"failed to parse the request JSON buffer: {reason}")


class LongArray:
    """An array that is written already, in pieces. No dataclass: orjson would write its fields."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces: Final = pieces


def write_json(
    document: dict[str, Any], outputs: Sequence[Tensor], memory: LargeMemory | None = None
) -> bytes | memoryview:
    """Write a document whose numpy arrays and numbers, wherever they are in it, come from ``outputs``.

    Long arrays are put together in ``memory``, where there is some.
    """
    long: list[LongArray] = []
    text = orjson.dumps(document, default=partial(_stand_in, long), option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes NaN and the infinities as null. Looking for it in the text costs next to nothing; only a hit makes
    # the arrays worth a look.
    if b"null" in text and any(_has_non_finite(tensor) for tensor in outputs):
        long = []
        text = orjson.dumps(
            document, default=partial(_stand_in, long)
        )  # not told of numpy, it asks for what is numpy's
    return text if not long else _with_long_arrays(text, long, memory)


def write_array(elements: np.ndarray | list[str]) -> LongArray:
    """Write a long array of numbers, or of texts, step by step: a thread that does so gives way to others."""
    pieces: list[bytes] = []
    for begin in range(0, len(elements), _STEP):
        step = elements[begin : begin + _STEP]
        text = orjson.dumps(step, option=orjson.OPT_SERIALIZE_NUMPY)
        if isinstance(step, np.ndarray) and b"null" in text:
            text = _spell_with_tokens(step, text)
        pieces += text[1:-1], b","
        time.sleep(0)
    pieces[-1] = b"]"
    return LongArray([b"[", *pieces])


def _stand_in(long: list[LongArray], value: object) -> orjson.Fragment:
    """What orjson writes for what it does not know. For a long array that is a byte which is nowhere else in JSON."""
    if isinstance(value, LongArray):
        long.append(value)
        return orjson.Fragment(_PLACE)
    if isinstance(value, np.ndarray | np.generic):
        return _with_tokens(value)
    raise TypeError(type(value).__name__)


def _with_long_arrays(text: bytes, long: list[LongArray], memory: LargeMemory | None) -> bytes | memoryview:
    """Put the arrays into their places. Joining releases the interpreter lock, which orjson keeps while it copies."""
    around = text.split(_PLACE)
    pieces: list[bytes | memoryview] = [around[0]]
    for array, after in zip(long, around[1:], strict=True):
        pieces += array.pieces
        array.pieces.clear()
        pieces.append(after)
    return b"".join(pieces) if memory is None else memory.join(pieces)


def _finite(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):  # 1e400: not the token, and orjson refuses it, too
        raise invalid_input(f"failed to parse the request JSON buffer: a number is beyond the range of FP64: {literal}")
    return number


def _has_non_finite(tensor: Tensor) -> bool:
    if tensor.datatype is DataType.BF16:
        return bool(((tensor.array & 0x7F80) == 0x7F80).any())
    return tensor.array.dtype.kind == "f" and not np.isfinite(tensor.array).all()


def _with_tokens(numbers: np.ndarray | np.generic) -> orjson.Fragment:
    return orjson.Fragment(_spell_with_tokens(numbers, orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)))


def _spell_with_tokens(numbers: np.ndarray | np.generic, text: bytes) -> bytes:
    """``text``, as orjson spells ``numbers``, with a token for each null, of which there is one for each non-finite."""
    if numbers.dtype.kind != "f":
        return text
    flat = numbers.reshape(-1)
    odd = flat[~np.isfinite(flat)]
    signs = np.where(np.isnan(odd), 0, np.sign(odd)).astype(np.intp)
    if odd.size and (signs == signs[0]).all():  # a mask, or a model that went wrong: no need to split
        return text.replace(b"null", _TOKENS[signs[0]])
    pieces = [b""] * (2 * odd.size + 1)
    pieces[::2] = text.split(b"null")
    pieces[1::2] = _TOKENS[signs].tolist()
    return b"".join(pieces)


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


LoadParameter: TypeAlias = bool | int | str | bytes
"""Of a load: a file's bytes, or what JSON has."""


def parse_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse an object; no bytes at all count as ``{}``. Raises ServeError: invalid_input."""
    if not body:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    if not isinstance(document, dict):
        raise invalid_input(f"expected a JSON object, got {type(document).__name__}")
    return document


def parameters_of(document: dict[str, Any]) -> dict[str, Any]:
    """The object ``parameters``, empty where there is none. Raises ServeError: invalid_input, for anything else."""
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise invalid_input(f"Unable to parse 'parameters': expected an object, got {type(parameters).__name__}")
    return parameters


def decode_load_body(body: bytes | memoryview) -> dict[str, LoadParameter]:
    """Read the parameters of a load, with the bytes of each file. Raises ServeError: invalid_input."""
    decoded: dict[str, LoadParameter] = {}
    for name, value in parameters_of(parse_object(body)).items():
        if name.startswith("file:"):
            try:
                value = base64.b64decode("".join(value.split()), validate=True)  # some tools break it into lines
            except (AttributeError, ValueError, binascii.Error):
                raise invalid_input(f"parameter '{name}': expected a file's bytes in base64") from None
        elif not isinstance(value, str | bool | int):
            raise invalid_input(f"parameter '{name}': expected a text, number or boolean, got {type(value).__name__}")
        decoded[name] = value
    return decoded
