"""Tensors whose shape clients see is not the model's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortserve.core.batch import Arrays


@dataclass(frozen=True, slots=True)
class Reshape:
    """From one form of a tensor's dimensions to another with as many elements.

    ``source`` and ``target`` leave out the first ``kept`` dimensions, which stay: 1 for the batch, or none. Free
    dimensions (-1) of the one are those of the other, in order.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    kept: int

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The same elements in the other form, without a copy where they are contiguous.

        Raises:
            ValueError: The array is not of the source's form.
        """
        # Before the check, because what stands for an optional input that was left out has no dimensions to reshape.
        if array.dtype.kind == "V":
            return array
        kept = self.kept
        if array.ndim - kept != len(self.source):
            raise ValueError(f"expected {kept + len(self.source)} dimensions, got {array.ndim}")
        free = [size for size, dim in zip(array.shape[kept:], self.source, strict=True) if dim == -1]
        free.reverse()
        return array.reshape((*array.shape[:kept], *[free.pop() if dim == -1 else dim for dim in self.target]))


@dataclass(frozen=True, slots=True)
class Reshapes:
    """Of the inputs and outputs of a model, in the signature's order; None for those that stay as they are."""

    inputs: tuple[Reshape | None, ...]
    outputs: tuple[Reshape | None, ...]

    def to_model(self, inputs: Arrays) -> Arrays:
        """Inputs as clients sent them, in the model's own form."""
        return _apply(self.inputs, inputs)

    def to_client(self, outputs: Arrays) -> Arrays:
        """Outputs as the model gave them, in the form that clients see.

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


def _apply(reshapes: tuple[Reshape | None, ...], arrays: Arrays) -> Arrays:
    return tuple(
        [array if reshape is None else reshape.apply(array) for reshape, array in zip(reshapes, arrays, strict=True)]
    )
