"""The datatypes of the Open Inference Protocol and their numpy element types.

numpy has no BF16: it is held as bit patterns in ``uint16``, the upper halves of float32.
"""

from enum import Enum
from typing import Final

import numpy as np

_NUMPY_NAMES: Final = {"FP16": "float16", "BF16": "uint16", "FP32": "float32", "FP64": "float64", "BYTES": "object"}


class DataType(Enum):
    """A datatype of the protocol; the value is its name in requests and metadata.

    ``numpy`` is the element type of arrays inside the server, in native byte order. BYTES are object arrays of ``str``,
    as ONNX Runtime takes them; BF16 are bit patterns in ``uint16``. ``itemsize`` is the number of bytes per element on
    the wire, 0 for BYTES, whose elements carry their own length.
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"

    numpy: np.dtype
    itemsize: int

    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(_NUMPY_NAMES.get(name, name.lower()))
        self.itemsize = 0 if name == "BYTES" else self.numpy.itemsize


DATATYPES: Final = {datatype.value: datatype for datatype in DataType}
"""Datatype by name. A dict, because it is read for each tensor and ``DataType(name)`` costs far more."""


def widen(bits: np.ndarray) -> np.ndarray:
    """Convert BF16 bit patterns to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Round float32 values to BF16 bit patterns: to nearest, ties to even. NaN stays NaN; overflow gives infinity."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
