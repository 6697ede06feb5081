"""Nodes of the optimized graph, and the nodes of the file that they replace."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import gpu_models
from ort_traces import execution, node, run, trace_file
from ortserve.model_file.graph import Declared, Graph, Node
from ortserve.model_file.reading import read_model
from ortserve.tools.profile.matching import Replacement, find_replacements, match_nodes
from ortserve.tools.profile.trace import read_trace


def chain(*nodes: tuple[str, str, str, str]) -> Graph:
    """A graph of nodes: operator, name, input, output."""
    made = tuple(Node(op, "", name, (read,), (write,), {}) for op, name, read, write in nodes)
    return Graph(made, {}, (Declared("x", 1, (1,), is_tensor=True),), ())


def described(found: list[Replacement]) -> dict[str, list[str]]:
    return {one.node.name: [node.op for node in one.replaced] for one in found if not one.is_unchanged}


def test_fused_node_is_in_place_of_the_nodes_between_its_values() -> None:
    source = chain(("MatMul", "m", "x", "a"), ("Mul", "s", "a", "b"), ("Relu", "r", "b", "c"), ("Neg", "n", "c", "y"))
    optimized = chain(("FusedMatMul", "f", "x", "c"), ("Neg", "n", "c", "y"))

    found, removed = find_replacements(source, optimized)
    assert described(found) == {"f": ["MatMul", "Mul", "Relu"]}
    assert removed == []


def test_nodes_that_change_only_the_layout_replace_nothing() -> None:
    source = chain(("Conv", "c0", "x", "a"), ("Relu", "r0", "a", "b"), ("Flatten", "f", "b", "y"))
    optimized = chain(("Conv", "b_nchwc", "x", "t1"), ("ReorderOutput", "o", "t1", "b"), ("Flatten", "f", "b", "y"))

    found, removed = find_replacements(source, optimized)
    assert described(found) == {"b_nchwc": ["Conv", "Relu"], "o": []}
    assert removed == []


def test_nodes_without_a_successor_are_removed_ones() -> None:
    source = chain(("Neg", "n", "x", "y"), ("Shape", "s", "x", "z"))

    _, removed = find_replacements(source, chain(("Neg", "n", "x", "y")))
    assert [node.op for node in removed] == ["Shape"]


def test_nodes_without_names_are_matched_in_order() -> None:
    graph = chain(("Add", "", "x", "a"), ("Mul", "named", "a", "b"), ("Add", "", "b", "y"))
    lines = (node("Add_4", 0, 1), node("named", 5, 1, op="Mul"), node("Add_9", 10, 1), execution(0, 20), run(0, 20))
    trace = read_trace(trace_file(*lines))

    found = match_nodes(trace, graph)
    assert [found[one.key].node.outputs for one in trace.nodes] == [("a",), ("b",), ("y",)]


def test_nodes_without_names_may_be_called_as_others_are_named() -> None:
    graph = chain(("Add", "Add_2", "x", "a"), ("Mul", "named", "a", "b"), ("Add", "", "b", "y"))
    lines = (
        node("Add_2", 0, 1, node_index="0"),
        node("named", 5, 1, op="Mul", node_index="1"),
        node("Add_2", 10, 1, node_index="2"),
    )
    trace = read_trace(trace_file(*lines, execution(0, 20), run(0, 20)))

    found = match_nodes(trace, graph)
    assert [found[one.key].node.outputs for one in trace.nodes] == [("a",), ("b",), ("y",)]


def test_nodes_without_names_run_in_another_order_than_that_of_a_file_that_nothing_optimized(tmp_path: Path) -> None:
    """The reference is ONNX Runtime itself: the graph that it saves, and a trace."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["b", 4]) for name in ("x", "y", "z")]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "trace")
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((1, 4), np.float32)})
    trace = read_trace(Path(session.end_profiling()).read_bytes().splitlines())

    found = match_nodes(trace, read_model(tmp_path / "optimized.onnx").graph)

    assert [one.op for one in trace.nodes] == ["Neg", "MatMul"]
    assert {key[2]: placed.node.outputs for key, placed in found.items()} == {"Neg": ("z",), "MatMul": ("y",)}


def test_shapes_decide_between_orders_of_the_same_operators(tmp_path: Path) -> None:
    """The reference is ONNX Runtime itself, which runs these nodes in another order than that of the file."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[b, 4] x, float[b, 8] w) => (float[b, 4] y, float[b, 8] z) { y = Neg(x)  z = Neg(w) }"""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "trace")
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = onnx.parser.parse_model(text).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((1, 4), np.float32), "w": np.ones((1, 8), np.float32)})
    trace = read_trace(Path(session.end_profiling()).read_bytes().splitlines())

    found = match_nodes(trace, read_model(tmp_path / "optimized.onnx").graph)

    assert [one.outputs[0][1] for one in trace.nodes] == [(1, 8), (1, 4)]
    assert [found[one.key].node.outputs for one in trace.nodes] == [("z",), ("y",)]


@pytest.mark.parametrize("kind", ["encoder", "convolutions"])
def test_every_node_that_runs_is_found_and_every_node_of_the_file_has_a_place(kind: str, tmp_path: Path) -> None:
    """The reference is ONNX Runtime's own: the optimized graph that it writes, and the trace of a run of it."""
    path = tmp_path / "model.onnx"
    if kind == "encoder":
        gpu_models.encoder(path, layers=2, hidden=32, heads=4, length=8)
    else:
        gpu_models.residual(path, blocks=(1, 1), width=16, size=32, classes=10)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.enable_profiling, options.profile_file_prefix, options.log_severity_level = True, str(tmp_path / "t"), 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    shape = [size if isinstance(size, int) else 2 for size in given.shape]
    dtype = "int64" if "int" in given.type else "float32"
    session.run(None, {given.name: np.zeros(shape, dtype)})
    with Path(session.end_profiling()).open("rb") as lines:
        trace = read_trace(lines)
    optimized = read_model(tmp_path / "optimized.onnx").graph
    source = read_model(path).graph

    matched = match_nodes(trace, optimized)
    assert len(matched) == len(trace.nodes) == len(optimized.nodes)
    assert all(place.node.op == op for (_, _, op, _), place in matched.items())
    found, removed = find_replacements(source, optimized)
    placed = Counter(id(node) for one in found for node in one.replaced)
    assert set(placed.values()) == {1}, "no node of the file has two successors"
    assert len(placed) + len(removed) == len(source.nodes)
    fused = {(one.node.op, tuple(node.op for node in one.replaced)) for one in found if not one.is_unchanged}
    expected = (
        ("BiasGelu", ("Add", "Div", "Erf", "Add", "Mul", "Mul")) if kind == "encoder" else ("Conv", ("Conv", "Relu"))
    )
    assert expected in fused
