"""Padding of requests to common lengths, so that they can share a batch, and cutting of their answers.

``model.yaml`` declares the padded axes and the registry checks them; the engine pads rows when it stages them.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from ortserve.core.batch import Arrays
from ortserve.core.tensor import format_shape
from ortserve.errors import ErrorKind, ServeError, invalid_input


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """The padded axis of an input, never the batch axis: its length grows to the next multiple of ``multiple``.

    ``value`` fills the added elements; ``dim_name`` is the model's name of the dimension.
    """

    input: str
    axis: int
    multiple: int
    value: bool | int | float | str
    dim_name: str

    def padded_length(self, length: int) -> int:
        """``length`` rounded up to a multiple; 0 stays 0."""
        return -(-length // self.multiple) * self.multiple

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The padded shape, batch axis included."""
        return (*shape[: self.axis], self.padded_length(shape[self.axis]), *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class CutAxis:
    """An axis of an output with the length of the padded axis of input ``source``. ``output`` and ``source`` are
    indices.
    """

    output: int
    name: str
    axis: int
    source: int


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of a batched model.

    Attributes:
        axes: The padded axis of each input, or None. Axes of one ``dim_name`` have the same ``multiple``.
        cuts: Axes of outputs that are cut back to the length of the request.
    """

    axes: tuple[PaddedAxis | None, ...]
    cuts: tuple[CutAxis, ...] = ()

    @property
    def pads_requests(self) -> bool:
        """Whether any axis is padded. Otherwise only rows are padded, to complete a bucket."""
        return any(self.axes)

    def shape_class(self, inputs: Arrays) -> Hashable:
        """The shape class of a request: its padded shapes without the rows. Requests of one class may share a batch.

        Raises:
            ServeError: invalid_input, if inputs disagree on the length of a shared dimension.
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
                        f"has {expected} on axis {first.axis}: both axes are dimension '{padded.dim_name}'"
                    )
                shape = padded.padded_shape(shape)
            shapes.append(shape[1:])
        return tuple(shapes)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Remove the padding from the outputs of one request with the inputs ``inputs``.

        Returns:
            Views on ``outputs``.

        Raises:
            ServeError: internal, if the length of an output differs from the dimension that it shares with an input, so
                that its padding cannot be identified.
        """
        shortened = list(outputs)
        for cut in self.cuts:
            padded = self.axes[cut.source]
            assert padded is not None
            length = inputs[cut.source].shape[padded.axis]
            expected = padded.padded_length(length)
            if length == expected:
                continue
            shape = outputs[cut.output].shape
            if len(shape) <= cut.axis or shape[cut.axis] != expected:
                raise ServeError(
                    ErrorKind.INTERNAL,
                    f"output '{cut.name}' has shape {format_shape(shape)}, but its axis {cut.axis} is dimension "
                    f"'{padded.dim_name}', which is {expected} long with padding",
                )
            shortened[cut.output] = shortened[cut.output][(slice(None),) * cut.axis + (slice(length),)]
        return tuple(shortened)


def padding_of_requests(padding: Padding | None) -> Padding | None:
    """The padding if it pads any axis of requests, else None."""
    return padding if padding is not None and padding.pads_requests else None


@dataclass(frozen=True, slots=True)
class StagedElements:
    """Counts of elements in the inputs of batches: all of them, and those that are padding."""

    staged: int = 0
    padded: int = 0

    def __add__(self, other: "StagedElements") -> "StagedElements":
        return StagedElements(self.staged + other.staged, self.padded + other.padded)
