"""BYTES tensors in binary form: each element a 4-byte little-endian length, then that many bytes.

ONNX Runtime holds strings as UTF-8 and hands them out as ``str``, so bytes that are not valid UTF-8 are refused here
rather than mangled there.
"""

import struct

import numpy as np

from ortserve.errors import invalid_input


def decode_bytes_elements(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Read exactly the elements of ``shape`` from ``data``.

    Returns:
        An object array of ``str`` with ``shape``.

    Raises:
        ServeError: invalid_input, when the elements do not fill ``data`` exactly or are not UTF-8.
    """
    count = 1
    for dim in shape:
        count *= dim
    view = memoryview(data)
    end = len(view)
    if count * 4 > end:  # checked before anything of that size is allocated
        raise invalid_input(f"expected {count} string elements for inference input '{name}', got {end} bytes")
    elements: list[str] = []
    offset = 0
    while offset < end:
        if end - offset < 4:
            raise invalid_input(f"incomplete string length indicator for inference input '{name}' at byte {offset}")
        (length,) = struct.unpack_from("<I", view, offset)
        offset += 4
        if length > end - offset:
            raise invalid_input(
                f"string element {len(elements)} of inference input '{name}' has length {length}, "
                f"but only {end - offset} bytes are left"
            )
        elements.append(decode_element(bytes(view[offset : offset + length]), len(elements), name))
        offset += length
        if len(elements) > count:
            break
    if len(elements) != count:
        got = f"{len(elements)}" if len(elements) < count else "more"
        raise invalid_input(f"expected {count} string elements for inference input '{name}', got {got}")
    return object_array(elements, shape)


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
