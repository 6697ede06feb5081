"""Sequences of requests: the part of a request in its sequence, and the tensors that the server adds to it."""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.batch import Arrays, deep_bytes
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import format_shape, is_absent
from ortserve.errors import ErrorKind, ServeError

SequenceId: TypeAlias = int | str
"""An unsigned integer of 64 bits, or a text. The integer 1 and the text "1" are two sequences."""

START: Final = "start"
READY: Final = "ready"
END: Final = "end"
ID: Final = "id"


@dataclass(slots=True, init=False)
class SequencePart:
    """The part of a request in its sequence. The id 0 or ``""`` stands for no sequence.

    ``is_ahead`` means that an ensemble received the request before it had answered an earlier one of the sequence.
    """

    id: Final[SequenceId]
    is_start: Final[bool]
    is_end: Final[bool]
    is_ahead: Final[bool]

    def __init__(
        self,
        id: SequenceId,  # noqa: A002
        is_start: bool = False,
        is_end: bool = False,
        is_ahead: bool = False,
    ) -> None:
        self.id = id
        self.is_start = is_start
        self.is_end = is_end
        self.is_ahead = is_ahead


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """A control input: its kind, and its value for one request as arrays of one element.

    ``off`` is also the value of padding rows. For a control of kind ``id``, ``on`` is not used.
    """

    kind: str
    datatype: DataType
    off: np.ndarray
    on: np.ndarray


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state of a model: an output that is the input of the next run.

    Attributes:
        input: Name of the input.
        output: Name of the output.
        output_index: Index of the output among those of the model.
        shape: Shape that the input accepts, in the form of batches; -1 for any size, None for any shape.
    """

    input: str
    output: str
    output_index: int
    shape: tuple[int, ...] | None

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that the next run can take an output of this shape as its input.

        In a batch, an array with another number of rows would shift the rows of other sequences.

        Raises:
            ServeError: internal.
        """
        expected = self.shape
        if expected is None or shape == expected:
            return
        is_right = len(shape) == len(expected)
        if is_right:
            for size, wanted in zip(shape, expected, strict=True):
                if size != wanted and wanted != -1:
                    is_right = False
        if not is_right:
            raise ServeError(
                ErrorKind.INTERNAL,
                f"output '{self.output}' cannot be the next state: input '{self.input}' expects "
                f"{format_shape(expected)}, got {format_shape(shape)}",
            )


class SequenceTensors:
    """The hidden tensors of a model. Its controls follow the clients' inputs, and its states follow the controls.

    All arrays are those of one request in the form of batches: with one row for a batched model.

    Attributes:
        controls: Controls in the order of the model's inputs.
        initial: The first states of a sequence, in host memory; never written to.
        first_states: The states with which a sequence begins: ``initial``, or references to copies in other memory.
        initial_bytes: Size of ``first_states``.
        states: Descriptions of the states, in the order of ``initial``.
        shown_outputs: Number of outputs, from the first on, that clients may request.
        id_datatype: Datatype of the control of kind ``id``; None without one.
    """

    def __init__(
        self,
        controls: tuple[ControlTensor, ...],
        initial: Arrays,
        states: tuple[StateTensor, ...],
        shown_outputs: int,
        first_states: Arrays = (),
        padding: Arrays = (),
    ) -> None:
        """Empty ``first_states`` stand for ``initial``. ``padding`` are the states of padding rows; empty for zeros."""
        self.controls: Final = controls
        self.initial: Final = initial
        self.first_states: Final = first_states or initial
        self.initial_bytes: Final = deep_bytes(self.first_states)
        self.states: Final = states
        self.shown_outputs: Final = shown_outputs
        self.id_datatype: Final = next((control.datatype for control in controls if control.kind == ID), None)
        self._id_off: Final = next((control.off for control in controls if control.kind == ID), None)
        self._padding: Final = padding

    @property
    def are_elsewhere(self) -> bool:
        """Whether the states are stored in other memory than the host's."""
        return self.first_states is not self.initial

    def kept_elsewhere(self, first_states: Arrays, padding: Arrays) -> "SequenceTensors":
        """The same tensors with states in other memory, such as that of a device.

        Each state is then an array of one element: an object that refers to the state. The length of the object is the
        size of the state in bytes, and its ``shape`` is that of the state.
        """
        return SequenceTensors(self.controls, self.initial, self.states, self.shown_outputs, first_states, padding)

    def id_array(self, sequence_id: SequenceId) -> np.ndarray | None:
        """The value of the control of kind ``id``: the low bits of an integer, or a text. None without the control."""
        like = self._id_off
        if like is None:
            return None
        if isinstance(sequence_id, str):
            text = np.empty(like.shape, object)
            text.fill(sequence_id)
            return text
        return np.full(like.shape, sequence_id, np.uint64).astype(like.dtype)

    def extend(
        self, inputs: Arrays, id_array: np.ndarray | None, is_start: bool, is_end: bool, states: Arrays
    ) -> Arrays:
        """The inputs of the model for one request with the clients' ``inputs``."""
        hidden: list[np.ndarray] = []
        for control in self.controls:
            kind = control.kind
            if kind == ID:
                hidden.append(control.off if id_array is None else id_array)
            elif kind == READY or (kind == START and is_start) or (kind == END and is_end):
                hidden.append(control.on)
            else:
                hidden.append(control.off)
        return (*inputs, *hidden, *states)

    def first(self, inputs: Arrays, rows: int) -> Arrays:
        """The inputs of ``rows`` requests that start sequences, for warm-up."""
        whole = self.extend((), None, is_start=True, is_end=False, states=self.initial)
        return (*inputs, *[array if rows == 1 else np.repeat(array, rows, axis=0) for array in whole])

    def padding_row(self, inputs: Arrays) -> Arrays:
        """A padding row in the shapes of ``inputs``, all inputs of one request: zeros, empty texts, controls off."""
        first_control = len(inputs) - len(self.initial) - len(self.controls)
        row = [array if is_absent(array) else _zeros_like(array) for array in inputs]
        for index, control in enumerate(self.controls):
            row[first_control + index] = control.off
        if self._padding:
            row[-len(self._padding) :] = self._padding
        return tuple(row)

    def next_states(self, outputs: Arrays) -> Arrays:
        """Copies of the states among the outputs of one request, whose memory is that of a batch.

        Raises:
            ServeError: internal, if the next run cannot accept a state.
        """
        states: list[np.ndarray] = []
        for state in self.states:
            output = outputs[state.output_index]
            shape: tuple[int, ...] = output[0].shape if self.are_elsewhere else output.shape
            if shape != state.shape:
                state.check(shape)
            states.append(output.copy())
        return tuple(states)


def _zeros_like(array: np.ndarray) -> np.ndarray:
    zeros = np.zeros(array.shape, array.dtype)
    if array.dtype.hasobject:
        zeros.fill("")
    return zeros
