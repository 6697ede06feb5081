"""Optimizers that change results or crash: sessions answer as numpy does, and survive."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from ortserve.config.session import SessionSettings
from ortserve.engine.corrections.harmful_optimizers import harmful_optimizers
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model

_TURN = "t = Transpose <perm = [0, 2, 1]> (x)"
_BRANCHES = "If (k) <then_branch = g () => (e) { e = Abs (d) }, else_branch = h () => (f) { f = Neg (d) }>"


def write(folder: Path, inputs: str, nodes: str, constants: str = "") -> Path:
    text = f"m ({inputs}) => (float[n,d] y) <{constants}> {{ {nodes} }}".replace("<>", "")
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'), str(folder / "model.onnx"))
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("inputs", "nodes", "constants"),
    [
        ("float[n,4,d] x, float[4] w", f"{_TURN} y = MatMul (t, w)", ""),
        ("float[n,4,d] x", f"{_TURN} y = MatMul (t, w)", "float[4] w = {1, 2, 3, 4}"),
        ("float[n,4,d] x", f"w = Constant <value = float[4] {{1, 2, 3, 4}}> () {_TURN} y = MatMul (t, w)", ""),
        ("float[n,4,d] x", f"w = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> () {_TURN} y = MatMul (t, w)", ""),
        ("float16[n,4,d] h, float[4] w", f"{_TURN.replace('(x)', '(h)')} c = Cast <to = 1> (t) y = MatMul (c, w)", ""),
        ("float[n,4,d] x, float[4] w", f"{_TURN} i = Identity (w) y = MatMul (t, i)", ""),
        ("float[n,4,d] x, float[4,1] v", f"{_TURN} i = Squeeze (v) y = MatMul (t, i)", ""),
        (
            "float[n,4,d] x, float[4] w",
            f"{_TURN} h = Mul (t, half) s = Add (h, h) y = MatMul (s, w)",
            "float half = {0.5}",
        ),
        (
            "float[n,4,d] x, float[4,1] v",
            f"{_TURN} h = Mul(t, half) u = Concat <axis=1> (v, v) i = ReduceSum <keepdims=0> (u, o) y = MatMul (h, i)",
            "float half = {0.5}, int64[1] o = {1}",
        ),
    ],
    ids=[
        "an input",
        "weights",
        "a constant",
        "a list",
        "behind a Cast",
        "a copy",
        "a column",
        "behind a moved Transpose",
        "a sum of columns",
    ],
)
@pytest.mark.parametrize("entry", ["", "ConstantFolding"])
def test_transposed_matrix_times_a_vector(tmp_path: Path, inputs: str, nodes: str, constants: str, entry: str) -> None:
    entries = {"optimization.disable_specified_optimizers": entry} if entry else {}
    options = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(entries=entries))
    session = open_session(write(tmp_path, inputs, nodes, constants), "m/1", options)
    x, w = np.arange(24, dtype=np.float32).reshape(2, 4, 3), np.arange(1, 5, dtype=np.float32)
    given = {"x": x, "h": x.astype(np.float16), "w": w, "v": w[:, None]}
    (y,) = session.run(None, {arg.name: given[arg.name] for arg in session.get_inputs()})
    np.testing.assert_allclose(y, x.transpose(0, 2, 1) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        f"{_TURN} y = MatMul (x, t)",
        f"{_TURN} y = MatMul (w, t)",
        "y = MatMul (x, w)",
    ],
    ids=["of matrices", "of a vector and a matrix", "not transposed"],
)
def test_other_products_are_fused(tmp_path: Path, nodes: str) -> None:
    assert harmful_optimizers(read_model(write(tmp_path, "float[n,4,d] x", nodes, "float[4] w = {1, 2, 3, 4}"))) == ()


@pytest.mark.parametrize(("size", "left_out"), [("height,width", ("NhwcTransformer",)), ("8,8", ())])
def test_quantized_average_of_an_image_smaller_than_its_kernel(
    tmp_path: Path, size: str, left_out: tuple[str, ...]
) -> None:
    """With channels on the last axis ONNX Runtime would divide by 0, which crashes the process."""
    quantized = "{} = QuantizeLinear ({}, s, z) {} = DequantizeLinear ({}, s, z)"
    nodes = " ".join(
        [
            "v = DequantizeLinear (w, s, z)",
            quantized.format("q1", "x", "x1", "q1"),
            "a = Conv (x1, v)",
            quantized.format("q2", "a", "x2", "q2"),
            "b = AveragePool <kernel_shape = [2, 2]> (x2)",
            quantized.format("q3", "b", "x3", "q3"),
            "c = Conv (x3, v)",
            quantized.format("q4", "c", "y", "q4"),
        ]
    )
    path = write(tmp_path, f"float[n,1,{size}] x", nodes, "float s = {0.5}, uint8 z = {0}, uint8[1,1,1,1] w = {2}")
    assert harmful_optimizers(read_model(path)) == left_out
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    (y,) = session.run(None, {"x": np.ones((1, 1, 8, 8), np.float32)})
    np.testing.assert_array_equal(y, np.ones((1, 1, 7, 7)))
    if left_out:
        with pytest.raises(ORT_ERRORS):
            session.run(None, {"x": np.ones((1, 1, 1, 1), np.float32)})


@pytest.mark.parametrize(
    ("inputs", "constants", "shape", "left_out"),
    [
        ("float[n,4] x, float[k,l] s", "", (500, 300), ("MatMulIntegerToFloatFusion",)),
        (
            "float[n,4] x",
            f"float[30,1,1] s = {{{', '.join(['0.5'] * 30)}}}",
            (30, 1, 1),
            ("MatMulIntegerToFloatFusion",),
        ),
        ("float[n,4] x", "float s = {0.5}", (), ()),
        ("float[n,4] x", "float[1,1] s = {0.5}", (1, 1), ()),
    ],
    ids=["an input", "more axes", "a number", "one for each column"],
)
def test_scales_that_widen_a_quantized_product(
    tmp_path: Path, inputs: str, constants: str, shape: tuple[int, ...], left_out: tuple[str, ...]
) -> None:
    """ONNX Runtime would write beyond the product of the matrices, which crashes the process."""
    nodes = "q, a, z = DynamicQuantizeLinear (x) p = MatMulInteger (q, w, z) f = Cast <to = 1> (p)"
    weights = ", ".join(filter(None, ["uint8[4,1] w = {1, 2, 3, 4}", constants]))
    path = write(tmp_path, inputs, f"{nodes} b = Mul (a, s) y = Mul (f, b)", weights)
    assert harmful_optimizers(read_model(path)) == left_out
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    scales = np.full(shape, 0.5, np.float32)
    given = {"x": np.ones((1, 4), np.float32), "s": scales}
    (y,) = session.run(None, {arg.name: given[arg.name] for arg in session.get_inputs()})
    np.testing.assert_allclose(y, 10 * np.broadcast_to(scales, np.broadcast_shapes(shape, (1, 1))), rtol=1e-6)


def test_a_gather_of_a_range(tmp_path: Path) -> None:
    """As a slice, it would return fewer entries than indices."""
    nodes = "r = Range (a, b, one) y = Gather <axis = 1> (x, r)"
    path = write(tmp_path, "float[n,l] x, int64 a, int64 b", nodes, "int64 one = {1}")
    assert harmful_optimizers(read_model(path)) == ("GatherToSliceFusion",)
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    x = np.array([[1, 2, 3]], np.float32)
    (y,) = session.run(None, {"x": x, "a": np.array(-2), "b": np.array(1)})
    np.testing.assert_array_equal(y, [[2, 3, 1]])
    with pytest.raises(ORT_ERRORS):
        session.run(None, {"x": x, "a": np.array(0), "b": np.array(4)})


@pytest.mark.parametrize(("before", "left_out"), [("Neg", ("Pad_Fusion",)), ("Relu", ())])
def test_a_maximum_over_padding(tmp_path: Path, before: str, left_out: tuple[str, ...]) -> None:
    """Padding of MaxPool itself is never the maximum, but the zeros of a Pad may be."""
    nodes = f"a = {before} (x) p = Pad (a, pads) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (p)"
    path = write(tmp_path, "float[n,1,2,2] x", nodes, "int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}")
    assert harmful_optimizers(read_model(path)) == left_out
    (y,) = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1)).run(
        None, {"x": np.ones((1, 1, 2, 2), np.float32)}
    )
    np.testing.assert_array_equal(y, np.full((1, 1, 2, 2), 0 if left_out else 1))


@pytest.mark.parametrize(
    ("node", "end"),
    [
        ("m = Transpose <perm = [0, 2, 1]> (t)", "Abs (m)"),
        ("m = Reshape (t, r)", "Abs (m)"),
        ("m = QuantizeLinear (t, s, z)", "DequantizeLinear (m, s, z)"),
    ],
)
def test_a_branch_that_reads_behind_a_dequantized_tensor(tmp_path: Path, node: str, end: str) -> None:
    """ONNX Runtime 1.32.0 ends the process when it loads the models with a branch."""
    constants = "float s = {0.5}, uint8 z = {8}, int64[3] r = {0, 3, 2}"
    branch = f"y = If (c) <then_branch = g () => (a) {{ a = {end} }}, else_branch = h () => (b) {{ b = Neg (x) }}>"
    feeds = {"x": np.array([[[-1, 2, -3], [4, -1.5, 0]]], np.float32), "c": np.array(True)}
    results = []
    for last, left_out in ((f"y = {end}", ()), (branch, ("QDQPropagationTransformer", "QDQFinalCleanupTransformer"))):
        nodes = f"q = QuantizeLinear (x, s, z) t = DequantizeLinear (q, s, z) {node} {last}"
        path = write(tmp_path, "float[n,2,3] x, bool c", nodes, constants)
        assert harmful_optimizers(read_model(path)) == left_out
        session = open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1), read_model(path))
        results += session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "turned",
    [
        "t = Transpose <perm = [1, 0, 2]> (x) c = Cast <to = 1> (t)",
        "t = Transpose <perm = [1, 0, 2]> (x) d = Cast <to = 1> (t) c = Identity (d)",
        "t = Transpose <perm = [1, 2, 0, 3]> (x1) a = ArgMax <axis = 0, keepdims = 0> (t) c = Cast <to = 1> (a)",
        f"t = Transpose <perm = [1, 0, 2]> (x) d = Cast <to = 1> (t) c = {_BRANCHES}",
        "t = Transpose <perm = [1, 0, 2]> (x) z = MatMul (t, h) y = Cast <to = 1> (z)",
        "d = Cast <to = 10> (x32) t = Transpose <perm = [1, 0, 2]> (d) z = MatMul (t, h) y = Cast <to = 1> (z)",
    ],
    ids=["a Cast", "a copy", "behind a moved Transpose", "a branch", "half precision", "half precision inside"],
)
def test_a_product_of_a_matrix_that_is_transposed_and_cast(tmp_path: Path, turned: str) -> None:
    """ONNX Runtime 1.32.0 ends the process when it loads some of these models."""
    inputs = "float16[n,2,3,2] x1" if "x1" in turned else "float[3,n,2] x32" if "x32" in turned else "float16[3,n,2] x"
    nodes = turned if "y =" in turned else f"{turned} y = MatMul (c, w)"
    constants = "float[2,1] w = {1, 2}, float16[2,1] h = {15360, 16384}, bool k = {1}"  # h is w, as bits
    path = write(tmp_path, inputs, nodes, constants)
    assert harmful_optimizers(read_model(path)) == ("MatmulTransposeFusion",)
    session = open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1), read_model(path))
    (given,) = session.get_inputs()
    x = np.arange(12, dtype=np.float32 if given.name == "x32" else np.float16)
    x = x.reshape((1, 2, 3, 2) if given.name == "x1" else (3, 2, 2))
    (result,) = session.run(None, {given.name: x})
    moved = x.argmax(1) if given.name == "x1" else x.transpose(1, 0, 2)
    assert result.shape[-1] == 1
    np.testing.assert_array_equal(
        np.sort(result.ravel()), np.sort((moved.astype(np.float32) @ np.array([[1], [2]], np.float32)).ravel())
    )
