"""Inputs that are made up."""

import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.padding import PaddedAxis, Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.registry.synthetic import FREE_DIM, synthetic_inputs


def signature(datatype: DataType, *shape: int, unbatched_because: str = "") -> ModelSignature:
    return ModelSignature((TensorSpec("x", datatype, shape),), (), unbatched_because)


@pytest.mark.parametrize("datatype", DataType)
def test_values_are_of_the_datatype_and_harmless(datatype: DataType) -> None:
    (array,) = synthetic_inputs(signature(datatype, -1, 50), rows=20, seed=0)
    assert array.shape == (20, 50)
    assert array.dtype == datatype.numpy
    if datatype is DataType.BYTES:
        assert set(array.flat) == {"a", "b"}
    elif datatype.numpy.kind == "f":
        assert abs(float(array.astype(np.float64).mean())) < 0.2
        assert 0.8 < float(array.astype(np.float64).std()) < 1.2
    else:
        assert set(array.flat) == {0, 1}


def test_shape_is_full_and_free_dimensions_agree() -> None:
    batched = ModelSignature(
        (TensorSpec("a", DataType.FP32, (-1, -1, 3)), TensorSpec("b", DataType.INT64, (-1, -1))), ()
    )
    assert [array.shape for array in synthetic_inputs(batched, 5, seed=0)] == [(5, FREE_DIM, 3), (5, FREE_DIM)]
    unbatched = signature(DataType.FP32, -1, 2, unbatched_because="reason")
    assert synthetic_inputs(unbatched, 5, seed=0)[0].shape == (FREE_DIM, 2)
    assert synthetic_inputs(signature(DataType.FP32, unbatched_because="reason"), 1, seed=0)[0].shape == ()


def test_padded_axes_are_as_long_as_batches_will_be() -> None:
    tokens = ModelSignature(
        (TensorSpec("ids", DataType.INT64, (-1, -1)), TensorSpec("bias", DataType.FP32, (-1, -1))), ()
    )
    padding = Padding((PaddedAxis("ids", 1, FREE_DIM * 2 - 1, 0, "seq"), None))
    assert [array.shape for array in synthetic_inputs(tokens, 3, 0, padding)] == [(3, FREE_DIM * 2 - 1), (3, FREE_DIM)]


def test_same_seed_gives_the_same_and_another_does_not() -> None:
    x = signature(DataType.FP32, -1, 4)
    first, again, other = (synthetic_inputs(x, 3, seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
