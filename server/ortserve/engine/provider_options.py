"""The options of execution providers: names, values, and the defaults of this server; TensorRT's shape profiles.

For an unknown option ONNX Runtime raises an error, writes a log line, or does nothing, depending on the provider. So
this module checks them, by the lists of ONNX Runtime 1.31.1 and OpenVINO's plug-in 1.8.1.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ortserve.config.declaration import did_you_mean
from ortserve.core.signature import ModelSignature
from ortserve.errors import ServeError, invalid_input

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
AZURE: Final = "AzureExecutionProvider"
"""Part of every ONNX Runtime. It runs only operators that call services of its vendor."""

GPU_PROVIDERS: Final = frozenset({CUDA, TENSORRT, "NvTensorRTRTXExecutionProvider", "ROCMExecutionProvider"})
"""Providers that compute on a GPU. A run keeps one host thread busy."""

_Rule: TypeAlias = Callable[[str], str]
"""Converts a value to the provider's spelling. Raises ValueError with the expectation."""


def make_provider_options(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """The options of a session's provider: this server's defaults, overridden by the checked configured options.

    Args:
        name: The provider's full name. Options of an unknown provider are not checked.
        given: The configured options.

    Raises:
        ServeError: invalid_input; the message names provider, option, expectation and value.
    """
    rules = _RULES.get(name)
    if rules is None:
        return dict(given)
    checked = dict(_DEFAULTS.get(name, {}))
    for option, value in given.items():
        if option not in rules:
            raise _invalid(name, f"there is no option '{option}'{did_you_mean(option, rules)}")
        try:
            checked[option] = rules[option](value)
        except ValueError as error:
            raise _invalid(name, f"{option}: {error}, got '{value}'") from None
    if name == TENSORRT:
        _check_tensorrt(checked)
        # Only sessions that capture get this option. Any other session would answer batches of all sizes with a replay
        # of its first batch, on that batch's memory (microsoft/onnxruntime#20050).
        checked.pop(_TENSORRT_GRAPH, None)
    return _openvino_options(checked) if name == OPENVINO else checked


def asks_for_graphs(name: str, given: Mapping[str, str]) -> bool:
    """Whether a provider's configured options request graph replay, as the setting ``graph_replay`` does."""
    return name == TENSORRT and given.get(_TENSORRT_GRAPH, "").lower() in ("1", "true")


def with_threads(name: str, options: Mapping[str, str], threads: int) -> dict[str, str]:
    """Add the number of threads of a run to the options if the provider has its own threads."""
    result = dict(options)
    if name == OPENVINO and result.get("device_type", "CPU") == "CPU":
        config = json.loads(result.get("load_config", "{}"))
        config.setdefault("CPU", {}).setdefault("INFERENCE_NUM_THREADS", str(threads))
        result["load_config"] = json.dumps(config)
    return result


def searches_each_shape(name: str, options: Mapping[str, str]) -> bool:
    """Whether cuDNN tries all algorithms at each new shape, which delays the run by 0.3 to 1.3 s."""
    return name == CUDA and options.get("cudnn_conv_algo_search") == "EXHAUSTIVE"


def _invalid(name: str, problem: str) -> ServeError:
    return invalid_input(f"execution_providers: {name}: {problem}")


def _flag(value: str) -> str:
    values = {"1": "1", "true": "1", "0": "0", "false": "0"}
    if value.lower() not in values:
        raise ValueError("expected true or false")
    return values[value.lower()]


def _true_or_false(value: str) -> str:
    """Check a flag of TensorRT, for which ONNX Runtime's Python API rejects 1 and 0."""
    return "true" if _flag(value) == "1" else "false"


def _whole(lowest: int, highest: int = 2**63 - 1) -> _Rule:
    def rule(value: str) -> str:
        is_number = value.isascii() and value.removeprefix("-").isdecimal()
        if not is_number or not lowest <= int(value) <= highest:
            top = f" to {highest}" if highest < 2**63 - 1 else " or more"
            raise ValueError(f"expected integer, {lowest}{top}")
        return str(int(value))

    return rule


def _one_of(*values: str) -> _Rule:
    def rule(value: str) -> str:
        if value not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return value

    return rule


def _text(value: str) -> str:
    if not value:
        raise ValueError("expected text")
    return value


def _own(value: str) -> str:
    raise ValueError("expected no value, because the server sets this option")


def _settings(value: str) -> str:
    """Check JSON text with OpenVINO's properties by device."""
    try:
        by_device: Any = json.loads(value)
    except ValueError:
        by_device = None
    if not isinstance(by_device, dict) or not all(isinstance(one, dict) for one in by_device.values()):
        raise ValueError('expected JSON such as {"CPU": {"NUM_STREAMS": "1"}}')
    return value


_CUDA_RULES: Final[Mapping[str, _Rule]] = {
    "arena_extend_strategy": _one_of("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv1d_pad_to_nc1d": _flag,
    "cudnn_conv_algo_search": _one_of("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "cudnn_conv_use_max_workspace": _flag,
    "device_id": _whole(0, 1023),
    "do_copy_in_default_stream": _flag,
    "enable_cuda_graph": _own,
    "enable_cudnn": _flag,
    "enable_skip_layer_norm_strict_mode": _flag,
    "external_data_loader_reading_threads": _whole(0, 64),
    "fuse_conv_bias": _flag,
    "gpu_external_alloc": _own,
    "gpu_external_empty_cache": _own,
    "gpu_external_free": _own,
    "gpu_mem_limit": _whole(1),
    "has_user_compute_stream": _own,
    "prefer_nhwc": _flag,
    "sdpa_kernel": _whole(0),
    "tunable_op_enable": _flag,
    "tunable_op_max_tuning_duration_ms": _whole(0),
    "tunable_op_tuning_enable": _flag,
    "use_ep_level_unified_stream": _flag,
    "use_tf32": _flag,
    "user_compute_stream": _own,
}
_TENSORRT_GRAPH: Final = "trt_cuda_graph_enable"
_TENSORRT_PROFILE: Final = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
"""The shapes for which TensorRT builds its engine. Without them, it builds for the first shape, and again for each
shape outside the range so far, which takes minutes each time."""
_TENSORRT_RULES: Final[Mapping[str, _Rule]] = {
    "device_id": _whole(0, 1023),
    "has_user_compute_stream": _own,
    "trt_auxiliary_streams": _whole(-1),
    "trt_bf16_enable": _true_or_false,
    "trt_build_heuristics_enable": _true_or_false,
    "trt_builder_optimization_level": _whole(0, 5),
    "trt_context_memory_sharing_enable": _true_or_false,
    _TENSORRT_GRAPH: _true_or_false,
    "trt_detailed_build_log": _true_or_false,
    "trt_dla_core": _whole(0),
    "trt_dla_enable": _true_or_false,
    "trt_dump_ep_context_model": _true_or_false,
    "trt_dump_subgraphs": _true_or_false,
    "trt_engine_cache_enable": _true_or_false,
    "trt_engine_cache_path": _text,
    "trt_engine_cache_prefix": _text,
    "trt_engine_decryption_enable": _true_or_false,
    "trt_engine_decryption_lib_path": _text,
    "trt_engine_hw_compatible": _true_or_false,
    "trt_ep_context_embed_mode": _whole(0, 1),
    "trt_ep_context_file_path": _text,
    "trt_external_data_bytestream": _own,
    "trt_external_data_bytestream_size": _own,
    "trt_extra_plugin_lib_paths": _text,
    "trt_force_sequential_engine_build": _true_or_false,
    "trt_force_timing_cache": _true_or_false,
    "trt_fp16_enable": _true_or_false,
    "trt_int8_calibration_table_name": _text,
    "trt_int8_enable": _true_or_false,
    "trt_int8_use_native_calibration_table": _true_or_false,
    "trt_layer_norm_fp32_fallback": _true_or_false,
    "trt_max_partition_iterations": _whole(1),
    "trt_max_workspace_size": _whole(0),
    "trt_min_subgraph_size": _whole(1),
    "trt_onnx_bytestream": _own,
    "trt_onnx_bytestream_size": _own,
    "trt_onnx_model_folder_path": _text,
    "trt_op_types_to_exclude": _text,
    "trt_preview_features": _text,
    "trt_profile_max_shapes": _text,
    "trt_profile_min_shapes": _text,
    "trt_profile_opt_shapes": _text,
    "trt_sparsity_enable": _true_or_false,
    "trt_tactic_sources": _text,
    "trt_timing_cache_enable": _true_or_false,
    "trt_timing_cache_path": _text,
    "trt_weight_stripped_engine_enable": _true_or_false,
    "user_compute_stream": _own,
}
_PRECISIONS: Final = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
_OPENVINO_RULES: Final[Mapping[str, _Rule]] = {
    "device_id": _whole(0, 1023),
    "device_type": _one_of("CPU", "GPU", "NPU"),
    "load_config": _settings,
    "num_of_threads": _whole(1, 1024),
    "num_streams": _whole(1, 1024),
    "precision": _one_of(*_PRECISIONS),
}
_RULES: Final[Mapping[str, Mapping[str, _Rule]]] = {
    CPU: {},
    CUDA: _CUDA_RULES,
    TENSORRT: _TENSORRT_RULES,
    OPENVINO: _OPENVINO_RULES,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    # ONNX Runtime's default is EXHAUSTIVE: 634 ms at each new shape against 1.9 ms, and no faster afterwards
    # (PaddlePaddle/PaddleX#5057); each batch size is a shape. By default the arena grows to the next power of two.
    CUDA: {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"},
}


def _check_tensorrt(options: Mapping[str, str]) -> None:
    missing = [option for option in _TENSORRT_PROFILE if option not in options]
    if 0 < len(missing) < len(_TENSORRT_PROFILE):
        raise _invalid(
            TENSORRT, f"{' and '.join(missing)}: expected to be set with the other options of the profile, got nothing"
        )
    for enable, path in (
        ("trt_engine_cache_enable", "trt_engine_cache_path"),
        ("trt_timing_cache_enable", "trt_timing_cache_path"),
    ):
        # Otherwise the files would be written to the server's working directory.
        if options.get(enable) == "true" and path not in options:
            raise _invalid(TENSORRT, f"{path}: {enable} also needs a folder, got none")


def _openvino_options(options: dict[str, str]) -> dict[str, str]:
    """Convert options of the former package to properties, because the plug-in reads only properties."""
    device = options.get("device_type", "CPU")
    properties = {
        "INFERENCE_NUM_THREADS": options.pop("num_of_threads", None),
        "NUM_STREAMS": options.pop("num_streams", None),
        "INFERENCE_PRECISION_HINT": _PRECISIONS.get(options.pop("precision", "")),
    }
    if device == "CPU" and properties["INFERENCE_PRECISION_HINT"] is None:
        # By default OpenVINO computes in BF16 if the processor can: probabilities of a small network were off by 0.001.
        properties["INFERENCE_PRECISION_HINT"] = _PRECISIONS["FP32"]
    given = {name: value for name, value in properties.items() if value is not None}
    if given:
        config = json.loads(options.get("load_config", "{}"))
        config[device] = given | config.get(device, {})
        options["load_config"] = json.dumps(config)
    return options


def when_engines_are_built(options: Mapping[str, str]) -> str:
    """A clause that says when TensorRT builds its engines, which takes minutes; for the progress of a load."""
    if any(key in options for key in _TENSORRT_PROFILE):
        return "which builds its engines here"
    return "which builds its engines here or, where dimensions are free, at the first run of each shape"


def most_rows(options: Mapping[str, str]) -> int | None:
    """The maximum of rows in the configured profiles, which TensorRT's provider enforces; None without profiles."""
    rows: dict[str, int] = {}
    for one in options.get("trt_profile_max_shapes", "").split(","):
        name, _, shape = one.rpartition(":")
        first = shape.partition("x")[0]
        if name and first.isdecimal():
            rows[name] = max(rows.get(name, 0), int(first))
    return min(rows.values(), default=None)


def wants_more_profiles(error: ServeError) -> bool:
    """Whether a session failed because inner tensors of the model need profiles, too.

    This happens if TensorRT runs only parts of the model, and inner tensors are inputs of these parts.
    """
    return "with associated profiles" in error.message


def why_built_anew(options: Mapping[str, str]) -> str:
    """The reason why another session of a model would build its engines again; empty if a cache holds the engines.

    Building takes minutes. ``options`` include the profile.
    """
    if not any(key in options for key in _TENSORRT_PROFILE):
        return (
            "expected trt_profile_…_shapes, because no profile can be derived and each new shape would build an engine"
        )
    if options.get("trt_engine_cache_enable") != "true":
        return "expected trt_engine_cache_enable with trt_engine_cache_path, to keep engines for other sessions"
    return ""


def profile_shapes(signature: ModelSignature, sizes: Sequence[int], given: Mapping[str, str]) -> dict[str, str]:
    """The options of one profile, from the smallest to the largest batch size, optimal for the largest.

    Returns:
        Empty if a profile is configured, if shapes do not follow from the number of rows, or if the option cannot
        hold an input's name.
    """
    if (
        not sizes
        or not signature.rows_lead
        or not signature.has_one_shape_class
        or any(key in given for key in _TENSORRT_PROFILE)
    ):
        return {}
    if any(mark in spec.name for spec in signature.inputs for mark in ":,"):
        return {}
    return {
        key: ",".join(f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape[1:])))}" for spec in signature.inputs)
        for key, rows in zip(_TENSORRT_PROFILE, (min(sizes), max(sizes), max(sizes)), strict=True)
    }
