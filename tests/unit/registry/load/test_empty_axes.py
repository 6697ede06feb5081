"""The axes along which inputs may be empty, compared with the outputs that ONNX Runtime does not write."""

from functools import partial
from pathlib import Path

import onnx
import pytest
from onnx import parser

from ortserve.model_file.reading import read_model
from ortserve.registry.load.empty_axes import find_empty_axes
from ortserve.rows import find_sizes

_PAST = "float[batch,2,past,4] past"
_NEW = "float[batch,2,length,4] new"


def found(
    folder: Path, inputs: str, nodes: str, initializers: str = "", *, computes_empty: bool = False, opset: int = 21
) -> dict[str, set[int]] | None:
    """The free axes along which inputs may be empty, before ONNX Runtime 1.32 or since then."""
    text = f"m ({inputs}) => (float[a,b,c,d] y) {initializers} {{ {nodes} }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    onnx.save(model, str(folder / "model.onnx"))
    content = read_model(folder / "model.onnx")
    axes = find_empty_axes(content, partial(find_sizes, content, keeps_targets=True), computes_empty=computes_empty)
    if axes is None:
        return None
    dims = {declared.name: declared.dims or () for declared in content.graph.inputs}
    return {name: {axis for axis in axes[name] if not isinstance(dims[name][axis], int)} for name in axes}


def test_inputs_of_a_model_that_joins_nothing_may_be_empty(tmp_path: Path) -> None:
    assert found(tmp_path, _PAST, "y = Neg (past)") is None


@pytest.mark.parametrize(
    ("way", "initializers"),
    [
        ("old = Identity (past)", ""),
        ("turned = Transpose <perm = [0, 2, 1, 3]> (past) old = Transpose <perm = [0, 2, 1, 3]> (turned)", ""),
        ("wide = Unsqueeze (past, first) old = Squeeze (wide, first)", "<int64[1] first = {0}>"),
        ("wide = Unsqueeze (past, first) old = Gather (wide, at)", "<int64[1] first = {0}, int64 at = {0}>"),
        ("first = Constant <value = int64[1] {-5}> () w = Unsqueeze (past, first) old = Squeeze (w, first)", ""),
        ("one, other = Split <axis = 3, num_outputs = 2> (past) old = Concat <axis = 2> (one, other)", ""),
        ("s = Shape (past) old = Cast <to = 1> (past)", ""),
    ],
)
def test_past_may_be_empty_along_the_axis_of_the_concat_only(tmp_path: Path, way: str, initializers: str) -> None:
    axes = found(tmp_path, f"{_PAST}, {_NEW}", f"{way} y = Concat <axis = -2> (old, new)", initializers)
    assert axes == {"past": {2}, "new": {2}}


def test_joined_pasts_are_empty_if_both_are(tmp_path: Path) -> None:
    nodes = "both = Concat <axis = 2> (past, new) y = Concat <axis = 3> (both, more)"
    assert found(tmp_path, f"{_PAST}, {_NEW}, float[batch,2,sum,4] more", nodes) == {
        "past": set(),
        "new": set(),
        "more": set(),
    }


@pytest.mark.parametrize(
    "nodes",
    [
        "r = Relu (past) y = Concat <axis = 2> (r, new)",
        "q = SequenceConstruct (past, new) y = ConcatFromSequence <axis = 2> (q)",
        "y = Loop (k, c, past) <body = b (int64 i, bool d, float t) => (bool d, float u) {u = Concat <axis=2> (t, t)}>",
    ],
)
def test_input_whose_way_to_a_concat_is_unknown_must_not_be_empty(tmp_path: Path, nodes: str) -> None:
    axes = found(tmp_path, f"{_PAST}, {_NEW}", nodes, "<int64 k = {1}, bool c = {1}>")
    assert axes is not None
    assert axes["past"] == set()


@pytest.mark.parametrize(
    ("nodes", "may_be_empty"),
    [
        (
            "p, s, z = DynamicQuantizeLinear (past) n, t, u = DynamicQuantizeLinear (new) y = MatMulInteger (p, n)",
            False,
        ),
        ("p, s, z = DynamicQuantizeLinear (past) y = MatMulInteger (p, w)", True),
        ("p = QuantizeLinear (past, one, zero) q = DequantizeLinear (p, one, zero) y = MatMul (q, q)", False),
        (
            "v=DequantizeLinear (w, one) p=QuantizeLinear (past, one) q=DequantizeLinear(p, one) y = MatMul(q, v)",
            True,
        ),
        ("p = QuantizeLinear (past, one, zero) q = DequantizeLinear (p, one, zero) y = MatMul (new, new)", True),
    ],
)
def test_quantized_products_of_two_computed_matrices_take_no_empty_ones(
    tmp_path: Path, nodes: str, may_be_empty: bool
) -> None:
    weights = "<float one = {1}, uint8 zero = {0}, uint8[4,1] w = {1, 2, 3, 4}>"
    axes = found(tmp_path, f"{_PAST}, {_NEW}", nodes, weights)
    assert axes is not None
    assert axes["past"] == ({0, 2} if may_be_empty else set())


@pytest.mark.parametrize(
    ("inputs", "nodes", "axes"),
    [
        (f"{_PAST}, {_NEW}", 'y = Einsum <equation = "bhpd,bhpe -> bhde"> (past, new)', {"past": set(), "new": set()}),
        (
            f"{_PAST}, {_NEW}",
            'k = Concat <axis = 2> (past, new) y = Einsum <equation = "bhpd,bhpe -> bhde"> (k, k)',
            {"past": set(), "new": set()},
        ),
        (
            f"{_PAST}, {_NEW}",
            'k = Concat <axis = 2> (past, new) y = Einsum <equation = "bhpd,bhqd -> bhqp"> (k, k)',
            {"past": {2}, "new": {2}},
        ),
        ("float[batch,hidden] x", "y = MoE (x, x)", {"x": {0}}),
        ("float[batch,steps,hidden] x", "y, s = LinearAttention (x, x, x)", {"x": {0, 1}}),
        (
            "float[batch,steps,hidden] x, int64[batch,steps] at",
            "y = RotaryEmbedding (x, at)",
            {"x": {0, 1}, "at": {0, 1}},
        ),
        ("float[batch,2,h,w] x", "y = ConvTranspose <kernel_shape = [3, 3]> (x, kernel)", None),
        ("float[batch,2,d,h,w] x", "y = ConvTranspose <kernel_shape = [3, 3, 3]> (x, kernel)", {"x": set()}),
        ("float[batch,2,h,w] x, float[o,2,kh,kw] k", "y = Conv (x, k)", {"x": {0, 2, 3}, "k": set()}),
        ("float[batch,2,h,w] x", "y = Conv (x, kernel)", None),
        ("float[n,2,h,w] x, float[o,2,kh,kw] k", "y = FusedConv (x, k)", {"x": {0, 2, 3}, "k": set()}),
        ("float[n,2,h,w] x, float[o,2,kh,kw] k", "y = ConvInteger (x, k)", {"x": {0, 2, 3}, "k": set()}),
        ("float[n,2,h,w] x, float[r,4] b, int64[r] at", "y = RoiAlign (x, b, at)", {"x": {0}, "b": {0}, "at": {0}}),
        ("float[k] x, float[n,k,m] z", "y = MatMul (x, z)", {"x": set(), "z": set()}),
        ("float[n,k] x, float[k,m] z", "y = MatMul (x, z)", {"x": {0, 1}, "z": {0, 1}}),
        ("float[k] x, float[n,k,m] z", "v = Neg (x) y = MatMul (v, z)", {"x": set(), "z": set()}),
        (
            "float[m,n,k] x, float[k,n,j] z",
            "t = Transpose <perm = [1, 0, 2]> (x) u = Transpose <perm = [1, 0, 2]> (z) y = MatMul (t, u)",
            {"x": set(), "z": set()},
        ),
        (
            "float[b,h,s,k] x, float[b,k,h,4] z",
            "t = Transpose <perm = [0, 2, 1, 3]> (z) y = MatMul (x, t)",
            {"x": {0, 1, 2, 3}, "z": {0, 1, 2}},
        ),
        ("float[batch,heads,length,4] x", "v = Neg (x) y = Attention (v, v, v)", {"x": {0, 2}}),
        (
            "float[n,m,k] x, float[n,j,k] z",
            "t = Transpose <perm = [0, 2, 1]> (z) u = Neg (t) v = Neg (x) y = MatMul (v, u)",
            {"x": {0, 1}, "z": {0, 1}},
        ),
        (
            "float[n,2,h,w] x, float[r,4] b, int64[r] at",
            "v = Neg (x) y = RoiAlign (v, b, at)",
            {"x": {0}, "b": {0}, "at": {0}},
        ),
        (
            "float[n,m,k] x, float[n,j,k] z",
            "t = Transpose <perm = [0, 2, 1]> (z) y = MatMul (x, t)",
            {"x": {0, 1}, "z": {0, 1}},
        ),
        ("float[n,m,k] x", "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, kernel)", None),
        ("float[n,m,k] x, float[n,j,k] z", "y = FusedMatMul <transB = 1> (x, z)", {"x": {0, 1}, "z": {0, 1}}),
        ("float[n,k,m] x, float[n,k,j] z", "y = FusedMatMul <transA = 1> (x, z)", {"x": {0, 2}, "z": {0, 2}}),
        ("float[n,k] x, float[k,m] z", "y = MatMulIntegerToFloat (x, z, s, s)", {"x": set(), "z": set()}),
        ("float[n,k] x, float[k,m] z", "y = QGemm (x, s, o, z, s, o)", {"x": set(), "z": set()}),
        ("float[n,k] x, float[k,m] z", "y = DynamicQuantizeMatMul (x, z, s)", {"x": set(), "z": set()}),
        ("float[n,m] x, float[n,k] z", "y = QLinearConcat <axis = 1> (s, o, x, s, o, z, s, o)", {"x": {1}, "z": {1}}),
        ("float[a,n,k] x", 'y = Einsum <equation = "...nk,...mk->...nm"> (x, x)', {"x": set()}),
        ("float[a,n,k] x, float[k,m] z", 'y = Einsum <equation = "...k,km->...m"> (x, z)', {"x": set(), "z": set()}),
        (
            "float[a,n,k] x, float[a,k,m] z",
            'y = Einsum <equation = "...nk,...km->...nm"> (x, z)',
            {"x": {0, 1}, "z": {0, 2}},
        ),
        ("float[n,k] x, float[k,m] z", 'y = Einsum <equation = "ab,bc"> (x, z)', {"x": {0}, "z": {1}}),
        ("float[n,k] x, float[m,k] z", 'y = Einsum <equation = "nk,mk"> (x, z)', {"x": set(), "z": set()}),
        ("float[n,k] x", 'y = Einsum <equation = "...k->k..."> (x)', {"x": {0, 1}}),
        (
            f"{_PAST}, {_NEW}",
            'k = Concat <axis = 2> (past, new) y = Einsum <equation = "...pd,...qd->...qp"> (k, k)',
            {"past": {2}, "new": {2}},
        ),
        ("uint8[n,m] x", "y = QLinearMul (x, s, o, x, s, o, s, o)", {"x": set()}),
        (
            "float[n,m] x",
            "q = QuantizeLinear (x, kernel) d = DequantizeLinear (q, kernel) y = Add (d, d)",
            {"x": set()},
        ),
        (
            "float[n,m] x",
            "q = QuantizeLinear (x, kernel) d = DequantizeLinear (q, kernel) y = Add (d, kernel)",
            {"x": {0, 1}},
        ),
        ("float[batch,size,size] x", "y = Inverse (x)", {"x": set()}),
        ("float[batch,n] x", "y = QuantizeLinear <axis = 1, block_size = 2> (x, x)", {"x": set()}),
        ("float[batch,n] x", "y = QuantizeLinear (x, kernel)", None),
    ],
)
def test_axes_on_which_an_operator_crashes_must_not_be_empty(
    tmp_path: Path, inputs: str, nodes: str, axes: dict[str, set[int]] | None
) -> None:
    assert found(tmp_path, inputs, nodes, "<float[1] kernel = {1}>") == axes


@pytest.mark.parametrize(
    ("inputs", "nodes", "axes"),
    [
        ("float[k] x, float[n,k,m] z", "y = MatMul (x, z)", None),
        ("float[n,k,m] x", "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, x)", None),
        ("float[n,k,m] x", "y = FusedMatMul <transA = 1> (x, x)", None),
        ("float[n,k] x", "y = QuantizeLinear <axis = 1, block_size = 2> (x, x)", None),
        (
            "float[m,n,k] x, float[m,k] z",
            "t = Transpose <perm = [1, 0, 2]> (x) p = MatMul (t, t) y = Concat <axis = 0> (x, z)",
            {"x": {0}, "z": {0}},
        ),
        ("float[n,k] x", "p = DynamicQuantizeMatMul (x, x, s) y = MatMul (x, x)", {"x": set()}),
        (
            "float[n,k] x",
            "q = QuantizeLinear (x, kernel) d = DequantizeLinear (q, kernel) y = MatMul (d, d)",
            {"x": set()},
        ),
    ],
)
def test_empty_products_that_are_computed_may_be_empty(
    tmp_path: Path, inputs: str, nodes: str, axes: dict[str, set[int]] | None
) -> None:
    assert found(tmp_path, inputs, nodes, "<float[1] kernel = {1}>", computes_empty=True) == axes


def test_branches_are_followed(tmp_path: Path) -> None:
    """Such decoders have two forms as branches of one model, with equal names in both."""
    nodes = """y = If (c) <
        then_branch = t () => (float[a,b,d,e] p) { old = Identity (past) p = Concat <axis = 2> (old, new) },
        else_branch = f () => (float[a,b,d,e] q) { old = Neg (fixed) q = Concat <axis = 3> (old, old) }>"""
    axes = found(tmp_path, f"{_PAST}, {_NEW}, bool c, float[1,2,3,4] fixed", nodes)
    assert axes is not None
    assert (axes["past"], axes["new"]) == ({2}, {2})


def test_attention_appends_to_an_empty_past_by_itself(tmp_path: Path) -> None:
    nodes = "a, k, v = Attention (new, new, new, mask, past, past) y = Concat <axis = 3> (a, a)"
    axes = found(tmp_path, f"{_PAST}, {_NEW}, float[1,1] mask", nodes)
    assert axes is not None
    assert (axes["past"], axes["new"]) == ({0, 2}, set())


def test_attention_that_is_a_function_appends_to_a_past_of_no_steps_only(tmp_path: Path) -> None:
    nodes = "y, k, v = Attention (new, new, new, , past, past)"
    axes = found(tmp_path, f"{_PAST}, {_NEW}", nodes, opset=25)
    assert axes is not None
    assert (axes["past"], axes["new"]) == ({2}, {2})


@pytest.mark.parametrize(
    ("dtype", "axes"),
    [("float16", {"x": {0}, "cache": {0, 1}}), ("float", None)],
)
def test_images_of_normalizations_of_fp16_have_pixels(
    tmp_path: Path, dtype: str, axes: dict[str, set[int]] | None
) -> None:
    inputs = f"{dtype}[batch,2,height,width] x, float[batch,length] cache"
    nodes = "u = Neg (x) y = InstanceNormalization (u, one, one)"
    assert found(tmp_path, inputs, nodes, f"<{dtype}[2] one = {{1, 1}}>") == axes


def test_normalization_with_a_computed_scale_has_the_type_of_its_image(tmp_path: Path) -> None:
    for dtype, axes in (("float16", {0}), ("float", {0, 2})):
        nodes = "s = Neg (scale) y = InstanceNormalization (x, s, s)"
        result = found(tmp_path, f"{dtype}[batch,2,width] x, {dtype}[2] scale", nodes)
        assert result is not None
        assert result["x"] == axes


@pytest.mark.parametrize(("inputs", "heads"), [("float[batch,heads,length,4] q", 1), ("float[batch,length,all] q", 2)])
def test_attention_has_heads(tmp_path: Path, inputs: str, heads: int) -> None:
    axes = found(tmp_path, inputs, "k = Identity (q) y = Attention <q_num_heads=2, kv_num_heads=2> (q, k, k)")
    assert axes == {"q": {0, 1, 2} - {heads}}
