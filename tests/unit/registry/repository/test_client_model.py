"""Models sent by clients: the options that clients can set, and those that only the operator can set."""

import json
from pathlib import Path
from typing import Any

import pytest

from models import builders
from ortserve.config.options import ServerOptions
from ortserve.config.session import FILE_ENTRIES
from ortserve.engine.providers import choose_provider
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.client_model import ClientModel, read_client_model

DEFAULTS = ServerOptions(warmup_s=1.5)


def read(config: dict[str, Any] | str | None, files: dict[str, bytes] | None = None) -> ClientModel | None:
    text = json.dumps(config) if isinstance(config, dict) else config
    return read_client_model("m", text, files or {}, DEFAULTS)


def refusal(config: dict[str, Any] | str | None, files: dict[str, bytes] | None = None) -> str:
    with pytest.raises(ServeError) as caught:
        read(config, files)
    assert caught.value.kind in (ErrorKind.INVALID_INPUT, ErrorKind.UNSUPPORTED)
    return caught.value.message


def test_load_without_parameters_uses_the_models_own_files() -> None:
    assert read(None) is None


def test_sent_configuration_equals_the_same_file() -> None:
    model = read({"maxBatchSize": "16", "input": [{"name": "x", "dims": ["4"], "data_type": "TYPE_FP32"}]})
    assert model is not None
    options = model.configuration.options
    assert (options.max_rows, options.inputs["x"].dims, options.warmup_s) == (16, (4,), 1.5)
    assert model.configuration.declared.max_batch_size == 16
    assert not model.files


def test_files_are_listed_as_a_repository_would(tmp_path: Path) -> None:
    model = read({}, {"file:1/model.onnx": b"one", "file:20/model.onnx": b"twenty", "file:labels.txt": b"cat"})
    assert model is not None
    written = model.write(tmp_path)
    assert (tmp_path / "20" / "model.onnx").read_bytes() == b"twenty"
    assert (tmp_path / "labels.txt").read_bytes() == b"cat"
    assert written.folder == tmp_path
    assert {version: written.file(version, model.configuration.options) for version in written.versions} == {
        1: tmp_path / "1" / "model.onnx",
        20: tmp_path / "20" / "model.onnx",
    }


@pytest.mark.parametrize(
    "parameter",
    [
        "file:../1/model.onnx",
        "file:1/../../model.onnx",
        "file:/etc/passwd",
        "file:1//model.onnx",
        "file:1/./model.onnx",
        "file:",
        "file:1/",
        "file:1\\model.onnx",
        "file:1/mo\x00del.onnx",
        "file:1/mo\ndel.onnx",
        "file:1/" + "m" * 256,
        "file:" + "ü" * 128 + "/model.onnx",
        "files:1/model.onnx",
    ],
)
def test_file_outside_the_model_folder_is_rejected(parameter: str) -> None:
    message = refusal({}, {parameter: b""})
    assert message.startswith("expected ")
    assert len(message) < 400


def test_files_need_a_configuration_and_a_version(tmp_path: Path) -> None:
    assert "expected the parameter 'config'" in refusal(None, {"file:1/model.onnx": b""})
    model = read({}, {"file:labels.txt": b"", "file:v1/model.onnx": b""})
    assert model is not None
    with pytest.raises(ServeError, match="no file of a version was sent"):
        model.write(tmp_path)


def test_file_that_is_a_folder_of_another_is_rejected(tmp_path: Path) -> None:
    model = read({}, {"file:1/a": b"", "file:1/a/b": b""})
    assert model is not None
    with pytest.raises(ServeError, match="file:1/a/b: cannot be written"):
        model.write(tmp_path)


def test_clients_cannot_set_operator_libraries() -> None:
    config = {"model_operations": {"op_library_filename": ["/tmp/evil.so"]}}
    assert "model_operations.op_library_filename can be set only in the server's own repository" in refusal(config)
    assert "runtime can be set only in the server's own repository" in refusal({"runtime": "evil.so"})


@pytest.mark.parametrize("entry", sorted(FILE_ENTRIES))
def test_clients_cannot_set_entries_that_access_files(entry: str) -> None:
    config = {"parameters": {entry: {"string_value": "/tmp/x"}}}
    assert f"parameters['{entry}'] can be set only in the server's own repository" in refusal(config)


@pytest.mark.parametrize(
    ("accelerator", "option"),
    [
        ("tensorrt", "trt_engine_cache_path"),
        ("tensorrt", "trt_engine_cache_enable"),
        ("tensorrt", "trt_timing_cache_path"),
        ("tensorrt", "trt_extra_plugin_lib_paths"),
        ("tensorrt", "trt_ep_context_file_path"),
        ("tensorrt", "trt_dump_ep_context_model"),
        ("tensorrt", "int8_calibration_table_name"),
        ("cuda", "user_compute_stream"),
        ("cuda", "gpu_external_alloc"),
        ("cuda", "an_option_of_the_future"),
    ],
)
def test_clients_can_set_only_known_harmless_provider_options(accelerator: str, option: str) -> None:
    accelerators = {"gpu_execution_accelerator": [{"name": accelerator, "parameters": {option: "1"}}]}
    config = {"optimization": {"execution_accelerators": accelerators}, "instance_group": [{"kind": "KIND_GPU"}]}
    assert "can be set only in the server's own repository" in refusal(config)


def test_server_defaults_apply_to_models_sent_by_clients() -> None:
    own: dict[str, bool | str] = {"trt_engine_cache_enable": True, "trt_engine_cache_path": "/var/cache/engines"}
    defaults = ServerOptions(execution_providers=({"tensorrt": own}, "cuda", "cpu"), intra_op_threads=300)
    wished = {"tensorrt": {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/var/cache/engines"}}
    model = read_client_model("m", "{}", {}, defaults)
    assert model is not None
    assert model.configuration.options.execution_providers[0] == wished
    assert model.configuration.options.intra_op_threads == 300

    def asking_for(option: str, value: str) -> str:
        accelerator = {"name": "tensorrt", "parameters": {option: value}}
        return json.dumps({"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}}})

    model = read_client_model("m", asking_for("trt_fp16_enable", "1"), {}, defaults)
    assert model is not None
    assert model.configuration.options.execution_providers[0] == {
        "tensorrt": wished["tensorrt"] | {"trt_fp16_enable": "1"}
    }
    for option, value in (("trt_engine_cache_path", "/etc"), ("trt_timing_cache_path", "/var/cache/engines")):
        with pytest.raises(
            ServeError, match=f"option '{option}' .* can be set only in the server's own repository, not by a client"
        ):
            read_client_model("m", asking_for(option, value), {}, defaults)
    with pytest.raises(ServeError, match="at most 300 threads in all instances, got 600"):
        read_client_model("m", '{"instance_group": [{"count": 2}]}', {}, defaults)


def test_clients_can_set_harmless_settings() -> None:
    accelerators = {"gpu_execution_accelerator": [{"name": "tensorrt", "parameters": {"precision_mode": "FP16"}}]}
    model = read(
        {
            "optimization": {"execution_accelerators": accelerators},
            "parameters": {
                "session.set_denormal_as_zero": {"string_value": "1"},
                "intra_op_thread_count": {"string_value": "1"},
                "gpu_mem_limit": {"string_value": "1000"},
            },
            "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}],
        }
    )
    assert model is not None
    assert model.configuration.options.execution_providers == (
        {"tensorrt": {"trt_fp16_enable": "1", "device_id": "0"}},
        {"cuda": {"gpu_mem_limit": "1000", "device_id": "0"}},
    )


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "a\\b"])
def test_labels_and_tensors_lie_in_the_models_folder(path: str) -> None:
    assert "expected a file in the model's folder" in refusal({"output": [{"name": "y", "label_filename": path}]})
    warmup = [{"inputs": {"x": {"dims": [1], "input_data_file": path}}}]
    assert "expected a file in the model's folder" in refusal({"model_warmup": warmup})


def test_clients_cannot_exceed_thread_and_byte_bounds() -> None:
    threads = {"intra_op_thread_count": {"string_value": "1000"}}
    assert "at most 256 threads in all instances, got 1000" in refusal({"parameters": threads})
    assert "got 320" in refusal(
        {"instance_group": [{"count": 64}], "parameters": {"intra_op_thread_count": {"string_value": "5"}}}
    )
    warmup = [{"batch_size": 3, "inputs": {"x": {"dims": [2**23], "zero_data": True}}}]
    assert "expected at most 16777216 elements, got 3 rows of [8388608] for input 'x'" in refusal(
        {"model_warmup": warmup}
    )


@pytest.mark.parametrize("name", ["../model.onnx", "..", "/model.onnx"])
def test_model_file_lies_in_its_versions_folder(name: str) -> None:
    assert "model_file: expected name of a file, without a folder" in refusal({"default_model_filename": name})


@pytest.mark.parametrize(
    "config",
    [
        {"instance_group": [{"kind": 7}]},
        {"input": [{"name": "x", "data_type": 99}]},
        {"dynamic_batching": {"default_queue_policy": {"timeout_action": 5}}},
        {"parameters": {"gpu_mem_limit": {"string_value": "9" * 5000}}},
    ],
)
def test_unknown_value_is_rejected_by_name(config: dict[str, Any]) -> None:
    assert "expected " in refusal(config)


@pytest.mark.parametrize(
    "config", ["", "{", '{"max_batch": 1}', '{"name": "other"}', '{"ensemble_scheduling": {"step": [{}]}}']
)
def test_bad_configuration_is_rejected_under_the_parameter_name(config: str) -> None:
    assert refusal(config).startswith("config: ")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_weights_of_a_sent_model_lie_in_its_own_folder(tmp_path: Path, location: str) -> None:
    # This is ONNX Runtime's own check. Without it a model could consist of any file that the server may read.
    (tmp_path / "m").mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    path = builders.external_weights(tmp_path / "m" / "model.onnx", location)
    with pytest.raises(ServeError, match=r"External data path validation failed"):
        open_session(path, "m", SessionOptions(choose_provider(["cpu"]), 1))


def test_weights_beside_a_model_are_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    path = builders.external_weights(tmp_path / "model.onnx", "w.bin")
    assert open_session(path, "m", SessionOptions(choose_provider(["cpu"]), 1)).get_inputs()
