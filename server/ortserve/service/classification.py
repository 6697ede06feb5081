"""The classification extension: an output's largest elements as texts, ``value:index`` or ``value:index:label``."""

import time
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from ortserve.codecs.bounds import MAX_TEXTS
from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import invalid_input

MAX_ELEMENTS: Final = 1_000_000
"""Maximum number of elements of an output that is classified."""

_UNORDERED: Final = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})
"""Datatypes that the extension does not classify."""

_STEP: Final = 1024
"""Number of texts after which a thread releases the interpreter lock. Compiled code never releases it by itself."""

_SHORT_WORK: Final = 25_000
_TEXT_WORK: Final = 40  # number of elements that are searched in the time in which one is formatted
_ROW_WORK: Final = 150  # the same for the numpy calls of a row; NaN in a row triples their number


def check_classifiable(output: TensorSpec, model: str) -> None:
    """Raises ServeError: invalid_input, for an output of an unsupported datatype, or with rows not on axis 0."""
    if output.datatype in _UNORDERED:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}' "
            f"due to unsupported type '{output.datatype.value}'"
        )
    if output.batch_axis:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}': expected rows on axis 0, got "
            f"rows on axis {output.batch_axis}"
        )


def is_short(array: np.ndarray, classes: int, *, is_batched: bool) -> bool:
    """Whether ``classify`` takes less than about 1 ms, or 2 ms with NaN, and may run on the event loop."""
    rows = len(array) if is_batched else 1
    return array.size + rows * (_ROW_WORK + _TEXT_WORK * min(classes, array.size)) <= _SHORT_WORK


def classify(output: Tensor, classes: int, labels: Sequence[str], *, is_batched: bool) -> Tensor:
    """Select the largest elements, of each row if rows are batched, otherwise of the whole tensor. Any thread.

    Args:
        output: An output that ``check_classifiable`` accepts. NaN counts as less than any number.
        classes: Number of elements to select, at least 1; reduced to the number that exist.
        labels: Labels by index in the row. Empty and missing labels are omitted.
        is_batched: Whether axis 0 is the batch axis.

    Returns:
        A BYTES tensor of shape ``(rows, k)``, or ``(k,)``; largest first, equal elements by their index.

    Raises:
        ServeError: invalid_input for more than ``MAX_ELEMENTS`` elements, or more than ``MAX_TEXTS`` texts.
    """
    array = output.array
    if array.size > MAX_ELEMENTS:
        raise invalid_input(
            f"output '{output.name}' cannot be classified: expected at most {MAX_ELEMENTS} elements, got {array.size}"
        )
    rows = array.reshape(len(array) if is_batched else 1, prod(array.shape[1:] if is_batched else array.shape))
    count = min(classes, rows.shape[1])
    if len(rows) * count > MAX_TEXTS:
        raise invalid_input(
            f"output '{output.name}' cannot be classified: expected at most {MAX_TEXTS} classes in all rows, got "
            f"{len(rows) * count}"
        )
    texts = np.empty((len(rows), count), object)
    for place, row in zip(texts, rows, strict=True):
        indices = _largest(row, count)
        for begin in range(0, count, _STEP):
            if begin:
                time.sleep(0)
            place[begin : begin + _STEP] = _format(row, indices[begin : begin + _STEP], labels)
    return Tensor(output.name, DataType.BYTES, texts if is_batched else texts[0])


def _format(row: np.ndarray, chosen: np.ndarray, labels: Sequence[str]) -> list[str]:
    indices = chosen.tolist()
    values = row[chosen].tolist()
    form = "%f:%d" if row.dtype.kind == "f" else "%d:%d"
    texts = [form % pair for pair in zip(values, indices, strict=True)]
    if labels:
        texts = [
            f"{text}:{labels[index]}" if index < len(labels) and labels[index] else text
            for text, index in zip(texts, indices, strict=True)
        ]
    return texts


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest elements, in descending order; equal elements in the order of their indices.

    NaN comes last.
    """
    if row.dtype.kind == "f" and np.isnan(row).any():
        numbers = np.flatnonzero(~np.isnan(row))
        largest = numbers[_largest(row[numbers], min(count, len(numbers)))]
        return np.concatenate((largest, np.flatnonzero(np.isnan(row))[: count - len(largest)]))
    if count < row.size:
        least = np.partition(row, row.size - count)[row.size - count]
        above = np.flatnonzero(row > least)
        equal = np.flatnonzero(row == least)[: count - len(above)]
        chosen = np.sort(np.concatenate((above, equal)))
    else:
        chosen = np.arange(row.size)
    # Sorted ascending from the back and reversed, so that equal elements keep the order of their indices.
    from_back = chosen[::-1]
    return from_back[np.argsort(row[from_back], kind="stable")][::-1]
