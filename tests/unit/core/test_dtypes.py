"""The datatypes against the protocol's table."""

import numpy as np
import pytest

from ortserve.core.dtypes import DATATYPES, DataType

# Names, bytes per element and numpy types as the protocol lists them.
TABLE = [
    ("BOOL", 1, np.bool_),
    ("UINT8", 1, np.uint8),
    ("UINT16", 2, np.uint16),
    ("UINT32", 4, np.uint32),
    ("UINT64", 8, np.uint64),
    ("INT8", 1, np.int8),
    ("INT16", 2, np.int16),
    ("INT32", 4, np.int32),
    ("INT64", 8, np.int64),
    ("FP16", 2, np.float16),
    ("BF16", 2, np.uint16),
    ("FP32", 4, np.float32),
    ("FP64", 8, np.float64),
    ("BYTES", 0, np.object_),
]


@pytest.mark.parametrize(("name", "itemsize", "numpy"), TABLE)
def test_datatype_is_as_the_protocol_says(name: str, itemsize: int, numpy: type[np.generic]) -> None:
    datatype = DATATYPES[name]
    assert datatype is DataType(name)
    assert datatype.itemsize == itemsize
    assert datatype.numpy == np.dtype(numpy)
    assert datatype.numpy.isnative


def test_there_are_no_others() -> None:
    assert list(DATATYPES) == [name for name, *_ in TABLE]
    assert set(DATATYPES.values()) == set(DataType)
