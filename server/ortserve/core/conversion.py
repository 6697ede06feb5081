"""Conversion between tensors of clients and tensors of batches, with rows on axis 0 and the model's own dimensions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import is_absent


class Conversion(Protocol):
    """Converts one tensor in one direction; returns a view if possible."""

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        """Convert the tensor of a request of ``rows`` rows.

        Raises:
            ValueError: The array has an unexpected number of dimensions.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reshape:
    """Changes the dimensions of a tensor, with the same number of elements.

    ``source`` and ``target`` omit the first ``kept`` dimensions, which do not change: 1 for the batch, or none. Free
    dimensions (-1) of both correspond in order. Returns a view if the elements are contiguous.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    kept: int

    def apply(self, array: np.ndarray, rows: int = 1) -> np.ndarray:
        kept = self.kept
        if array.ndim - kept != len(self.source):
            raise ValueError(f"expected {kept + len(self.source)} dimensions, got {array.ndim}")
        free = [size for size, dim in zip(array.shape[kept:], self.source, strict=True) if dim == -1]
        free.reverse()
        return array.reshape((*array.shape[:kept], *[free.pop() if dim == -1 else dim for dim in self.target]))


@dataclass(frozen=True, slots=True)
class MoveAxis:
    """Moves one axis: the batch axis of an input to the front, or that of an output to its position for clients."""

    source: int
    target: int

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        return np.moveaxis(array, self.source, self.target)


@dataclass(frozen=True, slots=True)
class RepeatForRows:
    """Repeats an input without rows for each row, without a copy."""

    reshape: Reshape | None = None

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        return repeated(array if self.reshape is None else self.reshape.apply(array, rows), rows)


@dataclass(frozen=True, slots=True)
class FirstRow:
    """Takes an output without rows from the first row of a batch; each row holds the whole output."""

    reshape: Reshape | None = None

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        first = array[0, ...]  # an array even if it holds a single number
        return first if self.reshape is None else self.reshape.apply(first, rows)


def repeated(array: np.ndarray, rows: int) -> np.ndarray:
    """A view of shape ``(rows, *array.shape)``; each row is ``array``."""
    return np.broadcast_to(array, (rows, *array.shape))


def match_batch_axis(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Remove or add a batch axis of 1 between a model with batches and one without. Returns a view.

    An array that does not fit ``spec`` with this change either is returned unchanged.
    """
    dimensions = len(spec.shape)
    if array.ndim == dimensions or spec.has_any_shape:
        return array
    if array.ndim == dimensions + 1 and spec.batch_axis is None and array.shape[0] == 1:
        return array[0, ...]  # an array even if it holds a single number
    if array.ndim == dimensions - 1 and spec.batch_axis == 0:
        return array[np.newaxis, ...]
    return array


@dataclass(frozen=True, slots=True)
class Conversions:
    """Conversions of the inputs and outputs of a model, in the signature's order; None for no conversion."""

    inputs: tuple[Conversion | None, ...]
    outputs: tuple[Conversion | None, ...]

    def to_model(self, inputs: Arrays, rows: int = 1) -> Arrays:
        """Convert a request's inputs of ``rows`` rows to their form in batches. Placeholders do not change."""
        return _apply(self.inputs, inputs, rows)

    def to_client(self, outputs: Arrays) -> Arrays:
        """Convert outputs of a batch to their form for clients.

        Raises:
            ValueError: An output does not have the configured number of dimensions.
        """
        return _apply(self.outputs, outputs)


def same_elements(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes always have equal numbers of elements, if their free dimensions correspond in order."""
    return _between_free(one) == _between_free(other)


def _between_free(dims: Sequence[int]) -> list[int]:
    products: list[int] = []
    run: list[int] = []
    for dim in dims:
        if dim == -1:
            products.append(math.prod(run))
            run = []
        else:
            run.append(dim)
    return [*products, math.prod(run)]


def _apply(conversions: tuple[Conversion | None, ...], arrays: Arrays, rows: int = 1) -> Arrays:
    return tuple(
        [
            array if conversion is None or is_absent(array) else conversion.apply(array, rows)
            for conversion, array in zip(conversions, arrays, strict=True)
        ]
    )
