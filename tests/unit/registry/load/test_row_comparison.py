"""Comparison of rows together and alone."""

import numpy as np
import pytest

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType, narrow
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.registry.load.row_trial import row_drift, why_no_rows, why_rows_depend


def gives(datatype: DataType) -> ModelSignature:
    return ModelSignature((), (TensorSpec("y", datatype, (-1, 2)),))


SIGNATURE = gives(DataType.FP32)


def split(together: np.ndarray) -> list[Arrays]:
    return [(together[row : row + 1],) for row in range(len(together))]


@pytest.mark.parametrize(
    ("datatype", "allowed", "too_much"),
    [
        (DataType.BF16, 2e-2, 2e-1),
        (DataType.FP16, 5e-3, 5e-2),
        (DataType.FP32, 5e-4, 5e-3),
        (DataType.FP64, 5e-7, 5e-6),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_tolerated_and_larger_differences_are_dependence(
    datatype: DataType, allowed: float, too_much: float, sign: int
) -> None:
    def spell(values: np.ndarray) -> np.ndarray:
        return narrow(values.astype(np.float32)) if datatype is DataType.BF16 else values.astype(datatype.numpy)

    together = np.ones((3, 2))
    for drift, depends in ((0, False), (allowed, False), (too_much, True)):
        drifted = together.copy()
        drifted[2, 1] += sign * drift
        reason = why_rows_depend(gives(datatype), (spell(together),), split(spell(drifted)))
        assert reason == ("output 'y' of a row depends on the rows beside it" if depends else "")


def test_gpu_rounding_is_tolerated_and_dependence_is_detected() -> None:
    together = np.array([[10, 1e-4], [-10, 0]], np.float32)
    rounded = together + np.array([[5e-3, 5e-3], [0, -5e-3]], np.float32)  # as TF32 rounds sums of values around 10
    assert why_rows_depend(SIGNATURE, (together,), split(rounded))
    assert why_rows_depend(SIGNATURE, (together,), split(rounded), is_coarse=True) == ""
    mixed = together - together.mean(axis=0)
    assert why_rows_depend(SIGNATURE, (together,), split(together + mixed / 4), is_coarse=True)
    assert why_rows_depend(SIGNATURE, (together,), split(np.full_like(together, np.nan)), is_coarse=True)


def test_nan_agrees_with_nan_only() -> None:
    nan = np.full((2, 2), np.nan, np.float32)
    assert why_rows_depend(SIGNATURE, (nan,), split(nan)) == ""
    assert why_rows_depend(SIGNATURE, (nan,), split(np.zeros((2, 2), np.float32)))


@pytest.mark.parametrize("datatype", [DataType.INT64, DataType.BOOL, DataType.BYTES])
def test_integers_and_texts_must_be_equal(datatype: DataType) -> None:
    texts = np.array([["1", "0"], ["0", "1"]], object)
    together = texts if datatype is DataType.BYTES else np.eye(2).astype(datatype.numpy)
    assert why_rows_depend(gives(datatype), (together,), split(together)) == ""
    assert why_rows_depend(gives(datatype), (together,), split(together[::-1]))


@pytest.mark.parametrize("shape", [(), (2, 2), (4, 2), (0, 2)])
def test_output_with_another_row_count_is_not_batched(shape: tuple[int, ...]) -> None:
    alone = split(np.zeros((3, 2), np.float32))
    reason = why_rows_depend(SIGNATURE, (np.zeros(shape, np.float32),), alone)
    assert reason == f"output 'y' has shape {list(shape)} for 3 rows"


def test_shape_of_a_row_must_not_depend_on_others() -> None:
    alone = split(np.zeros((3, 1), np.float32))
    reason = why_rows_depend(SIGNATURE, (np.zeros((3, 2), np.float32),), alone)
    assert reason == "the shape of output 'y' for a row depends on the rows beside it"


def test_every_output_is_compared() -> None:
    signature = ModelSignature((), (*SIGNATURE.outputs, TensorSpec("z", DataType.INT64, (-1,))))
    y, z = np.zeros((2, 2), np.float32), np.array([1, 2])
    alone = [(y[:1], z[:1]), (y[1:], z[:1])]
    assert why_rows_depend(signature, (y, z), alone) == "output 'z' of a row depends on the rows beside it"


def test_drift_is_the_largest_difference_of_a_finite_float() -> None:
    together = np.array([[1.0, np.nan], [np.inf, 2.0], [3.0, 4.0]], np.float32)
    alone = together.copy()
    assert row_drift(SIGNATURE, (together,), split(alone)) == 0.0
    alone[2, 1] = 4.25
    alone[0, 0] = 0.875
    assert row_drift(SIGNATURE, (together,), split(alone)) == 0.25
    assert row_drift(gives(DataType.BF16), (narrow(together),), split(narrow(alone))) == 0.25


@pytest.mark.parametrize(
    ("datatype", "together"),
    [
        (DataType.INT64, np.arange(4).reshape(2, 2)),
        (DataType.BYTES, np.array([["a"], ["b"]], object)),
        (DataType.FP32, np.empty((2, 0), np.float32)),
    ],
)
def test_integers_strings_and_empty_outputs_have_no_drift(datatype: DataType, together: np.ndarray) -> None:
    assert row_drift(gives(datatype), (together,), split(together)) == 0.0


def test_wrong_number_of_rows_is_found_without_rows_alone() -> None:
    assert why_no_rows(SIGNATURE, (np.zeros((3, 2), np.float32),), 3) == ""
    assert why_no_rows(SIGNATURE, (np.zeros((2, 2), np.float32),), 3) == "output 'y' has shape [2, 2] for 3 rows"
