import math

import numpy as np
import pytest

from ortserve.core.agreement import Agreement, AgreementMeter, parse_bound, predicted_hits
from ortserve.errors import ServeError

REFERENCE = np.array([[1.0, 2.0], [4.0, -3.0]], np.float32)


def compare(reference: np.ndarray, candidate: np.ndarray, samples: int = 2) -> Agreement:
    meter = AgreementMeter(["y"])
    meter.add([reference], [candidate], samples)
    return meter.result()


def test_equal_outputs_have_no_error() -> None:
    """The cosine of a row with itself is not exactly 1 in floating point."""
    rows = np.random.default_rng(0).random((50, 10), np.float32)
    (error,) = compare(rows, rows, 50).outputs
    assert (error.max, error.relative, error.cosine, error.top1) == (0, 0, 0, 0)


def test_errors_of_numbers_are_measured() -> None:
    (error,) = compare(REFERENCE, np.array([[2.0, 1.0], [4.0, -3.0]], np.float32)).outputs
    assert error.max == 1
    assert error.relative == 0.25
    assert error.cosine == pytest.approx(1 - 4 / 5)
    assert error.top1 == 0.5


def test_the_worst_batch_counts_and_shares_are_of_all() -> None:
    meter = AgreementMeter(["y"])
    meter.add([REFERENCE], [REFERENCE], 2)
    meter.add([REFERENCE], [REFERENCE[:, ::-1]], 2)
    (error,) = meter.result().outputs
    assert error.max == 7
    assert error.top1 == 0.5
    assert meter.result().samples == 4


def test_a_row_of_zeros_agrees_only_with_zeros() -> None:
    zeros = np.zeros((2, 2), np.float32)
    assert compare(zeros, zeros).error("cosine") == 0
    assert compare(zeros, REFERENCE).error("cosine") == 1
    assert compare(zeros, REFERENCE).error("relative") == math.inf


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (REFERENCE, REFERENCE[:1]),
        (REFERENCE, np.array([[1.0, np.nan], [4.0, -3.0]], np.float32)),
        (np.array([[1.0, np.inf], [4.0, -3.0]], np.float32), REFERENCE),
    ],
)
def test_other_shapes_and_non_finite_elements_are_infinitely_far(reference: np.ndarray, candidate: np.ndarray) -> None:
    agreement = compare(reference, candidate)
    assert agreement.error("max") == math.inf
    assert agreement.error("cosine") == math.inf
    assert agreement.error("top1") == 1


def test_equal_non_finite_elements_agree() -> None:
    special = np.array([[np.nan, np.inf], [-np.inf, 1.0]], np.float32)
    assert compare(special, special.copy()).error("relative") == 0


def test_texts_and_integers_count_elements_that_differ() -> None:
    (texts,) = compare(np.array(["a", "b"], object), np.array(["a", "c"], object)).outputs
    assert (texts.max, texts.top1) == (1, 0.5)
    (numbers,) = compare(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 9]), 4).outputs
    assert (numbers.max, numbers.top1) == (5, 0.25)
    assert (texts.cosine, numbers.cosine) == (0.5, 0.25)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_that_fp64_cannot_tell_apart_differ(dtype: type) -> None:
    (error,) = compare(np.array([2**53, 7], dtype), np.array([2**53 + 1, 7], dtype)).outputs
    assert (error.max, error.top1) == (1, 0.5)
    assert compare(np.array([3, 7], dtype), np.array([3.25, 7])).error("max") == 0.25


def test_largest_element_is_found_beside_masked_ones() -> None:
    """Models give classes that are not allowed the score of minus infinity."""
    reference, candidate = np.array([[-np.inf, -1, -2], [np.nan, 3, np.inf]]), np.array([[-np.inf, -2, -1]] * 2)
    candidate[1] = reference[1]
    assert compare(reference, candidate).error("top1") == 0.5


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_cosine_of_rows_whose_squares_are_no_numbers(scale: float) -> None:
    reference = np.array([[1.0, 0.0], [3.0, 4.0]]) * scale
    assert compare(reference, reference * 2).error("cosine") == pytest.approx(0)
    assert compare(reference, reference[::-1]).error("cosine") == pytest.approx(0.4)


def test_accuracy_is_what_the_model_loses() -> None:
    meter = AgreementMeter(["y"])
    meter.add([REFERENCE], [REFERENCE[:, ::-1]], 2, np.array([1, 0]))
    agreement = meter.result()
    assert (agreement.reference_accuracy, agreement.accuracy, agreement.error("accuracy")) == (1, 0, 1)


def test_labels_find_the_output_of_classes() -> None:
    assert predicted_hits([REFERENCE, np.array([1, 0])], np.array([1, 1])) == 1
    assert predicted_hits([np.array(["cat", "dog"], object)], np.array(["cat", "cat"])) == 1
    with pytest.raises(ServeError, match=r"scores for each sample, got float32 \[2, 1\]"):
        predicted_hits([REFERENCE[:, :1]], np.array([0, 0]))


@pytest.mark.parametrize(("text", "shown"), [("0.01", "max=0.01"), ("cosine=1e-2", "cosine=0.01")])
def test_bounds_are_parsed(text: str, shown: str) -> None:
    assert str(parse_bound(text)) == shown


@pytest.mark.parametrize("text", ["", "cosine", "cosine=", "=1", "speed=1", "-1", "nan", "inf", "cosine=-1"])
def test_invalid_bounds_are_rejected(text: str) -> None:
    with pytest.raises(ServeError, match="--max-error: expected a number from 0"):
        parse_bound(text)


def test_a_bound_says_how_it_is_exceeded() -> None:
    agreement = compare(REFERENCE, REFERENCE + 0.5)
    assert parse_bound("0.5").excess(agreement) == ""
    assert parse_bound("0.4").excess(agreement) == "max error 0.5 exceeds 0.4"
    with pytest.raises(ServeError, match="expected --labels"):
        parse_bound("accuracy=0.1").excess(agreement)
