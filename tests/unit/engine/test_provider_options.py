"""Options of execution providers, and shape profiles of TensorRT."""

import json
from collections.abc import Sequence

import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.provider_options import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    make_provider_options,
    profile_shapes,
    searches_each_shape,
    with_threads,
)
from ortserve.errors import ErrorKind, ServeError

CUDA_DEFAULTS = {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
PROFILE = {f"trt_profile_{bound}_shapes": "x:1x4" for bound in ("min", "opt", "max")}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (CPU, {}, {}),
        (CUDA, {}, CUDA_DEFAULTS),
        (CUDA, {"device_id": "01", "use_tf32": "False"}, CUDA_DEFAULTS | {"device_id": "1", "use_tf32": "0"}),
        (
            CUDA,
            {"cudnn_conv_algo_search": "EXHAUSTIVE", "arena_extend_strategy": "kNextPowerOfTwo", "prefer_nhwc": "1"},
            {"cudnn_conv_algo_search": "EXHAUSTIVE", "arena_extend_strategy": "kNextPowerOfTwo", "prefer_nhwc": "1"},
        ),
        (CUDA, {"gpu_mem_limit": "2147483648"}, CUDA_DEFAULTS | {"gpu_mem_limit": "2147483648"}),
        (TENSORRT, {}, {}),
        (
            TENSORRT,
            {"trt_fp16_enable": "true", "trt_auxiliary_streams": "-1", "trt_builder_optimization_level": "5"},
            {"trt_fp16_enable": "true", "trt_auxiliary_streams": "-1", "trt_builder_optimization_level": "5"},
        ),
        (TENSORRT, PROFILE, PROFILE),
        (TENSORRT, {"trt_cuda_graph_enable": "true"}, {}),  # the server sets it for each session
        (TENSORRT, {"trt_cuda_graph_enable": "false"}, {}),
        (
            TENSORRT,
            {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/engines"},
            {"trt_engine_cache_enable": "true", "trt_engine_cache_path": "/engines"},
        ),
        ("AnotherExecutionProvider", {"anything": "goes"}, {"anything": "goes"}),
    ],
)
def test_options_are_checked_and_override_the_server_defaults(
    name: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert make_provider_options(name, given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}),
        (
            {"num_of_threads": "3", "num_streams": "2", "precision": "BF16"},
            {"CPU": {"INFERENCE_NUM_THREADS": "3", "NUM_STREAMS": "2", "INFERENCE_PRECISION_HINT": "bf16"}},
        ),
        (
            {"num_of_threads": "3", "load_config": '{"CPU": {"INFERENCE_NUM_THREADS": "5"}}'},
            {"CPU": {"INFERENCE_NUM_THREADS": "5", "INFERENCE_PRECISION_HINT": "f32"}},
        ),
        ({"device_type": "NPU", "num_streams": "2"}, {"NPU": {"NUM_STREAMS": "2"}}),
    ],
)
def test_options_of_openvino_are_properties_of_its_device(
    given: dict[str, str], expected: dict[str, dict[str, str]]
) -> None:
    options = make_provider_options(OPENVINO, given)
    assert json.loads(options.pop("load_config")) == expected
    assert options == {key: value for key, value in given.items() if key == "device_type"}


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        (CPU, {"use_arena": "1"}, "there is no option 'use_arena'"),
        (CUDA, {"gpu_memory_limit": "1"}, "there is no option 'gpu_memory_limit'; did you mean 'gpu_mem_limit'?"),
        (CUDA, {"device_id": "first"}, "device_id: expected integer, 0 to 1023, got 'first'"),
        (CUDA, {"device_id": "-1"}, "device_id: expected integer, 0 to 1023, got '-1'"),
        (CUDA, {"gpu_mem_limit": "2GB"}, "gpu_mem_limit: expected integer, 1 or more, got '2GB'"),
        (CUDA, {"use_tf32": "yes"}, "use_tf32: expected true or false, got 'yes'"),
        (
            CUDA,
            {"cudnn_conv_algo_search": "heuristic"},
            "cudnn_conv_algo_search: expected one of EXHAUSTIVE, HEURISTIC, DEFAULT, got 'heuristic'",
        ),
        (
            CUDA,
            {"enable_cuda_graph": "1"},
            "enable_cuda_graph: expected no value, because the server sets this option, got '1'",
        ),
        (
            TENSORRT,
            {"trt_cuda_graph_enable": "maybe"},
            "trt_cuda_graph_enable: expected true or false, got 'maybe'",
        ),
        (
            CUDA,
            {"user_compute_stream": "94"},
            "user_compute_stream: expected no value, because the server sets this option, got '94'",
        ),
        (TENSORRT, {"trt_fp16": "1"}, "there is no option 'trt_fp16'; did you mean 'trt_fp16_enable'?"),
        (
            TENSORRT,
            {"trt_builder_optimization_level": "6"},
            "trt_builder_optimization_level: expected integer, 0 to 5, got '6'",
        ),
        (
            TENSORRT,
            {"trt_profile_min_shapes": "x:1x4"},
            (
                "trt_profile_opt_shapes and trt_profile_max_shapes: expected to be set with the other options of the "
                "profile, got nothing"
            ),
        ),
        (
            TENSORRT,
            {"trt_engine_cache_enable": "1"},
            "trt_engine_cache_path: trt_engine_cache_enable also needs a folder, got none",
        ),
        (TENSORRT, {"trt_engine_cache_path": ""}, "trt_engine_cache_path: expected text, got ''"),
        (OPENVINO, {"device_type": "CPU_FP32"}, "device_type: expected one of CPU, GPU, NPU, got 'CPU_FP32'"),
        (
            OPENVINO,
            {"load_config": '{"NUM_STREAMS": "1"}'},
            'load_config: expected JSON such as {"CPU": {"NUM_STREAMS": "1"}}, got \'{"NUM_STREAMS": "1"}\'',
        ),
        (OPENVINO, {"load_config": "{"}, 'load_config: expected JSON such as {"CPU": {"NUM_STREAMS": "1"}}, got \'{\''),
    ],
)
def test_wrong_option_is_rejected_with_provider_and_expectation(name: str, given: dict[str, str], problem: str) -> None:
    with pytest.raises(ServeError) as caught:
        make_provider_options(name, given)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == f"execution_providers: {name}: {problem}"


def test_provider_with_own_threads_gets_their_number_unless_configured() -> None:
    options = with_threads(OPENVINO, make_provider_options(OPENVINO, {}), 2)
    assert json.loads(options["load_config"])["CPU"]["INFERENCE_NUM_THREADS"] == "2"
    given = make_provider_options(OPENVINO, {"num_of_threads": "1"})
    assert with_threads(OPENVINO, given, 2) == given
    assert with_threads(OPENVINO, {"device_type": "GPU"}, 2) == {"device_type": "GPU"}
    assert with_threads(CUDA, {"device_id": "1"}, 2) == {"device_id": "1"}


def test_exhaustive_kernel_search_is_detected() -> None:
    assert not searches_each_shape(CUDA, make_provider_options(CUDA, {}))
    assert searches_each_shape(CUDA, {"cudnn_conv_algo_search": "EXHAUSTIVE"})
    assert not searches_each_shape(TENSORRT, {})


IMAGE = TensorSpec("image", DataType.FP32, (-1, 3, 8, 8))
SCALE = TensorSpec("scale", DataType.FP32, (-1,))
TOKENS = TensorSpec("tokens", DataType.INT64, (-1, -1))


@pytest.mark.parametrize(
    ("inputs", "sizes", "given", "expected"),
    [
        ((IMAGE,), (8, 1, 4), {}, ["image:1x3x8x8", "image:8x3x8x8", "image:8x3x8x8"]),
        ((IMAGE, SCALE), (2,), {}, ["image:2x3x8x8,scale:2"] * 3),
        ((IMAGE,), (), {}, []),
        ((IMAGE,), (2,), {"trt_profile_max_shapes": "image:9x3x8x8"}, []),
        ((TOKENS,), (2,), {}, []),
        ((TensorSpec("a:b", DataType.FP32, (-1, 2)),), (2,), {}, []),
    ],
)
def test_one_profile_spans_all_sizes(
    inputs: tuple[TensorSpec, ...], sizes: Sequence[int], given: dict[str, str], expected: list[str]
) -> None:
    made = profile_shapes(ModelSignature(inputs, inputs), sizes, given)
    assert list(made.values()) == expected
    assert list(made) == [f"trt_profile_{bound}_shapes" for bound in ("min", "opt", "max")][: len(expected)]


def test_unbatched_model_has_no_profile() -> None:
    assert profile_shapes(ModelSignature((IMAGE,), (IMAGE,), "why not"), (2,), {}) == {}
