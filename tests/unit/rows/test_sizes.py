"""Claims about sizes, compared with the tensors that ONNX Runtime computes, and models without checks."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import parser

from ortserve.engine.corrections.operator_checks import check_edits
from ortserve.model_file.reading import read_model
from ortserve.rows import Value, find_sizes
from rows.brute_force import Observation
from rows.cases import fill_weights
from rows.claims import Check
from rows.exported import CORPUS
from rows.growing import GrowingGraph
from rows.random_graphs import grow, grow_widely


def known(folder: Path, inputs: str, nodes: str, weights: str = "") -> Value:
    """What is known about the tensor ``y``."""
    return found(
        folder, f'<ir_version: 8, opset_import: ["": 18]> m ({inputs}) => (float[n] z) {weights} {{ {nodes} }}'
    )


def found(folder: Path, text: str) -> Value:
    onnx.save(parser.parse_model(text), str(folder / "model.onnx"))
    model = read_model(folder / "model.onnx")
    return find_sizes(model).tensors[id(model.graph)]["y"]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("grown", [grow, grow_widely])
def test_claims_hold_for_random_graphs(tmp_path: Path, grown: Callable[[int], GrowingGraph], seed: int) -> None:
    graph = grown(seed)
    onnx.save(graph.model(), str(tmp_path / "model.onnx"))
    model = read_model(tmp_path / "model.onnx")
    claims = find_sizes(model).tensors[id(model.graph)]
    for run in zip(*graph.values.values(), strict=True):
        check = Check(claims)
        for name, array in zip(graph.values, run, strict=True):
            if array is not None and name in claims:
                check.look(name, Observation([array], {}))
                assert array.size or not claims[name].has_elements, name
        assert not check.findings


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.onnx")), ids=lambda path: path.stem)
def test_exported_model_gets_no_checks(path: Path) -> None:
    """None of these models makes an empty tensor that a check would be for."""
    assert check_edits(read_model(path)) == {}


@pytest.mark.parametrize(
    ("inputs", "nodes", "weights", "may_be_empty"),
    [
        ("float[n,4] x", "y = Slice (x, one, long, one)", "<int64[1] one = {1}, int64[1] long = {9}>", False),
        ("float[n,m] x", "y = Slice (x, one, long, one)", "<int64[1] one = {1}, int64[1] long = {9}>", True),
        ("float[n,m] x", "y = Slice (x, zero, one, one)", "<int64[1] one = {1}, int64[1] zero = {0}>", False),
        ("float[n,m] x", "a, b, c, y = Split <axis = 1, num_outputs = 4> (x)", "", True),
        ("float[n,m] x", "a, b, y, d = Split <axis = 1, num_outputs = 4> (x)", "", False),
        ("float[n,1,h,w] x", "y = MaxPool <kernel_shape = [2, 2]> (x)", "", True),
        ("float[n,1,h,w] x", "y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)", "", False),
        ("float[n,1,8,8] x", "y = MaxPool <kernel_shape = [2, 2]> (x)", "", False),
        ("float[n,m] x", "i = NonZero (x) y = Transpose (i)", "", True),
        ("float[n,m] x, float[k,m] p", _RANGE := """s = Shape (x) a = Gather (s, at) r = Shape (p) b = Gather (r, at)
            end = Add (a, b) y = Range (b, end, step)""", "<int64 at = {0}, int64 step = {1}>", False),
        ("float[n,m] x, float[k,m] p", _RANGE.replace("(b, end", "(end, b"), "<int64 at={0}, int64 step={1}>", True),
        ("float[n,m] x, bool c", """y = If (c) <then_branch = t () => (float[a] q) { q = Neg (x) },
            else_branch = f () => (int64[a,b] q) { q = NonZero (x) }>""", "", True),
        ("float[n,m] x, float[k,1] p", """c = Slice (x, one, long, zero) a = Add (c, p) s = Shape (a)
            y = ConstantOfShape (s)""", "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] long = {9}>", True),
    ],
)  # fmt: skip
def test_tensors_that_may_become_empty(
    tmp_path: Path, inputs: str, nodes: str, weights: str, may_be_empty: bool
) -> None:
    assert known(tmp_path, inputs, nodes, weights).has_elements != may_be_empty


def test_equal_names_in_calls_of_a_function_are_different_sizes(tmp_path: Path) -> None:
    """A Range between the numbers of rows of two tensors may be empty, although a function computes both."""
    text = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
    m (float[n] x, float[k] z) => (int64[r] y) <int64 step = {1}>
        { a = own.rows (x) b = own.rows (z) end = Add (a, step) y = Range (b, end, step) }
    <domain: "own", opset_import: ["": 18]>
    rows (t) => (c) { i = Constant <value_int = 0> () s = Shape (t) c = Gather (s, i) }"""
    assert not found(tmp_path, text).has_elements


def test_squeeze_of_an_axis_that_a_scalar_lacks_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    """ONNX Runtime rejects the model with its reason; the analysis before must not fail."""
    assert known(tmp_path, "float x", "y = Squeeze (x, axes)", "<int64[1] axes = {0}>").has_elements


_LINEAR = "coefficients = [1.0, 2.0, 3.0, 4.0], intercepts = [0.0, 0.0], classlabels_ints = [0, 1]"


@pytest.mark.parametrize(
    ("nodes", "weights", "needed"),
    [
        ("y = MatMul (x, w)", "float[5,3] w", 5),
        ("y = Gemm <transB = 1> (x, w)", "float[3,5] w", 5),
        ("c = Sub (x, v) y = Relu (c)", "float[6] v", 6),
        ("c = Sub (x, v) y = Relu (c)", "float[1] v", None),
        ("y = Softmax (x)", "", None),
        ("y = BatchNormalization (x, v, v, v, v)", "float[4] v", 4),
        ("y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0, 4.0], targets = 2> (x)", "", 2),
        (f"l, y = ai.onnx.ml.LinearClassifier <{_LINEAR}> (x)", "", 2),
        ("y = ai.onnx.ml.Scaler <offset = [1.0, 2.0], scale = [1.0, 2.0]> (x)", "", 2),
        ("y = ai.onnx.ml.ArrayFeatureExtractor (x, i)", "int64[2] i = {0, 8}", 9),
    ],
)  # fmt: skip
def test_sizes_that_a_model_needs_are_those_of_its_parameters(
    tmp_path: Path, nodes: str, weights: str, needed: int | None
) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
        m (float[?,?] x) => (float[?,?] y) <{weights}> {{ {nodes} }}"""
    model = parser.parse_model(text)
    fill_weights(model)
    onnx.save(model, str(tmp_path / "model.onnx"))
    assert find_sizes(read_model(tmp_path / "model.onnx"), keeps_targets=True).needed == {"x": [None, needed]}


def test_images_need_the_channels_of_the_first_convolution(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]>
        m (float[?,?,?,?] x) => (float[?,?,?,?] y) <float[4,3,1,1] w> { y = Conv (x, w) }"""
    model = parser.parse_model(text)
    fill_weights(model)
    onnx.save(model, str(tmp_path / "model.onnx"))
    assert find_sizes(read_model(tmp_path / "model.onnx"), keeps_targets=True).needed == {"x": [None, 3, None, None]}
