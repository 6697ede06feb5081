"""Between tensors as clients see them and as batches hold them: rows on axis 0, the rest in the model's own form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.tensor import is_absent


class Conversion(Protocol):
    """Of one tensor, in one direction: a view where that is possible."""

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        """Convert the tensor of a request of ``rows`` rows.

        Raises:
            ValueError: The array is not of the form that is converted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reshape:
    """From one form of a tensor's dimensions to another with as many elements.

    ``source`` and ``target`` leave out the first ``kept`` dimensions, which stay: 1 for the batch, or none. Free
    dimensions (-1) of the one are those of the other, in order. A view where the elements are contiguous.
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
    """Moves one axis: the batch axis of an input to the front, or that of an output to where clients see it."""

    source: int
    target: int

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        return np.moveaxis(array, self.source, self.target)


@dataclass(frozen=True, slots=True)
class RepeatForRows:
    """An input without rows: the same for each row, without a copy."""

    reshape: Reshape | None = None

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        return repeated(array if self.reshape is None else self.reshape.apply(array, rows), rows)


@dataclass(frozen=True, slots=True)
class FirstRow:
    """An output without rows, of which each row of a batch has the whole."""

    reshape: Reshape | None = None

    def apply(self, array: np.ndarray, rows: int) -> np.ndarray:
        first = array[0, ...]  # an array, also where the whole is a single number
        return first if self.reshape is None else self.reshape.apply(first, rows)


def repeated(array: np.ndarray, rows: int) -> np.ndarray:
    """A view of shape ``(rows, *array.shape)``, each of whose rows is ``array``."""
    return np.broadcast_to(array, (rows, *array.shape))


@dataclass(frozen=True, slots=True)
class Conversions:
    """Of the inputs and outputs of a model, in the signature's order; None for those that stay as they are."""

    inputs: tuple[Conversion | None, ...]
    outputs: tuple[Conversion | None, ...]

    def to_model(self, inputs: Arrays, rows: int = 1) -> Arrays:
        """Inputs of ``rows`` rows as clients sent them, as batches hold them; those that are absent stay so."""
        return _apply(self.inputs, inputs, rows)

    def to_client(self, outputs: Arrays) -> Arrays:
        """Outputs of a batch, as clients see them.

        Raises:
            ValueError: An output is not of the form that the configuration says.
        """
        return _apply(self.outputs, outputs)


def same_elements(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the two forms have as many elements whatever the free dimensions are, each in the place of another's."""
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
