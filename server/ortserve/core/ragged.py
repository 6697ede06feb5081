"""Ragged batches: requests of different shapes joined to one tensor, inputs derived from them, and outputs divided.

The owner of a model declares them and the registry checks them (``registry/load/ragged_tensors``). The engine joins the
requests when it stages them, and the batcher gives each request its part of the outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.errors import ErrorKind, ServeError

ELEMENT_COUNT: Final = "element_count"
ACCUMULATED: Final = "accumulated_element_count"
ACCUMULATED_WITH_ZERO: Final = "accumulated_element_count_with_zero"
MAX_COUNT_AS_SHAPE: Final = "max_element_count_as_shape"
ITEM_SHAPE: Final = "item_shape"
ITEM_SHAPE_FLATTEN: Final = "item_shape_flatten"
_LARGEST_COUNT: Final = 2**31 - 1
"""The largest INT32."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that the server derives from the shapes of another one.

    Attributes:
        name: Name of the input in the model.
        datatype: INT32 or FP32.
        kind: The kind of its values, one of the constants of this module.
        source: Index of the input whose shapes it describes.
    """

    name: str
    datatype: DataType
    kind: str
    source: int

    def make(self, arrays: Arrays) -> np.ndarray:
        """Make the tensor for a batch. ``arrays`` are the source input of its requests, each ``(rows_i, *item_i)``.

        Raises:
            ServeError: too_large, for more elements than an INT32 counts.
        """
        kind = self.kind
        if kind in (ITEM_SHAPE, ITEM_SHAPE_FLATTEN):
            shapes = np.array([array.shape[1:] for array in arrays for _ in range(len(array))])
            return self._checked(shapes if kind == ITEM_SHAPE else shapes.reshape(-1))
        counts = np.array([array.size for array in arrays])
        if kind == MAX_COUNT_AS_SHAPE:
            return np.zeros(counts.max(), self.datatype.numpy)
        if kind != ELEMENT_COUNT:
            counts = np.cumsum(counts)
        if kind == ACCUMULATED_WITH_ZERO:
            counts = np.concatenate([np.zeros(1, counts.dtype), counts])
        return self._checked(counts)

    def _checked(self, numbers: np.ndarray) -> np.ndarray:
        if numbers.size and int(numbers.max()) > _LARGEST_COUNT:
            raise ServeError(
                ErrorKind.TOO_LARGE,
                f"batch input '{self.name}': expected at most {_LARGEST_COUNT} elements, got {int(numbers.max())}",
            )
        return numbers.astype(self.datatype.numpy)


class RaggedTensors:
    """The inputs and outputs of a ragged model that are joined, derived or divided by element.

    Attributes:
        joined: Indices of the inputs whose elements are joined to one tensor of one axis, request after request.
        batch_inputs: Inputs that the server derives; they follow the clients' inputs in the session.
        scattered: Outputs of one axis that are divided like an input: index of the input by index of the output.
        output_names: Names of the outputs, for errors.
    """

    def __init__(
        self,
        joined: frozenset[int],
        batch_inputs: tuple[BatchInput, ...],
        scattered: Mapping[int, int],
        output_names: tuple[str, ...],
    ) -> None:
        self.joined: Final = joined
        self.batch_inputs: Final = batch_inputs
        self.scattered: Final = scattered
        self.output_names: Final = output_names

    def divide(self, outputs: Arrays, inputs: Sequence[Arrays], rows: int) -> list[Arrays]:
        """Give each request its part of the outputs: views.

        Args:
            outputs: Outputs of the batch.
            inputs: Inputs of each request, in the order of the batch.
            rows: Rows of the batch.

        Raises:
            ServeError: internal, for an output that does not have one row for each row of the batch, or one element for
                each of its source.
        """
        columns = [
            self._divide_rows(index, output, inputs, rows)
            if index not in self.scattered
            else self._scatter(index, output, inputs)
            for index, output in enumerate(outputs)
        ]
        return [tuple([column[place] for column in columns]) for place in range(len(inputs))]

    def _divide_rows(self, index: int, output: np.ndarray, inputs: Sequence[Arrays], rows: int) -> list[np.ndarray]:
        if output.ndim == 0 or len(output) != rows:
            raise self._misfit(index, output, f"{rows} rows, one per row of its batch")
        parts: list[np.ndarray] = []
        first = 0
        for arrays in inputs:
            after = first + len(arrays[0])
            parts.append(output[first:after])
            first = after
        return parts

    def _scatter(self, index: int, output: np.ndarray, inputs: Sequence[Arrays]) -> list[np.ndarray]:
        source = self.scattered[index]
        needed = sum([arrays[source].size for arrays in inputs])
        if output.ndim != 1 or len(output) != needed:
            raise self._misfit(
                index, output, f"one axis of {needed} elements, one per element of its source input in the batch"
            )
        parts: list[np.ndarray] = []
        first = 0
        for arrays in inputs:
            like = arrays[source]
            parts.append(output[first : first + like.size].reshape(like.shape))
            first += like.size
        return parts

    def _misfit(self, index: int, output: np.ndarray, expected: str) -> ServeError:
        return ServeError(
            ErrorKind.INTERNAL,
            f"output '{self.output_names[index]}': expected {expected}, got shape {list(output.shape)}",
        )
