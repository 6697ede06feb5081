"""Batch inputs by kind, and outputs that are divided among requests of different shapes."""

import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.ragged import BatchInput, RaggedTensors
from ortserve.errors import ServeError

REQUESTS = tuple(np.zeros(shape, np.float32) for shape in ((1, 3), (2, 3), (1, 1)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("element_count", [3, 6, 1]),
        ("accumulated_element_count", [3, 9, 10]),
        ("accumulated_element_count_with_zero", [0, 3, 9, 10]),
        ("max_element_count_as_shape", [0] * 6),
        ("item_shape", [[3], [3], [3], [1]]),
        ("item_shape_flatten", [3, 3, 3, 1]),
    ],
)
@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FP32])
def test_kinds_are_those_of_triton(kind: str, expected: list[object], datatype: DataType) -> None:
    made = BatchInput("b", datatype, kind, 0).make(REQUESTS)
    assert made.dtype == datatype.numpy
    assert made.tolist() == expected


def test_counts_beyond_an_int32_are_rejected() -> None:
    huge = np.broadcast_to(np.zeros(1, np.int8), (1, 2**31))
    with pytest.raises(ServeError, match=r"batch input 'b': expected at most 2147483647 elements, got 2147483648"):
        BatchInput("b", DataType.INT32, "element_count", 0).make((huge,))


def test_each_request_gets_views_of_its_rows_and_of_its_elements() -> None:
    ragged = RaggedTensors(frozenset({0}), (), {1: 0}, ("rows", "flat"))
    rows, flat = np.arange(8).reshape(4, 2), np.arange(10)
    parts = ragged.divide((rows, flat), [(array,) for array in REQUESTS], 4)
    assert [part[0].tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]], [[6, 7]]]
    assert [part[1].tolist() for part in parts] == [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8]], [[9]]]
    assert all(np.shares_memory(part[1], flat) for part in parts)


@pytest.mark.parametrize(
    ("rows", "flat", "error"),
    [
        (np.zeros(3), np.zeros(10), r"output 'rows': expected 4 rows, one per row of its batch, got shape \[3\]"),
        (np.zeros(()), np.zeros(10), r"output 'rows': expected 4 rows"),
        (np.zeros(4), np.zeros(9), r"output 'flat': expected one axis of 10 elements, .* got shape \[9\]"),
        (np.zeros(4), np.zeros((10, 1)), r"output 'flat': .* got shape \[10, 1\]"),
    ],
)
def test_outputs_that_cannot_be_divided_are_named(rows: np.ndarray, flat: np.ndarray, error: str) -> None:
    ragged = RaggedTensors(frozenset({0}), (), {1: 0}, ("rows", "flat"))
    with pytest.raises(ServeError, match=error):
        ragged.divide((rows, flat), [(array,) for array in REQUESTS], 4)
