"""Between the shapes that clients see and the model's own."""

import numpy as np
import pytest

from ortserve.core.reshape import Reshape, Reshapes, same_elements


def test_dimensions_after_the_batch_change_and_elements_stay() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    reshaped = Reshape((3, 4), (12,), 1).apply(array)
    np.testing.assert_array_equal(reshaped, array.reshape(2, 12))
    assert np.shares_memory(reshaped, array)


@pytest.mark.parametrize(
    ("source", "target", "kept", "shape", "expected"),
    [
        ((3, 2), (1, 3, 2), 0, (3, 2), (1, 3, 2)),
        ((1,), (), 1, (5, 1), (5,)),
        ((), (1,), 1, (5,), (5, 1)),
        ((-1, 4), (-1, 2, 2), 1, (5, 7, 4), (5, 7, 2, 2)),
        ((-1, 6, -1), (1, -1, 2, 3, -1), 0, (2, 6, 3), (1, 2, 2, 3, 3)),
        ((-1,), (-1,), 1, (0, 3), (0, 3)),
    ],
)
def test_free_dimensions_keep_their_order(
    source: tuple[int, ...],
    target: tuple[int, ...],
    kept: int,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    assert Reshape(source, target, kept).apply(np.zeros(shape)).shape == expected


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2,), (2, 3, 5)])
def test_array_of_another_form_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"dimensions|reshape"):
        Reshape((3, 4), (12,), 1).apply(np.zeros(shape))


def test_what_is_not_reshaped_is_passed_on_as_it_is() -> None:
    one, other = np.zeros((2, 4)), np.ones((2, 3))
    reshapes = Reshapes((None, Reshape((3,), (3, 1), 1)), (Reshape((4,), (2, 2), 1),))
    inputs = reshapes.to_model((one, other))
    assert inputs[0] is one
    assert inputs[1].shape == (2, 3, 1)
    assert reshapes.to_client((one,))[0].shape == (2, 2, 2)


def test_place_of_an_input_that_was_left_out_stays_empty() -> None:
    nothing = np.empty(2, "V1")
    assert Reshape((3, 4), (12,), 1).apply(nothing) is nothing


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((2, 6), (12,), True),
        ((1,), (), True),
        ((2,), (), False),
        ((-1, 4), (-1, 2, 2), True),
        ((-1, 4), (4, -1), False),
        ((-1, -1), (-1,), False),
        ((2, -1, 3), (1, 2, -1, 3, 1), True),
        ((0,), (), False),
    ],
)
def test_forms_have_the_same_elements_whatever_is_free(one: list[int], other: list[int], same: bool) -> None:
    assert same_elements(one, other) is same
