"""Tensors as raw bytes, in a body or in shared memory. The REST binary extension and gRPC share the layout.

The layout is little-endian and row-major, without padding. A BYTES element is a 4-byte little-endian length and the
bytes. ONNX Runtime holds strings as UTF-8 and returns them as ``str``, so elements that are not UTF-8 are rejected.
"""

import codecs
import contextlib
import struct
import time
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Final

import numpy as np

from ortserve.codecs.bounds import MAX_TEXT_BYTES, MAX_TEXTS
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionSpan
from ortserve.core.request import Parameter
from ortserve.errors import ErrorKind, ServeError, invalid_input


def decode_binary_tensor(
    data: bytes | memoryview, datatype: DataType, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray:
    """Decode a tensor of non-negative ``shape``, without a copy except for BYTES.

    Returns:
        A possibly unaligned view on ``data``, which is read-only if ``data`` is; for BYTES a new array.

    Raises:
        ServeError: invalid_input if ``data`` does not have the exact length of the tensor, and for BOOL elements other
            than 0 and 1, for which the behaviour of kernels is undefined. For BYTES as ``decode_bytes_elements``.
    """
    if datatype is DataType.BYTES:
        return decode_bytes_elements(data, shape, name)
    expected = prod(shape) * datatype.itemsize
    if len(data) != expected:
        raise invalid_input(
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {len(data)}"
        )
    if datatype is DataType.BOOL and expected and np.frombuffer(data, np.uint8).max() > 1:
        raise invalid_input(f"input '{name}' for model '{model}' has BOOL elements other than 0 and 1")
    return np.ndarray(shape, datatype.numpy, data)


def encode_binary_tensor(
    array: np.ndarray, datatype: DataType, memory: LargeMemory | None = None
) -> bytes | memoryview:
    """Encode a tensor as bytes. A contiguous tensor is returned as a view on its memory.

    Many or long texts are written to ``memory``, if given.
    """
    if datatype is DataType.BYTES:
        return encode_bytes_elements(array, memory)
    if array.size == 0:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


_LENGTH: Final = struct.Struct("<I")
_SHORT: Final = 256
_SHORT_LENGTHS: Final = [_LENGTH.pack(size) for size in range(_SHORT)]

_WINDOW_BYTES: Final = 256 * 1024
"""Bytes that are copied at a time and then divided into elements: each slice of a memoryview would cost an object."""

_STEP_BYTES: Final = 1024 * 1024
_STEP_TEXTS: Final = 1024
_ELEMENT_BYTES: Final = 1024
"""Bytes added to the size of each element. A thread releases the interpreter lock after each ``_STEP_BYTES`` counted in
this way: after about 0.1 ms of short elements and 0.3 ms of long ones. Compiled code never releases it by itself."""


class TextArray:
    """An object array that is filled from its beginning. Releases the interpreter lock at intervals."""

    def __init__(self, count: int) -> None:
        self._array = np.empty(count, dtype=object)
        self._step: list[str] = []
        self._step_bytes = 0
        self.filled = 0

    def add(self, text: str) -> None:
        """Append an element, up to ``count`` elements in total."""
        self._step.append(text)
        self._count(1, len(text))

    def extend(self, texts: list[str], nbytes: int) -> None:
        """Append elements of ``nbytes`` bytes."""
        self._step += texts
        self._count(len(texts), nbytes)

    def _count(self, texts: int, nbytes: int) -> None:
        self.filled += texts
        self._step_bytes += _ELEMENT_BYTES * texts + nbytes
        if self._step_bytes >= _STEP_BYTES:
            self._put()
            self._step_bytes = 0
            time.sleep(0)

    def array(self) -> np.ndarray:
        """Return the elements added so far, with shape ``(filled,)``."""
        self._put()
        return self._array[: self.filled]

    def _put(self) -> None:
        self._array[self.filled - len(self._step) : self.filled] = self._step
        self._step = []


def decode_bytes_elements(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Decode the elements of ``shape``, which must fill ``data`` exactly.

    Returns:
        An object array of ``str`` with ``shape``.

    Raises:
        ServeError: invalid_input if the elements do not fill ``data`` exactly or are not UTF-8; too_large for too many
            or too long elements.
    """
    count = prod(shape)
    end = len(data)
    view = memoryview(data)
    if count * 4 > end:  # checked before the array is allocated
        raise invalid_input(f"expected {count} string elements for inference input '{name}', got {end} bytes")
    check_text_count(count, name)
    if count == 1 and _LENGTH.unpack_from(data)[0] == end - 4 <= MAX_TEXT_BYTES:
        return object_array([decode_element(view[4:], 0, name)], shape)
    texts = TextArray(count)
    begin = 0  # offset of the window in data
    window = bytes(data[:_WINDOW_BYTES])
    offset = 0  # offset in the window of the next element
    while texts.filled < count:
        bounds = _text_bounds(window, offset, min(count - texts.filled, _STEP_TEXTS))
        if len(bounds) > 1:
            texts.extend(_decode_texts(window, bounds, texts.filled, name), bounds[-1] - offset)
            offset = bounds[-1]
            continue
        size = 4  # of the element, or of its length if the window does not contain it
        if offset + 4 <= len(window):
            size += _LENGTH.unpack_from(window, offset)[0]
        begin, offset = begin + offset, 0
        if begin + size > end or size > MAX_TEXT_BYTES + 4:
            break
        if size > _WINDOW_BYTES:  # decoded without a copy
            texts.add(decode_element(view[begin + 4 : begin + size], texts.filled, name))
            begin += size
        window = bytes(view[begin : begin + _WINDOW_BYTES])
    if begin + offset < end or texts.filled < count:
        raise _fault(data, begin + offset, texts.filled, count, name)
    return texts.array().reshape(shape)


def _text_bounds(window: bytes, begin: int, most: int) -> list[int]:
    """Find at most ``most`` elements. Returns ``begin`` and the ends of the elements that ``window`` contains whole."""
    bounds = [begin]
    stop, end = begin, len(window)
    for _ in range(most):
        if stop + 4 > end:
            break
        size = window[stop]
        if window[stop + 1] | window[stop + 2] | window[stop + 3]:
            size = _LENGTH.unpack_from(window, stop)[0]
        stop += 4 + size
        if stop > end:
            break
        bounds.append(stop)
    return bounds


def _decode_texts(window: bytes, bounds: list[int], index: int, name: str) -> list[str]:
    """Decode the elements between ``bounds``; ``index`` is that of the first one. Raises ServeError: invalid_input."""
    try:
        return [window[begin + 4 : stop].decode() for begin, stop in pairwise(bounds)]
    except UnicodeDecodeError:
        return [
            decode_element(window[begin + 4 : stop], index + at, name)
            for at, (begin, stop) in enumerate(pairwise(bounds))
        ]


def check_text_count(count: int, name: str) -> None:
    """Check the number of texts. Raises ServeError: too_large for more than ``MAX_TEXTS`` elements."""
    if count > MAX_TEXTS:
        raise ServeError(
            ErrorKind.TOO_LARGE,
            f"input '{name}': expected at most {MAX_TEXTS} string elements in one request, got {count}",
        )


def check_text_size(size: int, index: int, name: str) -> None:
    """Check the bytes of element ``index``. Raises ServeError: too_large for more than ``MAX_TEXT_BYTES``."""
    if size > MAX_TEXT_BYTES:
        raise ServeError(
            ErrorKind.TOO_LARGE,
            f"string element {index} of inference input '{name}': expected at most {MAX_TEXT_BYTES} bytes, got {size}",
        )


def _fault(data: bytes | memoryview, offset: int, index: int, count: int, name: str) -> ServeError:
    """Return the error for element ``index`` at ``offset``, or for a missing or additional element."""
    left = len(data) - offset
    if left == 0:
        return invalid_input(f"expected {count} string elements for inference input '{name}', got {index}")
    if left < 4:
        return invalid_input(f"incomplete string length indicator for inference input '{name}' at byte {offset}")
    (length,) = _LENGTH.unpack_from(data, offset)
    start, left = offset + 4, left - 4
    if length > left:
        return invalid_input(
            f"string element {index} of inference input '{name}' has length {length}, but only {left} bytes are left"
        )
    try:
        check_text_size(length, index, name)
        decode_element(data[start : start + length], index, name)
    except ServeError as error:
        return error
    return invalid_input(f"expected {count} string elements for inference input '{name}', got more")


def decode_element(element: bytes | memoryview, index: int, name: str) -> str:
    """Decode one element, a long one in steps. Raises ServeError: invalid_input if it is not UTF-8."""
    try:
        if len(element) > _STEP_BYTES:
            with contextlib.suppress(UnicodeDecodeError):  # its position would be that in a step
                return _decode_in_steps(memoryview(element))
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_input(
            f"string element {index} of inference input '{name}' is not valid UTF-8 "
            f"({error.reason} at byte {error.start}); ONNX string tensors hold text"
        ) from None


def _decode_in_steps(text: memoryview) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    for begin in range(0, len(text), _STEP_BYTES):
        parts.append(decoder.decode(text[begin : begin + _STEP_BYTES]))
        time.sleep(0)
    return "".join([*parts, decoder.decode(b"", final=True)])


def object_array(elements: list[str], shape: tuple[int, ...]) -> np.ndarray:
    """Create an object array of ``shape`` that holds ``elements`` without conversion."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def encode_bytes_elements(array: np.ndarray, memory: LargeMemory | None = None) -> bytes | memoryview:
    """Encode an object array of ``str`` as length-prefixed UTF-8 elements in row-major order.

    Releases the interpreter lock at intervals. Joining the result of several steps would hold it: without ``memory``
    this function is for short results and other processes.
    """
    texts = array.ravel()
    if len(texts) == 1 and len(texts[0]) <= _STEP_BYTES:
        content: bytes = texts[0].encode()
        return _LENGTH.pack(len(content)) + content
    steps: list[bytes | memoryview] = []
    begin = 0
    while begin < len(texts):
        step = next_texts(texts, begin, _STEP_TEXTS, _STEP_BYTES)
        if begin:
            time.sleep(0)
        begin += len(step)
        if len(step[0]) > _STEP_BYTES:
            parts = _encode_in_steps(step[0])
            steps += [_LENGTH.pack(sum([len(part) for part in parts])), *parts]
            continue
        encoded = [text.encode() for text in step]
        pieces = [b""] * (2 * len(step))
        pieces[::2] = [_SHORT_LENGTHS[size] if size < _SHORT else _LENGTH.pack(size) for size in map(len, encoded)]
        pieces[1::2] = encoded
        steps.append(b"".join(pieces))
    return b"".join(steps) if memory is None or len(steps) < 2 else memory.join(steps)


def next_texts(texts: np.ndarray, begin: int, most: int, most_characters: int) -> list[str]:
    """The texts of the next step: at most ``most``, with at most ``most_characters`` in total, or a single one."""
    step: list[str] = texts[begin : begin + most].tolist()
    if sum(map(len, step)) <= most_characters:
        return step
    return step[: max(1, bisect_right(list(accumulate(map(len, step))), most_characters))]


def _encode_in_steps(text: str) -> list[bytes]:
    parts: list[bytes] = []
    for begin in range(0, len(text), _STEP_BYTES):
        parts.append(text[begin : begin + _STEP_BYTES].encode())
        time.sleep(0)
    return parts


REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
BYTE_SIZE: Final = "shared_memory_byte_size"


def read_span(parameters: Mapping[str, Parameter], what: str) -> RegionSpan:
    """Read the place of an input or output in shared memory from its parameters.

    ``what``, for example ``input 'x'``, names the tensor in errors.

    Raises:
        ServeError: invalid_input for a value of a wrong type, and for a missing size.
    """
    region = parameters.get(REGION)
    if type(region) is not str:
        raise _error(REGION, "a string", what, region)
    if BYTE_SIZE not in parameters:
        raise invalid_input(f"{what}: '{REGION}' also needs '{BYTE_SIZE}'")
    return RegionSpan(region, _unsigned(parameters, OFFSET, what), _unsigned(parameters, BYTE_SIZE, what))


def _unsigned(parameters: Mapping[str, Parameter], key: str, what: str) -> int:
    value = parameters.get(key, 0)
    if type(value) is not int or value < 0:
        raise _error(key, "an unsigned integer", what, value)
    return value


def _error(key: str, expected: str, what: str, got: object) -> Exception:
    return invalid_input(f"Unable to parse '{key}': expected {expected} for {what}, got {got!r}")
