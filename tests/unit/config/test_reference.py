"""The JSON Schema of model.yaml for editors: it must agree with the server."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ortserve.config.model import ModelOptions, load_model_options
from ortserve.config.options import ServerOptions
from ortserve.config.reference import make_schema
from ortserve.errors import ServeError

GOOD = [
    "",
    "max_rows: null",
    "version_policy: {latest: 3}\nrequired: true",
    "version_policy: {specific: [1, 7]}",
    "execution_providers: [cuda, cpu]",
    "execution_providers: [{tensorrt: {trt_fp16_enable: true, device_id: 1}}, CPUExecutionProvider]",
    "pad: {ids: {axis: 1, multiple: 16, value: 0}}",
    "inputs: {x: {datatype: FP32, dims: [-1, 4], reshape: [-1, 2, 2], optional: true}}",
    "outputs: {y: {labels: labels.txt}, z: {labels: [cat, dog], dims: []}}\nserved_outputs: [z]",
    "session: {graph_optimization: basic, execution_mode: parallel, inter_op_threads: 2, spinning: true}",
    "session: {entries: {session.set_denormal_as_zero: 1}, shrink_arenas: ['cpu:0'], operator_libraries: [ops.so]}",
    "warmup_samples: [{name: w, rows: 4, count: 2, inputs: {x: {data: zeros, dims: [4]}, y: {file: y.bin}}}]",
    "queue_policy: {timeout_s: 0.5, timeout_action: delay, timeout_override: false, max_requests: 10}",
    "priority_levels: 2\npriority_queue_policies: {1: {max_requests: 5}}",
    "model_file: net.onnx\nbatched: false\nslo_s: 0.1",
]
BAD = [
    "max_row: 4",
    "max_rows: 0",
    "max_rows: many",
    "slo_s: 0",
    "required: maybe",
    "version_policy: {latest: 1, all: true}",
    "version_policy: {all: false}",
    "execution_providers: []",
    "execution_providers: cpu",
    "execution_providers: [{cuda: {}, cpu: {}}]",
    "pad: {ids: {axis: 1}}",
    "inputs: {x: {datatype: FP33}}",
    "inputs: {x: {dims: [-2]}}",
    "inputs: {x: {shape: [1]}}",
    "outputs: {y: {labels: 3}}",
    "session: {graph_optimization: most}",
    "session: {graph_optimisation: all}",
    "session: {entries: {session.no_such_thing: 1}}",
    "session: {shrink_arenas: [cpu]}",
    "warmup_samples: [{rows: 0}]",
    "warmup_samples: [{inputs: {x: {data: ones}}}]",
    "queue_policy: {timeout_action: wait}",
    "priority_queue_policies: {1: {max_requests: 0}}",
    "model_file: ../net.onnx",
    "model_file: ..",
]


def is_taken_by_the_schema(text: str) -> bool:
    # Editors read keys of mappings as strings.
    validator = jsonschema.Draft202012Validator(make_schema())
    return bool(validator.is_valid(_with_text_keys(yaml.safe_load(text) or {})))


def is_taken_by_the_server(folder: Path, text: str) -> bool:
    (folder / "model.yaml").write_text(text)
    try:
        load_model_options(folder / "model.yaml", ServerOptions())
    except ServeError:
        return False
    return True


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def test_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(make_schema())


@pytest.mark.parametrize("text", GOOD)
def test_valid_file_is_accepted_by_schema_and_server(tmp_path: Path, text: str) -> None:
    assert is_taken_by_the_schema(text)
    assert is_taken_by_the_server(tmp_path, text)


@pytest.mark.parametrize("text", BAD)
def test_invalid_file_is_rejected_by_schema_and_server(tmp_path: Path, text: str) -> None:
    assert not is_taken_by_the_schema(text)
    assert not is_taken_by_the_server(tmp_path, text)


def test_every_key_has_a_description() -> None:
    schema = make_schema()
    assert schema["properties"].keys() == ModelOptions.model_fields.keys()
    assert [name for name, described in schema["properties"].items() if not described.get("description")] == []
    nested = {
        f"{kind}.{name}": described
        for kind, definition in schema["$defs"].items()
        for name, described in definition.get("properties", {}).items()
    }
    undescribed = {key for key, described in nested.items() if not described.get("description")}
    # Their type is sufficient.
    assert all(
        key.startswith(("PadAxis.", "LatestVersions.", "AllVersions.", "SpecificVersions.")) for key in undescribed
    )
