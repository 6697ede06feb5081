"""BYTES tensors in binary form: each element a 4-byte little-endian length, then that many bytes.

ONNX Runtime holds strings as UTF-8 and hands them out as ``str``, so bytes that are not valid UTF-8 are refused here
rather than mangled there.
"""

import struct
from math import prod
from typing import Final

import numpy as np

from ortserve.errors import ServeError, invalid_input

_LENGTH: Final = struct.Struct("<I")


def decode_bytes_elements(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Read exactly the elements of ``shape`` from ``data``.

    Returns:
        An object array of ``str`` with ``shape``.

    Raises:
        ServeError: invalid_input, when the elements do not fill ``data`` exactly or are not UTF-8.
    """
    count = prod(shape)
    end = len(data)
    if count * 4 > end:  # checked before anything of that size is allocated
        raise invalid_input(f"expected {count} string elements for inference input '{name}', got {end} bytes")
    raw = bytes(data)  # slices of a memoryview are objects of their own and would have to be copied once more each
    elements: list[str] = []
    append, read_length = elements.append, _LENGTH.unpack_from
    offset = 0  # of the first element that was not read
    # What this costs is paid for each element, on the loop: what is wrong with one is found out afterwards.
    try:
        for _ in range(count):
            (length,) = read_length(raw, offset)
            start = offset + 4
            stop = start + length
            if stop > end:
                break
            append(raw[start:stop].decode())
            offset = stop
    except (struct.error, UnicodeDecodeError):
        pass
    if offset < end or len(elements) < count:
        raise _fault(raw, offset, len(elements), count, name)
    return object_array(elements, shape)


def _fault(raw: bytes, offset: int, index: int, count: int, name: str) -> ServeError:
    """What is wrong with element ``index`` at ``offset``, or with there being one, or none."""
    left = len(raw) - offset
    if left == 0:
        return invalid_input(f"expected {count} string elements for inference input '{name}', got {index}")
    if left < 4:
        return invalid_input(f"incomplete string length indicator for inference input '{name}' at byte {offset}")
    (length,) = _LENGTH.unpack_from(raw, offset)
    start, left = offset + 4, left - 4
    if length > left:
        return invalid_input(
            f"string element {index} of inference input '{name}' has length {length}, but only {left} bytes are left"
        )
    try:
        decode_element(raw[start : start + length], index, name)
    except ServeError as error:
        return error
    return invalid_input(f"expected {count} string elements for inference input '{name}', got more")


def decode_element(element: bytes, index: int, name: str) -> str:
    """Raises ServeError: invalid_input, when ``element`` is not UTF-8."""
    try:
        return element.decode()
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
    """Spell an object array of ``str`` as length-prefixed UTF-8 elements in row-major order."""
    pieces: list[bytes] = []
    for element in array.ravel():
        encoded = element.encode()
        pieces.append(struct.pack("<I", len(encoded)))
        pieces.append(encoded)
    return b"".join(pieces)
