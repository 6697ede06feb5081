"""Instance groups and accelerators as execution providers."""

import tracemalloc
from typing import Any

import pytest
from google.protobuf import text_format

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.config.model import LoadOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.triton_execution import ProviderWishes, choose_providers

TENSORRT = 'gpu_execution_accelerator { name: "tensorrt" %s }'
OPENVINO = 'cpu_execution_accelerator { name: "openvino" }'


def wishes(text: str, cuda: dict[str, str] | None = None, usual: tuple[str, ...] = ("cpu",)) -> ProviderWishes:
    config = text_format.Parse(text, ModelConfig())
    accelerators = config.optimization.execution_accelerators
    defaults = LoadOptions(execution_providers=usual)
    return choose_providers(config.instance_group, accelerators, cuda or {}, defaults)


def accelerated(text: str) -> str:
    return "optimization { execution_accelerators { " + text + " } }"


@pytest.mark.parametrize(
    ("text", "usual", "expected"),
    [
        ("", ("cuda", "cpu"), ["cuda", "cpu"]),
        ("instance_group { kind: KIND_AUTO }", ("cuda", "cpu"), ["cuda", "cpu"]),
        ("", ("CUDA", "CPU"), ["cuda", "cpu"]),
        (accelerated(TENSORRT % ""), ("Cuda", "Cpu"), ["tensorrt", "cuda", "cpu"]),
        ("instance_group { kind: KIND_CPU }", ("cuda", "cpu"), ["cpu"]),
        ("instance_group { kind: KIND_GPU }", ("cpu",), ["cuda"]),
        ("instance_group { kind: KIND_GPU gpus: 1 }", ("cpu",), [{"cuda": {"device_id": "1"}}]),
        ("instance_group { gpus: 0 } instance_group { gpus: 0 }", ("cpu",), [{"cuda": {"device_id": "0"}}]),
        (accelerated(OPENVINO), ("cpu",), ["openvino", "cpu"]),
        (accelerated(OPENVINO), ("cuda", "cpu"), ["cuda", "openvino", "cpu"]),
        (accelerated(TENSORRT % "") + "instance_group { kind: KIND_GPU }", ("cpu",), ["tensorrt", "cuda"]),
        (accelerated(TENSORRT % ""), ("cpu",), ["tensorrt", "cpu"]),
        (
            accelerated('gpu_execution_accelerator { name: "cuda" parameters { key: "use_tf32" value: "0" } }'),
            ("cuda", "cpu"),
            [{"cuda": {"use_tf32": "0"}}, "cpu"],
        ),
    ],
)
def test_execution_providers_are_the_configured_ones(text: str, usual: tuple[str, ...], expected: list[Any]) -> None:
    assert wishes(text, usual=usual).providers == expected


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("instance_group { gpus: [0, 1] }", (0, 1)),
        ("instance_group { count: 2 gpus: [0, 3] }", (0, 3, 0, 3)),
        ("instance_group { gpus: 2 } instance_group { count: 2 gpus: 1 }", (2, 1, 1)),
        ("instance_group { count: 3 gpus: 1 }", ()),
        ("instance_group { kind: KIND_GPU }", ()),
    ],
)
def test_instances_are_placed_on_the_gpus_that_groups_name(text: str, gpus: tuple[int, ...]) -> None:
    assert wishes(text).gpus == gpus


def test_parameters_of_tensorrt_become_its_options() -> None:
    parameters = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "trt_engine_cache_enable": "True",
        "int8_use_native_calibration_table": "0",
    }
    text = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    group = "instance_group { kind: KIND_GPU gpus: 2 }"
    assert wishes(accelerated(TENSORRT % text) + group, {"gpu_mem_limit": "7"}).providers == [
        {
            "tensorrt": {
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "1073741824",
                "trt_engine_cache_enable": "1",
                "trt_int8_use_native_calibration_table": "0",
                "device_id": "2",
            }
        },
        {"cuda": {"gpu_mem_limit": "7", "device_id": "2"}},
    ]


def test_accelerator_for_another_kind_than_the_instances_is_reported() -> None:
    on_cpu = wishes(accelerated(TENSORRT % "") + "instance_group { kind: KIND_CPU }")
    on_gpu = wishes(accelerated(OPENVINO) + "instance_group { kind: KIND_GPU }")
    assert (on_cpu.providers, on_gpu.providers) == (["cpu"], ["cuda"])
    assert "gpu_execution_accelerator: the model is on the CPU" in on_cpu.without_effect[0]
    assert "cpu_execution_accelerator: the model is on a GPU" in on_gpu.without_effect[0]
    assert (on_cpu.wants_gpu, on_gpu.wants_gpu) == (False, True)


def test_accelerators_of_a_gpu_are_not_read_for_instances_on_the_cpu() -> None:
    unknown = TENSORRT % 'parameters { key: "minimum_segment_size" value: "3" }'
    on_cpu = wishes(
        accelerated(unknown + ' gpu_execution_accelerator { name: "migraphx" }') + "instance_group { kind: KIND_CPU }"
    )
    assert on_cpu.providers == ["cpu"]
    assert "gpu_execution_accelerator: the model is on the CPU" in on_cpu.without_effect[0]


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("instance_group { kind: KIND_MODEL }", ErrorKind.UNSUPPORTED, "KIND_MODEL is not supported"),
        (
            "instance_group { kind: KIND_CPU } instance_group { kind: KIND_GPU }",
            ErrorKind.UNSUPPORTED,
            "expected instances of one kind, got KIND_CPU, KIND_GPU",
        ),
        (
            "instance_group { gpus: [0, -1] }",
            ErrorKind.INVALID_INPUT,
            "instance_group.gpus: expected 0 or more, got -1",
        ),
        (
            "instance_group { kind: KIND_GPU gpus: [0, 1] } instance_group { kind: KIND_GPU }",
            ErrorKind.INVALID_INPUT,
            "instance_group.gpus: expected GPUs in every group, because some groups name several",
        ),
        ("instance_group { kind: KIND_CPU gpus: 0 }", ErrorKind.INVALID_INPUT, "expected none for KIND_CPU"),
        ("instance_group { count: -1 }", ErrorKind.INVALID_INPUT, "expected 0 or more, got -1"),
        (
            "instance_group { count: 64 } instance_group { }",
            ErrorKind.INVALID_INPUT,
            "instance_group: expected at most 64 instances in all, got 65",
        ),
        (
            "instance_group { count: 33 gpus: [0, 1] }",
            ErrorKind.INVALID_INPUT,
            "instance_group: expected at most 64 instances in all, got 66",
        ),
        (
            accelerated('gpu_execution_accelerator { name: "migraphx" }'),
            ErrorKind.UNSUPPORTED,
            "expected tensorrt or cuda, got 'migraphx'",
        ),
        (
            accelerated('cpu_execution_accelerator { name: "dnnl" }'),
            ErrorKind.UNSUPPORTED,
            "expected openvino, got 'dnnl'",
        ),
        (
            accelerated(TENSORRT % 'parameters { key: "precision_mode" value: "FP8" }'),
            ErrorKind.INVALID_INPUT,
            "precision_mode: expected one of FP32, FP16, INT8, got 'FP8'",
        ),
        (
            accelerated(TENSORRT % 'parameters { key: "precision" value: "FP16" }'),
            ErrorKind.INVALID_INPUT,
            "tensorrt has no parameter 'precision'",
        ),
    ],
)
def test_impossible_placement_is_rejected(text: str, kind: ErrorKind, problem: str) -> None:
    with pytest.raises(ServeError, match=problem) as caught:
        wishes(text)
    assert caught.value.kind is kind


def test_absurd_count_is_rejected_before_allocation() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ServeError, match="expected at most 64 instances in all, got 2000000"):
            wishes("instance_group { count: 1000000 gpus: [0, 1] }")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
