"""The execution provider of each node, as reported by the real ONNX Runtime."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from models import builders
from ortserve.engine.placement import (
    Placement,
    check_placement,
    count_operators,
    describe_elsewhere,
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


def test_provider_must_run_at_least_one_node() -> None:
    check_placement(CUDA, {CUDA: 1, CPU: 40})
    check_placement(CUDA, {})
    with pytest.raises(ServeError) as caught:
        check_placement(CUDA, {CPU: 40, "OpenVINOExecutionProvider": 2})
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "execution_providers: CUDAExecutionProvider runs none of the model's nodes; "
        "CPUExecutionProvider runs 40, OpenVINOExecutionProvider runs 2"
    )


@pytest.mark.parametrize(
    ("kinds", "described"),
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
def test_operator_description_is_short_for_any_number(kinds: dict[str, int], described: str) -> None:
    assert describe_operators(kinds) == described


def test_nodes_are_left_to_the_cpu_by_every_provider_but_itself() -> None:
    left = {"Unique": 2}
    assert left_to_cpu(CUDA, {CUDA: {"MatMul": 1}, CPU: left}) == left
    assert left_to_cpu(TENSORRT, {TENSORRT: {"MatMul": 1}, CUDA: {"Relu": 1}, CPU: left}) == left
    assert left_to_cpu(TENSORRT, {TENSORRT: {"MatMul": 1}, CUDA: {"Relu": 1}}) == {}
    assert left_to_cpu(CPU, {CPU: left}) == {}
    assert left_to_cpu(OPENVINO, {OPENVINO: {"MatMul": 1}, CPU: left}) == left
    assert left_to_cpu(OPENVINO, {OPENVINO: {"MatMul": 1}}) == {}


def test_placement_is_described_by_provider() -> None:
    assert describe_placement({CUDA: 31, CPU: 2}) == "CUDAExecutionProvider: 31, CPUExecutionProvider: 2"


def chain(path: Path, *nodes: tuple[str, str, str]) -> Path:
    """A chain of nodes, by operator, domain and name: x FP32 [batch, 4] → y FP32 [batch, 4]."""
    between = ["x", *(f"h{number}" for number in range(1, len(nodes))), "y"]
    made = [
        helper.make_node(operator, [start], [end], name=name, domain=domain)
        for (operator, domain, name), start, end in zip(nodes, between, between[1:], strict=False)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(made, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def placed_on_cpu(path: Path) -> Placement:
    return count_operators(open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1)))


def test_nodes_on_others_than_the_chosen_provider_are_named(tmp_path: Path) -> None:
    nodes = (("Elu", "", "first"), ("FastGelu", "com.microsoft", "/head/gelu"), ("Hardmax", "", ""))
    placed = placed_on_cpu(chain(tmp_path / "model.onnx", *nodes))
    assert describe_elsewhere(CUDA, placed) == f"{CPU}: Elu 'first', com.microsoft.FastGelu '/head/gelu', Hardmax"
    assert describe_elsewhere(CPU, placed) == ""


def test_many_nodes_and_long_names_are_abbreviated(tmp_path: Path) -> None:
    nodes = [("Elu", "", f"{number:02}{'n' * 1000}") for number in range(62)]
    described = describe_elsewhere(CUDA, placed_on_cpu(chain(tmp_path / "model.onnx", *nodes)))
    assert described.endswith(f"'49{'n' * 126}' and 12 more")
    assert described.count("Elu") == 50
    exactly = placed_on_cpu(chain(tmp_path / "fifty.onnx", *nodes[:50]))
    assert describe_elsewhere(CUDA, exactly).endswith(f"'49{'n' * 126}'")


def test_node_with_an_invalid_name_is_described_by_its_operator(tmp_path: Path) -> None:
    path = chain(tmp_path / "model.onnx", ("Elu", "", "NAME"))
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\xff\xfeME"))
    assert describe_elsewhere(CUDA, placed_on_cpu(path)) == f"{CPU}: Elu"
