"""Options of a model that serves sequences of requests: their schedule, controls and states."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from ortserve.config.declaration import DECLARATION
from ortserve.config.tensors import Dim, FileName
from ortserve.core.dtypes import DataType

FLAG_DATATYPES: Final = (DataType.BOOL, DataType.INT32, DataType.FP32)
ID_DATATYPES: Final = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)


class SequenceControl(BaseModel):
    """An input of the model that the server fills."""

    model_config = DECLARATION

    kind: Literal["start", "ready", "end", "id"]
    """``start`` and ``end``: whether the request is the first or last of its sequence. ``ready``: whether the row holds
    a request; always true, except in the rows of free slots with ``direct``. ``id``: the id of the sequence."""
    datatype: DataType | None = None
    """Checked against the model: BOOL, INT32 or FP32; for ``id`` UINT64, INT64, UINT32, INT32 or BYTES."""
    values: tuple[bool | int | float, bool | int | float] = Field(
        default=(False, True), json_schema_extra={"expects": "list of two numbers"}
    )
    """The values for false and true. No effect for ``id``."""


class SequenceState(BaseModel):
    """A tensor that the server keeps from one request of a sequence to the next."""

    model_config = DECLARATION

    input: str
    """The input of the model that receives the state."""
    output: str
    """The output of the model with the next state. Clients receive it if ``outputs`` or ``served_outputs`` lists it."""
    datatype: DataType | None = None
    """Checked against the model."""
    dims: tuple[Dim, ...] | None = None
    """Checked against the model. Dimensions without the batch dimension."""
    initial_dims: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...] | None = None
    """Dimensions of the first state. Unset: ``dims``, with 1 for free ones. 0 lets a state begin empty and grow."""
    initial_file: FileName | None = Field(
        default=None, json_schema_extra={"expects": "name of a file, without a folder"}
    )
    """A file in the folder ``initial_state`` of the model with the raw first state. Unset: zeros, or empty texts."""


class SequenceOptions(BaseModel):
    """Sequences of requests."""

    model_config = DECLARATION

    strategy: Literal["oldest", "direct"] = "oldest"
    """``oldest``: requests of different sequences share batches like requests without sequences. ``direct``: each
    sequence has a slot, which is its row in the batches of one instance."""
    max_idle_s: float = Field(default=1.0, gt=0, le=86400 * 30)
    """Time without a request, since its last answer, after which a sequence ends."""
    max_candidates: int = Field(default=1024, ge=1, le=1_048_576)
    """Maximum number of running sequences per instance with ``oldest``; further ones wait until one ends. With
    ``direct`` this is the maximum number of rows."""
    max_sequences: int = Field(default=65_536, ge=1, le=16_777_216)
    """Maximum number of sequences, waiting ones included; further ones are rejected as ``overloaded``."""
    max_state_bytes: int = Field(default=1024**3, ge=1, le=2**44)
    """Maximum size of all states. A sequence that would exceed it is rejected at its start as ``overloaded``; one whose
    state grows beyond it ends. The load fails if a first state is larger."""
    min_slot_utilization: float = Field(default=0.0, ge=0, le=1)
    """With ``direct``: share of the slots that must have a request for a batch to run before ``queue_delay_s`` has
    passed. 0: every batch runs at once."""
    controls: Mapping[str, SequenceControl] = Field(default_factory=dict)
    """Inputs that the server fills, by name. Each kind is allowed once."""
    states: tuple[SequenceState, ...] = ()
    """States that the server keeps."""

    def problems(self) -> Iterator[str]:
        """Yield one line per contradiction between the values."""
        kinds = [control.kind for control in self.controls.values()]
        for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            yield f"sequences.controls: expected at most one input of kind {kind}, got {kinds.count(kind)}"
        for name, control in self.controls.items():
            allowed = ID_DATATYPES if control.kind == "id" else FLAG_DATATYPES
            if control.datatype not in (None, *allowed):
                names = ", ".join(datatype.value for datatype in allowed)
                got = control.datatype and control.datatype.value
                yield f"sequences.controls.{name}.datatype: expected one of {names} for {control.kind}, got {got}"
        inputs = [*self.controls, *(state.input for state in self.states)]
        outputs = [state.output for state in self.states]
        for role, names_of in (("input", inputs), ("output", outputs)):
            for one in sorted({name for name in names_of if names_of.count(name) > 1}):
                yield f"sequences: expected {role} '{one}' for one control or state, got {names_of.count(one)}"
        for state in self.states:
            yield from _state_problems(state)


def _state_problems(state: SequenceState) -> Iterator[str]:
    dims, first = state.dims, state.initial_dims
    if dims is None or first is None:
        return
    name = f"for state input '{state.input}'"
    if len(dims) != len(first):
        yield (
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions {name}. "
            f"{len(first)} != {len(dims)}"
        )
        return
    for size, expected in zip(first, dims, strict=True):
        if expected not in (-1, size):
            yield (
                f"'initial_state' dim for input name '{state.input}' doesn't match 'state' dim description. "
                f"{size} != {expected}"
            )
            return
