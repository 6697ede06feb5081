"""The requests that share a batch after padding, and the part of answers that is cut off."""

import numpy as np
import pytest

from ortserve.core.padding import CutAxis, PaddedAxis, Padding
from ortserve.errors import ErrorKind, ServeError

IDS = PaddedAxis("ids", axis=1, multiple=4, value=0, dim_name="seq")
MASK = PaddedAxis("mask", axis=2, multiple=4, value=0, dim_name="seq")
PADDING = Padding((IDS, None, MASK), cuts=(CutAxis(output=1, name="y", axis=2, source=0),))


def request(length: int, *, rows: int = 1, mask_length: int | None = None, width: int = 5) -> tuple[np.ndarray, ...]:
    """Inputs ids [rows, length], bias [rows, width] and mask [rows, 2, length]."""
    mask = np.zeros((rows, 2, length if mask_length is None else mask_length))
    return np.zeros((rows, length)), np.zeros((rows, width)), mask


@pytest.mark.parametrize(("length", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8), (8, 8)])
def test_length_grows_to_the_next_multiple(length: int, padded: int) -> None:
    assert IDS.padded_length(length) == padded
    assert MASK.padded_shape((3, 2, length)) == (3, 2, padded)


def test_requests_share_a_class_when_their_padded_shapes_are_equal() -> None:
    assert PADDING.shape_class(request(1)) == PADDING.shape_class(request(4, rows=3))
    assert PADDING.shape_class(request(4)) != PADDING.shape_class(request(5))
    assert PADDING.shape_class(request(4)) != PADDING.shape_class(request(4, width=6))


def test_inputs_that_disagree_on_a_shared_dimension_are_refused_by_both_names() -> None:
    # With padding they would be equal, and the model would take elements of one for padding.
    with pytest.raises(ServeError) as caught:
        PADDING.shape_class(request(3, mask_length=2))
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "input 'mask' has length 2 on axis 2, but input 'ids' has 3 on axis 1: both axes are dimension 'seq'"
    )


def test_answer_is_cut_to_the_length_of_the_request_without_a_copy() -> None:
    outputs = np.arange(4.0).reshape(2, 2), np.arange(16.0).reshape(2, 2, 4)
    whole, cut = PADDING.cut_back(outputs, request(3, rows=2))
    assert whole is outputs[0]
    np.testing.assert_array_equal(cut, outputs[1][:, :, :3])
    assert cut.base is not None
    assert np.shares_memory(cut, outputs[1])


def test_answer_to_a_request_that_needed_no_padding_is_left_as_it_is() -> None:
    outputs = np.zeros((1, 2)), np.zeros((1, 2, 9))
    assert PADDING.cut_back(outputs, request(4))[1] is outputs[1]


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 5), (1, 2)])
def test_output_that_is_not_as_long_as_its_dimension_is_not_handed_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(ServeError, match=r"output 'y' has shape .* dimension 'seq', which is 4 long") as caught:
        PADDING.cut_back((np.zeros((1, 2)), np.zeros(shape)), request(3))
    assert caught.value.kind is ErrorKind.INTERNAL


def test_padding_of_rows_alone_pads_no_request() -> None:
    assert PADDING.pads_requests
    assert not Padding((None, None)).pads_requests
