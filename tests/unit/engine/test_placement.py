"""Which execution provider runs which node, as the real ONNX Runtime tells."""

from pathlib import Path

import pytest

from models import builders
from ortserve.engine.placement import (
    check_placement,
    count_operators,
    describe_operators,
    describe_placement,
    left_to_cpu,
    read_placement,
)
from ortserve.engine.provider_options import CPU, CUDA, OPENVINO, TENSORRT
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError


def test_nodes_are_counted_by_the_provider_that_runs_them(tmp_path: Path) -> None:
    session = open_session(builders.mlp(tmp_path / "model.onnx"), "m", SessionOptions(ProviderChoice(CPU), 1))
    assert read_placement(session) == {CPU: 4}
    operators = count_operators(session)
    assert operators == {CPU: {"MatMul": 2, "Relu": 1, "Softmax": 1}}
    assert next(iter(operators[CPU])) == "MatMul"


def test_provider_must_take_a_node_where_there_are_some() -> None:
    check_placement(CUDA, {CUDA: 1, CPU: 40})
    check_placement(CUDA, {})
    with pytest.raises(ServeError) as caught:
        check_placement(CUDA, {CPU: 40, "OpenVINOExecutionProvider": 2})
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "execution_providers: CUDAExecutionProvider takes none of the model's nodes; "
        "CPUExecutionProvider takes 40, OpenVINOExecutionProvider takes 2"
    )


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ({}, ""),
        ({"MatMul": 12, "Relu": 4}, "12 MatMul, 4 Relu"),
        ({"x" * 1000: 1}, f"1 {'x' * 64}"),
        (
            {f"Op{number}": 2 for number in range(500)},
            ", ".join(f"2 Op{n}" for n in range(20)) + " and 480 other operators",
        ),
    ],
)
def test_operators_in_words_are_short_however_many_there_are(kinds: dict[str, int], told: str) -> None:
    assert describe_operators(kinds) == told


def test_nodes_are_left_to_the_cpu_by_a_provider_of_a_gpu_alone() -> None:
    left = {"Unique": 2}
    assert left_to_cpu(CUDA, {CUDA: {"MatMul": 1}, CPU: left}) == left
    assert left_to_cpu(TENSORRT, {TENSORRT: {"MatMul": 1}, CUDA: {"Relu": 1}, CPU: left}) == left
    assert left_to_cpu(TENSORRT, {TENSORRT: {"MatMul": 1}, CUDA: {"Relu": 1}}) == {}
    assert left_to_cpu(CPU, {CPU: left}) == {}
    assert left_to_cpu(OPENVINO, {OPENVINO: {"MatMul": 1}, CPU: left}) == {}


def test_placement_in_words() -> None:
    assert describe_placement({CUDA: 31, CPU: 2}) == "CUDAExecutionProvider: 31, CPUExecutionProvider: 2"
