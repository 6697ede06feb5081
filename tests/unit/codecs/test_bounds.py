"""Shapes that are impossible for arrays."""

import numpy as np
import pytest

from ortserve.codecs.bounds import MAX_DIMS, shape_fault


@pytest.mark.parametrize("shape", [[], [0], [1] * 64, [0] * 64, [2**60 - 1], [0, 2**59], [2**30, 2**29, 0]])
def test_largest_shapes_of_the_widest_elements_are_accepted(shape: list[int]) -> None:
    assert shape_fault(shape) is None
    if 0 in shape:
        assert np.empty(shape, np.float64).shape == tuple(shape)


@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**29], [0, 2**60], [2**62, 0, 2**62]])
def test_too_many_elements_are_rejected_even_beside_a_zero(shape: list[int]) -> None:
    text = ",".join(map(str, shape))
    assert shape_fault(shape) == f"at most {2**60 - 1} elements, got [{text}]"
    with pytest.raises(ValueError, match=r"too (big|large)"):
        np.empty(shape, np.float64)


def test_too_many_dimensions_are_rejected_before_their_product_is_computed() -> None:
    assert shape_fault([2**62] * 1_000_000) == f"at most {MAX_DIMS} dimensions, got 1000000"
    with pytest.raises(ValueError, match="maximum supported dimension"):
        np.empty([1] * (MAX_DIMS + 1))
