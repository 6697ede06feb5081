"""BYTES tensors in binary form: each element a 4-byte little-endian length, then that many bytes.

ONNX Runtime holds strings as UTF-8 and hands them out as ``str``, so bytes that are not valid UTF-8 are refused here
rather than mangled there.
"""

import struct
import time
from math import prod
from typing import Final

import numpy as np

from ortserve.codecs.bounds import MAX_TEXT_BYTES, MAX_TEXTS
from ortserve.errors import ErrorKind, ServeError, invalid_input

_LENGTH: Final = struct.Struct("<I")

_WINDOW_BYTES: Final = 256 * 1024
"""Copied at a time, to be cut into elements: slices of a memoryview are objects of their own."""

_STEP: Final = 1024
"""Elements after which a thread offers the interpreter lock: some 0.1 ms. Compiled code never does so by itself."""


class TextArray:
    """An object array that is filled element by element. A thread that fills a long one gives way to others."""

    def __init__(self, count: int) -> None:
        self._array = np.empty(count, dtype=object)
        self._step: list[str] = []
        self.filled = 0

    def add(self, text: str) -> None:
        """Put in the next element. There is room for ``count``."""
        self._step.append(text)
        self.filled += 1
        if len(self._step) == _STEP:
            self._put()
            time.sleep(0)

    def array(self) -> np.ndarray:
        """The elements so far, of shape ``(filled,)``."""
        self._put()
        return self._array[: self.filled]

    def _put(self) -> None:
        self._array[self.filled - len(self._step) : self.filled] = self._step
        self._step = []


def decode_bytes_elements(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Read exactly the elements of ``shape`` from ``data``.

    Returns:
        An object array of ``str`` with ``shape``.

    Raises:
        ServeError: invalid_input, when the elements do not fill ``data`` exactly or are not UTF-8; too_large, for more
            elements, or a longer one, than are allowed.
    """
    count = prod(shape)
    end = len(data)
    if count * 4 > end:  # checked before anything of that size is allocated
        raise invalid_input(f"expected {count} string elements for inference input '{name}', got {end} bytes")
    check_text_count(count, name)
    texts = TextArray(count)
    begin = 0  # of the window
    window = bytes(data[:_WINDOW_BYTES])
    offset = 0  # in the window, of the first element that was not read
    try:
        while texts.filled < count:
            stop = offset + 4
            if stop <= len(window):
                stop += _LENGTH.unpack_from(window, offset)[0]
            if stop <= len(window):
                texts.add(window[offset + 4 : stop].decode())
                offset = stop
                continue
            size = stop - offset  # of the element, or 4 where its length is not in the window either
            begin, offset = begin + offset, 0
            if begin + size > end or size > MAX_TEXT_BYTES + 4:
                break
            window = bytes(data[begin : begin + max(size, _WINDOW_BYTES)])
    except UnicodeDecodeError:
        pass
    if begin + offset < end or texts.filled < count:
        raise _fault(data, begin + offset, texts.filled, count, name)
    return texts.array().reshape(shape)


def check_text_count(count: int, name: str) -> None:
    """Raises ServeError: too_large, for more elements than are allowed."""
    if count > MAX_TEXTS:
        raise ServeError(
            ErrorKind.TOO_LARGE,
            f"input '{name}': expected at most {MAX_TEXTS} string elements in one request, got {count}",
        )


def _fault(data: bytes | memoryview, offset: int, index: int, count: int, name: str) -> ServeError:
    """What is wrong with element ``index`` at ``offset``, or with there being one, or none."""
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
    if length > MAX_TEXT_BYTES:
        return ServeError(
            ErrorKind.TOO_LARGE,
            f"string element {index} of inference input '{name}': expected at most {MAX_TEXT_BYTES} bytes, "
            f"got {length}",
        )
    try:
        decode_element(data[start : start + length], index, name)
    except ServeError as error:
        return error
    return invalid_input(f"expected {count} string elements for inference input '{name}', got more")


def decode_element(element: bytes | memoryview, index: int, name: str) -> str:
    """Raises ServeError: invalid_input, when ``element`` is not UTF-8."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid_input(
            f"string element {index} of inference input '{name}' is not valid UTF-8 "
            f"({error.reason} at byte {error.start}); ONNX string tensors hold text"
        ) from None


def object_array(elements: list[str], shape: tuple[int, ...]) -> np.ndarray:
    """Put ``elements`` (as many as ``shape`` has) into an object array, never looking inside them."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def encode_bytes_elements(array: np.ndarray) -> bytes:
    """Spell an object array of ``str`` as length-prefixed UTF-8 elements in row-major order.

    A thread that spells many gives way to others.
    """
    pieces: list[bytes] = []
    for element in array.ravel():
        encoded = element.encode()
        pieces.append(_LENGTH.pack(len(encoded)))
        pieces.append(encoded)
        if len(pieces) % (2 * _STEP) == 0:
            time.sleep(0)
    return b"".join(pieces)
