"""``sequence_batching`` becomes options of ``model.yaml``, with Triton's errors and Triton's view for clients."""

from pathlib import Path

import pytest

from ortserve._pb import model_config_pb2 as pb
from ortserve.config.options import ServerOptions
from ortserve.core.dtypes import DataType
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.configuration import Configuration, read_configuration
from ortserve.registry.repository.triton_sequences import describe_sequences

START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START %s } }'
INT32 = "int32_false_true: [ 0, 1 ]"
STATE = 'state { input_name: "S" output_name: "N" data_type: TYPE_INT32 dims: [ 1 ] %s }'
FIRST = 'initial_state { name: "s" data_type: TYPE_INT32 %s }'


def read(folder: Path, batching: str, more: str = "", file: str = "config.pbtxt") -> Configuration:
    text = f"max_batch_size: 4 sequence_batching {{ {batching} }} {more}" if file == "config.pbtxt" else batching
    (folder / file).write_text(text)
    return read_configuration("m", folder / file, ServerOptions())


@pytest.mark.parametrize(
    ("pbtxt", "yaml"),
    [
        ("", "{strategy: direct}"),
        ("direct { minimum_slot_utilization: 0.5 }", "{strategy: direct, min_slot_utilization: 0.5}"),
        ("oldest { }", "{max_candidates: 4}"),
        ("oldest { max_candidate_sequences: 9 }", "{max_candidates: 9}"),
        ("oldest { max_candidate_sequences: -1 }", "{max_candidates: 4}"),
        ("max_sequence_idle_microseconds: 2500000", "{strategy: direct, max_idle_s: 2.5}"),
        (
            START % "fp32_false_true: [ -1, 2 ]",
            "{strategy: direct, controls: {START: {kind: start, datatype: FP32, values: [-1.0, 2.0]}}}",
        ),
        (
            'control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }',
            "{strategy: direct, controls: {I: {kind: id, datatype: BYTES}}}",
        ),
        (
            STATE % (FIRST % 'dims: 1 data_file: "f"'),
            (
                "{strategy: direct, states: [{input: S, output: N, datatype: INT32, dims: [1], initial_dims: [1], "
                "initial_file: f}]}"
            ),
        ),
    ],
)
def test_both_files_set_the_same_options(tmp_path: Path, pbtxt: str, yaml: str) -> None:
    from_pbtxt = read(tmp_path, pbtxt).options.sequences
    assert from_pbtxt == read(tmp_path, f"sequences: {yaml}", file="model.yaml").options.sequences


def test_delays_and_preferred_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    options = read(tmp_path, "oldest { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 500 }").options
    assert (options.preferred_rows, options.queue_delay_s) == ((2, 4), 0.0005)
    assert read(tmp_path, "direct { max_queue_delay_microseconds: 500 }").options.queue_delay_s == 0.0005


END = START.replace("_START", "_END").replace("START", "END")


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        ("control_input { }", "sequence batching control tensor must have a name for m"),
        (
            f"{START % INT32} {START.replace('_START', '_END') % INT32}",
            "sequence batching control tensor 'START' is specified for multiple control kinds for m",
        ),
        (
            f"{START % INT32} {(START % INT32).replace('START', 'OTHER', 1)}",
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            START % "",
            (
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
                "CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            START % f"{INT32} bool_false_true: [ false, true ]",
            (
                "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
                "'bool_false_true' for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            START % "int32_false_true: 1",
            "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            f'control_input {{ name: "I" control {{ kind: CONTROL_SEQUENCE_CORRID {INT32} }} }}',
            (
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                "for CONTROL_SEQUENCE_CORRID for m"
            ),
        ),
        (
            'control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }',
            (
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ),
        ),
        (
            "oldest { preferred_batch_size: 0 }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            STATE % (f"{FIRST % 'dims: 1 zero_data: true'} " * 2),
            "initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            STATE % "initial_state { data_type: TYPE_FP32 }",
            "The data type used for 'initial_state' field of state 'S' does not match the state data type.",
        ),
        (
            STATE % "initial_state { data_type: TYPE_INT32 dims: 1 }",
            "Field 'name' must be set when using initial_state for state input 'S'.",
        ),
        (
            STATE % (FIRST % "dims: [ 1, 1 ] zero_data: true"),
            (
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
                "'S'. 2 != 1"
            ),
        ),
        (
            STATE % (FIRST % "dims: -1 zero_data: true"),
            "'initial_state' field for state input name 'S' contains variable dimensions.",
        ),
        (
            STATE % (FIRST % "dims: 2 zero_data: true"),
            "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 2 != 1",
        ),
        (STATE % (FIRST % "dims: 1"), "initial_state setting expects state'S' to have state_data set"),
        (STATE % (FIRST % 'dims: 1 data_file: "../x"'), "initial_file: expected name of a file, without a folder"),
    ],
)
def test_errors_have_the_texts_of_triton(tmp_path: Path, batching: str, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(tmp_path, batching)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert text in caught.value.message


def test_the_response_cache_is_not_for_sequences(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="Response Cache does not currently support model m with sequence batching"):
        read(tmp_path, "", "response_cache { enable: true }")


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("{strategy: newest}", "sequences.strategy: expected one of oldest, direct"),
        ("{controls: {a: {kind: begin}}}", "expected one of start, ready, end, id"),
        ("{controls: {a: {kind: start}, b: {kind: start}}}", "expected at most one input of kind start, got 2"),
        ("{controls: {a: {kind: start, datatype: FP64}}}", "expected one of BOOL, INT32, FP32 for start, got FP64"),
        ("{states: [{input: s, output: n}, {input: s, output: m}]}", "expected input 's' for one control or state"),
        ("{states: [{input: s, output: n, dims: [2], initial_dims: [3]}]}", "doesn't match 'state' dim description"),
        ("{}\nresponse_cache: true", "response_cache: expected false"),
        ("{}\npad: {x: {axis: 1, multiple: 8, value: 0}}", "pad: expected no padded inputs"),
        ("{}\npriority_levels: 2", "priority_levels, queue_policy: expected none"),
    ],
)
def test_errors_of_model_yaml_name_the_key(tmp_path: Path, yaml: str, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(tmp_path, f"sequences: {yaml}", file="model.yaml")
    assert text in caught.value.message


def test_options_are_shown_as_triton_shows_them(tmp_path: Path) -> None:
    batching = (
        f"oldest {{ max_candidate_sequences: 9 preferred_batch_size: 4 }} {START % INT32} "
        'control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } '
        f"{STATE % (FIRST % 'dims: 1 zero_data: true')} max_sequence_idle_microseconds: 1000000"
    )
    found = read(tmp_path, batching)
    shown = pb.ModelSequenceBatching()
    datatypes = {"START": DataType.INT32, "I": DataType.UINT64, "S": DataType.INT32}
    describe_sequences(shown, found.options, datatypes, 4)
    shown.state[0].initial_state[0].name = "s"
    assert shown == found.declared.sequence_batching
