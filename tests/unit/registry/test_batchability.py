"""What outputs tell of whether rows depend on each other."""

import numpy as np
import pytest

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.registry.batchability import row_drift, why_rows_depend

SIGNATURE = ModelSignature((), (TensorSpec("y", DataType.FP32, (-1, 2)),))


def split(together: np.ndarray) -> list[Arrays]:
    return [(together[row : row + 1],) for row in range(len(together))]


@pytest.mark.parametrize(
    ("datatype", "allowed", "too_much"),
    [(np.float16, 5e-3, 5e-2), (np.float32, 5e-4, 5e-3), (np.float64, 5e-7, 5e-6)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_no_dependence_and_more_than_that_is(
    datatype: type[np.floating], allowed: float, too_much: float, sign: int
) -> None:
    together = np.ones((3, 2), datatype)
    for drift, depends in ((0, False), (allowed, False), (too_much, True)):
        alone = split(together.copy())
        alone[2][0][0, 1] += datatype(sign * drift)
        reason = why_rows_depend(SIGNATURE, (together,), alone)
        assert reason == ("output 'y' of a row depends on the rows beside it" if depends else "")


def test_nan_agrees_with_nan_only() -> None:
    nan = np.full((2, 2), np.nan, np.float32)
    assert why_rows_depend(SIGNATURE, (nan,), split(nan)) == ""
    assert why_rows_depend(SIGNATURE, (nan,), split(np.zeros((2, 2), np.float32)))


@pytest.mark.parametrize("datatype", [np.int64, np.bool_, object])
def test_what_is_not_rounded_must_be_equal(datatype: type) -> None:
    together = np.array([["1", "0"], ["0", "1"]], object) if datatype is object else np.eye(2).astype(datatype)
    assert why_rows_depend(SIGNATURE, (together,), split(together)) == ""
    assert why_rows_depend(SIGNATURE, (together,), split(together[::-1]))


@pytest.mark.parametrize("shape", [(), (2, 2), (4, 2), (0, 2)])
def test_output_of_another_number_of_rows_is_no_batch(shape: tuple[int, ...]) -> None:
    alone = split(np.zeros((3, 2), np.float32))
    reason = why_rows_depend(SIGNATURE, (np.zeros(shape, np.float32),), alone)
    assert reason == f"output 'y' has shape {list(shape)} for 3 rows"


def test_shape_of_a_row_must_not_depend_on_others() -> None:
    alone = split(np.zeros((3, 1), np.float32))
    reason = why_rows_depend(SIGNATURE, (np.zeros((3, 2), np.float32),), alone)
    assert reason == "the shape of output 'y' for a row depends on the rows beside it"


def test_every_output_counts() -> None:
    signature = ModelSignature((), (*SIGNATURE.outputs, TensorSpec("z", DataType.INT64, (-1,))))
    y, z = np.zeros((2, 2), np.float32), np.array([1, 2])
    alone = [(y[:1], z[:1]), (y[1:], z[:1])]
    assert why_rows_depend(signature, (y, z), alone) == "output 'z' of a row depends on the rows beside it"


def test_drift_is_the_largest_difference_of_a_finite_float() -> None:
    together = np.array([[1.0, np.nan], [np.inf, 2.0], [3.0, 4.0]], np.float32)
    alone = split(together.copy())
    assert row_drift((together,), alone) == 0.0
    alone[2][0][0, 1] = 4.25
    alone[0][0][0, 0] = 0.875
    assert row_drift((together,), alone) == 0.25


def test_integers_and_texts_and_empty_outputs_have_no_drift() -> None:
    for together in (np.arange(4).reshape(2, 2), np.array([["a"], ["b"]], object), np.empty((2, 0), np.float32)):
        assert row_drift((together,), split(together)) == 0.0
