"""Tensors as raw bytes: the REST binary extension and gRPC's raw contents share this layout.

Little-endian, row-major, no padding; BYTES elements carry a length prefix (``bytes_elements``).
"""

from math import prod

import numpy as np

from ortserve.codecs.bytes_elements import decode_bytes_elements, encode_bytes_elements
from ortserve.core.dtypes import DataType
from ortserve.errors import invalid_input


def decode_binary_tensor(
    data: bytes | memoryview, datatype: DataType, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray:
    """Read a tensor of non-negative ``shape`` without copying (BYTES excepted).

    Returns:
        A read-only view on ``data``, which may be unaligned.

    Raises:
        ServeError: invalid_input, when ``data`` is not exactly as long as the tensor, or when a BOOL is neither 0 nor
            1: kernels may do anything with another byte.
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


def encode_binary_tensor(array: np.ndarray, datatype: DataType) -> bytes | memoryview:
    """Spell a tensor as bytes; a contiguous one is returned as a view on its memory, not copied."""
    if datatype is DataType.BYTES:
        return encode_bytes_elements(array)
    if array.size == 0:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
