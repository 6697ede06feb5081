"""The datatypes of the Open Inference Protocol and what holds them in memory."""

from enum import Enum
from typing import Final

import numpy as np

_NUMPY_NAMES: Final = {"FP16": "float16", "BF16": "uint16", "FP32": "float32", "FP64": "float64", "BYTES": "object"}


class DataType(Enum):
    """A wire datatype; the value is its name in requests and metadata.

    ``numpy`` is the element type of the array that holds such a tensor inside the server, always native byte order:
    BYTES are object arrays of ``str`` (as ONNX Runtime takes them), BF16 the bit patterns in ``uint16``.
    ``itemsize`` is bytes per element on the wire, 0 for BYTES, whose elements carry their own length.
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
"""Wire name to datatype: a plain dict, because it is asked once a tensor, and ``DataType(name)`` costs far more."""
