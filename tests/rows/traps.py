"""Models whose rows only seem independent. The proof must accept none of them.

Most appear correct for single rows, for equal rows, for small numbers, or for two rows of a certain size.
"""
# A line for each model.
# ruff: noqa: E501
# fmt: off

from typing import Final

from rows.cases import Case

_X: Final = "float[N,4] x"
_RANGE: Final = "n = Shape<start=0, end=1>(x) m = Squeeze(n) r = Range(zero, m, one)"
_RANGE_WEIGHTS: Final = "int64 zero = {0}, int64 one = {1}"
_FLAT: Final = f"{_RANGE} b = Mul(r, five) c = Add(b, i) f = Reshape(x, s) y = Gather(f, c)"
_FLAT_WEIGHTS: Final = f"{_RANGE_WEIGHTS}, int64 five = {{5}}, int64[2] s = {{-1, 4}}"
_BRANCH: Final = "c1 = Squeeze(g) y = If(c1) <then_branch = t () => (a) { a = Softmax<axis=0>(x) }, else_branch = o () => (b) { b = Relu(x) }>"
_FOLDED: Final = "n = Shape<start=0, end=1>(h) t = Concat<axis=0>(n, m1) r = Reshape(h, t) p = Softmax<axis=1>(r) s = Shape(x)"
_NAMED: Final = "c = Shape(z) n0 = Gather(c, zero) n = Unsqueeze(n0, zero1) d = Shape(h) m0 = Gather(d, one) m = Unsqueeze(m0, zero1) k = Concat<axis=0>(n, m, less) t = Reshape(z, k) e = Shape<start=2>(t) g = Concat<axis=0>(less, e) f = Reshape(t, g) r = Range(zero, n0, one) b = Mul(r, m0) q = ReduceSum<keepdims=0>(h, two1) a = ArgMax<axis=1, keepdims=0>(q) i = Add(b, a) y = Gather(f, i)"
_NAMED_WEIGHTS: Final = "int64 zero = {0}, int64 one = {1}, int64[1] zero1 = {0}, int64[1] two1 = {2}, int64[1] less = {-1}"
MASKED_WRITE: Final = "p = NonZero(m) t = Transpose<perm=[1,0]>(p) f = Reshape(m, less) k = Cast<to=7>(f) a = ReduceSum(k) e = Expand(v, a) w = Reshape(e, less) y = ScatterND(x, t, w)"
MASK_WEIGHTS: Final = "float zero = {0}, float v = {7}, int64[1] less = {-1}"
CHUNK: Final = "s = Shape(c) n = Gather(s, start) a = Add(n, rest) d = Div(a, parts) e = Mul(d, parts) y1 = Slice(c, start, d, start) y2 = Slice(c, d, e, start)"
CHUNK_WEIGHTS: Final = "int64[1] start = {0}, int64[1] rest = {1}, int64[1] parts = {2}"
_LAST: Final = "b = Slice(z, start, end, one1) l = Shape<start=1>(z) d = Sub(l, five) c = Slice(z, d, end, one1)"
_WINDOWS: Final = "a = MaxPool<kernel_shape=[2], strides=[3], pads=[0,1], ceil_mode=1>(z)"
_INFERRED: Final = "u = Add(x, w) l = Shape<start=2>(w) n = Shape<start=0, end=1>(x) m = Squeeze(n) k = Squeeze(l) r = Range(zero, m, one) h = Mul(r, k) o = ArgMax<axis=2, keepdims=0>(u) q = Reshape(o, less) i = Add(h, q) f = Reshape(u, less) y = Gather(f, i)"
_INFERRED_WEIGHTS: Final = "int64 zero = {0}, int64 one = {1}, int64[1] less = {-1}, float number = {1}, bool yes = {1}, int64[1] first = {0}"
_INFINITE: Final = [[[1.0] * 4], [[float("inf")] * 4], [[2.0] * 4]]

TRAPS: Final = [
    Case("a column meets a vector", "float[N,1] x, float[N] z", "y = Sub(x, z)"),
    Case("a constant as long as one batch", _X, "y = Add(x, c)", "float[3,4] c"),
    Case("position in the batch", _X, "n = Shape<start=0, end=1>(x) p = Slice(w, z, n) y = Add(x, p)", "float[64,4] w, int64[1] z = {0}"),
    Case("the batch size as a number", _X, "n = Shape<start=0, end=1>(x) f = Cast<to=1>(n) y = Div(x, f)"),
    Case("the number of all elements", _X, "n = Size(x) f = Cast<to=1>(n) y = Mul(x, f)"),
    Case("whether there is more than one row", _X, "n = Shape<start=0, end=1>(x) g = Greater(n, o) f = Cast<to=1>(g) y = Add(x, f)", "int64[1] o = {1}"),
    Case("at most eight rows", _X, "n = Shape<start=0, end=1>(x) g = Min(n, o) f = Cast<to=1>(g) y = Add(x, f)", "int64[1] o = {8}"),
    Case("the row's number as a feature", _X, f"{_RANGE} f = Cast<to=1>(r) u = Unsqueeze(f, one1) y = Add(x, u)", f"{_RANGE_WEIGHTS}, int64[1] one1 = {{1}}"),
    Case("the row's number modulo two", _X, f"{_RANGE} q = Mod(r, two) f = Cast<to=1>(q) u = Unsqueeze(f, one1) y = Add(x, u)", f"{_RANGE_WEIGHTS}, int64 two = {{2}}, int64[1] one1 = {{1}}"),
    Case("the row's number through a reduction", _X, f"{_RANGE} u = Unsqueeze(r, one1) k = ReduceMax<axes=[1]>(u) f = Cast<to=1>(k) y = Add(x, f)", f"{_RANGE_WEIGHTS}, int64[1] one1 = {{1}}"),
    Case("the row's number as a token", _X, f"{_RANGE} e = Gather(w, r) y = Add(x, e)", f"{_RANGE_WEIGHTS}, float[64,4] w"),
    Case("a running number", _X, "s = Shape(x) c = ConstantOfShape<value=float[1]{1}>(s) p = CumSum(c, a) y = Add(x, p)", "int64 a = {0}"),
    Case("a diagonal", _X, "e = EyeLike(x) y = Add(x, e)"),
    Case("a transposed matrix times a vector", "float[3,N] x", "t = Transpose(x) y = MatMul(t, w)", "float[3] w"),
    Case("a matrix that is transposed and cast times a vector", "double[3,N] x", "t = Transpose(x) c = Cast<to=1>(t) y = MatMul(c, w)", "float[3] w"),
    Case("a matrix that is transposed and scaled times a vector", "float[3,N] x", "t = Transpose(x) s = Mul(two, t) y = MatMul(s, w)", "float two = {2}, float[3] w"),
    Case("stacks that are transposed and summed times a vector", "float[3,N,2] x", "t = Transpose<perm=[1,0,2]>(x) s = ReduceSum<keepdims=0>(t, last) y = MatMul(s, w)", "int64[1] last = {2}, float[3] w"),
    Case("one of two transposed matrices times a vector", "float[3,N,2] x", "t = Transpose<perm=[1,0,2]>(x) s = Gather<axis=2>(t, i) y = MatMul(s, w)", "int64 i = {1}, float[3] w"),
    Case("transposed matrices or themselves times a vector", "float[2,3,N] x", "t = Transpose<perm=[0,2,1]>(x) s = Where(c, t, t) y = MatMul(s, w)", "bool c = {1}, float[3] w"),
    Case("a product that transposes a matrix beside a vector", "float[3,N] x", "y = com.microsoft.FusedMatMul<transA=1>(x, w)", "float[3] w"),
    Case("an axis that ONNX Runtime leaves out of a reciprocal", "float[N,4] x, float[N,4] z", "d = Div(one, x) m = Mul(d, z) y = Softmax<axis=0>(m)", "float[1,1,1] one = {1}"),
    Case("an axis that ONNX Runtime leaves out of a normalization", "float[N,8] x", "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes=[-1]>(p) a = Add(v, small) q = Sqrt(a) n = Div(d, q) g = Mul(n, s) h = Add(g, b) y = Softmax<axis=0>(h)", "float two = {2}, float[1,1,1] small = {0.00001}, float[8] s, float[8] b", opset=13),
    Case("an axis that ONNX Runtime leaves out of a table", "float[N,8] x, float[8] z", "d = Div(one, z) m = Mul(d, z) a = Mul(x, m) y = Softmax<axis=0>(a)", "float[1,1,1] one = {1}"),
    Case("torn rows", "float[N,6] x", "s = Shape(x) a = Reshape(x, t) b = Softmax(a) y = Reshape(b, s)", "int64[2] t = {-1, 4}", refused_alone=True),
    Case("batch folded into one axis", _X, "s = Shape(x) a = Reshape(x, t) b = Softmax<axis=1>(a) y = Reshape(b, s)", "int64[2] t = {1, -1}"),
    Case("one row by the declaration of an inner tensor, which ONNX Runtime believes", _X, f"h = Relu(x) {_FOLDED} y = Reshape(p, s)", "int64[1] m1 = {-1}, float[1,4] h"),
    Case("one row by a declaration in a branch", "float[N,4] x, bool c", f"y = If(c) <then_branch = t () => (a) <float[1,4] h> {{ h = Relu(x) {_FOLDED} a = Reshape(p, s) }}, else_branch = e () => (b) {{ b = Neg(x) }}>", "int64[1] m1 = {-1}", feeds={"c": [True] * 3}),
    Case("one row by the declaration of a state", _X, f"y = Loop(k, , x) <body = step (int64 i, bool g, float[1,4] h) => (g2, o) {{ g2 = Identity(g) {_FOLDED} o = Reshape(p, s) }}>", "int64[1] m1 = {-1}, int64 k = {2}"),
    Case("batch flattened", _X, "s = Shape(x) a = Flatten<axis=0>(x) b = Softmax<axis=1>(a) y = Reshape(b, s)"),
    Case("transposed memory order", _X, "a = Transpose(x) y = Reshape(a, s)", "int64[2] s = {-1, 4}"),
    Case("rows interleaved, then split", "float[N,2,4] x", "a = Reshape(x, s) y1, y2 = Split<axis=0>(a)", "int64[2] s = {-1, 4}"),
    Case("old softmax", _X, "y = Softmax<axis=0>(x)", opset=12),
    Case("a quantized softmax with its axis beyond the rank", "uint8[N] x", "y = com.microsoft.QLinearSoftmax<opset=12>(x, s, z, s, z)", "float s = {0.01}, uint8 z = {0}", below=255),
    Case("old softmax over rows in the middle", "float[2,N,4] x", "y = Softmax(x)", opset=12),
    Case("a new function in an old model, where ONNX Runtime runs old operators", "float[2,N,4] x", "y = local.f(x)", functions="f (a) => (b) { b = Softmax(a) }", opset=12, function_opset=17),
    Case("a function that is called like an operator", _X, "y = local.Relu(x)", functions="Relu (a) => (b) { b = Softmax<axis=0>(a) }"),
    Case("a function in place of which ONNX Runtime runs its own operator", "float[N,1,2,2] x, float[N,4] b, int32[N] i", "y = com.microsoft.CropAndResize(x, b, i, s)", "int32[2] s = {2, 2}", functions="CropAndResize (x, b, i, s) => (y) { y = Relu(x) }", function_domain="com.microsoft", feeds={"b": [[[0, 0, 1, 1]]] * 3, "i": [[0]] * 3}),
    Case("the last row", _X, "a = Gather(x, i) y = Add(x, a)", "int64 i = {-1}"),
    Case("all but the first row", "float[N,4] x", "y = Slice(x, s, e, a)", "int64[1] s = {-1}, int64[1] e = {999}, int64[1] a = {0}"),
    Case("a flat index from an input", "float[N,5,4] x, int64[N] i", _FLAT, _FLAT_WEIGHTS, feeds={"i": [[-1], [2], [-1]]}),
    Case("a flat index that may be negative", "float[N,5,4] x, int64 i", _FLAT, _FLAT_WEIGHTS, feeds={"i": [-1, -1, -1]}),
    Case("a flat index from a logarithm", "float[N,5,4] x, float[1] w", f"p = Abs(w) g = ReduceLogSum<keepdims=0>(p) i = Cast<to=7>(g) {_FLAT}", _FLAT_WEIGHTS, feeds={"w": [[0.25]] * 3}),
    Case("a flat index that is negated", "float[N,5,4] x, int64[N,5] t", f"k = ArgMax<axis=1, keepdims=0>(t) i = Neg(k) {_FLAT}", _FLAT_WEIGHTS, below=9),
    Case("a flat index less one", "float[N,5,4] x, int64[N,5] t", f"k = ArgMax<axis=1, keepdims=0>(t) i = Sub(k, one) {_FLAT}", _FLAT_WEIGHTS, feeds={"t": [[[9, 1, 1, 1, 1]]] * 3}),
    Case("a flat index of another stride", "float[N,5,4] x, int64[N,5] t", f"i = ArgMax<axis=1, keepdims=0>(t) {_FLAT.replace('five', 'six')}", _FLAT_WEIGHTS.replace("five = {5}", "six = {4}"), below=9),
    Case("a flat index beyond the row", "float[N,5,4] x, int64[N,9] t", f"i = ArgMax<axis=1, keepdims=0>(t) {_FLAT}", _FLAT_WEIGHTS, feeds={"t": [[[0, 0, 0, 0, 0, 0, 1, 0, 0]]] * 3}, refused_alone=True),
    Case("a flat index behind an offset", "float[N,5,4] x", f"{_RANGE} k = Range(zero, five, one) j = Add(k, one) u = Unsqueeze(r, one1) b = Mul(u, five) c = Add(b, j) f = Reshape(x, s) y = Gather(f, c)", f"{_FLAT_WEIGHTS}, int64[1] one1 = {{1}}", refused_alone=True),
    Case("a flat index that a table gives, which is the same for all rows", "float[N,3,4] x, int64[N,5] t", f"{_RANGE} k = ArgMax<axis=1, keepdims=0>(t) h = Concat<axis=0>(n, five1) e = Expand(w, h) g = Reshape(e, all) d = Mul(r, five) j = Add(d, k) i = Gather(g, j) b = Mul(r, three) c = Add(b, i) f = Reshape(x, s) y = Gather(f, c)", f"{_RANGE_WEIGHTS}, int64 five = {{5}}, int64[1] five1 = {{5}}, int64 three = {{3}}, int64[1] all = {{-1}}, int64[1,5] w = {{0, 1, 2, 3, 4}}, int64[2] s = {{-1, 4}}", feeds={"t": [[[0, 0, 0, 0, 1]], [[1, 0, 0, 0, 0]], [[1, 0, 0, 0, 0]]]}, refused_alone=True),
    Case("a flat index from a sum that overflows", "float[N,5,4] x, int64[N] o, int64[N,5] t", f"p = Max(o, zero) d = Add(p, p) k = ArgMax<axis=1, keepdims=0>(t) i = Min(d, k) {_FLAT}", _FLAT_WEIGHTS, feeds={"o": [[2**63 - 1]] * 3}),
    Case("a flat index from a bounded sum that overflows", "float[N,5,4] x, int64[N] o, int64[N,5] t", f"p = Mod(o, big) d = Add(p, p) e = Add(d, d) k = ArgMax<axis=1, keepdims=0>(t) i = Min(k, e) {_FLAT}", f"{_FLAT_WEIGHTS}, int64 big = {{4611686018427387904}}", feeds={"o": [[2**62 - 1]] * 3}),
    Case("a flat index from a bounded product that overflows", "float[N,5,4] x, int64[N] o, int64[N,5] t", f"p = Mod(o, big) d = Mul(p, five) k = ArgMax<axis=1, keepdims=0>(t) i = Min(k, d) {_FLAT}", f"{_FLAT_WEIGHTS}, int64 big = {{4611686018427387904}}", feeds={"o": [[(2**64 - 1) // 5]] * 3}),
    Case("a flat index from a bounded number that a type does not hold", "float[N,5,4] x, int64[N] o, int64[N,5] t", f"p = Mod(o, big) d = Cast<to=6>(p) e = Cast<to=7>(d) k = ArgMax<axis=1, keepdims=0>(t) i = Min(k, e) {_FLAT}", f"{_FLAT_WEIGHTS}, int64 big = {{1099511627776}}", feeds={"o": [[2**32 - 1]] * 3}),
    Case("a free number that overflows", "float[N,4] x, int64 i", f"j = Identity(i) p = Max(j, zero) d = Add(p, p) e = Less(d, zero) g = Unsqueeze(e, zero1) {_BRANCH}", "int64 zero = {0}, int64[1] zero1 = {0}", feeds={"i": [2**63 - 1] * 3}),
    Case("a free number without an absolute value", "float[N,4] x, int64 i", f"j = Identity(i) d = Abs(j) e = Less(d, zero) g = Unsqueeze(e, zero1) {_BRANCH}", "int64 zero = {0}, int64[1] zero1 = {0}", feeds={"i": [-(2**63)] * 3}),
    Case("a free number that a type does not hold", "float[N,4] x, int64 i", f"j = Identity(i) c = Cast<to=6>(j) d = Cast<to=7>(c) e = Equal(d, j) f = Not(e) g = Unsqueeze(f, zero1) {_BRANCH}", "int64[1] zero1 = {0}", feeds={"i": [2**40] * 3}),
    Case("a maximum of fewer entries than its window has", "float[N,1,3] x", f"p = MaxPool<kernel_shape=[4], strides=[2]>(x) s = Shape<start=2>(p) g = Equal(s, one) {_BRANCH}", "int64[1] one = {1}"),
    Case("an average whose padding ignores the dilation", "float[N,1,7] x", f'p = AveragePool<kernel_shape=[2], dilations=[2], auto_pad="SAME_LOWER">(x) s = Shape<start=2>(p) g = Less(s, seven) {_BRANCH}', "int64[1] seven = {7}", opset=19),
    Case("a transposed convolution that leaves out its last entries", "float[N,1,4] x", f'p = ConvTranspose<strides=[3], auto_pad="SAME_UPPER">(x, w) s = Shape<start=2>(p) g = Less(s, twelve) {_BRANCH}', "float[1,1,2] w, int64[1] twelve = {12}"),
    Case("a reversed slice that starts before the first entry", _X, f"v = Slice(w, start, end, axis, step) s = Shape(v) g = Equal(s, one) {_BRANCH}", "float[5] w, int64[1] start = {-9}, int64[1] end = {-9}, int64[1] axis = {0}, int64[1] step = {-1}, int64[1] one = {1}"),
    Case("a row of more entries than a target shape holds, which ONNX Runtime then infers", "float[N,?] x", f"{_RANGE} h = Concat<axis=0>(n, one1) t = Reshape(x, h) y = Gather(t, r)", f"{_RANGE_WEIGHTS}, int64[1] one1 = {{1}}", feeds={"x": [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]}),
    Case("the first entries of rows that have more than a target shape holds", "float[N,?] x", "n = Shape<start=0, end=1>(x) h = Concat<axis=0>(n, one) t = Reshape(x, h) y = Slice(t, zero, n)", "int64[1] zero = {0}, int64[1] one = {1}", feeds={"x": [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]}),
    Case("rows behind a size that ONNX Runtime infers", "float[?,N] x", "n = Shape<start=1, end=2>(x) m = Shape<start=0, end=1>(x) h = Concat<axis=0>(n, one) t = Reshape(x, h) k = Concat<axis=0>(n, m) y = Reshape(t, k)", "int64[1] one = {1}", feeds={"x": [[[1], [2], [3]], [[4], [5], [6]], [[7], [8], [9]]]}),
    Case("rows behind an inferred size of the result", "float[N,?] x", "u = Unsqueeze(x, zero) h = Shape(u) m = Gather(h, zero) g = Gather(h, i) n = Unsqueeze(g, zero) k = Concat<axis=0>(m, n, two) y = Reshape(u, k)", "int64[1] zero = {0}, int64 i = {1}, int64[1] two = {2}", feeds={"x": [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 11, 12]]]}),
    Case("rows of several entries that are transposed", "float[N,?] x", "n = Shape<start=0, end=1>(x) h = Concat<axis=0>(n, one) t = Reshape(x, h) e = Expand(t, f) u = Transpose(e) k = Concat<axis=0>(less, n) y = Reshape(u, k)", "int64[1] one = {1}, int64[2] f = {1, 4}, int64[1] less = {-1}", feeds={"x": [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]}),
    Case("rows of several entries that are resized", "float[N,?] x", 'n = Shape<start=0, end=1>(x) h = Concat<axis=0>(n, one) t = Reshape(x, h) u = Unsqueeze(t, last) k = Concat<axis=0>(n, one, one, one) y = Resize<mode="nearest", coordinate_transformation_mode="align_corners", nearest_mode="floor">(u, , , k)', "int64[1] one = {1}, int64[2] last = {2, 3}", feeds={"x": [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]}),
    Case("a size that is called like another, by the declaration of an inner tensor", "float[N,A,2] z, float[N,B,2] w", f"h = Relu(w) {_NAMED}", f"{_NAMED_WEIGHTS}, float[N,A,2] h", sizes={"A": 3, "B": 2}),
    Case("a constant that the proof does not know, in place of which ONNX Runtime infers the other size", "float[N,A] x, float[N,B] z", "s = Shape(z) n = Gather(s, zero) l = Gather(s, one) p = Mul(n, l) p1 = Unsqueeze(p, zero1) d = Div(seven, six) e = Abs(d) c = Cast<to=7>(e) k = Concat<axis=0>(p1, c) t = Reshape(x, k) r = Range(zero, n, one) b = Mul(r, l) a = ArgMax<axis=1, keepdims=0>(z) i = Add(b, a) y = Gather(t, i)", "int64 zero = {0}, int64 one = {1}, int64[1] zero1 = {0}, float[1] seven = {7.0}, float[1] six = {6.0}", sizes={"A": 3, "B": 2}, feeds={"x": [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]}),
    Case("a size that is 0, which in a target shape copies the number of rows", "float[N,M] x, float[N,4] z", "c = Slice(x, two, end, one) e = Unsqueeze(c, zero) l = Shape<start=1, end=2>(c) h = Concat<axis=0>(less, l) t = Reshape(e, h) s = Shape<start=1, end=2>(t) f = Cast<to=1>(s) y = Add(z, f)", "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {99}, int64[1] less = {-1}", sizes={"M": 2}),
    Case("a size that is 0 beside a size of 1, which in a target shape copies the number of rows", "float[N,M] x, float[N,K] q, float[N,4] z", "d = Slice(x, two, end, one) c = Add(d, q) e = Unsqueeze(c, zero) l = Shape<start=1, end=2>(c) h = Concat<axis=0>(less, l) t = Reshape(e, h) s = Shape<start=1, end=2>(t) f = Cast<to=1>(s) y = Add(z, f)", "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {99}, int64[1] less = {-1}", sizes={"M": 2, "K": 1}),
    Case("a flat index among rows with positions, of which the table has none behind the past", "float[N,Q,4] x, float[N,P,4] p, float[N,5,4] k", "n = Shape<start=0, end=1>(x) m = Squeeze(n) l = Shape<start=1, end=2>(x) a = Shape<start=1, end=2>(p) e = Add(a, l) t = Slice(w, a, e) h = Add(x, t) c = Concat<axis=1>(h, k) f = Reshape(c, s) b = Add(l, five) r = Range(zero, m, one) o = ReduceSum<keepdims=0>(c, two) j = ArgMax<axis=1, keepdims=0>(o) u = Mul(r, b) i = Add(u, j) y = Gather(f, i)", "float[3,4] w, int64 zero = {0}, int64 one = {1}, int64[2] s = {-1, 4}, int64[1] five = {5}, int64[1] two = {2}", sizes={"Q": 1}),
    Case("index tuples from an input", "float[N,4] x, int64[N,2] i", "y = GatherND(x, i)", feeds={"i": [[[-1, 0]], [[0, 1]], [[-1, 3]]]}),
    Case("a number of a row less one", _X, f"{_RANGE} p = Sub(r, one) q = Unsqueeze(p, one1) y = GatherND(x, q)", f"{_RANGE_WEIGHTS}, int64[1] one1 = {{1}}"),
    Case("slices of texts in a branch, of which ONNX Runtime copies the first text", "string[2,N] x, bool c", "y = If(c) <then_branch = t () => (a) { a = Gather(x, one) }, else_branch = e () => (b) { b = Gather(x, one) }>", "int64 one = {1}"),
    Case("indices of MaxPool", "float[N,1,4,4] x", "a, y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)"),
    Case("Squeeze without axes", "float[N,4,1] x", "y = Squeeze(x)"),
    Case("a branch on the number of rows", _X, "n = Shape<start=0, end=1>(x) m = Equal(n, one) c = Squeeze(m) y = If(c) <then_branch = t () => (a) { a = Relu(x) }, else_branch = e () => (b) { b = Neg(x) }>", "int64[1] one = {1}"),
    Case("a branch between the number of rows and a constant", "float[N,4] x, bool c", "k = If(c) <then_branch = t () => (a) { a = Shape<start=0, end=1>(x) }, else_branch = e () => (b) { b = Identity(one) }> f = Cast<to=1>(k) y = Mul(x, f)", "int64[1] one = {1}", feeds={"c": [True] * 3}),
    Case("a branch between a constant and the number of rows", "float[N,4] x, bool c", "k = If(c) <then_branch = t () => (a) { a = Identity(one) }, else_branch = e () => (b) { b = Shape<start=0, end=1>(x) }> f = Cast<to=1>(k) y = Mul(x, f)", "int64[1] one = {1}", feeds={"c": [False] * 3}),
    Case("half a length that is rounded", "float[N,L] x", "l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) h = Mul(f, half) g = Floor(h) q = Equal(g, h) c = Squeeze(q) y = If(c) <then_branch = t () => (a) { a = Relu(x) }, else_branch = e () => (b) { b = Softmax<axis=0>(x) }>", "float[1] half = {0.5}"),
    Case("a length that overflows", "float[N,L] x", f"l = Shape<start=1, end=2>(x) c = Cast<to=6>(l) d = Mul(c, big) e = Mul(d, big) g = Equal(e, zero) {_BRANCH}", "int32[1] big = {65536}, int32[1] zero = {0}"),
    Case("a length that is rounded beside a large number", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) d = Add(f, big) e = Sub(d, big) h = Equal(e, f) g = Not(h) {_BRANCH}", "float[1] big = {100000000.0}"),
    Case("a length that is rounded within a sum", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) e = Sum(f, big, small) h = Equal(e, f) g = Not(h) {_BRANCH}", "float[1] big = {100000000.0}, float[1] small = {-100000000.0}"),
    Case("a length that is rounded within a reduction", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) d = Concat<axis=0>(f, big, small) e = ReduceSum(d) h = Equal(e, f) g = Not(h) {_BRANCH}", "float[1] big = {100000000.0}, float[1] small = {-100000000.0}"),
    Case("a length that a reduction rounds as a float", "float[N,L] x", f"l = Shape<start=1, end=2>(x) d = Concat<axis=0>(l, big) e = ReduceSum(d) f = Sub(e, big) h = Equal(f, l) g = Not(h) {_BRANCH}", "int64[1] big = {4503599627370496000}"),
    Case("a small part of a length that is rounded beside a number", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) p = Mul(f, tiny) d = Add(p, big) e = Sub(d, big) h = Equal(e, p) g = Not(h) {_BRANCH}", "float[1] tiny = {0.00000095367431640625}, float[1] big = {1000.0}"),
    Case("a third of a length that is rounded beside a number", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=1>(l) p = Div(f, three) d = Add(p, big) e = Sub(d, big) h = Equal(e, p) g = Not(h) {_BRANCH}", "float[1] three = {3.0}, float[1] big = {1000.0}"),
    Case("a third of a length that a type does not hold", "float[N,L] x", f"l = Shape<start=1, end=2>(x) f = Cast<to=11>(l) p = Div(f, three) d = Cast<to=1>(p) e = Cast<to=11>(d) h = Equal(e, p) g = Not(h) {_BRANCH}", "double[1] three = {3.0}"),
    Case("a length that may be one", "float[N,L] x, float[N] z", "y = Add(x, z)", sizes={"L": 1}),
    Case("a recurrence over the batch", "float[N,4,3] x", "y = LSTM<hidden_size=2>(x, w, r)", "float[1,8,3] w, float[1,8,2] r"),
    Case("a running state over the batch", _X, "f, y = Scan(w, x) <num_scan_inputs=1, body = step (float[4] s, float[4] e) => (s2, o) { s2 = Add(s, e) o = Identity(s2) }>", "float[4] w"),
    Case("a scan that sees the whole batch", _X, "y = Scan(x) <num_scan_inputs=1, body = step (float[4] e) => (o) { m = ReduceSum<keepdims=0>(x) o = Add(e, m) }>"),
    Case("an early exit", "int64[N,4] x", "y = Loop(n, t, x) <body = step (int64 i, bool g, int64[N,4] h) => (g2, k) { k = Add(h, one) m = ReduceMin<keepdims=0>(k) g2 = Less(m, end) }>", "int64 n = {20}, bool t = {1}, int64 one = {1}, int64 end = {6}"),
    Case("steps that a row decides", "float[N,4] x, int64[N] k", "m = ReduceMax<keepdims=0>(k) y = Loop(m, , x) <body = step (int64 i, bool g, float[N,4] h) => (g2, j) { g2 = Identity(g) j = Add(h, one) }>", "float one = {1}", feeds={"k": [[1], [4], [2]]}),
    Case("a loop that adds the rows up late", _X, "y, f = Loop(n, , x, w) <body = step (int64 i, bool g, float[N,4] h, float[4] u) => (g2, j, u2) { g2 = Identity(g) u2 = ReduceSum<axes=[0], keepdims=0>(h) j = Add(h, u) }>", "int64 n = {3}, float[4] w", opset=12),
    Case("trimmed to the longest", "float[N,5] x, int64[N] k", "m = ReduceMax<keepdims=1>(k) a = Slice(x, s, m, i) y = ReduceMean<axes=[1]>(a)", "int64[1] s = {0}, int64[1] i = {1}", feeds={"k": [[1], [5], [2]]}),
    Case("as many results as a row asks for", "float[N,5] x, int64[N] k", "m = ReduceMax<keepdims=1>(k) y, i = TopK(x, m)", feeds={"k": [[1], [4], [2]]}),
    Case("an infinite row as a pixel", _X, 'y = Resize<mode="linear">(x, , s)', "float[2] s = {1, 2}", feeds={"x": _INFINITE}),
    Case("an infinite row as a slice of a volume", "float[N,1,4] x", 'y = Resize<mode="linear">(x, , s)', "float[3] s = {1, 1, 2}", feeds={"x": [[row] for row in _INFINITE]}),
    Case("an infinite row as a pixel, cubic", "float[1,1,N,4] x", 'y = Resize<mode="cubic">(x, , s)', "float[4] s = {1, 1, 1, 2}", feeds={"x": [[[row]] for row in _INFINITE]}),
    Case("an infinite row as a pixel, before opset 10", _X, 'y = Upsample<mode="linear">(x, s)', "float[2] s = {1, 2}", opset=9, feeds={"x": _INFINITE}),
    Case("dynamic quantization", _X, "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)"),
    Case("dynamic quantization of a product", _X, "q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast<to=1>(i) y = Mul(f, s)", "uint8[4,3] w"),
    Case("batch statistics", "float[N,3,4] x", "y, a, c = BatchNormalization<training_mode=1>(x, s, b, m, v)", "float[3] s, float[3] b, float[3] m, float[3] v = {1, 2, 3}"),
    Case("the largest value as a scale", _X, "a = Abs(x) s = ReduceMax<keepdims=0>(a) y = QuantizeLinear(x, s, z)", "int8 z = {0}"),
    Case("the largest value as a bound", _X, "m = ReduceMax<keepdims=0>(x) h = Mul(m, half) y = Clip(x, , h)", "float half = {0.5}"),
    Case("noise from constants", _X, "a = RandomNormal<shape=[4]>() y = Add(x, a)"),
    Case("noise from dropout of a constant", _X, "d = Dropout(w, r, t) y = Add(x, d)", "float[4] w, float r = {0.5}, bool t = {1}"),
    Case("stop words", "string[N] x", 'y = StringNormalizer<stopwords=["red"], is_case_sensitive=1>(x)', feeds={"x": [["green"], ["red"], ["blue"]]}),
    Case("values for features, counted along the rows", "float[2,N,3] x", "y = ai.onnx.ml.Imputer<imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=0.0>(x)", feeds={"x": [[[[0.0] * 3]] * 2] * 3}),
    Case("scores without their second class, which ONNX Runtime writes one after another", "float[N,3] x", 'l, y = ai.onnx.ml.LinearClassifier<coefficients=[0.1, 0.2, 0.3], intercepts=[0.5], classlabels_ints=[0, 1], post_transform="PROBIT">(x)', scale=0.1),
    Case("ragged text", "string[N] x", 'y = com.microsoft.Tokenizer<mark=0, pad_value="", separators=[" "], mincharnum=1>(x)', feeds={"x": [["a b c"], ["a"], ["a b"]]}),
    Case("ragged text that is counted", "string[N] x, float[N,4] z", 't = com.microsoft.Tokenizer<mark=0, pad_value="", separators=[" "], mincharnum=1>(x) c = Scan(one, t) <num_scan_inputs=1, scan_input_axes=[1], body = step (float s, string[K] e) => (s2) { s2 = Add(s, s) }> y = Mul(z, c)', "float one = {1}", feeds={"x": [["a b c"], ["a"], ["a b"]]}),
    Case("an odd number of entries that are rotated in pairs", "float[N,2,4,3] x", "y = com.microsoft.RotaryEmbedding(x, p, c, s)", "int64[1] p = {0}, float[8,1] c, float[8,1] s"),
    Case("weights with an odd number of entries that are rotated in pairs", "float[N,2,4,3] x", "r = com.microsoft.RotaryEmbedding(k, p, c, s) y = Add(x, r)", "float[1,2,4,3] k, int64[1] p = {0}, float[8,1] c, float[8,1] s"),
    Case("an odd number of entries that are rotated in pairs, of the standard", "float[N,2,4,3] x, int64[N,4] p", "y = RotaryEmbedding(x, c, s, p)", "float[8,1] c, float[8,1] s", opset=23),
    Case("a mask of queries that is a mask of rows", "float[N,2,1,4] q, float[N,6] x", "y = Attention(q, k, k, x)", "float[1,2,6,4] k", opset=23),
    Case("a shape with slopes of which ONNX Runtime does not know", "float[N,1] x, float[N,3] z", "h = PRelu(w, x) s = Shape<start=0, end=1>(h) t = Concat<axis=0>(s, less) r = Reshape(z, t) p = Softmax<axis=1>(r) k = Shape(z) y = Reshape(p, k)", "float[3] w = {1, 2, 3}, int64[1] less = {-1}"),
    Case("an axis that ONNX Runtime does not remove from a shape", "float[N,4] x, float[1] z", "q = Squeeze<axes=[-1]>(z) s = Shape(q) t = Concat<axis=0>(s, m) r = Reshape(x, t) p = Softmax<axis=1>(r) y = Reshape(p, m)", "int64[2] m = {-1, 4}", opset=10),
    Case("an axis that ONNX Runtime does not add to a shape", "float[4,N] x, float[4] z", "q = Unsqueeze<axes=[-1]>(z) s = Shape(q) t = Concat<axis=0>(s, less) r = Reshape(x, t) p = ReduceSum<axes=[1]>(r) f = Reshape(p, m) y = Add(x, f)", "int64[2] m = {4, -1}, int64[1] less = {-1}", opset=10),
    Case("no axis that ONNX Runtime removes from a shape", "float[N,4] x, float[1] z", "q = Squeeze(z, e) s = Shape(q) t = Concat<axis=0>(s, m) r = Reshape(x, t) p = Softmax<axis=1>(r) y = Reshape(p, m)", "int64[2] m = {-1, 4}, int64[0] e"),
    Case("axes that ONNX Runtime leaves out of a shape", "float[N,4] x, float[1,2,3] z", "q = ConvTranspose<output_shape=[1]>(z, w) s = Shape<start=2>(q) t = Concat<axis=0>(s, m) r = Reshape(x, t) p = Softmax<axis=0>(r) y = Reshape(p, m)", "float[2,1,2] w, int64[2] m = {-1, 4}"),
    Case("numbers that are counted over all masked positions", _X, f"m = Less(x, zero) {MASKED_WRITE.replace('w = Reshape(e, less)', 'b = Reshape(e, less) w = CumSum(b, axis)')}", f"{MASK_WEIGHTS}, int64 axis = {{0}}"),
    Case("the number of all masked positions", _X, f"m = Less(x, zero) {MASKED_WRITE.replace('Expand(v, a)', 'Expand(q, a)').replace('e = ', 'q = Cast<to=1>(a) e = ')}", MASK_WEIGHTS),
    Case("the batch size at masked positions", _X, f"m = Less(x, zero) n = Shape<start=0, end=1>(x) q = Cast<to=1>(n) {MASKED_WRITE.replace('Expand(v, a)', 'Expand(q, a)')}", MASK_WEIGHTS),
    Case("a mask whose rows lie along another axis", "float[N,3] x, float[1,N] z", f"m = Less(z, zero) {MASKED_WRITE}", MASK_WEIGHTS),
    Case("a mask whose rows lie in another order", "float[N] z, float[N,2] h", f"x = Concat<axis=0>(z, z) b = Less(h, zero) m = Reshape(b, less) {MASKED_WRITE.replace('y =', 'j =')} y1, y2 = Split<axis=0>(j)", MASK_WEIGHTS),
    Case("masked numbers of two rounds", "float[N,3] z", f"b = Less(z, zero) m = Concat<axis=1>(b, b) x = Concat<axis=1>(z, z) {MASKED_WRITE.replace('f = Reshape(m,', 'f = Reshape(b,').replace('e = Expand(v, a)', 'e = Loop(two, yes) <body = step (int64 i, bool g) => (g2, o) { g2 = Identity(g) h = Cast<to=1>(i) o = Expand(h, a) }>')}", f"{MASK_WEIGHTS}, int64 two = {{2}}, bool yes = {{1}}"),
    Case("rows of several entries after the first round", f"{_X}, float[N,?] h", f"u, y = Loop(two, yes, x, x) <body = step (int64 i, bool g, float[n,4] s, float[k,4] z) => (g2, s2, o) {{ g2 = Identity(g) m = Less(s, zero) {MASKED_WRITE.replace('y = ScatterND(x,', 'o = ScatterND(z,')} four = Constant<value_ints=[4]>() r = Identity(h) c = Shape<start=0, end=1>(r) b = Concat<axis=0>(c, four) s2 = Reshape(r, b) }}>", f"{MASK_WEIGHTS}, int64 two = {{2}}, bool yes = {{1}}", feeds={"x": [[[1] * 4]] * 3, "h": [[[-1] + [1] * 7], [[-1] + [1] * 7], [[1] * 8]]}),
    Case("entries at masked positions", _X, "m = Less(x, zero) p = NonZero(m) t = Transpose(p) g = GatherND(x, t) s = ReduceSum(g) y = Add(x, s)", "float zero = {0}"),
    Case("halves of interleaved rows", "float[N,2,4] x", f"c = Reshape(x, flat) {CHUNK}", f"{CHUNK_WEIGHTS}, int64[2] flat = {{-1, 4}}"),
    Case("one row more than half of the stacked rows", "float[N,4] x, float[N,4] z", f"c = Concat<axis=0>(x, z) {CHUNK}", CHUNK_WEIGHTS.replace("{1}", "{2}")),
    Case("halves of three stacked rows", _X, f"c = Concat<axis=0>(x, x, x) {CHUNK}", CHUNK_WEIGHTS),
    Case("the last entries, counted from the end or by a computed position", "float[N,M] z", f"{_LAST} n = Shape<start=0, end=1>(b) e = Squeeze(n) r = Range(zero, e, one) k = Shape<start=1>(b) q = Squeeze(k) h = Mul(r, q) o = ArgMax<axis=1, keepdims=0>(b) i = Add(h, o) f = Reshape(c, less) y = Gather(f, i)", "int64 zero = {0}, int64 one = {1}, int64[1] one1 = {1}, int64[1] start = {-5}, int64[1] five = {5}, int64[1] end = {999999999999}, int64[1] less = {-1}", sizes={"M": 3}, feeds={"z": [[[9, 1, 2]], [[5, 4, 3]], [[7, 2, 6]]]}),
    Case("windows with as much padding at the other end", f"{_X}, float[N,1,3] z", f"{_WINDOWS.replace('a =', 'p =')} {_WINDOWS.replace('a =', 'q =').replace('0,1', '1,0')} s = Shape<start=2>(p) t = Shape<start=2>(q) e = Equal(s, t) g = Not(e) {_BRANCH}"),
    Case("windows in a branch that ONNX Runtime puts in place of the node", "float[N,1,1] x, float[1,1,3] z", f"c = IsNaN(number) d = Not(c) w = If(d) <then_branch = t () => (a) {{ {_WINDOWS} }}, else_branch = e () => (b) {{ {_WINDOWS.replace('a =', 'b =').replace('[3]', '[2]')} }}> {_INFERRED}", _INFERRED_WEIGHTS, feeds={"z": [[[[1, 2, 3]]]] * 3}),
    Case("windows of all rounds of a loop", "float[N,1,1] x, float[1,1,3] z", f"p = Loop(one, yes) <body = step (int64 j, bool c) => (d, a) {{ d = Identity(c) {_WINDOWS} }}> w = Squeeze(p, first) {_INFERRED}", _INFERRED_WEIGHTS),
]
