"""Model configurations as JSON and text, and the paths of their fields."""

import json

import pytest
from google.protobuf import text_format

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config import MAX_JSON_LENGTH, config_json, parse_config_json, parse_config_text, set_fields
from ortserve.errors import ErrorKind, ServeError

# The example of the protocol's text, complete for one batching model.
EXAMPLE = """
name: "simple" platform: "onnxruntime_onnx" backend: "onnxruntime" version_policy { latest { num_versions: 1 } }
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_INT32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 16 }
optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
dynamic_batching { preferred_batch_size: 8 }
instance_group { name: "simple" kind: KIND_CPU count: 1 }
default_model_filename: "model.onnx"
"""
EXAMPLE_JSON = """
{"name":"simple","platform":"onnxruntime_onnx","backend":"onnxruntime","runtime":"",
 "version_policy":{"latest":{"num_versions":1}},"max_batch_size":8,
 "input":[{"name":"INPUT0","data_type":"TYPE_INT32","format":"FORMAT_NONE","dims":[16],
   "is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,
   "is_non_linear_format_io":false}],
 "output":[{"name":"OUTPUT0","data_type":"TYPE_INT32","dims":[16],"label_filename":"",
   "is_shape_tensor":false,"is_non_linear_format_io":false}],
 "batch_input":[],"batch_output":[],
 "optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},
   "output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,
   "eager_batching":false},
 "dynamic_batching":{"preferred_batch_size":[8],"max_queue_delay_microseconds":0,
   "preserve_ordering":false,"priority_levels":0,"default_priority_level":0,
   "priority_queue_policy":{}},
 "instance_group":[{"name":"simple","kind":"KIND_CPU","count":1,"gpus":[],
   "secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],
 "default_model_filename":"model.onnx","cc_model_filenames":{},"metric_tags":{},
 "parameters":{},"model_warmup":[]}
"""


def parse(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_complete_configuration_has_the_protocol_form() -> None:
    assert config_json(parse(EXAMPLE)) == json.loads(EXAMPLE_JSON)


def test_integers_are_json_numbers_and_map_keys_are_strings() -> None:
    shown = config_json(
        parse(
            "input { dims: -1 dims: 9007199254740993 } version_policy { specific { versions: 3 } } "
            "dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 "
            "priority_queue_policy { key: 2 value { timeout_action: DELAY } } } "
            'parameters { key: "a" value { string_value: "b" } } metric_tags { key: "c" value: "d" }'
        )
    )
    assert shown["input"][0]["dims"] == [-1, 9007199254740993]
    assert shown["version_policy"] == {"specific": {"versions": [3]}}
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 2**64 - 1
    assert shown["dynamic_batching"]["priority_queue_policy"]["2"]["timeout_action"] == "DELAY"
    assert (shown["parameters"], shown["metric_tags"]) == ({"a": {"string_value": "b"}}, {"c": "d"})


def test_unset_members_have_no_key_if_clients_check_for_the_key() -> None:
    shown = config_json(parse('model_warmup { inputs { key: "x" value { zero_data: true } } }'))
    for absent in ("dynamic_batching", "sequence_batching", "ensemble_scheduling", "response_cache", "optimization"):
        assert absent not in shown
    assert shown["model_warmup"][0]["inputs"]["x"] == {"data_type": "TYPE_INVALID", "dims": [], "zero_data": True}


def test_decoder_accepts_string_integers_and_both_name_spellings() -> None:
    text = '{"max_batch_size": "16", "versionPolicy": {"latest": {"num_versions": 2}}, "backend": "onnxruntime"}'
    assert parse_config_json(text) == parse(
        'max_batch_size: 16 version_policy { latest { num_versions: 2 } } backend: "onnxruntime"'
    )


def test_shown_configuration_can_be_read_again() -> None:
    assert parse_config_json(json.dumps(config_json(parse(EXAMPLE)))) == parse(EXAMPLE)


def test_shown_configuration_of_thousands_of_tensors_is_half_as_long_as_the_longest() -> None:
    tensors = "".join(f'{kind} {{ name: "{kind}_{n:04d}" }}' for kind in ("input", "output") for n in range(2048))
    text = json.dumps(config_json(parse(tensors)))
    assert len(text) < MAX_JSON_LENGTH / 2
    assert len(parse_config_json(text).input) == 2048


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"max_batch": 1}', 'no field named "max_batch" at "ModelConfig"; did you mean'),
        ('{"max_batch_size": 1.5}', "max_batch_size"),
        ('{"max_batch_size": 3000000000}', "max_batch_size"),
        ('{"input": [{"data_type": "TYPE_FOO"}]}', "data_type"),
        ("{not json", "Failed to load JSON"),
        (b'{"\xff', "decode"),
        ("[]", r"expected a JSON object, got '\[\]'"),
        ('""', "expected a JSON object"),
        (b"null", "expected a JSON object"),
        ("", "expected a JSON object"),
        ('{"input":' * 5000, "JSON"),
        ("{}".ljust(MAX_JSON_LENGTH + 1), "expected at most 2097152 characters, got 2097153"),
        ('{"parameters": {"a": null}}', "parameters"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "scheduling_choice"),
    ],
)
def test_invalid_configuration_is_rejected_in_one_line(text: str | bytes, problem: str) -> None:
    with pytest.raises(ServeError, match=problem) as caught:
        parse_config_json(text)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith("config: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_both_forms_of_lists_and_messages_are_parsed() -> None:
    one = parse_config_text(b'input [ { name: "x", dims: [ -1, 16 ] }, { name: "y" dims: 3 } ] # and a comment\n')
    other = parse_config_text(b'input: { name: "x" dims: -1 dims: 16 } input { name: "y" dims: [3] }')
    assert one == other
    assert [list(tensor.dims) for tensor in one.input] == [[-1, 16], [3]]


def test_braces_of_an_empty_json_map_hold_no_entry() -> None:
    config = parse_config_text(
        b"parameters: {} metric_tags: {}, cc_model_filenames: {} dynamic_batching: { priority_queue_policy: {} }"
    )
    assert list(set_fields(config)) == ["dynamic_batching"]
    ensemble = parse_config_text(b'ensemble_scheduling { step { input_map: {} output_map { key: "a" } } }')
    (step,) = ensemble.ensemble_scheduling.step
    assert (dict(step.input_map), dict(step.output_map)) == ({}, {"a": ""})
    assert parse_config_text(b"metric_tags { value: 'v' }").metric_tags == {"": "v"}


def test_byte_order_mark_of_windows_editors_is_skipped() -> None:
    assert parse_config_text(b"\xef\xbb\xbfname: 'simple'\r\nmax_batch_size: 8\r\n").name == "simple"


def test_empty_file_holds_nothing() -> None:
    assert parse_config_text(b"") == ModelConfig()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b"\nmax_batch: 3",
            '2:1 : Message type "ModelConfig" has no field named "max_batch"; did you mean \'max_batch_size\'?',
        ),
        (
            b"optimization { graph { levels: 1 } }",
            'Message type "ModelOptimizationPolicy.Graph" has no field named "levels"; did you mean \'level\'?',
        ),
        (b"x: 3", '1:1 : Message type "ModelConfig" has no field named "x".'),
        (b'max_batch_size: "a"', "Couldn't parse integer"),
        (b"input [ { data_type: TYPE_FOO } ]", 'Enum type "DataType" has no value named TYPE_FOO.'),
        (b"input [ {", 'Expected "}"'),
        (b'name: "a" name: "b"', 'should not have multiple "name" fields'),
        (b"dynamic_batching {} sequence_batching {}", "scheduling_choice"),
        (b"\xff", "is not valid UTF-8"),
    ],
)
def test_syntax_errors_name_line_and_column(content: bytes, problem: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_config_text(content)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert problem in caught.value.message


def test_set_fields_in_lists_and_maps_are_listed_by_path() -> None:
    config = text_format.Parse(
        'max_batch_size: 1 input { name: "x" } input { optional: true } dynamic_batching {} '
        'parameters { key: "k" value { string_value: "v" } } metric_tags { key: "k" value: "v" } '
        "optimization { eager_batching: false }",
        ModelConfig(),
    )
    assert sorted(set(set_fields(config))) == [
        "dynamic_batching",
        "input",
        "input.name",
        "input.optional",
        "max_batch_size",
        "metric_tags",
        "optimization",
        "parameters",
        "parameters.string_value",
    ]
