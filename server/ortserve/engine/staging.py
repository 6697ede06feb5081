"""Stages the rows of a batch on the host: one copy, into a buffer that the next batch reuses.

``HostStaging`` accepts batches of any shape. Batches with bound buffers are staged in these directly
(``host_binding``).
"""

from collections.abc import Sequence

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.padding import PaddedAxis, Padding, StagedElements
from ortserve.core.ragged import RaggedTensors
from ortserve.core.tensor import is_absent


def stage_rows(arrays: Arrays, out: np.ndarray, rows: int) -> None:
    """Copy the rows of ``arrays`` one after another into ``out`` and fill the rest with the last row.

    Args:
        arrays: At least one array of shape ``(rows_i, *item)``, all of ``out``'s dtype.
        out: Shape ``(bucket, *item)``; overwritten whole.
        rows: The sum of ``rows_i``, from 1 to ``bucket``.

    Raises:
        ValueError: ``arrays`` have other shapes.
    """
    if rows == len(out):
        np.concatenate(arrays, out=out)
        return
    np.concatenate(arrays, out=out[:rows])
    out[rows:] = out[rows - 1]


class HostStaging:
    """Buffers of one instance, one for each input. Not for concurrent runs.

    ``elements`` counts staged elements, if batches are padded; other threads may read it.
    """

    def __init__(
        self, axes: Sequence[int | None], padding: Padding | None = None, ragged: RaggedTensors | None = None
    ) -> None:
        """Allocate no buffer yet.

        Args:
            axes: The axis of each input that carries the rows; None for an input without rows. 0 for all inputs of a
                model that is not batched.
            padding: How batches are padded; None if they never are. Then ``elements`` stays zero.
            ragged: The joined tensors of a model whose requests may differ in shape, which is never padded; None for
                other models.
        """
        self._axes = axes
        self._buffers: list[np.ndarray | None] = [None] * len(axes)
        self._padding = padding
        self._ragged = ragged
        self.elements = StagedElements()

    def stage(self, parts: Sequence[Arrays], bucket: int) -> list[np.ndarray]:
        """Stage one aligned, contiguous array of ``bucket`` rows for each input, in the model's own form.

        A single aligned array that fills the bucket is not copied. Padded axes are filled with their declared value.
        Padding rows repeat the last row: with real values, no kernel is slow or fails.

        Args:
            parts: For each input at least one array of shape ``(rows_i, *item)``, at most ``bucket`` rows in all. For
                an input without a batch axis, all rows are equal. ``item`` differs only in the length of a padded axis,
                and these lengths pad to the same length.
            bucket: Rows to run. Ignored for a model without a batch axis, whose inputs have any shape.

        Returns:
            The requests' arrays, or buffers that the next call overwrites. For a ragged model, the derived inputs
            follow them.
        """
        if self._padding is None:
            if self._ragged is not None:
                return self._stage_ragged(self._ragged, parts, bucket)
            return [self._stage(index, arrays, bucket) for index, arrays in enumerate(parts)]
        staged = [
            self._stage(index, arrays, bucket) if axis is None else self._stage_padded(index, arrays, bucket, axis)
            for index, (arrays, axis) in enumerate(zip(parts, self._padding.axes, strict=True))
        ]
        elements = sum([array.size for array in staged])
        brought = sum([array.size for arrays in parts for array in arrays])
        self.count(elements, elements - brought)
        return staged

    def count(self, staged: int, padded: int) -> None:
        """Count elements that were staged elsewhere, ``padded`` of them as padding."""
        self.elements = StagedElements(self.elements.staged + staged, self.elements.padded + padded)

    def _stage_ragged(self, ragged: RaggedTensors, parts: Sequence[Arrays], bucket: int) -> list[np.ndarray]:
        staged = [
            np.concatenate([array.reshape(-1) for array in arrays])
            if index in ragged.joined
            else self._stage(index, arrays, bucket)
            for index, arrays in enumerate(parts)
        ]
        staged += [derived.make(parts[derived.source]) for derived in ragged.batch_inputs]
        return staged

    def _stage_padded(self, index: int, arrays: Arrays, bucket: int, padded: PaddedAxis) -> np.ndarray:
        axis, shape = padded.axis, arrays[0].shape
        length = padded.padded_length(shape[axis])
        shortest = min([array.shape[axis] for array in arrays])
        if shortest == length:
            return self._stage(index, arrays, bucket)
        buffer = self._buffer(index, bucket, padded.padded_shape(shape)[1:], arrays[0].dtype)
        before = (slice(None),) * (axis - 1)
        # Fill all rows with one assignment instead of one per request: each costs about 0.5 µs.
        buffer[(slice(bucket), *before, slice(shortest, None))] = padded.value
        first = 0
        for array in arrays:
            after = first + len(array)
            buffer[(slice(first, after), *before, slice(array.shape[axis]))] = array
            first = after
        if first < bucket:
            buffer[first:bucket] = buffer[first - 1]
        return buffer[:bucket]

    def _stage(self, index: int, arrays: Arrays, bucket: int) -> np.ndarray:
        first, axis = arrays[0], self._axes[index]
        if axis != 0:
            return _stage_off_front(arrays, bucket, axis)
        # Only a model without a batch axis gets an array without rows: there is no row to repeat.
        if len(arrays) == 1 and (first.ndim == 0 or len(first) >= bucket or len(first) == 0):
            return _as_runnable(first)
        buffer = self._buffer(index, bucket, first.shape[1:], first.dtype)[:bucket]
        stage_rows(arrays, buffer, sum(map(len, arrays)))
        return buffer

    def _buffer(self, index: int, bucket: int, item: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A buffer of at least ``bucket`` rows, with arbitrary content."""
        if dtype.hasobject:  # a reused buffer would keep the strings alive
            return np.empty((bucket, *item), dtype)
        buffer = self._buffers[index]
        if buffer is None or len(buffer) < bucket or buffer.shape[1:] != item or buffer.dtype != dtype:
            buffer = self._buffers[index] = np.empty((bucket, *item), dtype)
        return buffer


def _stage_off_front(arrays: Arrays, bucket: int, axis: int | None) -> np.ndarray:
    """Stage an input whose rows are on another axis than 0, or that has no rows."""
    first = arrays[0]
    if is_absent(first):
        return first
    if axis is None:
        return _as_runnable(first[0, ...])
    if len(arrays) == 1 and len(first) >= bucket:
        return _as_runnable(np.moveaxis(first, 0, axis))
    item = first.shape[1:]
    staged = np.empty((*item[:axis], bucket, *item[axis:]), first.dtype)
    stage_rows(arrays, np.moveaxis(staged, axis, 0), sum(map(len, arrays)))
    return staged


def _as_runnable(array: np.ndarray) -> np.ndarray:
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()
