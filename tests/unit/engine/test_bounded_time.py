"""Models whose run time is bounded by the number of rows, and for others the node that is named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortserve.example
from models import builders
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine import bounded_time
from ortserve.engine.bounded_time import MAX_NODES
from ortserve.model_file.reading import read_model

Node = onnx.NodeProto


def ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def spec(
    name: str = "x", datatype: DataType = DataType.FP32, shape: Sequence[int] = (-1, 4), **more: Any
) -> TensorSpec:
    return TensorSpec(name, datatype, tuple(shape), **more)


def signature(*inputs: TensorSpec, output: TensorSpec | None = None, alone_because: str = "") -> ModelSignature:
    return ModelSignature(inputs or (spec(),), (output or spec("y"),), alone_because)


def why_unbounded(path: Path, of: ModelSignature) -> str:
    return bounded_time.why_unbounded(read_model(path), of)


def write(
    path: Path,
    *nodes: Node,
    weights: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    inputs: Sequence[str] = ("x",),
) -> Path:
    """Write a model with these nodes; the values of its interface are irrelevant here."""
    x = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in inputs]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", x, [y], weights)
    domains = ("", "ai.onnx.ml", "com.microsoft", "own")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, 21) for domain in domains])
    model.functions.extend(functions)
    path.write_bytes(model.SerializeToString())
    return path


def node(operator: str, inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",), **attributes: Any) -> Node:
    return helper.make_node(operator, inputs, outputs, name=f"the {operator}", **attributes)


def why(path: Path, *nodes: Node, **more: Sequence[onnx.TensorProto] | Sequence[onnx.FunctionProto]) -> str:
    return why_unbounded(write(path / "m.onnx", *nodes, **more), signature())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "of"),
    [
        (builders.mlp, signature(spec(shape=(-1, 64)))),
        (builders.identity, signature()),
        (builders.row_mixer, signature()),
        (builders.fixed_batch, signature(spec(shape=(1, 4)), alone_because="the first dimension is fixed")),
        (builders.image_classifier, signature(spec("data", shape=(1, 3, 8, 8)), alone_because="likewise")),
    ],
)
def test_models_of_fixed_shapes_are_bounded(tmp_path: Path, build: object, of: ModelSignature) -> None:
    assert callable(build)
    assert why_unbounded(build(tmp_path / "m.onnx"), of) == ""


@pytest.mark.parametrize("name", ["digits", "simple"])
def test_bundled_models_for_numbers_are_bounded(name: str) -> None:
    (path,) = (Path(ortserve.example.__file__).parent / "repository" / name).rglob("*.onnx")
    assert why_unbounded(path, signature()) == ""


def test_a_model_with_a_loop_names_it(tmp_path: Path) -> None:
    assert why_unbounded(builders.slow(tmp_path / "m.onnx"), signature()) == "a node (Loop) is control flow"


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (signature(spec(shape=(-1, -1))), "does not fix the shape of input 'x'"),
        (signature(spec(shape=(), has_any_shape=True)), "does not fix the shape of input 'x'"),
        (signature(spec(), alone_because="rows depend on each other"), "does not fix the shape of input 'x'"),
        (signature(spec(datatype=DataType.BYTES)), "input 'x' holds strings"),
        (signature(output=spec("y", DataType.BYTES)), "output 'y' holds strings"),
        (signature(spec(), spec("w", batch_axis=None, is_optional=True)), "a request with input 'w' runs alone"),
    ],
)
def test_interface_with_free_dimensions_is_not_bounded(tmp_path: Path, of: ModelSignature, reason: str) -> None:
    assert reason in why_unbounded(builders.identity(tmp_path / "m.onnx"), of)


@pytest.mark.parametrize("operator", ["NonZero", "Unique", "Compress", "NonMaxSuppression", "RoiAlign"])
def test_operators_that_depend_on_values_are_named_unless_the_values_are_fixed(tmp_path: Path, operator: str) -> None:
    reason = f"the time of node 'the {operator}' ({operator}) depends on values"
    assert why(tmp_path, node(operator)) == reason
    assert why(tmp_path, node(operator, ["w"]), weights=[ints("w", 1)]) == ""


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("TopK", ["x", "n"]),
        ("Expand", ["x", "n"]),
        ("Reshape", ["x", "n"]),
        ("Tile", ["x", "n"]),
        ("ConstantOfShape", ["n"]),
        ("Slice", ["x", "w", "n"]),
        ("Pad", ["x", "n"]),
        ("Resize", ["x", "", "", "n"]),
        ("Range", ["w", "n", "w"]),
        ("OneHot", ["x", "n", "w"]),
        ("ReduceSum", ["x", "n"]),
    ],
)
def test_shape_from_values_is_bounded_only_if_constant(tmp_path: Path, operator: str, inputs: list[str]) -> None:
    of_values, weights = node("Cast", ["x"], ["n"], to=TensorProto.INT64), [ints("w", 1)]
    reason = why(tmp_path, of_values, node(operator, inputs), weights=weights)
    assert reason == f"node 'the {operator}' ({operator}) takes a shape from values, through its input 'n'"
    # A value is fixed if it is computed from the input's shape and from weights.
    of_shape = [node("Shape", ["x"], ["s"]), node("Mul", ["s", "w"], ["n"])]
    assert why(tmp_path, *of_shape, node(operator, inputs), weights=weights) == ""
    of_random = node("RandomUniformLike", ["w"], ["n"])
    assert "takes a shape from values" in why(tmp_path, of_random, node(operator, inputs), weights=weights)


def test_initializer_that_requests_can_override_is_not_constant(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", node("Expand", ["x", "n"]), weights=[ints("n", 2)], inputs=["x", "n"])
    assert why_unbounded(path, signature()) == ""
    of_both = signature(spec(), spec("n", DataType.INT64, (1,), is_optional=True), alone_because="n has no rows")
    fixed = ModelSignature((spec(shape=(1, 4)), *of_both.inputs[1:]), of_both.outputs, "n has no rows")
    assert "takes a shape from values, through its input 'n'" in why_unbounded(path, fixed)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Cast", to=TensorProto.STRING)],
        [node("Constant", [], value_string="a")],
        [node("Constant", [], value=numpy_helper.from_array(np.array(["a"], object), "v"))],
    ],
)
def test_nodes_that_make_strings_are_named(tmp_path: Path, nodes: list[Node]) -> None:
    assert why(tmp_path, *nodes).endswith("produces strings")
    assert why(tmp_path, node("Cast", to=TensorProto.FLOAT)) == ""


def test_strings_among_the_initializers_are_named(tmp_path: Path) -> None:
    texts = numpy_helper.from_array(np.array(["a"], object), "words")
    assert "holds strings" in why(tmp_path, node("Identity"), weights=[texts])


@pytest.mark.parametrize(
    ("operator", "domain"), [("StringNormalizer", ""), ("BeamSearch", "com.microsoft"), ("Anything", "own")]
)
def test_operators_that_are_not_known_are_not_bounded(tmp_path: Path, operator: str, domain: str) -> None:
    shown = f"{domain}.{operator}" if domain else operator
    reason = f"the time of node 'the {operator}' ({shown}) is not known to be bounded by its shapes"
    assert why(tmp_path, node(operator, domain=domain)) == reason


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft"])
def test_names_of_known_domains_are_recognised(tmp_path: Path, domain: str) -> None:
    assert why(tmp_path, node("Gelu", domain=domain)) == ""


def function(name: str, *nodes: Node) -> onnx.FunctionProto:
    return helper.make_function("own", name, ["a", "b"], ["c"], nodes, [helper.make_opsetid("", 21)])


def test_functions_of_the_model_are_analysed(tmp_path: Path) -> None:
    expand = function("Grow", node("Expand", ["a", "b"], ["c"]))
    call = node("Grow", ["x", "n"], domain="own")
    assert why(tmp_path, call, functions=[expand], weights=[ints("n", 2)]) == ""
    reason = why(tmp_path, node("Cast", ["x"], ["n"], to=TensorProto.INT64), call, functions=[expand])
    assert "takes a shape from values, through its input 'b'" in reason
    loop = function("Grow", node("Loop", ["a", "", "b"], ["c"]))
    assert "is control flow" in why(tmp_path, call, functions=[loop], weights=[ints("n", 2)])


def test_nested_functions_are_analysed_within_the_node_limit(tmp_path: Path) -> None:
    depth = 40  # 2 to the power of it nodes
    chain = [
        function(f"F{k}", *[node(f"F{k + 1}", ["a", "b"], ["c"], domain="own") for _ in range(2)]) for k in range(depth)
    ]
    end = function(f"F{depth}", node("Add", ["a", "b"], ["c"]))
    assert "more than" in why(tmp_path, node("F0", ["x", "x"], domain="own"), functions=[*chain, end])


def test_large_graph_is_not_analysed(tmp_path: Path) -> None:
    nodes = [node("Identity", ["x"], [f"y{k}"]) for k in range(MAX_NODES)]
    assert why(tmp_path, *nodes) == ""
    assert "more than" in why(tmp_path, *nodes, node("Identity"))
    assert "more than" in why(tmp_path, *nodes, weights=[ints("w", 1)])


@pytest.mark.parametrize("content", [b"", b"\xff not a model \xff", b"ORTM" * 9])
def test_a_file_in_another_format_is_not_bounded(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert why_unbounded(tmp_path / "m.onnx", signature()) == "the model file cannot be read as ONNX"
    assert why_unbounded(tmp_path / "missing.onnx", signature()) == "the model file cannot be read as ONNX"
