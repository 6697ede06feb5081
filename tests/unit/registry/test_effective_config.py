"""The effective configuration of versions that the real ONNX Runtime serves."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from models import builders
from ortserve.codecs.model_config import config_json
from ortserve.config.model import LoadOptions
from ortserve.core.dtypes import DataType
from ortserve.registry.effective_config import describe_config
from ortserve.registry.registry import Registry
from ortserve.telemetry.metrics import Metrics
from rows.exported import CORPUS


async def describe(
    root: Path, build: Callable[[Path], Path], file: str = "", text: str = "", **defaults: object
) -> dict[str, Any]:
    """The configuration of a model with this file, after a round trip through JSON."""
    folder = root / "m" / "1"
    folder.mkdir(parents=True)
    build(folder / "model.onnx")
    if file:
        (root / "m" / file).write_text(text)
    options = LoadOptions.model_validate({"warmup_s": 0.05, "intra_op_threads": 1} | defaults)
    registry = Registry([root], options, Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all()
    shown: dict[str, Any] = json.loads(json.dumps(config_json(describe_config(registry.find("m", "")))))
    await registry.close()
    return shown


async def test_configuration_of_a_model_without_a_file_is_completed_as_in_triton(tmp_path: Path) -> None:
    shown = await describe(tmp_path, builders.mlp, max_rows=8)
    assert shown == {
        "name": "m",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 8,
        "input": [
            {
                "name": "x",
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [64],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "output": [
            {
                "name": "y",
                "data_type": "TYPE_FP32",
                "dims": [10],
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "graph": {"level": 0},
            "priority": "PRIORITY_DEFAULT",
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "dynamic_batching": {
            "preferred_batch_size": [8],
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
            "priority_levels": 0,
            "default_priority_level": 0,
            "priority_queue_policy": {},
        },
        "instance_group": [
            {
                "name": "m",
                "kind": "KIND_CPU",
                "count": 1,
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "default_model_filename": "model.onnx",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {"intra_op_thread_count": {"string_value": "1"}},
        "model_warmup": [],
    }


async def test_unbatched_model_is_described_with_whole_shapes(tmp_path: Path) -> None:
    shown = await describe(tmp_path, builders.fixed_batch)
    assert (shown["max_batch_size"], shown["input"][0]["dims"]) == (0, [1, 4])
    assert "dynamic_batching" not in shown


async def test_dependent_rows_are_a_batch_only_if_configured(tmp_path: Path) -> None:
    shown = await describe(tmp_path / "one", builders.row_mixer, "model.yaml", "max_rows: 8")
    assert (shown["max_batch_size"], shown["input"][0]["dims"]) == (0, [-1, 4])
    shown = await describe(tmp_path / "other", builders.row_mixer, "config.pbtxt", "max_batch_size: 8")
    assert (shown["max_batch_size"], shown["input"][0]["dims"]) == (8, [4])


async def test_differently_named_first_dimensions_are_a_batch_if_configured(tmp_path: Path) -> None:
    shown = await describe(tmp_path, builders.two_batch_names, "config.pbtxt", "max_batch_size: 8")
    assert (shown["max_batch_size"], shown["input"][0]["dims"]) == (8, [4])


async def test_rows_off_axis_0_are_not_described_as_a_batch(tmp_path: Path) -> None:
    """They would put the batch dimension before the others."""

    def time_first(path: Path) -> Path:
        return Path(shutil.copy(CORPUS / "torch_lstm_time_first.onnx", path))

    shown = await describe(tmp_path, time_first)
    assert (shown["max_batch_size"], [len(each["dims"]) for each in shown["input"]]) == (0, [3])


async def test_effective_fields_of_config_pbtxt_are_shown(tmp_path: Path) -> None:
    shown = await describe(
        tmp_path,
        builders.mlp,
        "config.pbtxt",
        'max_batch_size: 4 input { name: "x" dims: [8, 8] reshape { shape: 64 } format: FORMAT_NONE } '
        "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 70 preserve_ordering: true "
        "priority_levels: 2 default_priority_level: 1 "
        "priority_queue_policy { key: 2 value { timeout_action: DELAY max_queue_size: 9 } } } "
        'instance_group { name: "mine" count: 2 kind: KIND_CPU } metric_tags { key: "a" value: "b" } '
        'parameters { key: "other" value { string_value: "c" } } response_cache { enable: true } '
        'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: [8, 8] random_data: true } } }',
    )
    assert shown["max_batch_size"] == 4
    assert (shown["input"][0]["dims"], shown["input"][0]["reshape"]) == ([8, 8], {"shape": [64]})
    assert shown["dynamic_batching"]["preferred_batch_size"] == [2]
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 70
    assert shown["dynamic_batching"]["priority_queue_policy"]["2"] == {
        "timeout_action": "DELAY",
        "default_timeout_microseconds": 0,
        "allow_timeout_override": False,
        "max_queue_size": 9,
    }
    assert (shown["instance_group"][0]["name"], shown["instance_group"][0]["count"]) == ("mine", 2)
    assert shown["parameters"]["other"] == {"string_value": "c"}
    assert shown["model_warmup"][0]["inputs"]["x"]["random_data"] is True
    # These options have no effect, but clients would act on them.
    assert shown["dynamic_batching"]["preserve_ordering"] is False
    assert "response_cache" not in shown


async def test_options_of_model_yaml_are_shown_as_tritons_fields(tmp_path: Path) -> None:
    shown = await describe(
        tmp_path,
        builders.mlp,
        "model.yaml",
        "max_rows: 4\nversion_policy: {all: true}\nqueue_delay_s: 0.001\nqueue_policy: {timeout_s: 0.5}\n"
        "session: {graph_optimization: basic, execution_mode: parallel, inter_op_threads: 2}\n"
        "outputs: {y: {labels: [a, b], dims: [10]}}\n"
        "warmup_samples: [{rows: 2, inputs: {x: {data: zeros}}}]\n",
    )
    assert shown["version_policy"] == {"all": {}}
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 1000
    assert shown["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 500_000
    assert shown["optimization"]["graph"]["level"] == -1
    assert shown["parameters"]["execution_mode"]["string_value"] == "1"
    assert shown["model_warmup"] == [
        {
            "name": "",
            "batch_size": 2,
            "count": 1,
            "inputs": {"x": {"data_type": "TYPE_FP32", "dims": [64], "zero_data": True}},
        }
    ]


@pytest.mark.parametrize("text", ["max_batch_size: 1", "max_batch_size: 1 dynamic_batching { }"])
async def test_batches_of_one_row_are_not_called_dynamic(tmp_path: Path, text: str) -> None:
    shown = await describe(tmp_path, builders.mlp, "config.pbtxt", text)
    assert (shown["max_batch_size"], shown["input"][0]["dims"]) == (1, [64])
    assert "dynamic_batching" not in shown


async def test_string_datatype_is_type_string(tmp_path: Path) -> None:
    def texts(path: Path) -> Path:
        return builders.identity(path, DataType.BYTES, ("batch", 2))

    assert (await describe(tmp_path, texts))["input"][0]["data_type"] == "TYPE_STRING"
