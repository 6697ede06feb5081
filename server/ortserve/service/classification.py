"""The classification extension: an output's largest elements as texts, ``value:index`` or ``value:index:label``."""

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import invalid_input

MAX_ELEMENTS: Final = 1_000_000
"""Of an output that is classified."""

_UNORDERED: Final = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})
"""Datatypes that the extension leaves out."""

_SHORT_WORK: Final = 25_000
_TEXT_WORK: Final = 40  # elements that are searched in the time that spelling one takes


def check_classifiable(output: TensorSpec, model: str) -> None:
    """Raises ServeError: invalid_input, for an output of a datatype that has no classes, or with rows elsewhere."""
    if output.datatype in _UNORDERED:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}' "
            f"due to unsupported type '{output.datatype.value}'"
        )
    if output.batch_axis:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}': "
            f"expected rows on axis 0, they are on axis {output.batch_axis}"
        )


def is_short(array: np.ndarray, classes: int, *, is_batched: bool) -> bool:
    """Whether ``classify`` takes less than about a millisecond, so that it may run on the event loop."""
    rows = len(array) if is_batched else 1
    return array.size + _TEXT_WORK * rows * min(classes, array.size) <= _SHORT_WORK


def classify(output: Tensor, classes: int, labels: Sequence[str], *, is_batched: bool) -> Tensor:
    """Pick the largest elements, of each row where rows are batched, else of the whole tensor. Any thread.

    Args:
        output: Of a datatype that ``check_classifiable`` lets pass; NaN counts as less than any number.
        classes: At least 1; as many as there are elements, where there are fewer.
        labels: By index in the row; the empty ones and those that are missing are left out.
        is_batched: Whether axis 0 is the batch.

    Returns:
        A BYTES tensor of shape ``(rows, k)``, or ``(k,)``; largest first, equal elements by their index.

    Raises:
        ServeError: invalid_input for more than ``MAX_ELEMENTS``.
    """
    array = output.array
    if array.size > MAX_ELEMENTS:
        raise invalid_input(
            f"output '{output.name}' cannot be classified: expected at most {MAX_ELEMENTS} elements, got {array.size}"
        )
    rows = array.reshape(len(array) if is_batched else 1, prod(array.shape[1:] if is_batched else array.shape))
    count = min(classes, rows.shape[1])
    texts = np.empty((len(rows), count), object)
    for place, row in zip(texts, rows, strict=True):
        place[:] = _spell_largest(row, count, labels)
    return Tensor(output.name, DataType.BYTES, texts if is_batched else texts[0])


def _spell_largest(row: np.ndarray, count: int, labels: Sequence[str]) -> list[str]:
    indices = _largest(row, count).tolist()
    values = row[indices].tolist()
    spell = "%f:%d" if row.dtype.kind == "f" else "%d:%d"
    texts = [spell % pair for pair in zip(values, indices, strict=True)]
    if labels:
        texts = [
            f"{text}:{labels[index]}" if index < len(labels) and labels[index] else text
            for text, index in zip(texts, indices, strict=True)
        ]
    return texts


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest elements, in descending order, equal elements in that of their indices."""
    keys = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    if count < row.size:
        least = np.partition(keys, row.size - count)[row.size - count]
        above = np.flatnonzero(keys > least)
        equal = np.flatnonzero(keys == least)[: count - len(above)]
        chosen = np.sort(np.concatenate((above, equal)))
    else:
        chosen = np.arange(row.size)
    # Sorted upwards from the back and turned round: so equal elements keep the order of their indices.
    from_back = chosen[::-1]
    return from_back[np.argsort(keys[from_back], kind="stable")][::-1]
