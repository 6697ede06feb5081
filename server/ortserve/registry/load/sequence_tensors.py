"""Checks the options of sequences against the model, and finds the hidden tensors that the server fills."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.codecs.binary_tensor import decode_binary_tensor
from ortserve.config.model import ModelOptions
from ortserve.config.sequences import FLAG_DATATYPES, ID_DATATYPES, SequenceControl, SequenceState
from ortserve.core.dtypes import DataType
from ortserve.core.sequence import ControlTensor, SequenceTensors, StateTensor
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import fits_shape, format_shape, zeros
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.model_files import read_model_file

INITIAL_FOLDER: Final = "initial_state"
"""Folder in the model's folder, with the files of first states."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The tensors of a model that clients neither send nor receive.

    Attributes:
        inputs: Inputs of controls, then inputs of states.
        outputs: Outputs of states, except those that clients may request.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def visible(self, signature: ModelSignature) -> ModelSignature:
        """The signature without the hidden tensors."""
        hidden_in, hidden_out = {spec.name for spec in self.inputs}, {spec.name for spec in self.outputs}
        return replace(
            signature,
            inputs=tuple(spec for spec in signature.inputs if spec.name not in hidden_in),
            outputs=tuple(spec for spec in signature.outputs if spec.name not in hidden_out),
        )

    def append(self, signature: ModelSignature) -> ModelSignature:
        """The signature with the hidden tensors at the end."""
        return replace(signature, inputs=(*signature.inputs, *self.inputs), outputs=(*signature.outputs, *self.outputs))


def find_hidden(options: ModelOptions, signature: ModelSignature) -> Hidden | None:
    """Find the hidden tensors in the model; None for a model without sequences.

    Raises:
        ServeError: invalid_input, for names that the model lacks, and for names that are also inputs of clients.
    """
    sequences = options.sequences
    if sequences is None:
        return None
    inputs = signature.inputs_by_name
    outputs = {spec.name: spec for spec in signature.outputs}
    for name in sequences.controls:
        if name not in inputs:
            raise invalid_input(
                f"configuration specified sequence control '{name}', but model does not provide that input"
            )
    for state in sequences.states:
        if state.input not in inputs:
            raise _unknown("input", state.input, list(inputs))
        if state.output not in outputs:
            raise _unknown("output", state.output, list(outputs))
    names = [*sequences.controls, *(state.input for state in sequences.states)]
    for name in names:
        if name in options.inputs:
            raise invalid_input(
                f"input '{name}' is filled by the server: expected it only in sequences, got it in inputs, too"
            )
    shown = {*options.outputs, *options.served_outputs}
    hidden = tuple(outputs[state.output] for state in sequences.states if state.output not in shown)
    if len(hidden) == len(outputs):
        raise invalid_input("sequences.states: expected an output that is not a state, or a state's output in outputs")
    return Hidden(tuple(inputs[name] for name in names), hidden)


def resolve_tensors(
    options: ModelOptions, signature: ModelSignature, shown_outputs: int, folder: Path | None
) -> SequenceTensors:
    """Check controls and states against the model, and create their first values. Blocks on the files of states.

    ``signature`` has the hidden tensors at the end. Clients may request the first ``shown_outputs`` outputs.

    Raises:
        ServeError: invalid_input, with the name, and the values of the model and of the configuration.
    """
    sequences = options.sequences
    assert sequences is not None
    if sequences.strategy == "direct" and signature.is_batched:
        for spec in signature.inputs:
            if spec.batch_axis is None:
                raise invalid_input(f"sequences.strategy: direct needs rows in all inputs, but '{spec.name}' has none")
    inputs = signature.inputs_by_name
    controls = tuple(_control(inputs[name], control) for name, control in sequences.controls.items())
    initial: list[np.ndarray] = []
    states: list[StateTensor] = []
    for state in sequences.states:
        source, target = inputs[state.input], signature.outputs[signature.output_index[state.output]]
        _check_state(state, source, target, is_batched=signature.is_batched)
        initial.append(_first_state(state, source, folder, sequences.max_state_bytes, is_batched=signature.is_batched))
        shape = (1, *source.row_shape) if signature.is_batched else source.row_shape
        states.append(
            StateTensor(
                state.input,
                state.output,
                signature.output_index[state.output],
                None if source.has_any_shape else shape,
            )
        )
    return SequenceTensors(controls, tuple(initial), tuple(states), shown_outputs)


def _unknown(role: str, name: str, known: list[str]) -> ServeError:
    return invalid_input(f"sequences.states: unexpected {role} '{name}', the model has: {', '.join(known)}")


def _control(spec: TensorSpec, control: SequenceControl) -> ControlTensor:
    row = spec.row_shape if spec.batch_axis is not None or spec.shape[:1] != (-1,) else spec.shape[1:]
    if row != (1,):
        raise invalid_input(
            f"unable to load model, sequence control '{spec.name}' in model has dims {format_shape(row)} but dims [1] "
            "is expected"
        )
    allowed = ID_DATATYPES if control.kind == "id" else FLAG_DATATYPES
    configured = control.datatype
    if spec.datatype not in allowed or (configured is not None and configured is not spec.datatype):
        wanted = configured.value if configured is not None else " or ".join(one.value for one in allowed)
        raise invalid_input(
            f"unable to load model, sequence control '{spec.name}', the model expects data-type {spec.datatype.value} "
            f"but the model configuration specifies data-type {wanted}"
        )
    shape = (1,) * len(spec.shape)
    if control.kind == "id":
        off = zeros(shape, spec.datatype)
        return ControlTensor(control.kind, spec.datatype, off, off)
    off, on = (np.full(shape, value, spec.datatype.numpy) for value in control.values)
    return ControlTensor(control.kind, spec.datatype, off, on)


def _check_state(state: SequenceState, source: TensorSpec, target: TensorSpec, *, is_batched: bool) -> None:
    if source.datatype is not target.datatype:
        raise invalid_input(
            f"state '{state.input}' is {source.datatype.value}, but its output '{state.output}' is "
            f"{target.datatype.value}"
        )
    if state.datatype is not None and state.datatype is not source.datatype:
        raise invalid_input(
            f"state '{state.input}': the model's datatype is {source.datatype.value}, but the model configuration "
            f"specifies {state.datatype.value}"
        )
    for spec in (source, target):
        if spec.is_sequence:
            raise invalid_input(f"state '{state.input}': expected a tensor, got the sequence of tensors '{spec.name}'")
        if spec.is_optional or (is_batched and spec.batch_axis is None):
            raise invalid_input(
                f"state '{state.input}': expected rows in '{spec.name}', which is the same for all rows"
            )
    if source.has_any_shape or target.has_any_shape:
        return
    own, following = source.row_shape, target.row_shape
    if len(own) != len(following) or any(
        one != other and -1 not in (one, other) for one, other in zip(own, following, strict=True)
    ):
        raise invalid_input(
            f"state '{state.input}' has dims {format_shape(own)}, but its output '{state.output}' has "
            f"{format_shape(following)}"
        )
    dims = state.dims
    if dims is not None and not fits_shape(dims, own):
        raise invalid_input(
            f"state '{state.input}': the model expects dims {format_shape(own)}, but the model configuration specifies "
            f"{format_shape(dims)}"
        )


def _first_state(
    state: SequenceState, spec: TensorSpec, folder: Path | None, max_bytes: int, *, is_batched: bool
) -> np.ndarray:
    """The first state of one sequence, in the form of batches."""
    dims = spec.row_shape if state.dims is None else state.dims
    if state.initial_dims is not None:
        dims = state.initial_dims
        if len(dims) != len(spec.row_shape) and not spec.has_any_shape:
            raise invalid_input(
                f"state '{state.input}': expected initial_dims of {len(spec.row_shape)} sizes, got {list(dims)}"
            )
        if not spec.has_any_shape and not fits_shape(dims, spec.row_shape):
            raise invalid_input(
                f"state '{state.input}': the model expects dims {format_shape(spec.row_shape)}, but initial_dims are "
                f"{format_shape(dims)}"
            )
    item = tuple([1 if dim == -1 else dim for dim in dims])
    shape = (1, *item) if is_batched else item
    nbytes = prod(shape) * np.dtype(spec.datatype.numpy).itemsize
    if nbytes > max_bytes:
        raise invalid_input(
            f"state '{state.input}': expected a first state of at most max_state_bytes {max_bytes}, got {nbytes} bytes "
            f"of shape {format_shape(shape)}"
        )
    if state.initial_file is not None:
        return _read_state(state, state.initial_file, spec, shape, folder)
    return zeros(shape, spec.datatype)


def _read_state(
    state: SequenceState, file: str, spec: TensorSpec, shape: tuple[int, ...], folder: Path | None
) -> np.ndarray:
    raw = read_model_file(folder, f"{INITIAL_FOLDER}/{file}", f"state '{state.input}'")
    needed = prod(shape) * spec.datatype.itemsize
    if len(raw) < needed:
        raise invalid_input(
            f"initial_state setting expects {needed} bytes, but the data provided from {file} has {len(raw)} bytes."
        )
    content = memoryview(raw)[:needed] if spec.datatype is not DataType.BYTES else memoryview(raw)
    return np.array(decode_binary_tensor(content, spec.datatype, shape, state.input, "initial state"))
