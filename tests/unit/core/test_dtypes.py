"""The datatypes against the protocol's table, and BF16 against ``ml_dtypes``."""

import ml_dtypes
import numpy as np
import pytest

from ortserve.core.dtypes import DATATYPES, DataType, narrow, widen

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


def test_only_the_datatypes_of_the_protocol_exist() -> None:
    assert list(DATATYPES) == [name for name, *_ in TABLE]
    assert set(DATATYPES.values()) == set(DataType)


EVERY_PATTERN = np.arange(2**16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)


def test_every_pattern_widens_to_its_value() -> None:
    expected = EVERY_PATTERN.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(widen(EVERY_PATTERN), expected)


def test_every_value_that_is_a_number_narrows_to_its_pattern() -> None:
    values = widen(EVERY_PATTERN)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(narrow(values)[numbers], EVERY_PATTERN[numbers])
    assert np.isnan(widen(narrow(values))[~numbers]).all()


def test_others_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(narrow(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 2, 3)])
def test_conversions_of_bfloat16_preserve_shapes(shape: tuple[int, ...]) -> None:
    assert narrow(np.ones(shape, np.float32)).shape == shape
    assert widen(np.ones(shape, np.uint16)).shape == shape
