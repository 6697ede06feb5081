"""Synthetic inputs."""

import numpy as np
import pytest

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType, widen
from ortserve.core.padding import PaddedAxis, Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent
from ortserve.errors import OutOfMemoryError
from ortserve.registry.load.inputs import FREE_DIM, ZEROS, InputGenerator


def signature(datatype: DataType, *shape: int, unbatched_because: str = "") -> ModelSignature:
    return ModelSignature((TensorSpec("x", datatype, shape),), (), unbatched_because)


def synthetic_inputs(of: ModelSignature, rows: int, seed: int, padding: Padding | None = None) -> Arrays:
    return InputGenerator(of, padding).generate(rows, seed)


@pytest.mark.parametrize("datatype", DataType)
def test_values_have_the_datatype_and_are_small(datatype: DataType) -> None:
    (array,) = synthetic_inputs(signature(datatype, -1, 50), rows=20, seed=0)
    assert array.shape == (20, 50)
    assert array.dtype == datatype.numpy
    if datatype is DataType.BYTES:
        assert set(array.flat) == {"a", "b c d"}
    elif datatype is DataType.BF16 or datatype.numpy.kind == "f":
        values = (widen(array) if datatype is DataType.BF16 else array).astype(np.float64)
        assert abs(float(values.mean())) < 0.2
        assert 0.8 < float(values.std()) < 1.2
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


def test_dimensions_have_the_sizes_that_the_proof_of_rows_assumes() -> None:
    x = TensorSpec("x", DataType.FP32, (-1, -1, -1), ("batch", "length", ""))
    assert synthetic_inputs(ModelSignature((x,), (), fixed_sizes=(("length", 6),)), 2, seed=0)[0].shape == (
        2,
        6,
        FREE_DIM,
    )


def test_padded_axes_have_the_padded_length() -> None:
    tokens = ModelSignature(
        (TensorSpec("ids", DataType.INT64, (-1, -1)), TensorSpec("bias", DataType.FP32, (-1, -1))), ()
    )
    padding = Padding((PaddedAxis("ids", 1, FREE_DIM * 2 - 1, 0, "seq"), None))
    assert [array.shape for array in synthetic_inputs(tokens, 3, 0, padding)] == [(3, FREE_DIM * 2 - 1), (3, FREE_DIM)]


@pytest.mark.parametrize("shape", [(10**6, 10**7), (2**40, 2**20)])
def test_shapes_beyond_all_memory_are_an_error_about_memory(shape: tuple[int, int]) -> None:
    with pytest.raises(OutOfMemoryError, match="input 'x' of shape"):
        synthetic_inputs(signature(DataType.FP32, *shape, unbatched_because="fixed"), 1, seed=0)


def test_seed_determines_the_values() -> None:
    x = signature(DataType.FP32, -1, 4)
    first, again, other = (synthetic_inputs(x, 3, seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("datatype", DataType)
def test_zero_spread_gives_equal_values(datatype: DataType) -> None:
    (array,) = InputGenerator(signature(datatype, -1, 2), None).generate(3, 0, ZEROS)
    assert array.shape == (3, 2)
    assert array.dtype == datatype.numpy
    assert set(array.flat) == {"a" if datatype is DataType.BYTES else 0}


def test_strings_differ_between_rows() -> None:
    (array,) = synthetic_inputs(signature(DataType.BYTES, -1, 2), rows=3, seed=0)
    assert array.tolist() == [["a", "a"], ["b c d", "b c d"], ["a", "a"]]
    scalar = signature(DataType.BYTES, unbatched_because="reason")
    assert synthetic_inputs(scalar, 1, seed=0)[0] == np.array("a", object)


def test_optional_inputs_are_absent_unless_requested() -> None:
    specs = (TensorSpec("a", DataType.FP32, (-1, 2)), TensorSpec("b", DataType.FP32, (-1, 3), is_optional=True))
    a, b = synthetic_inputs(ModelSignature(specs, ()), 3, 0)
    assert [is_absent(a), is_absent(b), len(b)] == [False, True, 3]
    a, b = InputGenerator(ModelSignature(specs, ()), None, includes_optional=True).generate(3, 0)
    assert [a.shape, b.shape] == [(3, 2), (3, 3)]


def test_free_dimensions_have_the_sizes_that_the_graph_needs() -> None:
    specs = (
        TensorSpec("x", DataType.FP32, (-1, -1, -1), ("", "features", ""), needed_shape=(-1, 5, -1)),
        TensorSpec("z", DataType.FP32, (-1, -1), ("", "features")),
    )
    x, z = InputGenerator(ModelSignature(specs, ())).generate(3, 0)
    assert [x.shape, z.shape] == [(3, 5, FREE_DIM), (3, 5)]
