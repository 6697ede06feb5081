"""Conversion between the shapes that clients see and those of the model."""

import numpy as np
import pytest

from ortserve.core.conversion import Conversions, FirstRow, MoveAxis, RepeatForRows, Reshape, same_elements


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
    reshapes = Conversions((None, Reshape((3,), (3, 1), 1)), (Reshape((4,), (2, 2), 1),))
    inputs = reshapes.to_model((one, other))
    assert inputs[0] is one
    assert inputs[1].shape == (2, 3, 1)
    assert reshapes.to_client((one,))[0].shape == (2, 2, 2)


def test_place_of_an_input_that_was_left_out_stays_empty() -> None:
    nothing = np.empty(2, "V1")
    assert Conversions((Reshape((3, 4), (12,), 1),), ()).to_model((nothing,), 2)[0] is nothing


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


def test_rows_come_to_the_front_and_go_back_without_a_copy() -> None:
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    conversions = Conversions((MoveAxis(1, 0),), (MoveAxis(0, 1),))
    (rows_first,) = conversions.to_model((x,), 3)
    assert rows_first.shape == (3, 2, 4)
    assert np.shares_memory(rows_first, x)
    (back,) = conversions.to_client((rows_first,))
    np.testing.assert_array_equal(back, x)
    assert back.flags.c_contiguous


def test_what_has_no_rows_is_repeated_without_a_copy_and_given_back_once() -> None:
    rate, table = np.array(8000), np.arange(6.0).reshape(2, 3)
    conversions = Conversions((RepeatForRows(), RepeatForRows(Reshape((2, 3), (6,), 0))), (FirstRow(),))
    first, second = conversions.to_model((rate, table), 5)
    assert (first.shape, first.strides) == ((5,), (0,))
    assert second.shape == (5, 6)
    assert np.shares_memory(second, table)
    np.testing.assert_array_equal(conversions.to_client((second,))[0], table.reshape(6))
    (back,) = conversions.to_client((first,))
    assert isinstance(back, np.ndarray), "a number is no array"
    assert back == 8000
