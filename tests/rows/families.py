"""Each family of operators in both directions: models with independent rows, and models with dependent rows.

A line is a name, the inputs, the nodes, and sometimes weights and options of ``Case``.
"""
# A line for each model.
# ruff: noqa: E501
# fmt: off

from typing import Any, Final

from rows.cases import Case
from rows.traps import CHUNK, CHUNK_WEIGHTS, MASK_WEIGHTS, MASKED_WRITE

_IMAGE: Final = "float[N,2,6,6] x"
_SEQUENCE: Final = "float[N,L,8] x"
_X: Final = "float[N,4] x"
_BYTES: Final = "uint8[N,4] x"

APART: Final[list[Case]] = []
MEET: Final[list[Case]] = []


def _apart(name: str, inputs: str, body: str, weights: str = "", **options: Any) -> None:
    APART.append(Case(name, inputs, body, weights, **options))


def _meet(name: str, inputs: str, body: str, weights: str = "", **options: Any) -> None:
    MEET.append(Case(name, inputs, body, weights, **options))


# Elementwise.
_apart("elementwise: unary chain", _X, "a = Relu(x) b = Exp(a) c = Neg(b) y = Tanh(c)")
for _op in ("Abs", "Ceil", "Erf", "Floor", "HardSwish", "Mish", "Round", "Sigmoid", "Sign", "Softplus", "Elu", "Selu"):
    _apart(f"elementwise: {_op}", _X, f"y = {_op}(x)", opset=18)
_apart("elementwise: bias", _X, "y = Add(x, w)", "float[4] w")
_apart("elementwise: bias of rank 2", _X, "y = Add(x, w)", "float[1,4] w")
_apart("elementwise: a column of each row", "float[N,4] x, float[N,1] z", "y = Mul(x, z)")
_apart("elementwise: rows in the middle", "float[2,N,4] x, float[N,1] z", "y = Sub(x, z)")
_apart("elementwise: variadic", "float[N,4] x, float[N,4] z", "a = Max(x, z, w) b = Mean(x, a) y = Sum(b, z, x)", "float[4] w")
_apart("elementwise: where", "bool[N,4] c, float[N,4] x", "y = Where(c, x, w)", "float[4] w")
_apart("elementwise: logic", "float[N,4] x, float[N,4] z", "a = Less(x, z) b = Greater(x, w) c = Or(a, b) y = Not(c)", "float[4] w")
_apart("elementwise: clip and cast", _X, "a = Clip(x, lo, hi) b = Cast<to=7>(a) y = Mod(b, m)", "float lo = {-2}, float hi = {2}, int64 m = {2}")
_apart("elementwise: PRelu", "float[N,3,5] x", "y = PRelu(x, w)", "float[3,1] w")
_apart("elementwise: dropout in inference", _X, "y = Dropout(x, r)", "float r = {0.5}")
_apart("elementwise: fused", _SEQUENCE, "a = com.microsoft.BiasGelu(x, w) b = com.microsoft.FastGelu(a) c = com.microsoft.QuickGelu(b) y = com.microsoft.Gelu(c)", "float[8] w")
_apart("elementwise: a mask as long as two sequences together", "float[N,A,2] x, float[N,B,2] z, float[N,C] m", "c = Concat<axis=1>(x, z) r = ReduceSum<keepdims=0>(c, two) a = Add(r, m) g = Unsqueeze(a, one) e = Expand(g, heads) l = Shape<start=1, end=2>(c) t = Concat<axis=0>(less, l) f = Reshape(e, t) p = Softmax<axis=1>(f) k = Concat<axis=0>(less, two, l) y = Reshape(p, k)", "int64[1] two = {2}, int64[1] one = {1}, int64[1] less = {-1}, int64[3] heads = {1, 2, 1}", sizes={"A": 2, "B": 3, "C": 5})
_apart("elementwise: the bits of numbers", _X, "a = BitCast<to=6>(x) b = BitwiseNot(a) y = BitCast<to=1>(b)", opset=26)
_apart("elementwise: texts", "string[N,3] x", "y = Equal(x, w)", 'string[1] w = {"red"}', opset=19)
_meet("elementwise: a column and a vector", "float[N,1] x, float[N] z", "y = Sub(x, z)")
_meet("elementwise: rows on two axes", "float[N,1] x, float[1,N] z", "y = Add(x, z)")
_meet("elementwise: a constant of three rows", _X, "y = Add(x, w)", "float[3,4] w")
_meet("elementwise: a bias along the rows", "float[1,N] x", "y = com.microsoft.BiasGelu(x, w)", "float[1] w")
_meet("elementwise: unequal shapes, before opset 8", _X, "y = Sum(x, w)", "float[1,4] w", opset=7)
_meet("elementwise: bounds of rows", "float[N] x, float[N] z", "y = Clip(x, z)")
_meet("elementwise: a condition of three rows", _X, "y = Where(c, x, w)", "bool[3,1] c = {1, 0, 1}, float[4] w")

# Matrix products.
_apart("matmul: weights", _X, "y = MatMul(x, w)", "float[4,3] w")
_apart("matmul: a vector", _X, "y = MatMul(x, w)", "float[4] w")
_apart("matmul: both sides", "float[N,3,4] x, float[N,4,2] z", "y = MatMul(x, z)")
_apart("matmul: weights for each head", "float[N,2,3,4] x", "y = MatMul(x, w)", "float[2,4,3] w")
_apart("matmul: rows as columns", "float[4,N] x", "y = MatMul(w, x)", "float[3,4] w")
_apart("matmul: Gemm", _X, "y = Gemm<transB=1, alpha=0.5>(x, w, b)", "float[3,4] w, float[3] b")
_apart("matmul: Gemm of columns", "float[4,N] x", "y = Gemm<transA=1>(x, w)", "float[4,3] w")
_apart("matmul: Gemm with a bias of rows", "float[N,4] x, float[N,3] z", "y = Gemm(x, w, z)", "float[4,3] w")
_apart("matmul: integers", _BYTES, "y = MatMulInteger(x, w, a, b)", "int8[4,3] w, uint8 a = {3}, int8 b = {1}")
_apart("matmul: QLinearMatMul", _BYTES, "y = QLinearMatMul(x, s, z, w, s, z, s, z)", "uint8[4,3] w, float s = {0.5}, uint8 z = {2}")
_apart("matmul: FusedMatMul", _X, "y = com.microsoft.FusedMatMul<transB=1>(x, w)", "float[3,4] w")
_apart("matmul: MatMulIntegerToFloat", _BYTES, "y = com.microsoft.MatMulIntegerToFloat(x, w, s, s)", "uint8[4,3] w, float s = {0.5}")
_meet("matmul: rows are summed", "float[4,N] x, float[N,3] z", "y = MatMul(x, z)")
_meet("matmul: all rows by all", "float[N,4] x, float[4,N] z", "y = MatMul(x, z)")
_meet("matmul: matrices of rows by stacks of rows", "float[N,4] x, float[N,4,3] z", "y = MatMul(x, z)")
_meet("matmul: weights for two rows", "float[N,3,4] x", "y = MatMul(x, w)", "float[2,4,3] w")
_meet("matmul: Gemm of all by all", "float[N,4] x, float[N,4] z", "y = Gemm<transB=1>(x, z)")
_meet("matmul: Gemm over rows", "float[N,4] x, float[N,3] z", "y = Gemm<transA=1>(x, z)")
_meet("matmul: FusedMatMul over rows", "float[N,4] x, float[N,3] z", "y = com.microsoft.FusedMatMul<transA=1>(x, z)")

# Einsum.
_apart("einsum: weights", _X, 'y = Einsum<equation="bi,io->bo">(x, w)', "float[4,3] w")
_apart("einsum: attention scores", "float[N,3,4] x, float[N,5,4] z", 'y = Einsum<equation="bqd,bkd->bqk">(x, z)')
_apart("einsum: dot product", "float[N,4] x, float[N,4] z", 'y = Einsum<equation="bi,bi->b">(x, z)')
_apart("einsum: rows moved", "float[N,3,4] x", 'y = Einsum<equation="bij->jbi">(x)')
_apart("einsum: ellipsis of several axes", "float[N,3,4] x", 'y = Einsum<equation="...i,io->...o">(x, w)', "float[4,2] w")
_apart("einsum: ellipses of different lengths", "float[N,3,4] x", 'y = Einsum<equation="b...i,...i->b...">(x, w)', "float[3,4] w")
_apart("einsum: ellipsis of rows with rows", "float[N,3,4] x, float[N,4,2] z", 'y = Einsum<equation="...ij,...jk->...ik">(x, z)')
_apart("einsum: ellipsis without a result", "float[N,3,4] x", 'y = Einsum<equation="...ij,jk">(x, w)', "float[4,2] w")
_apart("einsum: positions for all rows, as relative attention has them", "float[5,N,2,4] q", 'y = Einsum<equation="ibnd,jbnd->bnij">(q, w)', "float[6,1,2,4] w")
_meet("einsum: positions for each of three rows", "float[5,N,2,4] q", 'y = Einsum<equation="ibnd,jbnd->bnij">(q, w)', "float[6,3,2,4] w")
_meet("einsum: ellipsis of rows beside rows", "float[N,3,4] x, float[N,4] z", 'y = Einsum<equation="n...,...->n...">(x, z)', feeds={"z": [[[1.0] * 4]] * 3})
_meet("einsum: ellipsis that pairs rows with entries", "float[N,4] x", 'y = Einsum<equation="...i,...i->...i">(x, w)', "float[3,4] w")
_meet("einsum: summed rows", _X, 'y = Einsum<equation="bi->i">(x)')
_meet("einsum: outer product", "float[N,4] x, float[N,4] z", 'y = Einsum<equation="bi,ci->bc">(x, z)')
_meet("einsum: rows contracted", "float[N,4] x, float[N,3] z", 'y = Einsum<equation="bi,bj->ij">(x, z)')

# Convolution and pooling.
_apart("conv: Conv", _IMAGE, "y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)", "float[3,2,3,3] w, float[3] b")
_apart("conv: over a free length", "float[N,2,L] x", "y = Conv<kernel_shape=[3], strides=[2]>(x, w)", "float[3,2,3] w")
_apart("conv: ConvTranspose", _IMAGE, "y = ConvTranspose<kernel_shape=[2,2], strides=[2,2]>(x, w)", "float[2,3,2,2] w")
_apart("conv: ConvInteger", "uint8[N,2,6,6] x", "y = ConvInteger(x, w)", "uint8[3,2,3,3] w")
_apart("conv: QLinearConv", "uint8[N,2,6,6] x", "y = QLinearConv(x, s, z, w, s, z, s, z)", "uint8[3,2,3,3] w, float s = {0.5}, uint8 z = {2}")
_apart("conv: FusedConv", _IMAGE, 'y = com.microsoft.FusedConv<activation="Relu">(x, w)', "float[3,2,3,3] w")
_apart("conv: pools", _IMAGE, "a = MaxPool<kernel_shape=[2,2]>(x) b = AveragePool<kernel_shape=[2,2]>(a) y1 = GlobalMaxPool(b) y2 = GlobalAveragePool(b) y3 = LpPool<kernel_shape=[2,2]>(x)")
_meet("conv: rows along the image", "float[1,2,N,6] x", "y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w)", "float[3,2,3,3] w")
_meet("conv: max over rows", "float[1,2,N,6] x", "y = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)")
_meet("conv: mean of all rows", "float[1,2,N,6] x", "y = GlobalAveragePool(x)")

# Normalization.
_apart("normalization: batch", "float[N,3,5] x", "y = BatchNormalization(x, s, b, m, v)", "float[3] s, float[3] b, float[3] m, float[3] v = {1, 2, 3}")
_apart("normalization: instance", "float[N,3,5] x", "y = InstanceNormalization(x, s, b)", "float[3] s, float[3] b")
_apart("normalization: group", "float[N,4,5] x", "y = GroupNormalization<num_groups=2>(x, s, b)", "float[4] s, float[4] b", opset=21)
_apart("normalization: layer", _SEQUENCE, "y = LayerNormalization<axis=-1>(x, s, b)", "float[8] s, float[8] b")
_apart("normalization: RMS", _SEQUENCE, "y = RMSNormalization<axis=-1>(x, s)", "float[8] s", opset=23)
_apart("normalization: Lp", _X, "y = LpNormalization<axis=1>(x)")
_apart("normalization: LRN", "float[N,4,5,5] x", "y = LRN<size=3>(x)")
_apart("normalization: mean and variance", "float[N,3,4,4] x", "y = MeanVarianceNormalization<axes=[2,3]>(x)")
_apart("normalization: skip and layer", "float[N,L,8] x, float[N,L,8] z", "y = com.microsoft.SkipLayerNormalization(x, z, s, b)", "float[8] s, float[8] b")
_apart("normalization: skip and RMS", "float[N,L,8] x, float[N,L,8] z", "y = com.microsoft.SkipSimplifiedLayerNormalization(x, z, s)", "float[8] s")
_meet("normalization: skip of one row of a matrix", "float[N,8] x", "y = com.microsoft.SkipLayerNormalization(x, w, s)", "float[1,8] w, float[8] s")
_meet("normalization: batch in training", "float[N,3,5] x", "y, a, c = BatchNormalization<training_mode=1>(x, s, b, m, v)", "float[3] s, float[3] b, float[3] m, float[3] v = {1, 2, 3}")
_meet("normalization: batch, with one channel a row", "float[2,N,4] x", "y = BatchNormalization(x, s, b, m, v)", "float[1] s, float[1] b, float[1] m, float[1] v = {1}")
_meet("normalization: instance over rows", "float[1,3,N] x", "y = InstanceNormalization(x, s, b)", "float[3] s, float[3] b", feeds={"x": [[[[1], [2], [3]]], [[[9], [8], [5]]], [[[4], [0], [2]]]]})
_meet("normalization: Lp over rows", _X, "y = LpNormalization<axis=0>(x)")
_meet("normalization: LRN over rows", "float[1,N,5,5] x", "y = LRN<size=3, alpha=0.5>(x)")
_meet("normalization: mean and variance over all", "float[N,3,4,4] x", "y = MeanVarianceNormalization(x)")

# Softmax.
for _op in ("Softmax", "LogSoftmax", "Hardmax"):
    _apart(f"softmax: {_op}", _X, f"y = {_op}(x)")
    _apart(f"softmax: {_op} over all of a row", "float[N,3,4] x", f"y = {_op}(x)", opset=12)
    _meet(f"softmax: {_op} over rows", _X, f"y = {_op}<axis=0>(x)")
    _meet(f"softmax: {_op} over rows in the middle", "float[3,N,4] x", f"y = {_op}(x)", opset=12)
_meet("softmax: counted from the end", "float[N,4] x", "y = Softmax<axis=-2>(x)")

# Reductions.
for _op in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare"):
    _apart(f"reduce: {_op}", "float[N,3,4] x", f"y = Reduce{_op}<keepdims=0>(x, a)", "int64[1] a = {-2}", opset=18)
    _meet(f"reduce: {_op} of all", _X, f"y = Reduce{_op}<keepdims=0>(x)", opset=18)
    _meet(f"reduce: {_op} over rows", _X, f"y = Reduce{_op}(x, a)", "int64[1] a = {-2}", opset=18)
_meet("reduce: a flag of 2, which counts as 0", _X, "y = ReduceSum<noop_with_empty_axes=2>(x)", opset=13)
_apart("reduce: LogSum", "float[N,3,4] x", "b = Abs(x) y = ReduceLogSum<keepdims=1>(b, a)", "int64[2] a = {1, 2}", opset=18)
_apart("reduce: axes as an attribute", "float[N,3,4] x", "y = ReduceMean<axes=[1,2], keepdims=0>(x)", opset=13)
_apart("reduce: nothing", _X, "y = ReduceSum<noop_with_empty_axes=1>(x)", opset=13)
_apart("reduce: rows move to the front", "float[3,N,4] x", "y = ReduceMax<axes=[0], keepdims=0>(x)")
_apart("reduce: ArgMax and ArgMin", "float[N,4] x", "y1 = ArgMax<axis=1, keepdims=0>(x) y2 = ArgMin<axis=-1>(x)")
_meet("reduce: ArgMax over rows", _X, "y = ArgMax<axis=0>(x)")
_meet("reduce: ArgMax by default", _X, "y = ArgMax(x)")

# Operators along one axis.
_apart("axis: TopK", _X, "y1, y2 = TopK(x, k)", "int64[1] k = {2}")
_apart("axis: CumSum", _X, "y = CumSum(x, a)", "int64 a = {1}")
_apart("axis: OneHot", "int64[N,3] x", "y = OneHot(x, d, v)", "int64 d = {4}, float[2] v = {0, 1}")
_apart("axis: OneHot in front", "int64[N,3] x", "y = OneHot<axis=0>(x, d, v)", "int64 d = {4}, float[2] v = {0, 1}")
_apart("axis: Trilu", "float[N,3,3] x", "y = Trilu(x)")
_apart("axis: Det", "float[N,3,3] x", "y = Det(x)")
_apart("axis: space and depth", "float[N,4,2,2] x", "a = DepthToSpace<blocksize=2>(x) y = SpaceToDepth<blocksize=2>(a)")
_apart("axis: DFT", "float[N,8,1] x", "y = DFT<axis=1>(x)")
_apart("axis: half of a DFT, with its real and imaginary parts", "float[N,9,1] x", "d = DFT<axis=1, onesided=1>(x) y = Reshape(d, s)", "int64[2] s = {-1, 10}")
_apart("axis: DFT and its inverse", "float[N,8,1] x", "d = DFT<axis=1>(x) e = DFT<axis=1, inverse=1>(d) y = Reshape(e, s)", "int64[2] s = {-1, 16}")
_apart("axis: STFT", "float[N,16,1] x", "y = STFT(x, s, , l)", "int64 s = {4}, int64 l = {8}")
_apart("axis: STFT with a window, as one vector", "float[N,16,1] x", "t = STFT(x, s, w, l) y = Reshape(t, v)", "int64 s = {3}, float[8] w, int64 l = {8}, int64[2] v = {-1, 30}")
_apart("axis: STFT with all of its parts, as one vector", "float[N,16,1] x", "t = STFT<onesided=0>(x, s, , l) y = Reshape(t, v)", "int64 s = {4}, int64 l = {8}, int64[2] v = {-1, 48}")
_apart("axis: ReverseSequence", "float[N,4] x, int64[N] lengths", "y = ReverseSequence<batch_axis=0, time_axis=1>(x, lengths)")
_meet("axis: TopK over rows", _X, "y, i = TopK<axis=0>(x, k)", "int64[1] k = {1}")
_meet("axis: CumSum over rows", _X, "y = CumSum(x, a)", "int64 a = {0}")
_meet("axis: Trilu over rows", _X, "y = Trilu(x)")
_meet("axis: DFT over rows", "float[N,4,1] x", "y = DFT<axis=0>(x)")

# Reshape and Flatten.
_apart("reshape: the rest in one", "float[N,2,3] x", "y = Reshape(x, s)", "int64[2] s = {0, -1}")
_apart("reshape: rows by -1", "float[N,2,3] x", "y = Reshape(x, s)", "int64[2] s = {-1, 6}")
_apart("reshape: Flatten", "float[N,2,3] x", "y = Flatten(x)")
_apart("reshape: heads and back", _SEQUENCE, "a = Reshape(x, s) b = Transpose<perm=[0,2,1,3]>(a) c = Relu(b) d = Transpose<perm=[0,2,1,3]>(c) y = Reshape(d, t)", "int64[4] s = {0, 0, 2, 4}, int64[3] t = {0, 0, 8}")
_apart("reshape: heads among the rows", "float[N,2,L,4] x, float[N,2,L,4] z", "s = Shape(x) a = Reshape(x, t) b = Reshape(z, t) c = Transpose<perm=[0,2,1]>(b) d = MatMul(a, c) e = Softmax(d) f = MatMul(e, b) y = Reshape(f, s)", "int64[3] t = {-1, 5, 4}")
_apart("reshape: tokens among the rows", _SEQUENCE, "s = Shape(x) a = Reshape(x, t) b = MatMul(a, w) y = Reshape(b, s)", "int64[2] t = {-1, 8}, float[8,8] w")
_apart("reshape: a computed target", _SEQUENCE, "s = Shape(x) n = Gather(s, i0) l = Gather(s, i1) m = Mul(l, e) u = Unsqueeze(n, i2) v = Unsqueeze(m, i2) t = Concat<axis=0>(u, v) y = Reshape(x, t)", "int64 i0 = {0}, int64 i1 = {1}, int64 e = {8}, int64[1] i2 = {0}")
_apart("reshape: rows in the middle", "float[2,N,6] x", "y = Reshape(x, s)", "int64[4] s = {2, -1, 2, 3}")
_apart("reshape: windows and back", "float[N,4,4,2] x", "a = Reshape(x, s) b = Transpose<perm=[0,1,3,2,4,5]>(a) c = Reshape(b, t) d = Softmax(c) e = Reshape(d, u) f = Transpose<perm=[0,1,3,2,4,5]>(e) y = Reshape(f, v)", "int64[6] s = {-1,2,2,2,2,2}, int64[3] t = {-1,4,2}, int64[6] u = {-1,2,2,2,2,2}, int64[4] v = {-1,4,4,2}")
_apart("reshape: windows of a convolution, whose number is computed", "float[N,2,L] x", "l = Shape<start=2, end=3>(x) k = Sub(l, two) c = Conv(x, w) t = Transpose<perm=[2,0,1]>(c) n = Shape<start=0, end=1>(x) m = Mul(n, two) h = Concat<axis=0>(k, m, two) f = Reshape(t, h) g = Transpose<perm=[1,0,2]>(f) p = Softmax(g) q = Transpose<perm=[1,0,2]>(p) r = Concat<axis=0>(k, n, four) u = Reshape(q, r) y = Transpose<perm=[1,0,2]>(u)", "float[4,2,3] w, int64[1] two = {2}, int64[1] four = {4}")
_apart("reshape: patches of an image of any size, with time in front", "float[N,H,W,4] x", "s = Shape(x) h = Slice(s, one, two) w = Slice(s, two, three) n = Slice(s, zero, one) h2 = Div(h, two) w2 = Div(w, two) k = Concat<axis=0>(n, h2, two, w2, two, four) a = Reshape(x, k) b = Transpose<perm=[0,1,3,2,4,5]>(a) m = Concat<axis=0>(n, less, p) c = Reshape(b, m) d = Transpose<perm=[1,0,2]>(c) t = Shape(d) l = Slice(t, zero, one) n2 = Mul(n, two) g = Concat<axis=0>(l, n2, e) f = Reshape(d, g) y = Reshape(f, t)", "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] four = {4}, int64[1] less = {-1}, int64[1] p = {16}, int64[1] e = {8}", sizes={"H": 4, "W": 6})
_apart("reshape: time in front of the rows, and a length that may be 0", "float[N,M,4] x", "c = Slice(x, one, end, one) d = Transpose<perm=[1, 0, 2]>(c) a = Reshape(d, flat) w = Tanh(a) m = Shape<start=1, end=2>(c) n = Shape<start=0, end=1>(x) t = Concat<axis=0>(m, n, four) e = Reshape(w, t) y = Transpose<perm=[1, 0, 2]>(e)", "int64[1] one = {1}, int64[1] end = {99}, int64[2] flat = {-1, 4}, int64[1] four = {4}", sizes={"M": 3})
_apart("reshape: time in front of the rows, and a length that is 0", "float[N,M,4] x", "c = Slice(x, one, end, one) d = Transpose<perm=[1, 0, 2]>(c) m = Shape<start=1, end=2>(c) n = Shape<start=0, end=1>(x) p = Mul(m, n) f = Concat<axis=0>(p, four) a = Reshape(d, f) w = Tanh(a) t = Concat<axis=0>(m, n, four) e = Reshape(w, t) y = Transpose<perm=[1, 0, 2]>(e)", "int64[1] one = {1}, int64[1] end = {99}, int64[1] four = {4}", sizes={"M": 1})
_meet("reshape: softmax over heads among the rows", "float[N,2,4] x", "s = Shape(x) a = Reshape(x, t) b = Softmax<axis=0>(a) y = Reshape(b, s)", "int64[2] t = {-1, 4}")
_meet("reshape: all in one row", _X, "s = Shape(x) a = Reshape(x, t) b = Softmax<axis=1>(a) y = Reshape(b, s)", "int64[2] t = {1, -1}")
_meet("reshape: Flatten of all", _X, "s = Shape(x) a = Flatten<axis=0>(x) b = Softmax<axis=1>(a) y = Reshape(b, s)")
_meet("reshape: rows and columns changed", "float[4,N] x", "y = Reshape(x, s)", "int64[2] s = {-1, 4}")

# Axes moved.
_apart("move: Transpose", "float[N,3,4] x", "y = Transpose<perm=[1,0,2]>(x)")
_apart("move: Transpose by default", "float[N,3,4] x", "y = Transpose(x)")
_apart("move: Unsqueeze and Squeeze", _X, "a = Unsqueeze(x, i) b = Relu(a) y = Squeeze(b, i)", "int64[2] i = {0, -1}")
_apart("move: axes as an attribute", _X, "a = Unsqueeze<axes=[0]>(x) y = Squeeze<axes=[0]>(a)", opset=11)
_meet("move: Squeeze without axes", "float[N,4,1] x", "y = Squeeze(x)", opset=13)
_meet("move: Squeeze with an empty list of axes", "float[N,4,1] x", "y = Squeeze(x, e)", "int64[0] e")
_meet("move: transposed memory", "float[N,4] x", "a = Transpose(x) y = Reshape(a, s)", "int64[2] s = {-1, 4}")

# Made larger.
_apart("expand: a token for each row", _SEQUENCE, "s = Shape<start=0, end=1>(x) t = Concat<axis=0>(s, r) c = Expand(w, t) y = Concat<axis=1>(c, x)", "float[1,1,8] w, int64[2] r = {1, 8}")
_apart("expand: within the row", "float[N,1,4] x", "y = Expand(x, s)", "int64[3] s = {1, 3, 1}")
_apart("expand: ConstantOfShape", _X, "s = Shape(x) c = ConstantOfShape<value=float[1]{2}>(s) y = Add(x, c)")
_apart("expand: Tile within the row", _X, "y = Tile(x, r)", "int64[2] r = {1, 3}")
_apart("expand: repeats that are split again", _X, "a = Tile(x, r) b, c = Split<axis=0>(a) y = Sub(b, c)", "int64[2] r = {2, 1}")
_meet("expand: rows repeated", _X, "y = Tile(x, r)", "int64[2] r = {2, 1}")
_meet("expand: as often as there are rows", _X, "n = Shape<start=0, end=1>(x) r = Concat<axis=0>(n, o) y = Tile(x, r)", "int64[1] o = {1}")
_meet("expand: rows on a second axis", "float[N,1] x", "n = Shape<start=0, end=1>(x) s = Concat<axis=0>(n, n) y = Expand(x, s)")
_meet("expand: to three rows", _X, "y = Expand(x, s)", "int64[2] s = {3, 4}")

# Parts.
_apart("slice: within the row", _X, "y = Slice(x, s, e, a)", "int64[1] s = {1}, int64[1] e = {3}, int64[1] a = {1}")
_apart("slice: all rows", _X, "y = Slice(x, s, e, a)", "int64[2] s = {0, 0}, int64[2] e = {9223372036854775807, 2}, int64[2] a = {0, 1}")
_apart("slice: as attributes", _X, "y = Slice<starts=[0], ends=[2], axes=[1]>(x)", opset=9)
_apart("slice: positions and a mask cut behind a past", "float[N,L,8] ids, float[N,2,P,4] past", "l = Shape<start=1, end=2>(ids) f = Shape<start=2, end=3>(past) v = Add(f, l) z = Slice(wpe, f, v, zero) x = Add(ids, z) h = Reshape(x, heads) q = Transpose<perm=[0, 2, 1, 3]>(h) k = Concat<axis=2>(past, q) e = Shape<start=2, end=3>(k) b = Sub(e, l) m = Slice(w, b, e, two) c = Slice(m, zero, e, three) t = Transpose<perm=[0, 1, 3, 2]>(k) s = MatMul(q, t) a = Add(s, c) p = Softmax(a) o = MatMul(p, k) u = Transpose<perm=[0, 2, 1, 3]>(o) n = Shape<start=0, end=1>(ids) g = Concat<axis=0>(n, l, eight) r = Reshape(u, g) d = Add(r, x) j = Reshape(d, heads) y = Reshape(j, less)", "float[16,8] wpe, float[1,1,16,16] w, int64[4] heads = {0, 0, 2, 4}, int64[1] two = {2}, int64[1] three = {3}, int64[1] zero = {0}, int64[1] eight = {8}, int64[3] less = {0, -1, 8}")
_apart("slice: a table cut to the length", _SEQUENCE, "l = Shape<start=1, end=2>(x) p = Slice(w, z, l, o) y = Add(x, p)", "float[1,77,8] w, int64[1] z = {0}, int64[1] o = {1}")
_apart("slice: Split within the row", _X, "y1, y2 = Split<axis=1>(x)")
_apart("slice: Split of stacked rows", "float[N,4] x, float[N,4] z", "a = Concat<axis=0>(x, z) b = Relu(a) y1, y2 = Split<axis=0>(b)")
_apart("slice: chunks of stacked rows", "float[N,4] x, float[N,4] z", f"j = Concat<axis=0>(x, z) c = Relu(j) {CHUNK}", CHUNK_WEIGHTS)
_apart("slice: Pad within the row", _X, "y = Pad(x, p)", "int64[4] p = {0, 1, 0, 2}")
_meet("slice: the first row", _X, "y = Slice(x, s, e, a)", "int64[1] s = {0}, int64[1] e = {1}, int64[1] a = {0}")
_meet("slice: rows reversed", _X, "y = Slice(x, s, e, a, t)", "int64[1] s = {-1}, int64[1] e = {-9223372036854775807}, int64[1] a = {0}, int64[1] t = {-1}")
_meet("slice: a table cut to the rows", _X, "n = Shape<start=0, end=1>(x) p = Slice(w, z, n) y = Add(x, p)", "float[64,4] w, int64[1] z = {0}")
_meet("slice: interleaved halves", "float[N,2,4] x", "a = Reshape(x, s) y1, y2 = Split<axis=0>(a)", "int64[2] s = {-1, 4}")
_meet("slice: Pad with a row", _X, "y = Pad(x, p)", "int64[4] p = {1, 0, 0, 0}")

# Concat.
_apart("concat: within the row", "float[N,4] x, float[N,3] z", "y = Concat<axis=1>(x, z)")
_apart("concat: texts", "string[N,1] x, string[N,2] z", "y = Concat<axis=-1>(x, z)")
_meet("concat: along the rows", "float[N,4] x, float[N,4] z", "y = Concat<axis=0>(x, z)")
_meet("concat: one more row", _X, "y = Concat<axis=0>(x, w)", "float[1,4] w")

# Gather and Scatter.
_apart("gather: columns", _X, "y = Gather<axis=1>(x, i)", "int64[2] i = {3, -1}")
_apart("gather: an embedding", "int64[N,L] x", "y = Gather(w, x)", "float[5,3] w")
_apart("gather: the first token", _SEQUENCE, "y = Gather<axis=1>(x, i)", "int64 i = {0}")
_apart("gather: elements", "float[N,4] x, int64[N,2] i", "y = GatherElements<axis=1>(x, i)")
_apart("gather: scattered elements", "float[N,4] x, int64[N,1] i, float[N,1] z", "y = ScatterElements<axis=1>(x, i, z)")
_apart("gather: GatherND with a batch", "float[N,4] x, int64[N,1] i", "y = GatherND<batch_dims=1>(x, i)")
_apart("gather: by the row's own number", "float[N,L,8] x, int64[N,L] ids", "n = Shape<start=0, end=1>(x) m = Squeeze(n) r = Range(z, m, o) a = ArgMax<axis=1, keepdims=0>(ids) u = Unsqueeze(r, k) v = Unsqueeze(a, k) t = Concat<axis=1>(u, v) y = GatherND(x, t)", "int64 z = {0}, int64 o = {1}, int64[1] k = {-1}")
_apart("gather: a flat index", "float[N,5,8] x, int64[N,5] ids", "n = Shape<start=0, end=1>(x) m = Squeeze(n, z) r = Range(zz, m, o) a = ArgMax<axis=1, keepdims=0>(ids) b = Mul(r, l) c = Add(a, b) f = Reshape(x, s) y = Gather(f, c)", "int64[1] z = {0}, int64 zz = {0}, int64 o = {1}, int64 l = {5}, int64[2] s = {-1, 8}")
_apart("gather: a flat index into a grid of padded sizes", "float[N,A,B,2] x", "p = Pad(x, w) g = Reshape(p, r) l = Shape<start=1, end=2>(g) m = Squeeze(l, zero1) i = Range(zero, m, one) j = Add(i, zero) n = Shape<start=0, end=1>(x) o = Squeeze(n, zero1) k = Range(zero, o, one) u = Unsqueeze(k, one1) b = Mul(u, l) c = Add(b, j) f = Reshape(g, flat) y = Gather(f, c)", "int64[8] w = {0, 0, 0, 0, 0, 1, 1, 0}, int64[3] r = {0, -1, 2}, int64 zero = {0}, int64 one = {1}, int64[1] zero1 = {0}, int64[1] one1 = {1}, int64[2] flat = {-1, 2}", sizes={"A": 2, "B": 3})
_apart("gather: a flat index of some entries", "float[N,5,8] x, int64[N,3] ids", "n = Shape<start=0, end=1>(x) m = Squeeze(n, z) r = Range(zz, m, o) a = ArgMax<axis=1, keepdims=0>(ids) b = Mul(r, l) c = Add(a, b) f = Reshape(x, s) y = Gather(f, c)", "int64[1] z = {0}, int64 zz = {0}, int64 o = {1}, int64 l = {5}, int64[2] s = {-1, 8}")
_apart("gather: repeats by OneHot", "float[N,3] x, float[N,K,3] z", "k = Shape<start=1, end=2>(z) v = Concat<axis=0>(one, k) h = OneHot(one, three, v) r = Reshape(h, flat) u = Unsqueeze(x, one) t = Tile(u, r) y = Add(t, z)", "int64[1] one = {1}, int64 three = {3}, int64[1] flat = {-1}", sizes={"K": 2})
_apart("gather: repeats by OneHot of a negative index", _X, "h = OneHot<axis=-1>(i, depth, v) r = Reshape(h, flat) t = Tile(x, r) y = Relu(t)", "int64[1] i = {-1}, int64 depth = {2}, int64[2] v = {1, 3}, int64[1] flat = {-1}")
_meet("gather: repeats of the rows by OneHot", _X, "k = Shape<start=0, end=1>(x) v = Concat<axis=0>(one, k) h = OneHot(one, two, v) r = Reshape(h, flat) t = Tile(x, r) y = ReduceSum(t, one)", "int64[1] one = {1}, int64 two = {2}, int64[1] flat = {-1}")
_meet("gather: the first row", _X, "y = Gather(x, i)", "int64[1] i = {0}")
_meet("gather: the last row", _X, "a = Gather(x, i) y = Add(x, a)", "int64 i = {-1}")
_meet("gather: rows by rows", "float[N,4] x, int64[N] i", "y = Gather(x, i)", feeds={"i": [[0], [-1], [-1]]})
_meet("gather: elements over rows", "float[N,4] x, int64[N,4] i", "y = GatherElements<axis=0>(x, i)", feeds={"i": [[[0, -1, 0, 0]], [[-1, 0, 0, -1]], [[0, 0, 0, 0]]]})
_meet("gather: GatherND without a batch", "float[N,4] x, int64[N,1] i", "y = GatherND(x, i)", feeds={"i": [[[0]], [[-1]], [[-1]]]})
_apart("gather: columns of quantized blocks", "int64[N] i", "y = com.microsoft.GatherBlockQuantized<gather_axis=1, quantize_axis=0, block_size=16>(w, i, s)", "uint4[32,4] w, float[2,4] s")
_apart("gather: a cache that is updated", "float[N,2,6,4] p, float[N,2,3,4] x, int64[N] i", "y = TensorScatter(p, x, i)", opset=24)
_apart("gather: a ring that is updated", "float[N,6,4] p, float[N,3,4] x, int64[N] i", "y = TensorScatter<axis=1, mode=\"circular\">(p, x, i)", opset=24, below=6)
_meet("gather: a ring of rows that is updated", "float[2,N,4] p, float[2,N,4] x", "y = TensorScatter<mode=\"circular\">(p, x, i)", "int64[2] i = {1, 1}", opset=24)
_meet("gather: scattered over rows", "float[N,4] x, int64[N,4] i, float[N,4] z", "y = ScatterElements<axis=0>(x, i, z)", feeds={"i": [[[0, 0, 0, 0]], [[0, 0, -1, -1]], [[0, 0, 0, 0]]]})
_apart("reshape: a table cut to the length, which is called like it", "float[N,L,4] x", "l = Shape<start=1, end=2>(x) p = Slice(w, zero, l, zero) a = Add(x, p) f = Flatten<axis=2>(a) s = Shape(x) r = Reshape(f, s) y = Softmax<axis=1>(r)", "float[9,4] w, int64[1] zero = {0}, float[L,4] p")
_apart("quantized: a size that is quantized anew", "float[N,4] x", "l = Shape<start=1, end=2>(x) k = Cast<to=2>(l) c = com.microsoft.QLinearConcat<axis=0>(half, zero, k, one, zero) f = Cast<to=1>(c) y = Mul(x, f)", "float half = {0.5}, float one = {1}, uint8 zero = {0}")
_apart("reshape: windows of windows", "float[N,1,L] x", "c = Conv<strides=[5], kernel_shape=[10]>(x, w) d = Conv<strides=[2], kernel_shape=[3]>(c, v) l = Shape<start=2, end=3>(x) q = Div(l, ten) m = Sub(q, one) n = Shape<start=0, end=1>(x) t = Concat<axis=0>(n, m, less) y = Reshape(d, t)", "float[1,1,10] w, float[1,1,3] v, int64[1] ten = {10}, int64[1] one = {1}, int64[1] less = {-1}", sizes={"L": 43})
_apart("copies: Expand to windows of windows", "float[N,1,L] x", "c = Conv<strides=[5], kernel_shape=[10]>(x, w) l = Shape<start=2, end=3>(x) q = Div(l, five) m = Sub(q, one) i = Squeeze(m) r = Range(zero, i, step) g = Cast<to=1>(r) n = Shape<start=0, end=1>(x) t = Concat<axis=0>(n, one, m) e = Expand(g, t) a = Add(c, e) y = Reshape(a, t)", "float[1,1,10] w, int64[1] five = {5}, int64[1] one = {1}, int64 zero = {0}, int64 step = {1}", sizes={"L": 43})
_apart("reshape: the square of a length", "float[N,L,L,2] x", "l = Shape<start=1, end=2>(x) q = Pow(l, two) n = Shape<start=0, end=1>(x) t = Concat<axis=0>(n, q, two) y = Reshape(x, t)", "int64[1] two = {2}")
_apart("reshape: positions in a square grid", "float[N,4,3] x", "r = Pow(n, h) w = Cast<to=7>(r) q = Sqrt(n) v = Cast<to=7>(q) t = Concat<axis=0>(one, w, v, c) p = Reshape(k, t) u = Reshape(p, flat) y = Add(x, u)", "float[1] n = {4}, float h = {0.5}, int64[1] one = {1}, int64[1] c = {3}, float[1,4,3] k, int64[3] flat = {1, -1, 3}")
_meet("reshape: a grid with the root of the number of rows", "float[N,4] x", "s = Shape<start=0, end=1>(x) f = Cast<to=1>(s) r = Sqrt(f) y = Add(x, r)")

# Resize.
_apart("resize: scales", "float[N,1,4,4] x", "y = Resize(x, , s)", "float[4] s = {1, 1, 2, 2}")
_apart("resize: sizes from the shape", "float[N,1,4,4] x", "n = Shape<start=0, end=2>(x) t = Concat<axis=0>(n, h) y = Resize(x, , , t)", "int64[2] h = {8, 6}")
_apart("resize: Upsample", "float[N,1,4,4] x", "y = Upsample(x, s)", "float[4] s = {1, 1, 2, 2}", opset=9)
_apart("resize: linear", "float[N,1,4,4] x", 'y = Resize<mode="linear">(x, , s)', "float[4] s = {1, 1, 2, 2}")
_apart("resize: linear, rows as channels", "float[1,N,4,4] x", 'y = Resize<mode="linear">(x, , s)', "float[4] s = {1, 1, 2, 2}")
_apart("resize: rows as pixels, which are copied", _X, "y = Resize(x, , s)", "float[2] s = {1, 2}")
_apart("resize: samples of a grid", "float[N,2,4,4] x, float[N,3,5,2] g", "y = GridSample(x, g)", opset=20)
_apart("resize: samples of a grid in a volume", "float[N,2,3,4,4] x, float[N,2,3,5,3] g", "y = GridSample(x, g)", opset=20)
_apart("resize: samples of a grid of com.microsoft", "float[N,2,4,4] x, float[N,3,5,2] g", "y = com.microsoft.GridSample(x, g)")
_meet("resize: samples of a grid for three rows", "float[N,2,4,4] x", "y = GridSample(x, g)", "float[3,3,5,2] g", opset=20, refused_alone=True)
_meet("resize: samples of a grid whose rows are pixels", "float[1,2,4,N] x, float[1,N,5,2] g", "y = GridSample(x, g)", opset=20)
_apart("resize: a grid from a matrix of each row, and its samples", "float[N,2,4,5] x, float[N,2,3] m", "s = Shape(x) g = AffineGrid(m, s) y = GridSample(x, g)", opset=20, scale=0.4)
_apart("resize: a grid in a volume", "float[N,3,4] m", "n = Shape<start=0, end=1>(m) s = Concat<axis=0>(n, r) y = AffineGrid<align_corners=1>(m, s)", "int64[4] r = {1, 2, 3, 4}", opset=20)
_meet("resize: a grid from one matrix for all rows", "float[N,2,4,5] x", "s = Shape(x) g = AffineGrid(m, s) y = GridSample(x, g)", "float[1,2,3] m", opset=20)
_meet("resize: as many grids as a number says", "float[N,2,3] m", "y = AffineGrid(m, s)", "int64[4] s = {1, 1, 2, 3}", opset=20)
_apart("resize: blocks added to an image", "float[N,8,9] x", "y = Col2Im(x, i, b)", "int64[2] i = {4, 4}, int64[2] b = {2, 2}", opset=18)
_meet("resize: blocks of rows added to an image", "float[1,N,9] x", "a = Concat<axis=1>(x, x, x, x) b = Col2Im(a, i, k) c = ReduceSum<keepdims=0>(b, z) d = Flatten(c) y = Gather<axis=0>(d, z)", "int64[2] i = {4, 4}, int64[2] k = {2, 2}, int64[1] z = {0}", opset=18)
_BOXES: Final = "n = Shape<start=0, end=1>(x) m = Squeeze(n) r = Range(zero, m, one)"
_apart("resize: a box of each row's own image", "float[N,2,6,6] x, float[N,4] b", f"{_BOXES} y = RoiAlign<output_height=2, output_width=2>(x, b, r)", "int64 zero = {0}, int64 one = {1}", opset=16, feeds={"b": [[[0, 0, 3, 3]], [[1, 2, 5, 5]], [[0, 3, 2, 4]]]})
_apart("resize: three boxes of each row's own image", "float[N,2,6,6] x, float[N,3,4] b", f"{_BOXES} u = Unsqueeze(r, axis) k = Concat<axis=0>(n, three) e = Expand(u, k) i = Reshape(e, less) f = Reshape(b, four) p = RoiAlign<output_height=2, output_width=3>(x, f, i) y = Reshape(p, back)", "int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}, int64[1] three = {3}, int64[1] less = {-1}, int64[2] four = {-1, 4}, int64[5] back = {-1, 3, 2, 2, 3}", opset=16, feeds={"b": [[[[0, 0, 3, 3], [1, 2, 5, 5], [0, 3, 2, 4]]], [[[0, 0, 1, 1]] * 3], [[[4, 2, 5, 5]] * 3]]})
_apart("resize: boxes of one image for all rows", "float[N,4] b, int64[N] i", "y = RoiAlign(w, b, i)", "float[4,2,6,6] w", opset=16, feeds={"b": [[[0, 0, 3, 3]], [[1, 2, 5, 5]], [[0, 3, 2, 4]]], "i": [[1], [3], [0]]})
_meet("resize: boxes of any row's image", "float[N,2,6,6] x, float[N,4] b, int64[N] i", "y = RoiAlign(x, b, i)", opset=16, feeds={"i": [[0], [0], [0]], "b": [[[0, 0, 3, 3]]] * 3})
_meet("resize: boxes of the image behind the number of the row", "float[N,4] b", f"{_BOXES.replace('x)', 'b)')} y = RoiAlign(w, b, r)", "int64 zero = {0}, int64 one = {1}, float[9,2,6,6] w", opset=16, feeds={"b": [[[0, 0, 3, 3]]] * 3})
_apart("conv: DeformConv", "float[N,2,6,6] x, float[N,8,5,5] o, float[N,4,5,5] m", "y = DeformConv<kernel_shape=[2,2]>(x, w, o, b, m)", "float[3,2,2,2] w, float[3] b", opset=19)
_meet("conv: DeformConv with offsets for one row", "float[N,2,6,6] x", "y = DeformConv<kernel_shape=[2,2]>(x, w, o)", "float[3,2,2,2] w, float[1,8,5,5] o", opset=19)
_meet("resize: rows doubled", "float[N,1,4,4] x", "y = Resize(x, , s)", "float[4] s = {2, 1, 1, 1}")
_meet("resize: rows blended", "float[1,1,N,4] x", 'y = Resize<mode="linear">(x, , s)', "float[4] s = {1, 1, 1.5, 1}")

# Recurrence.
_apart("recurrence: LSTM", "float[T,N,3] x", "y, y1, y2 = LSTM<hidden_size=2>(x, w, r)", "float[1,8,3] w, float[1,8,2] r")
_apart("recurrence: GRU with a state", "float[T,N,3] x, float[1,N,2] h", "y, y1 = GRU<hidden_size=2>(x, w, r, , , h)", "float[1,6,3] w, float[1,6,2] r")
_apart("recurrence: RNN both ways with lengths", "float[T,N,3] x, int32[N] lengths", 'y = RNN<hidden_size=2, direction="bidirectional">(x, w, r, , lengths)', "float[2,2,3] w, float[2,2,2] r")
_apart("recurrence: a score of each step, as a product of both directions with a vector", "float[T,N,3] x", 'a, b, c = LSTM<hidden_size=2, direction="bidirectional">(x, w, r) d = Transpose<perm=[0,2,1,3]>(a) e = Reshape(d, s) f = Transpose<perm=[1,0,2]>(e) g = Tanh(f) y = MatMul(g, v)', "float[2,8,3] w, float[2,8,2] r, int64[3] s = {0, 0, -1}, float[4] v")
_meet("recurrence: LSTM over rows", "float[N,4,3] x", "y, y1 = LSTM<hidden_size=2>(x, w, r)", "float[1,8,3] w, float[1,8,2] r")
_meet("recurrence: GRU over rows", "float[N,4,3] x", "y = GRU<hidden_size=2>(x, w, r)", "float[1,6,3] w, float[1,6,2] r")
_meet("recurrence: RNN over rows", "float[N,4,3] x", "y = RNN<hidden_size=2>(x, w, r)", "float[1,2,3] w, float[1,2,2] r")

# Quantization.
_apart("quantize: one scale", _X, "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)", "float s = {0.1}, uint8 z = {7}")
_apart("quantize: a scale for each channel", _X, "y = QuantizeLinear<axis=1>(x, s, z)", "float[4] s = {0.1, 0.2, 0.3, 0.4}, int8[4] z = {0, 1, 2, 3}")
_apart("quantize: QLinear operators", _BYTES, "a = com.microsoft.QLinearAdd(x, s, z, w, s, z, s, z) b = com.microsoft.QLinearSigmoid(a, s, z, s, z) y = com.microsoft.QLinearLeakyRelu(b, s, z, s, z)", "uint8[4] w, float s = {0.5}, uint8 z = {2}")
_apart("quantize: QLinearConcat", "uint8[N,4] x, uint8[N,3] v", "y = com.microsoft.QLinearConcat<axis=1>(s, z, x, s, z, v, s, z)", "float s = {0.5}, uint8 z = {2}")
_meet("quantize: one scale for the batch", _X, "y, s, z = DynamicQuantizeLinear(x)")
_meet("quantize: DynamicQuantizeMatMul", _X, "y = com.microsoft.DynamicQuantizeMatMul(x, w, s)", "uint8[4,3] w, float s = {0.1}")
_meet("quantize: one block of one row", _BYTES, "y = DequantizeLinear<axis=1, block_size=4>(x, s)", "float[1,1] s = {2}", opset=21)
_meet("quantize: the largest as a scale", _X, "a = Abs(x) s = ReduceMax<keepdims=0>(a) y = QuantizeLinear(x, s, z)", "int8 z = {0}")
_meet("quantize: QLinearConcat along rows", "uint8[N,4] x, uint8[N,4] v", "y = com.microsoft.QLinearConcat<axis=0>(s, z, x, s, z, v, s, z)", "float s = {0.5}, uint8 z = {2}")

# Attention.
_apart("attention: com.microsoft", _SEQUENCE, "y = com.microsoft.Attention<num_heads=2>(x, w, b)", "float[8,24] w, float[24] b")
for _domain, _opset in (("", 27), ("com.microsoft.", 17)):
    _apart(f"attention: linear, {_domain}", "float[N,L,8] q, float[N,L,4] k, float[N,L,6] v, float[N,2,2,3] p, float[N,L,2] d, float[N,L,2] b", f"a, s = {_domain}LinearAttention<q_num_heads=4, kv_num_heads=2>(q, k, v, p, d, b) y, y1 = {_domain}LinearAttention<q_num_heads=4, kv_num_heads=2>(q, k, v, s, d, b)", opset=_opset, scale=0.5)
    _meet(f"attention: linear, along the rows, {_domain}", "float[1,N,4] x", f'y, s = {_domain}LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(x, x, x)', opset=_opset)
    _apart(f"attention: a convolution of the past, {_domain}", "float[N,3,L] x, float[N,3,2] p", f'a, s = {_domain}CausalConvWithState<activation="silu">(x, w, b, p) c = Add(a, x) y, y1 = {_domain}CausalConvWithState(c, w, , s)', "float[3,1,3] w, float[3] b", opset=_opset)
    _apart(f"attention: a convolution without a past, {_domain}", "float[N,3,L] x", f"y, y1 = {_domain}CausalConvWithState(x, w)", "float[3,1,3] w", opset=_opset)
    _meet(f"attention: a convolution along the rows, {_domain}", "float[2,3,N] x", f"y, s = {_domain}CausalConvWithState(x, w)", "float[3,1,3] w", opset=_opset)
_apart("attention: masked", "float[N,L,8] x, int32[N,L] m", "y = com.microsoft.Attention<num_heads=2>(x, w, b, m)", "float[8,24] w, float[24] b", below=2, feeds={"m": [[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]], [[1, 0, 0, 0, 0]]]})
_apart("attention: many heads", "float[N,L,8] q, float[N,T,8] k, float[N,T,8] v", "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v)")
_apart("attention: of the standard", "float[N,2,L,4] q, float[N,2,T,4] k, float[N,2,T,4] v", "y = Attention(q, k, v)", opset=23)
_apart("attention: embedding", "int32[N,L] x", "y, m = com.microsoft.EmbedLayerNormalization(x, , w, p, , s, b)", "float[5,8] w, float[9,8] p, float[8] s, float[8] b")
_apart("attention: rotary", "float[N,2,L,8] x, int64[N,L] p", "y = com.microsoft.RotaryEmbedding(x, p, c, s)", "float[9,4] c, float[9,4] s")
_PAST: Final = "float[N,1,64] x, float[N,1,3,16] k, float[N,1,3,16] v, int32[N] s"
_apart("attention: grouped queries", _PAST, "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(x, , , k, v, s, t)", "int32 t = {4}")
_apart("attention: grouped queries, rotated", _PAST, "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1, do_rotary=1>(x, , , k, v, s, t, c, c)", "int32 t = {4}, float[9,8] c")
_apart("attention: grouped queries, positions without effect", f"{_PAST}, int64[N,1] p", "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(x, , , k, v, s, t, , , p)", "int32 t = {4}")
_meet("attention: grouped queries, prompts at positions", "float[N,3,64] x, int64[N,3] p, int32[N] s", "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1, do_rotary=1>(x, , , , , s, t, c, c, p)", "int32 t = {3}, float[9,8] c", feeds={"p": [[[0, 1, 2]], [[2, 3, 4]], [[4, 5, 6]]], "s": [[2], [2], [2]]})
_meet("attention: grouped queries of idle rows", f"{_PAST}, int32[N] i", "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(x, , , k, v, s, t, , , , , , , , , , i)", "int32 t = {4}", below=1)
_meet("attention: grouped queries, a past of a window", _PAST, "y, y1, y2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1, local_window_size=2, sliding_window_cache=1>(x, , , k, v, s, t)", "int32 t = {4}", below=1)
_apart("attention: values of another width", "float[N,L,8] q, float[N,L,6] v", "a, b, c = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, v) d = Shape(b) e = Reshape(b, d) y = ReduceSum<keepdims=0>(e, last) y1 = ReduceSum<keepdims=0>(c, last)", "int64[1] last = {3}")
_meet("attention: grouped queries with a past only", _PAST, "y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(x, , , k, v, s, t)", "int32 t = {4}")
_apart("attention: many heads with a past", "float[N,L,8] q, float[N,2,3,4] k, float[N,2,3,4] v", "y, y1, y2 = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , k, v)")
_meet("attention: many heads with a past only", "float[N,L,8] q, float[N,2,3,4] k, float[N,2,3,4] v", "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , k, v)")
_meet("attention: keys wider than values", _SEQUENCE, "y, y1 = com.microsoft.Attention<num_heads=1, qkv_hidden_sizes=[4, 4, 2]>(x, w, b)", "float[8,10] w, float[10] b")
_meet("attention: rows are tokens", "float[1,N,8] q", "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q)")
_meet("attention: rows are tokens of com.microsoft", "float[1,N,8] x", "y = com.microsoft.Attention<num_heads=2>(x, w, b)", "float[8,24] w, float[24] b")
_meet("attention: rows are tokens of the standard", "float[1,2,N,4] q", "y = Attention(q, q, q)", opset=23)

# Classic learning.
_apart("ml: linear models", "float[N,3] x", "a = ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0, 3.0], intercepts=[0.5]>(x) y = Relu(a)")
_apart("ml: models of one target each, joined", "float[N,3] x", "a = ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0, 3.0], intercepts=[0.5]>(x) b = ai.onnx.ml.SVMRegressor<coefficients=[1.0], kernel_params=[0.5, 0.0, 2.0], kernel_type=\"RBF\", n_supports=1, rho=[0.3], support_vectors=[1.0, 0.0, 2.0]>(x) c = Reshape(a, s) d = Reshape(b, s) y = Concat<axis=1>(c, d)", "int64[2] s = {-1, 1}")
_apart("ml: two classes of one score", "float[N,3] x", "l, p = ai.onnx.ml.LinearClassifier<coefficients=[0.1, 0.2, 0.3], intercepts=[0.5], classlabels_ints=[0, 1]>(x) y = Reshape(p, s)", "int64[2] s = {-1, 2}")
_apart("ml: two classes of trees", "float[N,3] x", "l, p = ai.onnx.ml.TreeEnsembleClassifier<class_ids=[0, 0], class_nodeids=[1, 2], class_treeids=[0, 0], class_weights=[0.3, 0.9], classlabels_int64s=[0, 1], nodes_falsenodeids=[2, 0, 0], nodes_featureids=[0, 0, 0], nodes_modes=[\"BRANCH_LEQ\", \"LEAF\", \"LEAF\"], nodes_nodeids=[0, 1, 2], nodes_treeids=[0, 0, 0], nodes_truenodeids=[1, 0, 0], nodes_values=[0.5, 0.0, 0.0], post_transform=\"LOGISTIC\">(x) y = Reshape(p, s)", "int64[2] s = {-1, 2}")
_apart("ml: fewer scores than classes", "float[N,3] x", "l, p = ai.onnx.ml.LinearClassifier<coefficients=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], intercepts=[0.5, 0.1], classlabels_ints=[0, 1, 2]>(x) y = Reshape(p, s)", "int64[2] s = {-1, 2}")
_apart("ml: scaler and normalizer", "float[N,3] x", 'a = ai.onnx.ml.Scaler<offset=[1.0, 2.0, 3.0], scale=[2.0, 2.0, 0.5]>(x) y = ai.onnx.ml.Normalizer<norm="L2">(a)')
_apart("ml: imputer", "float[N,3] x", "a = ai.onnx.ml.Imputer<imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=0.0>(x) y = ai.onnx.ml.Binarizer<threshold=1.0>(a)")
_apart("ml: labels", "string[N,3] x", 'y = ai.onnx.ml.LabelEncoder<keys_strings=["red", "blue"], values_int64s=[1, 2], default_int64=-1>(x)')
_apart("ml: one hot", "int64[N,3] x", "y = ai.onnx.ml.OneHotEncoder<cats_int64s=[0, 1, 2, 3]>(x)")
_apart("ml: columns", "float[N,3] x", "y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", "int64[2] i = {2, 0}")
_apart("ml: words", "int64[N,6] x", 'y = TfIdfVectorizer<mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=0, ngram_counts=[0, 3], ngram_indexes=[0, 1, 2, 3], pool_int64s=[1, 2, 3, 1, 2]>(x)')
_apart("ml: features cut and filled up", "float[N,4] x, float[N,2] z", "y = ai.onnx.ml.FeatureVectorizer<inputdimensions=[3, 5]>(x, z)")
_meet("ml: a vector is normalized", "float[N] x", 'y = ai.onnx.ml.Normalizer<norm="L2">(x)', feeds={"x": [[1], [2], [5]]})
_meet("ml: words of all", "int64[N] x", 'y = TfIdfVectorizer<mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0, ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[1, 2, 3]>(x)')

# The number of results depends on all rows.
_meet("count: NonZero", _X, "y = NonZero(x)")
_meet("count: Unique", "int64[N] x", "y = Unique(x)")
_apart("count: a masked write", _SEQUENCE, f"m = Less(x, zero) {MASKED_WRITE}", MASK_WEIGHTS)
_apart("count: a write at masked times", f"{_SEQUENCE}, bool[N,L] c", f"u = Unsqueeze(c, less) s = Shape(x) m = Expand(u, s) {MASKED_WRITE}", MASK_WEIGHTS)
_meet("count: Compress", "float[N,4] x, bool[N] c", "y = Compress<axis=0>(x, c)", feeds={"c": [[1], [0], [1]]})
_apart("count: Compress along another axis", "float[N,4] x", "y = Compress<axis=1>(x, c)", "bool[4] c = {1, 0, 1, 1}")
_apart("count: columns by a mask", "float[N,4] x", "n = NonZero(c) i = Squeeze(n, z) y = Gather<axis=1>(x, i)", "bool[4] c = {1, 0, 1, 1}, int64[1] z = {0}")
_meet("count: Compress along the rows by a constant", _X, "y = Compress<axis=0>(x, c)", "bool[1] c = {1}")
_meet("count: Compress of all entries", _X, "y = Compress(x, c)", "bool[3] c = {1, 0, 1}")
_meet("count: NonZero of the number of rows", _X, "n = Shape<start=0, end=1>(x) r = Sub(n, one) z = NonZero(r) k = Shape<start=1>(z) f = Cast<to=1>(k) y = Add(x, f)", "int64[1] one = {1}")
_meet("count: Compress by the number of rows", _X, "n = Shape<start=0, end=1>(x) g = Greater(n, one) c = Concat<axis=0>(always, g) k = Compress<axis=0>(w, c) s = ReduceSum<keepdims=0>(k) y = Add(x, s)", "int64[1] one = {1}, bool[1] always = {1}, float[2] w = {2, 3}")
_meet("count: NonMaxSuppression", "float[1,N,4] x, float[1,1,N] s", "y = NonMaxSuppression(x, s, m)", "int64[1] m = {9}", feeds={"x": [[[[0, 0, 1, 1]]], [[[0, 0, 1, 1.1]]], [[[3, 3, 4, 4]]]], "s": [[[[0.9]]], [[[0.8]]], [[[0.7]]]]})

# Noise.
_meet("random: like the rows", _X, "y = RandomNormalLike(x)")
_meet("random: Bernoulli", "float[N,64] x", "a = Sigmoid(x) y = Bernoulli(a)")
_meet("random: Dropout in training", "float[N,64] x", "y = Dropout(x, r, t)", "float r = {0.5}, bool t = {1}")
_meet("random: Multinomial", "float[N,4] x", "y = Multinomial<sample_size=32>(x)")
_meet("random: of constants", "float[N,4] x", "a = RandomNormal<shape=[4]>() y = Add(x, a)")

# Control flow.
_IF: Final = "y = If(c) <then_branch = t () => (a) { a = Relu(x) }, else_branch = e () => (b) { b = Neg(x) }>"
_apart("control: If on an input without rows", "float[N,4] x, bool c", _IF)
_apart("control: If whose branches name their results like the node, as in merged decoders", "float[N,4] x, bool c", "y = If(c) <then_branch = t () => (y) { y = Relu(x) }, else_branch = e () => (y) { y = Neg(x) }>")
_apart("control: If on a length", "float[N,L] x", "l = Shape<start=1, end=2>(x) m = Greater(l, two) c = Squeeze(m) " + _IF, "int64[1] two = {2}")
_apart("control: Loop of fixed steps", _X, "y = Loop(n, , x) <body = step (int64 i, bool g, float[N,4] h) => (g2, k) { g2 = Identity(g) j = Add(h, h) k = Tanh(j) }>", "int64 n = {3}")
_apart("control: Loop whose condition stays true", _X, "f, s = Loop(n, t, x) <body = step (int64 i, bool g, float[N,4] h) => (g2, h2, k) { g2 = Identity(g) h2 = Tanh(h) k = Relu(h) }> u = Transpose<perm=[1,0,2]>(s) y = Reshape(u, r)", "int64 n = {3}, bool t = {1}, int64[2] r = {-1, 12}")
_apart("control: Loop over time", "float[N,5,4] x", "f, y = Loop(n, , w) <body = step (int64 i, bool g, float[4] h) => (g2, h2, k) { g2 = Identity(g) h2 = Mul(h, h) s = Gather<axis=1>(x, i) k = Add(s, h) }>", "int64 n = {3}, float[4] w")
_apart("control: Scan over time", "float[5,N,4] x, float[N,4] h", "y1, y2 = Scan(h, x) <num_scan_inputs=1, body = step (float[N,4] s, float[N,4] e) => (s2, o) { s2 = Add(s, e) o = Tanh(s2) }>")
_apart("control: Scan of rows without a state", _X, "y = Scan(x) <num_scan_inputs=1, body = step (float[4] e) => (o) { d = Sub(w, e) p = Mul(d, d) o = ReduceSum<keepdims=0>(p, a) }>", "float[6,4] w, int64[1] a = {1}")
_meet("control: If on the number of rows", _X, "n = Shape<start=0, end=1>(x) m = Equal(n, one) c = Squeeze(m) " + _IF, "int64[1] one = {1}")
_meet("control: If on all values", _X, "m = ReduceSum<keepdims=0>(x) c = Greater(m, z) " + _IF, "float z = {0}")
_meet("control: Loop whose number of steps is not known", _X, "f, s = Loop(n, t, x) <body = step (int64 i, bool g, float[N,4] h) => (g2, h2, k) { l = Less(i, one) g2 = And(l, g) h2 = Tanh(h) k = Relu(h) }> y = Reshape(s, r)", "int64 n = {3}, bool t = {1}, int64 one = {1}, int64[2] r = {-1, 8}")
_meet("control: Loop until all are done", _X, "y = Loop(n, t, x) <body = step (int64 i, bool g, float[N,4] h) => (g2, k) { k = Add(h, one) m = ReduceMin<keepdims=0>(k) g2 = Less(m, ten) }>", "int64 n = {20}, bool t = {1}, float one = {1}, float ten = {5}")
_meet("control: Loop as often as there are rows", _X, "n = Shape<start=0, end=1>(x) m = Squeeze(n) y = Loop(m, , x) <body = step (int64 i, bool g, float[N,4] h) => (g2, k) { g2 = Identity(g) k = Add(h, h) }>")
_meet("control: Scan of rows with a state", _X, "f, y = Scan(w, x) <num_scan_inputs=1, body = step (float[4] s, float[4] e) => (s2, o) { s2 = Add(s, e) o = Tanh(s2) }>", "float[4] w", scale=0.5)
_meet("control: Scan of rows in reverse", _X, "y = Scan(x) <num_scan_inputs=1, scan_input_directions=[1], body = step (float[4] e) => (o) { o = Neg(e) }>")

# Functions.
_apart("function: its own operators", _X, "y = local.f(x)", functions="f (a) => (b) { c = Exp(a) b = Softmax<axis=1>(c) }")
_apart("function: an attribute", _X, "y = local.f<axis=1>(x)", functions="f <axis> (a) => (b) { b = Softmax<axis: int = @axis>(a) }")
_meet("function: its own operators over rows", _X, "y = local.f(x)", functions="f (a) => (b) { c = Exp(a) b = Softmax<axis=0>(c) }")
_meet("function: an attribute that is the rows' axis", _X, "y = local.f<axis=0>(x)", functions="f <axis> (a) => (b) { b = Softmax<axis: int = @axis>(a) }")
