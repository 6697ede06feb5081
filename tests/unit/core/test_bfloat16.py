"""Bit patterns of BF16 against ``ml_dtypes``, which knows the type."""

import ml_dtypes
import numpy as np
import pytest

from ortserve.core.bfloat16 import narrow, widen

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
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    assert narrow(np.ones(shape, np.float32)).shape == shape
    assert widen(np.ones(shape, np.uint16)).shape == shape
