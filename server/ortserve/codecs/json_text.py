"""JSON of REST: documents, the ``data`` arrays of tensors, and the parameters of control calls.

Triton and its clients write the bare tokens ``NaN``, ``Infinity`` and ``-Infinity``. The json module reads documents
with such tokens. orjson, which is many times faster, reads all others and writes all documents.

No element of a tensor is cast silently. Fractions for integers, numbers beyond the range of the datatype, and booleans,
strings or nulls in place of numbers are rejected, although numpy would accept them.
"""

import base64
import binascii
import json
import struct
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from ortserve.codecs.binary_tensor import check_text_count, next_texts, object_array
from ortserve.codecs.bounds import INLINE_CHARACTERS, INLINE_ELEMENTS
from ortserve.core.dtypes import DataType, narrow, widen
from ortserve.core.large_memory import LargeMemory
from ortserve.core.tensor import MAX_DIMS, Tensor, format_shape
from ortserve.errors import ServeError, invalid_input

_TOKENS: Final = np.array([b"NaN", b"Infinity", b"-Infinity"], object)
"""Tokens by the sign of the value: 0 for NaN, 1 for infinity, -1 for negative infinity."""

_PLACE: Final = b"\1"
_STEP: Final = 4096
"""Maximum number of elements that are encoded at a time, in about 0.2 ms."""


def parse_json(text: bytes | memoryview) -> Any:
    """Parse a document.

    Raises:
        ServeError: invalid_input; the message contains the reason and the position.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason = f"{error.msg} at {error.pos}"
    raw = bytes(text)
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            # Decoded here, because the json module also accepts UTF-16, UTF-32 and surrogates in bytes.
            document = json.loads(raw.decode())
        except json.JSONDecodeError as error:  # orjson has stopped at the first token
            reason = f"{error.msg} at {error.pos}"
        except (ValueError, RecursionError):
            pass
        else:
            _check_values(raw)
            return document
    raise invalid_input(f"failed to parse the request JSON buffer: {reason}")


def _check_values(document: bytes) -> None:
    """Check a document that the json module accepts for lone surrogates and for numbers beyond FP64, as orjson does.

    Raises:
        ServeError: invalid_input.
    """
    try:
        orjson.loads(document.replace(b"NaN", b"0").replace(b"Infinity", b"0"))
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg}") from None


class LongJson:
    """An encoded array or text, in pieces. No dataclass, because orjson would encode the fields of a dataclass."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces: Final = pieces


def write_json(
    document: dict[str, Any], outputs: Sequence[Tensor], memory: LargeMemory | None = None
) -> bytes | memoryview:
    """Encode a document with the arrays and numbers of ``outputs``.

    A document with long arrays or texts is written to ``memory``, if given.
    """
    long: list[LongJson] = []
    text = orjson.dumps(document, default=partial(_stand_in, long), option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson encodes NaN and infinities as null. Searching the text is cheap; the arrays are checked only after a hit.
    if b"null" in text and any(_has_non_finite(tensor) for tensor in outputs):
        long = []
        # Without OPT_SERIALIZE_NUMPY, orjson calls ``default`` for numpy's values.
        text = orjson.dumps(document, default=partial(_stand_in, long))
    return text if not long else _with_long_arrays(text, long, memory)


def write_array(elements: np.ndarray) -> LongJson:
    """Encode a long array of numbers or texts in steps, and release the interpreter lock after each step."""
    pieces: list[bytes] = []
    begin = 0
    while begin < len(elements):
        if elements.dtype.hasobject:
            texts = next_texts(elements, begin, _STEP, INLINE_CHARACTERS)
            begin += len(texts)
            pieces += [orjson.dumps(texts)[1:-1]] if len(texts) > 1 else _write_text(texts[0])
        else:
            step = elements[begin : begin + _STEP]
            begin += len(step)
            text = orjson.dumps(step, option=orjson.OPT_SERIALIZE_NUMPY)
            pieces.append((_spell_with_tokens(step, text) if b"null" in text else text)[1:-1])
        pieces.append(b",")
        time.sleep(0)
    pieces[-1] = b"]"
    return LongJson([b"[", *pieces])


def _write_text(text: str) -> list[bytes]:
    """Encode a long text in steps like ``write_array``."""
    pieces = [b'"']
    for begin in range(0, len(text), INLINE_CHARACTERS):
        pieces.append(orjson.dumps(text[begin : begin + INLINE_CHARACTERS])[1:-1])
        time.sleep(0)
    return [*pieces, b'"']


def _stand_in(long: list[LongJson], value: object) -> orjson.Fragment:
    """Encode values that orjson does not support. A byte that cannot occur in JSON marks the place of a LongJson."""
    if isinstance(value, LongJson):
        long.append(value)
        return orjson.Fragment(_PLACE)
    if isinstance(value, np.ndarray | np.generic):
        return _with_tokens(value)
    raise TypeError(type(value).__name__)


def _with_long_arrays(text: bytes, long: list[LongJson], memory: LargeMemory | None) -> bytes | memoryview:
    """Insert the long arrays and texts. Joining releases the interpreter lock; orjson would hold it while copying."""
    around = text.split(_PLACE)
    pieces: list[bytes | memoryview] = [around[0]]
    for array, after in zip(long, around[1:], strict=True):
        pieces += array.pieces
        array.pieces.clear()
        pieces.append(after)
    return b"".join(pieces) if memory is None else memory.join(pieces)


def _has_non_finite(tensor: Tensor) -> bool:
    if tensor.datatype is DataType.BF16:
        return bool(((tensor.array & 0x7F80) == 0x7F80).any())
    return tensor.array.dtype.kind == "f" and not np.isfinite(tensor.array).all()


def _with_tokens(numbers: np.ndarray | np.generic) -> orjson.Fragment:
    return orjson.Fragment(_spell_with_tokens(numbers, orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)))


def _spell_with_tokens(numbers: np.ndarray | np.generic, text: bytes) -> bytes:
    """Replace each null in ``text``, the encoding of ``numbers`` by orjson, by the token of the non-finite value."""
    if numbers.dtype.kind != "f":
        return text
    flat = numbers.reshape(-1)
    odd = flat[~np.isfinite(flat)]
    signs = np.where(np.isnan(odd), 0, np.sign(odd)).astype(np.intp)
    if odd.size and (signs == signs[0]).all():  # all values are equal, for example in a mask
        return text.replace(b"null", _TOKENS[signs[0]])
    pieces = [b""] * (2 * odd.size + 1)
    pieces[::2] = text.split(b"null")
    pieces[1::2] = _TOKENS[signs].tolist()
    return b"".join(pieces)


_NUMBERS: Final = frozenset((int, float))
_WANTED: Final = {"f": "numbers", "i": "integers", "u": "integers", "b": "booleans (true, false, 0 or 1)"}


def decode_json_data(data: list[Any], datatype: DataType, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Create a tensor of ``shape`` from ``data``, whose elements are in row-major order, at any nesting.

    Returns:
        A new contiguous array of ``datatype.numpy``.

    Raises:
        ServeError: invalid_input; the message contains the input, the expected and the actual value. too_large for too
            many texts.
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


def encode_json_data(
    array: np.ndarray, datatype: DataType, *, in_steps: bool = False
) -> np.ndarray | list[Any] | LongJson:
    """Return a flat list or array for ``write_json``. Many elements and long texts are encoded here, in steps.

    ``in_steps`` also encodes few elements here: one of many arrays, which ``write_json`` would encode in one step.
    """
    flat = array.ravel()
    elements = widen(flat) if datatype is DataType.BF16 else flat
    is_long = array.size > INLINE_ELEMENTS or (datatype is DataType.BYTES and has_long_texts([flat]))
    if is_long or (in_steps and array.size > 0):
        return write_array(elements)
    return flat.tolist() if datatype is DataType.BYTES else elements


def encode_json_text(text: str) -> str | LongJson:
    """Return a text for ``write_json``. A long one is encoded here, in steps."""
    return LongJson(_write_text(text)) if len(text) > INLINE_CHARACTERS else text


def has_long_texts(arrays: Sequence[np.ndarray]) -> bool:
    """Whether arrays of texts together take too long for the event loop, as JSON."""
    return sum([sum(map(len, array.ravel().tolist())) for array in arrays]) > INLINE_CHARACTERS


def _flatten(data: list[Any], shape: tuple[int, ...], name: str) -> tuple[list[Any], set[type]]:
    """Return the elements of nested lists, and their types.

    numpy is not used, because it converts all elements to one type: booleans beside numbers to numbers, and numbers
    beside a text to texts of the same length, so that a body of 100 kB could take gigabytes.
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
            return _bfloat16_bits(_floats(elements, datatype, name), name)
    elif target.kind == "f":
        if types <= _NUMBERS:
            return _floats(elements, datatype, name)
    elif target.kind in "iu":
        if types == {int}:
            try:
                return np.array(elements, target)
            except OverflowError:
                limits = np.iinfo(target)
                low, high = min(elements), max(elements)
                got = low if low < limits.min else high
                raise _type_error(name, datatype, f"{got}: its range is {limits.min} to {limits.max}") from None
    elif types == {bool} or (types <= {bool, int} and set(elements) <= {0, 1}):
        return np.array(elements, target)
    raise _type_error(name, datatype, _first_odd(elements, datatype))


def _floats(elements: list[Any], datatype: DataType, name: str) -> np.ndarray:
    """Decode numbers; those of BF16 as FP32."""
    try:
        # Less than half the time of numpy, which converts through FP64.
        if datatype is DataType.FP32 or datatype is DataType.BF16:
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
    except UnicodeEncodeError:  # a lone surrogate escape, which json.loads accepts and orjson rejects
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


def _type_error(name: str, datatype: DataType, got: str) -> ServeError:
    wanted = _WANTED["f" if datatype is DataType.BF16 else datatype.numpy.kind]
    return invalid_input(f"Unable to parse 'data' of input '{name}': expected {wanted} for {datatype.value}, got {got}")


def _range_error(name: str, datatype: DataType) -> ServeError:
    return _type_error(name, datatype, "a number beyond its range")


def _count_error(name: str, shape: tuple[int, ...], got: str) -> ServeError:
    return invalid_input(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field: "
        f"input '{name}' of shape {format_shape(shape)} takes {prod(shape)} elements, got {got}"
    )


LoadParameter: TypeAlias = bool | int | str | bytes | memoryview
"""A parameter of a load call: the bytes of a file, or a JSON value."""


def parse_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a JSON object. An empty body counts as ``{}``. Raises ServeError: invalid_input."""
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
    """Return the object ``parameters`` without keys that are null; empty if it is missing.

    Raises ServeError: invalid_input for another type.
    """
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise invalid_input(f"Unable to parse 'parameters': expected an object, got {type(parameters).__name__}")
    return {name: value for name, value in parameters.items() if value is not None}


def decode_load_body(body: bytes | memoryview) -> dict[str, LoadParameter]:
    """Decode the parameters of a load call, whose files are in base64. Raises ServeError: invalid_input."""
    decoded: dict[str, LoadParameter] = {}
    for name, value in parameters_of(parse_object(body)).items():
        if name.startswith("file:"):
            try:
                value = base64.b64decode("".join(value.split()), validate=True)  # some tools insert line breaks
            except (AttributeError, ValueError, binascii.Error):
                raise invalid_input(f"parameter '{name}': expected the content of a file in base64") from None
        elif not isinstance(value, str | bool | int):
            raise invalid_input(f"parameter '{name}': expected a string, number or boolean, got {type(value).__name__}")
        decoded[name] = value
    return decoded
