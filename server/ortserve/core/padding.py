"""The rules of padding: how long requests of a model become, so that they may run together, and how answers are cut.

Which axes are padded is declared in ``model.yaml`` and checked by the registry; the rows are padded where they are
staged, by the engine.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ortserve.core.batch import Arrays
from ortserve.core.tensor import format_shape
from ortserve.errors import ErrorKind, ServeError, invalid_input


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """The one axis of an input, never the batch axis, whose length grows to the next multiple of ``multiple``.

    ``value`` is what the added elements hold, and ``dim_name`` what the model calls the dimension.
    """

    input: str
    axis: int
    multiple: int
    value: bool | int | float | str
    dim_name: str

    def padded_length(self, length: int) -> int:
        """At least ``length``; 0 stays 0."""
        return -(-length // self.multiple) * self.multiple

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole shape, batch axis included."""
        return (*shape[: self.axis], self.padded_length(shape[self.axis]), *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class CutAxis:
    """An axis of an output that is as long as a padded axis: that of input ``source``, by their indices."""

    output: int
    name: str
    axis: int
    source: int


@dataclass(frozen=True, slots=True)
class Padding:
    """What is padded in the batches of a batched model.

    Attributes:
        axes: For each input its padded axis, None where it has none. Axes of one ``dim_name`` have one ``multiple``.
        cuts: Where answers are cut back to the length of the request.
    """

    axes: tuple[PaddedAxis | None, ...]
    cuts: tuple[CutAxis, ...] = ()

    @property
    def pads_requests(self) -> bool:
        """Whether any axis is padded; else it is rows alone, which complete a bucket."""
        return any(self.axes)

    def shape_class(self, inputs: Arrays) -> Hashable:
        """What requests that may share a batch have in common: their shapes but for the rows, padded.

        Raises:
            ServeError: invalid_input, when inputs disagree on the length of a dimension that they share.
        """
        lengths: dict[str, tuple[PaddedAxis, int]] = {}
        shapes = []
        for array, padded in zip(inputs, self.axes, strict=True):
            shape = array.shape
            if padded is not None:
                length = shape[padded.axis]
                first, expected = lengths.setdefault(padded.dim_name, (padded, length))
                if length != expected:
                    raise invalid_input(
                        f"input '{padded.input}' has length {length} on axis {padded.axis}, but input '{first.input}' "
                        f"has {expected} on axis {first.axis}: both are dimension '{padded.dim_name}'"
                    )
                shape = padded.padded_shape(shape)
            shapes.append(shape[1:])
        return tuple(shapes)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Cut what belongs to padding off the outputs of one request, whose inputs were ``inputs``.

        Returns:
            Views on ``outputs``.

        Raises:
            ServeError: internal, when an output has another length than the dimension it shares with an input: which
                of its elements are padding cannot be told.
        """
        cut = list(outputs)
        for output, length in self._shortened(outputs, inputs):
            cut[output.output] = cut[output.output][(slice(None),) * output.axis + (slice(length),)]
        return tuple(cut)

    def _shortened(self, outputs: Arrays, inputs: Arrays) -> Iterator[tuple[CutAxis, int]]:
        """Axes of outputs that hold padding, and their length without it."""
        for output in self.cuts:
            padded = self.axes[output.source]
            assert padded is not None
            length = inputs[output.source].shape[padded.axis]
            expected = padded.padded_length(length)
            if length == expected:
                continue
            shape = outputs[output.output].shape
            if len(shape) <= output.axis or shape[output.axis] != expected:
                raise ServeError(
                    ErrorKind.INTERNAL,
                    f"output '{output.name}' has shape {format_shape(shape)}, but its axis {output.axis} is dimension "
                    f"'{padded.dim_name}', which is {expected} long with padding",
                )
            yield output, length


def padding_of_requests(padding: Padding | None) -> Padding | None:
    """The padding, if any axis of a request is padded; None where it is rows alone."""
    return padding if padding is not None and padding.pads_requests else None


@dataclass(frozen=True, slots=True)
class StagedElements:
    """Elements of batches' inputs: all, and of these the ones that no request brought."""

    staged: int = 0
    padded: int = 0
