"""The largest elements of outputs, as texts."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.codecs.bounds import MAX_TEXTS
from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.classification import MAX_ELEMENTS, check_classifiable, classify, is_short

ORDERED = [
    datatype for datatype in DataType if datatype not in (DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES)
]


def texts(
    values: object, classes: int, datatype: DataType = DataType.FP32, labels: Sequence[str] = (), *, batch: bool = True
) -> list[list[str]] | list[str]:
    output = classify(Tensor("y", datatype, np.array(values, datatype.numpy)), classes, labels, is_batched=batch)
    assert (output.name, output.datatype) == ("y", DataType.BYTES)
    spelled: list[list[str]] | list[str] = output.array.tolist()
    return spelled


def test_each_row_has_its_own_classes_largest_first() -> None:
    assert texts([[0.5, 2, -1], [7, 200, 8]], 2) == [["2.000000:1", "0.500000:0"], ["200.000000:1", "8.000000:2"]]


def test_rows_of_any_shape_are_flattened() -> None:
    assert texts([[[1, 9], [3, 4]]], 2, DataType.INT64) == [["9:1", "4:3"]]
    assert texts([5, 6], 3, DataType.INT64) == [["5:0"], ["6:0"]]


def test_model_without_a_batch_has_one_row_of_classes() -> None:
    assert texts([[1, 9], [3, 4]], 3, DataType.INT8, batch=False) == ["9:1", "4:3", "3:2"]
    assert texts(7, 3, DataType.INT8, batch=False) == ["7:0"]


def test_existing_labels_are_appended() -> None:
    assert texts([[1, 2, 3, 0]], 4, DataType.UINT8, ["cat", "", "dog"]) == [["3:2:dog", "2:1", "1:0:cat", "0:3"]]


def test_many_classes_have_their_order_and_labels() -> None:
    values = np.random.default_rng(0).permutation(5000)
    expected = [f"{value}:{index}:{index}" for value, index in sorted(zip(values, range(5000), strict=True))[::-1]]
    assert texts([values], 5000, DataType.INT32, [str(index) for index in range(5000)]) == [expected]


def test_number_of_classes_is_limited_to_the_elements() -> None:
    assert texts([[1, 2]], 9, DataType.INT32) == [["2:1", "1:0"]]
    assert texts(np.empty((2, 0)), 3) == [[], []]
    assert classify(Tensor("y", DataType.FP32, np.empty((0, 3))), 2, (), is_batched=True).array.shape == (0, 2)
    assert texts(np.empty(0), 3, batch=False) == []


@pytest.mark.parametrize("datatype", ORDERED)
def test_every_ordered_datatype_is_ordered_to_the_ends_of_its_range(datatype: DataType) -> None:
    if datatype.numpy.kind == "f":
        values = [-np.inf, np.inf, 0.0]
        expected = [["inf:1", "0.000000:2", "-inf:0"]]
    else:
        bounds = np.iinfo(datatype.numpy)
        values = [bounds.min, bounds.max, 1]
        expected = [[f"{bounds.max}:1", "1:2", f"{bounds.min}:0"]]
    assert texts([values], 3, datatype) == expected


def test_nan_comes_last() -> None:
    assert texts([[np.nan, 1, -np.inf, 2]], 2) == [["2.000000:3", "1.000000:1"]]
    assert texts([[np.nan, 1]], 2) == [["1.000000:1", "nan:0"]]
    assert texts([[np.nan, 1, -np.inf, 2]], 3) == [["2.000000:3", "1.000000:1", "-inf:2"]]
    assert texts([[np.nan, -np.inf, np.nan]], 2) == [["-inf:1", "nan:0"]]
    assert texts([[np.nan, np.nan]], 1) == [["nan:0"]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 35))
def test_equal_elements_keep_the_order_of_their_indices(values: list[int], classes: int) -> None:
    best = sorted(range(len(values)), key=lambda index: (-values[index], index))[:classes]
    assert texts([values], classes, DataType.INT16) == [[f"{values[index]}:{index}" for index in best]]


@pytest.mark.parametrize("datatype", [DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES])
def test_unordered_datatype_is_rejected(datatype: DataType) -> None:
    with pytest.raises(ServeError, match=f"unsupported type '{datatype.value}'") as caught:
        check_classifiable(TensorSpec("y", datatype, (-1,)), "m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_other_datatypes_are_classified() -> None:
    for datatype in ORDERED:
        check_classifiable(TensorSpec("y", datatype, (-1,)), "m")


def test_too_many_elements_are_rejected_and_many_are_classified_on_a_thread() -> None:
    with pytest.raises(ServeError, match="at most 1000000 elements, got 1000001") as caught:
        classify(Tensor("y", DataType.INT8, np.empty((1, MAX_ELEMENTS + 1), np.int8)), 1, (), is_batched=True)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    with pytest.raises(ServeError, match=f"at most {MAX_TEXTS} classes in all rows, got {2 * MAX_TEXTS}"):
        classify(Tensor("y", DataType.INT8, np.empty((2, MAX_TEXTS), np.int8)), 2 * MAX_TEXTS, (), is_batched=True)
    assert is_short(np.empty((8, 1000)), 5, is_batched=True)
    assert not is_short(np.empty((64, 1000)), 5, is_batched=True)
    assert not is_short(np.empty((8, 1000)), 1000, is_batched=True)
    assert is_short(np.empty(()), 5, is_batched=False)
    assert is_short(np.empty((100, 10)), 1, is_batched=True)
    for width in (1, 0):  # each row takes several calls of numpy, however short it is
        assert not is_short(np.empty((500, width)), 1, is_batched=True)
