"""Claims about sizes, compared with the tensors that ONNX Runtime computes, and the models that get checks."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from ortserve.engine.empty_tensors.analysis import find_sizes
from ortserve.engine.empty_tensors.known import Known
from ortserve.engine.operator_checks import check_edits
from ortserve.model_file.reading import read_model
from rows.exported import CORPUS
from rows.random_graphs import grow, grow_widely

CHECKED = {"dynamo_text_tower", "dynamo_unet", "sklearn_nearest_neighbours", "torch_unet"}
"""Models of the corpus with tensors that may become empty: by a pooling of images of any size, a Slice, or a Scan."""


def known(folder: Path, inputs: str, nodes: str, weights: str = "") -> Known:
    """What is known about the tensor ``y``."""
    text = f'<ir_version: 8, opset_import: ["": 18]> m ({inputs}) => (float[n] z) {weights} {{ {nodes} }}'
    onnx.save(parser.parse_model(text), str(folder / "model.onnx"))
    return find_sizes(read_model(folder / "model.onnx"))[""]["y"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("grown", [grow, grow_widely])
def test_claims_hold_for_random_graphs(tmp_path: Path, grown: type, seed: int) -> None:
    graph = grown(seed)
    onnx.save(graph.model(), str(tmp_path / "model.onnx"))
    claims = find_sizes(read_model(tmp_path / "model.onnx"))[""]
    for name, runs in graph.values.items():
        for array in runs:
            if array is not None and name in claims:
                assert contradiction(claims[name], array) == "", name


def contradiction(claim: Known, array: np.ndarray) -> str:
    """What is wrong about a claim; empty if it holds."""
    sizes = array.shape if claim.sizes is None else claim.sizes
    if len(sizes) != array.ndim or any(size not in (None, real) for size, real in zip(sizes, array.shape, strict=True)):
        return f"sizes {claim.sizes} of {array.shape}"
    if not array.size:
        return "" if claim.may_be_empty else "empty"
    if array.dtype.kind not in "iuf":
        return ""
    wrong = {
        "least": claim.least is not None and array.min() < float(claim.least),
        "zero": claim.has_no_zero and not array.all(),
        "elements": claim.elements is not None and [float(one) for one in claim.elements] != array.ravel().tolist(),
    }
    return " ".join(name for name, is_wrong in wrong.items() if is_wrong)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.onnx")), ids=lambda path: path.stem)
def test_only_models_with_tensors_that_may_become_empty_get_checks(path: Path) -> None:
    assert bool(check_edits(read_model(path))) == (path.stem in CHECKED)


@pytest.mark.parametrize(
    ("inputs", "nodes", "weights", "may_be_empty"),
    [
        ("float[n,4] x", "y = Slice (x, one, long, one)", "<int64[1] one = {1}, int64[1] long = {9}>", False),
        ("float[n,m] x", "y = Slice (x, one, long, one)", "<int64[1] one = {1}, int64[1] long = {9}>", True),
        ("float[n,m] x", "y = Slice (x, zero, one, one)", "<int64[1] one = {1}, int64[1] zero = {0}>", False),
        ("float[n,1,h,w] x", "y = MaxPool <kernel_shape = [2, 2]> (x)", "", True),
        ("float[n,1,h,w] x", "y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)", "", False),
        ("float[n,1,8,8] x", "y = MaxPool <kernel_shape = [2, 2]> (x)", "", False),
        ("float[n,m] x", "i = NonZero (x) y = Transpose (i)", "", True),
        ("float[n,m] x, float[k,m] p", _RANGE := """s = Shape (x) a = Gather (s, at) r = Shape (p) b = Gather (r, at)
            end = Add (a, b) y = Range (b, end, step)""", "<int64 at = {0}, int64 step = {1}>", False),
        ("float[n,m] x, float[k,m] p", _RANGE.replace("(b, end", "(end, b"), "<int64 at={0}, int64 step={1}>", True),
        ("float[n,m] x", """y = If (c) <then_branch = t () => (float[a] q) { q = Neg (x) },
            else_branch = f () => (int64[a,b] q) { q = NonZero (x) }>""", "<bool c = {1}>", True),
    ],
)  # fmt: skip
def test_tensors_that_may_become_empty(
    tmp_path: Path, inputs: str, nodes: str, weights: str, may_be_empty: bool
) -> None:
    assert known(tmp_path, inputs, nodes, weights).may_be_empty == may_be_empty


def test_equal_names_in_calls_of_a_function_are_different_sizes(tmp_path: Path) -> None:
    """A Range between the numbers of rows of two tensors may be empty, although a function computes both."""
    text = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
    m (float[n] x, float[k] z) => (int64[r] y) <int64 step = {1}>
        { a = own.rows (x) b = own.rows (z) end = Add (a, step) y = Range (b, end, step) }
    <domain: "own", opset_import: ["": 18]>
    rows (t) => (c) { i = Constant <value_int = 0> () s = Shape (t) c = Gather (s, i) }"""
    onnx.save(parser.parse_model(text), str(tmp_path / "model.onnx"))
    assert find_sizes(read_model(tmp_path / "model.onnx"))[""]["y"].may_be_empty


def test_squeeze_of_an_axis_that_a_scalar_lacks_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    """ONNX Runtime rejects the model with its reason; the analysis before must not fail."""
    assert known(tmp_path, "float x", "y = Squeeze (x, axes)", "<int64[1] axes = {0}>").sizes is None
