"""Translates ``sequence_batching`` of a ``config.pbtxt`` to the options of ``model.yaml``, and back for clients.

The texts of errors are Triton's.
"""

from collections.abc import Mapping
from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.model import ModelOptions
from ortserve.config.sequences import ID_DATATYPES, SequenceControl, SequenceState
from ortserve.core.dtypes import DataType
from ortserve.errors import invalid_input
from ortserve.registry.repository.triton_fields import datatype_name, type_name

_Batching = pb.ModelSequenceBatching
_KINDS: Final = {
    _Batching.Control.CONTROL_SEQUENCE_START: "start",
    _Batching.Control.CONTROL_SEQUENCE_READY: "ready",
    _Batching.Control.CONTROL_SEQUENCE_END: "end",
    _Batching.Control.CONTROL_SEQUENCE_CORRID: "id",
}
_KIND_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}
_VALUES: Final = {
    "int32_false_true": DataType.INT32,
    "fp32_false_true": DataType.FP32,
    "bool_false_true": DataType.BOOL,
}
_DEFAULT_IDLE_US: Final = 1_000_000


def read_sequences(config: pb.ModelConfig, name: str) -> dict[str, Any]:
    """Translate ``sequence_batching`` to options.

    Raises:
        ServeError: invalid_input.
    """
    batching = config.sequence_batching
    rows = config.max_batch_size or 1
    sequences: dict[str, Any] = {
        "strategy": "oldest" if batching.HasField("oldest") else "direct",
        "max_idle_s": (batching.max_sequence_idle_microseconds or _DEFAULT_IDLE_US) / 1e6,
        "controls": _controls(batching, name),
        "states": [_state(state, name) for state in batching.state],
    }
    given: dict[str, Any] = {"sequences": sequences}
    if batching.HasField("oldest"):
        oldest = batching.oldest
        sequences["max_candidates"] = max(oldest.max_candidate_sequences, 0) or rows
        if any(size <= 0 for size in oldest.preferred_batch_size):
            raise invalid_input(f"sequence batching preferred batch size must be positive for {name}")
        if any(size > rows for size in oldest.preferred_batch_size):
            raise invalid_input(f"sequence batching preferred batch size must be <= max batch size for {name}")
        given["preferred_rows"] = list(oldest.preferred_batch_size)
        given["queue_delay_s"] = oldest.max_queue_delay_microseconds / 1e6
    elif batching.HasField("direct"):
        share = batching.direct.minimum_slot_utilization
        if not 0 <= share <= 1:
            raise invalid_input(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")
        sequences["min_slot_utilization"] = share
        given["queue_delay_s"] = batching.direct.max_queue_delay_microseconds / 1e6
    if config.response_cache.enable:
        raise invalid_input(
            f"Response Cache does not currently support model {name} with sequence batching scheduler. "
            "Please disable the response cache."
        )
    return given


def _controls(batching: pb.ModelSequenceBatching, name: str) -> dict[str, dict[str, Any]]:
    controls: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for tensor in batching.control_input:
        if not tensor.name:
            raise invalid_input(f"sequence batching control tensor must have a name for {name}")
        if tensor.name in controls or len(tensor.control) > 1:
            raise invalid_input(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {name}"
            )
        for control in tensor.control:
            if control.kind not in _KINDS:
                raise invalid_input(f"sequence batching control tensor '{tensor.name}' has an unknown kind for {name}")
            kind = _Batching.Control.Kind.Name(control.kind)
            if control.kind in seen:
                raise invalid_input(f"sequence batching specifies multiple {kind} tensors for {name}")
            seen.add(control.kind)
            is_id = control.kind == _Batching.Control.CONTROL_SEQUENCE_CORRID
            controls[tensor.name] = _id_control(control, kind, name) if is_id else _flag_control(control, kind, name)
    return controls


def _flag_control(control: pb.ModelSequenceBatching.Control, kind: str, name: str) -> dict[str, Any]:
    given = [field for field in _VALUES if len(getattr(control, field))]
    if not given:
        raise invalid_input(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{kind} for {name}"
        )
    if len(given) > 1:
        raise invalid_input(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}"
        )
    (field,) = given
    values = list(getattr(control, field))
    if len(values) != 2:
        raise invalid_input(f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {name}")
    return {"kind": _KINDS[control.kind], "datatype": _VALUES[field].value, "values": values}


def _id_control(control: pb.ModelSequenceBatching.Control, kind: str, name: str) -> dict[str, Any]:
    if any(len(getattr(control, field)) for field in _VALUES):
        raise invalid_input(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{kind} for {name}"
        )
    datatype = datatype_name(control.data_type, f"data_type of {kind}")
    if datatype not in {known.value for known in ID_DATATYPES}:
        raise invalid_input(
            f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
            "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )
    return {"kind": "id", "datatype": datatype}


def _state(state: pb.ModelSequenceBatching.State, name: str) -> dict[str, Any]:
    for field, value in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not value:
            raise invalid_input(f"sequence batching state must have '{field}' for {name}")
    given: dict[str, Any] = {"input": state.input_name, "output": state.output_name, "dims": list(state.dims)}
    if state.data_type:
        given["datatype"] = datatype_name(state.data_type, f"data_type of state '{state.input_name}'")
    if any(dim < -1 for dim in state.dims):
        raise invalid_input(f"dims of state '{state.input_name}': expected sizes of 0 or more, or -1")
    of = f"for state input '{state.input_name}'"
    if len(state.initial_state) > 1:
        raise invalid_input(
            f"initial_state field {of} must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        given |= _initial(initial, state, of)
    return given


def _initial(
    initial: pb.ModelSequenceBatching.InitialState, state: pb.ModelSequenceBatching.State, of: str
) -> dict[str, Any]:
    if initial.data_type != state.data_type:
        raise invalid_input(
            f"The data type used for 'initial_state' field of state '{state.input_name}' does not match the state "
            "data type."
        )
    if not initial.name:
        raise invalid_input(f"Field 'name' must be set when using initial_state {of}.")
    if len(initial.dims) != len(state.dims):
        raise invalid_input(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions {of}. "
            f"{len(initial.dims)} != {len(state.dims)}"
        )
    for size, expected in zip(initial.dims, state.dims, strict=True):
        if size < 0:
            raise invalid_input(
                f"'initial_state' field for state input name '{state.input_name}' contains variable dimensions."
            )
        if expected not in (-1, size):
            raise invalid_input(
                f"'initial_state' dim for input name '{state.input_name}' doesn't match 'state' dim description. "
                f"{size} != {expected}"
            )
    given: dict[str, Any] = {"initial_dims": list(initial.dims)}
    match initial.WhichOneof("state_data"):
        case "zero_data":
            pass
        case "data_file":
            given["initial_file"] = initial.data_file
        case _:
            raise invalid_input(f"initial_state setting expects state'{state.input_name}' to have state_data set")
    return given


def describe_sequences(
    batching: pb.ModelSequenceBatching, options: ModelOptions, datatypes: Mapping[str, DataType], max_rows: int
) -> None:
    """Write the options of a served model in Triton's form.

    Args:
        batching: Empty message to fill.
        options: Options of the model, with ``sequences`` set.
        datatypes: Datatypes of the model's inputs, by name.
        max_rows: Maximum number of rows of a batch.
    """
    sequences = options.sequences
    assert sequences is not None
    batching.max_sequence_idle_microseconds = round(sequences.max_idle_s * 1e6)
    if sequences.strategy == "oldest":
        batching.oldest.max_candidate_sequences = sequences.max_candidates
        batching.oldest.preferred_batch_size.extend(options.preferred_rows or (max_rows,))
        batching.oldest.max_queue_delay_microseconds = round(options.queue_delay_s * 1e6)
    else:
        batching.direct.max_queue_delay_microseconds = round(options.queue_delay_s * 1e6)
        batching.direct.minimum_slot_utilization = sequences.min_slot_utilization
    for name, control in sequences.controls.items():
        _describe_control(batching.control_input.add(name=name), control, datatypes[name])
    for state in sequences.states:
        _describe_state(batching, state, type_name(datatypes[state.input]))


def _describe_control(
    tensor: pb.ModelSequenceBatching.ControlInput, control: SequenceControl, datatype: DataType
) -> None:
    kind = _KIND_NUMBERS[control.kind]
    if control.kind == "id":
        tensor.control.add(kind=kind, data_type=type_name(datatype))
        return
    off, on = control.values
    match datatype:
        case DataType.INT32:
            tensor.control.add(kind=kind, int32_false_true=[int(off), int(on)])
        case DataType.FP32:
            tensor.control.add(kind=kind, fp32_false_true=[float(off), float(on)])
        case _:
            tensor.control.add(kind=kind, bool_false_true=[bool(off), bool(on)])


def _describe_state(batching: pb.ModelSequenceBatching, state: SequenceState, datatype: str) -> None:
    message = batching.state.add(
        input_name=state.input, output_name=state.output, data_type=datatype, dims=state.dims or ()
    )
    if state.initial_dims is None and state.initial_file is None:
        return
    dims = state.initial_dims if state.initial_dims is not None else state.dims or ()
    initial = message.initial_state.add(name=state.input, data_type=datatype, dims=dims)
    if state.initial_file is None:
        initial.zero_data = True
    else:
        initial.data_file = state.initial_file
