"""Divisions of integers: ONNX Runtime's results, without the fault that would crash this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from ortserve.engine.corrections.replaced_nodes import replacement_edits
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.model_file.reading import read_model


def write(
    folder: Path, inputs: str, nodes: str, constants: str = "", opset: int = 21, functions: Sequence[str] = ()
) -> Path:
    text = f"m ({inputs}) => (int64[n] y) <{constants}> {{ {nodes} }}".replace("<>", "")
    text += "".join(f'<domain: "own", opset_import: ["": {opset}, "own": 1]> {function} ' for function in functions)
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "own": 1]> {text}')
    model.graph.output[0].type.tensor_type.elem_type = model.graph.input[0].type.tensor_type.elem_type
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def opened(path: Path) -> Session:
    return open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("operator", ["Div", "Mod", "Mod <fmod = 1>"])
def test_results_are_those_of_onnx_runtime(tmp_path: Path, operator: str, dtype: type[np.integer[Any]]) -> None:
    name = np.dtype(dtype).name
    path = write(tmp_path, f"{name}[n] a, {name}[n] b", f"c = Identity (b) y = {operator} (a, c)")
    ends, rng = np.iinfo(dtype), np.random.default_rng(0)
    a = np.concatenate([rng.integers(ends.min, ends.max, 500), rng.integers(-9, 9, 500)]).astype(dtype)
    a[:2] = ends.min, ends.max
    b = np.roll(a, 1)
    b[b == 0] = -1
    b[2] = ends.min
    a[2] = ends.min
    a[(a == ends.min) & (b == -1)] = 5
    plain = ort.InferenceSession(str(path), providers=[CPU]).run(None, {"a": a, "b": b})
    session = opened(path)

    np.testing.assert_array_equal(session.run(None, {"a": a, "b": b})[0], plain[0])
    least, one = np.full(40, ends.min, dtype), np.full(40, -1, dtype)
    expected = least if operator == "Div" else np.zeros_like(least)
    np.testing.assert_array_equal(session.run(None, {"a": least, "b": one})[0], expected)
    with pytest.raises(ORT_ERRORS):
        session.run(None, {"a": one, "b": np.zeros_like(one)})


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize(
    "nodes",
    [
        "y = If (c) <then_branch = t () => (u) { u = DIVIDE (a, b) }, else_branch = e () => (v) { v = Neg (a) }>",
        "y = If (c) <then_branch = t () => (u) { u = DIVIDE (least, b) }, else_branch = e () => (v) { v = Neg (a) }>",
        "y = Loop (one, , a) <body = l (int64 i, bool g, s) => (h, r) { h = Identity (g) r = DIVIDE (s, b) }>",
        "y = Scan (a, b) <num_scan_inputs = 2, body = l (int32 s, int32 d) => (r) { r = DIVIDE (s, d) }>",
        (
            "p = If (c) <then_branch = t () => (u) { u = Add (a, b) }, else_branch = e () => (v) { v = Neg (a) }> "
            "q = Sub (p, b) o = Identity (b) w = If (c) <then_branch = i () => (k) { k = Identity (o) }, "
            "else_branch = j () => (m) { m = Identity (a) }> y = DIVIDE (q, w)"
        ),
    ],
    ids=["If", "If of a constant", "Loop", "Scan", "behind If"],
)
def test_divisions_in_and_behind_graphs_of_nodes_are_no_fault(tmp_path: Path, nodes: str, operator: str) -> None:
    constants = "int64 one = {1}, int32 least = {-2147483648}"
    path = write(tmp_path, "int32[n] a, int32[n] b, bool c", nodes.replace("DIVIDE", operator), constants)
    assert len(replacement_edits(read_model(path))) == 1
    feeds = {"a": np.full(2, -(2**31), np.int32), "b": np.full(2, -1, np.int32), "c": np.array(True)}
    (found,) = opened(path).run(None, feeds)
    assert found.tolist() == [-(2**31) if operator == "Div" else 0] * 2


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize(
    ("nodes", "functions"),
    [
        ("y = own.f (a, b)", ["f (p, q) => (r) { o = Identity (q) r = DIVIDE (p, o) t = Neg (r) }"]),
        (
            "z = own.g (a, b) y = own.f (a, z)",
            [
                "f (p, q) => (r) { r = DIVIDE (p, q) }",
                "g (a, b) => (y) { c = own.f (a, b) d = Sub (c, c) y = Add (d, b) }",
            ],
        ),
        (
            "y = own.f (a, b, c)",
            [
                (
                    "f (p, q, k) => (r) { r = If (k) <then_branch = t () => (u) { u = DIVIDE (p, q) }, "
                    "else_branch = e () => (v) { v = Neg (p) }> }"
                )
            ],
        ),
        (
            (
                "i = Identity (b) y = If (c) <then_branch = t () => (u) { u = own.f (a, i) }, "
                "else_branch = e () => (v) { v = Neg (a) }>"
            ),
            ["f (p, q) => (r) { r = DIVIDE (p, q) }"],
        ),
    ],
    ids=["a call", "nested calls", "If in a function", "a call in If"],
)
def test_divisions_in_functions_are_no_fault(tmp_path: Path, nodes: str, functions: list[str], operator: str) -> None:
    functions = [function.replace("DIVIDE", operator) for function in functions]
    path = write(tmp_path, "int32[n] a, int32[n] b, bool c", nodes, functions=functions)
    feeds = {"a": np.array([-(2**31), 7], np.int32), "b": np.array([-1, -1], np.int32), "c": np.array(True)}
    (found,) = opened(path).run(None, feeds)
    assert found.tolist() == ([-(2**31), -7] if operator == "Div" else [0, 0])


@pytest.mark.parametrize(("opset", "function_opset"), [(21, 8), (21, 9), (21, 18), (8, 21)])
def test_functions_of_other_operator_sets_still_load_and_divide(
    tmp_path: Path, opset: int, function_opset: int
) -> None:
    function = ["f (p, q) => (r) { r = Div (p, q) }"]
    path = write(tmp_path, "int64[n] a, int64[n] b", "y = own.f (a, b)", opset=opset, functions=function)
    model = onnx.load(path)
    model.functions[0].opset_import[0].version = function_opset
    onnx.save(model, str(path))
    least = -(2**63) if function_opset >= 9 else -8  # divisions before Where stay as they are
    (found,) = opened(path).run(None, {"a": np.array([least, 7]), "b": np.array([-1, -1])})
    assert found.tolist() == [least if function_opset >= 9 else 8, -7]


def test_division_in_a_function_for_several_types_stays_as_it_is(tmp_path: Path) -> None:
    nodes = "f = Cast <to = 1> (a) g = own.f (f, f) h = Cast <to = 7> (g) i = own.f (a, b) y = Add (h, i)"
    path = write(tmp_path, "int64[n] a, int64[n] b", nodes, functions=["f (p, q) => (r) { r = Div (p, q) }"])
    assert replacement_edits(read_model(path)) == {}
    (found,) = opened(path).run(None, {"a": np.array([6]), "b": np.array([2])})
    assert found.tolist() == [4]


def test_constant_divisor_of_minus_one_is_no_fault_either(tmp_path: Path) -> None:
    path = write(tmp_path, "int64[n] a", "y = Div (a, one)", "int64 one = {-1}")
    (found,) = opened(path).run(None, {"a": np.array([-(2**63), 7])})
    assert found.tolist() == [-(2**63), -7]


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_constants_are_no_fault_at_the_load_either(tmp_path: Path, operator: str) -> None:
    constants = "int32[2] least = {-2147483648, 7}, int32 one = {-1}"
    path = write(tmp_path, "int32[n] a", f"d = {operator} (least, one) y = Add (a, d)", constants)
    (found,) = opened(path).run(None, {"a": np.zeros(2, np.int32)})
    assert found.tolist() == ([-(2**31), -7] if operator == "Div" else [0, 0])


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ("c = Constant <value_int=-9223372036854775808> () one = Constant <value_int=-1> () d = Div (c, one)", ""),
        ("c = Sub (most, one) m = Neg (one) d = Div (c, m)", "int64 most = {-9223372036854775807}, int64 one = {1}"),
        ("s = Shape (a) z = Sub (s, s) c = Add (z, k) d = Div (c, m)", f"int64 k = {{{-(2**63)}}}, int64 m = {{-1}}"),
    ],
    ids=["integers of nodes", "computed", "of a size and a constant divisor"],
)
def test_numbers_that_no_request_contains_are_no_fault_either(tmp_path: Path, nodes: str, constants: str) -> None:
    path = write(tmp_path, "int64[2] a", f"{nodes} y = Add (a, d)", constants)
    (found,) = opened(path).run(None, {"a": np.zeros(2, np.int64)})
    assert found.tolist() == [-(2**63)] * 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("opset", [7, 8])
def test_divisions_before_where_are_no_fault_either(tmp_path: Path, opset: int, dtype: type[np.integer[Any]]) -> None:
    name, least = np.dtype(dtype).name, np.iinfo(dtype).min
    path = write(tmp_path, f"{name}[n] a, {name}[n] b", "y = Div (a, b)", opset=opset)
    a, b = np.array([least, 7, -7, 7, least, least + 1], dtype), np.array([-1, -1, 2, -3, 1, -1], dtype)
    (found,) = opened(path).run(None, {"a": a, "b": b})
    assert found.tolist() == [least, -7, -3, -2, least, -(least + 1)]
    with pytest.raises(ORT_ERRORS):
        opened(path).run(None, {"a": a, "b": np.zeros_like(b)})


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_smallest_number_as_a_constant_dividend_is_no_fault_either(
    tmp_path: Path, dtype: type[np.integer[Any]]
) -> None:
    name, least = np.dtype(dtype).name, np.iinfo(dtype).min
    path = write(tmp_path, f"{name}[n] a", "y = Div (least, a)", f"{name} least = {{{least}}}")
    (found,) = opened(path).run(None, {"a": np.array([-1, 2], dtype)})
    assert found.tolist() == [least, least // 2]


@pytest.mark.parametrize(
    ("inputs", "nodes", "constants", "opset"),
    [
        ("float[n] a, float[n] b", "y = Div (a, b)", "", 21),
        ("uint8[n] a, uint8[n] b", "y = Div (a, b)", "", 21),
        ("int64[n] a", "c = Constant <value = int64 {3}> () y = Div (a, c)", "", 21),
        ("int64[n] a", "y = Mod (a, c)", "int64[2] c = {3, 4}", 21),
        ("int64[n] a", "y = Div (c, a)", "int64 c = {7}", 21),
        ("int64[n] a, float[n] x", "s = Shape (x) d = Div (s, two) y = Add (a, d)", "int64 two = {2}", 21),
        ("int32[n] a, float s", "c = DequantizeLinear (a, s) y = Div (c, c)", "", 21),
        ("int64[n] a, int64[n] b", "y = Div (a, b)", "", 6),
    ],
    ids=[
        "floats",
        "bytes",
        "a constant",
        "constants",
        "a constant dividend",
        "sizes",
        "of a known operator only",
        "before broadcasting",
    ],
)
def test_other_divisions_stay_as_they_are(tmp_path: Path, inputs: str, nodes: str, constants: str, opset: int) -> None:
    assert replacement_edits(read_model(write(tmp_path, inputs, nodes, constants, opset))) == {}


@pytest.mark.parametrize(
    "nodes",
    [
        "i = Cast <to = 7> (a) y = Div (i, i)",
        "i = ArgMax <keepdims = 0> (a) y = Div (i, i)",
        "v, i = TopK (a, one) y = Mod (i, i)",
        "i = Cast <to = 6> (a) t, u = Split <num_outputs = 2> (i) y = Mod (u, t)",
        "i = Cast <to = 6> (a) c = Greater (a, a) w = Where (c, i, i) y = Div (w, w)",
    ],
    ids=["Cast", "ArgMax", "TopK", "Split", "Where"],
)
def test_types_follow_from_the_nodes(tmp_path: Path, nodes: str) -> None:
    path = write(tmp_path, "float[n] a", nodes, "int64[1] one = {1}")
    assert list(replacement_edits(read_model(path))) == [(1, "y")]


def test_malformed_nodes_are_left_to_onnx_runtime(tmp_path: Path) -> None:
    path = write(tmp_path, "int64[n] a", "v, i = TopK (a, a) y = Div (a, a)")
    model = onnx.load(path)
    del model.graph.node[0].output[:], model.graph.node[1].input[1:]
    onnx.save(model, str(path))
    assert replacement_edits(read_model(path)) == {}
