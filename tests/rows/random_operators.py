"""Further steps of random graphs: rare, quantized and fused operators, classical models, texts.

Each step adds one operator with suitable operands and with attributes that are relevant to rows.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import TensorProto

from rows.grower import TEXTS, Grower
from rows.growing import BOOL, FLOAT, INT64, Unsuitable

Step: TypeAlias = Callable[[Grower], object]
Attributes: TypeAlias = dict[str, Any]


_MS: Final = "com.microsoft"
_ML: Final = "ai.onnx.ml"

_ANY_NUMBER: Final = """
    Asinh Atan Celu Cos Cosh Exp Gelu HardSigmoid HardSwish LeakyRelu Mish Shrink Sin Sinh Softsign Swish Tan
    ThresholdedRelu Identity
"""
_SMALL_NUMBER: Final = "Acos Asin Atanh"
_POSITIVE_NUMBER: Final = "Acosh Log Reciprocal Sqrt"


def _unary(g: Grower) -> object:
    draw, name = g.rng.random(), g.pick()
    if draw < 0.15:
        return g.graph.add(
            g.rng.choice(_SMALL_NUMBER.split()), g.graph.add("Mul", g.graph.add("Tanh", name), g.real(0.9))
        )
    if draw < 0.4:
        return g.graph.add(
            g.rng.choice(_POSITIVE_NUMBER.split()), g.graph.add("Add", g.graph.add("Abs", name), g.real(1))
        )
    if draw < 0.5:
        return g.graph.add(g.rng.choice(("Gelu", "QuickGelu", "FastGelu")), name, domain=_MS)
    return g.graph.add(g.rng.choice(_ANY_NUMBER.split()), name)


def _variadic(g: Grower) -> object:
    left = g.pick()
    others = [g.partner(left) for _ in range(g.rng.randint(0, 2))]
    operands = [left, *others]
    g.rng.shuffle(operands)
    return g.graph.add(g.rng.choice(("Sum", "Mean", "Max", "Min")), *operands)


def _binary(g: Grower) -> object:
    left = g.pick("fi", exact=True)
    op = g.rng.choice(("Pow", "PRelu", "Mod", "Mod"))
    if op == "Pow":
        return g.graph.add(op, left, g.graph.add_weight(np.array(g.rng.choice((2, 3, 1)), np.float32)))
    if op == "PRelu":
        return g.graph.add(op, left, g.partner(left))
    extra: Attributes = {"fmod": 1} if g.graph.alone(left).dtype.kind == "f" or g.rng.random() < 0.3 else {}
    divisor = g.graph.add_weight(np.array(g.rng.choice((2, 3, -3)), g.graph.alone(left).dtype))
    return g.graph.add(op, left, divisor, **extra)


def _bits(g: Grower) -> object:
    name = g.pick("iu")
    op = g.rng.choice(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift"))
    if op == "BitwiseNot":
        return g.graph.add(op, name)
    extra: Attributes = {"direction": g.rng.choice(("LEFT", "RIGHT"))} if op == "BitShift" else {}
    return g.graph.add(op, name, g.partner(name), **extra)


def _logic(g: Grower) -> object:
    draw = g.rng.random()
    if draw < 0.3:
        return g.graph.add(g.rng.choice(("IsNaN", "IsInf")), g.pick())
    if draw < 0.45:
        return g.graph.add("Not", g.pick("b"))
    if draw < 0.7:
        left = g.pick("b")
        return g.graph.add(g.rng.choice(("And", "Or", "Xor", "Equal")), left, g.partner(left))
    left = g.pick("fi", exact=True)
    op = g.rng.choice(("LessOrEqual", "GreaterOrEqual", "Less", "Greater", "Equal"))
    return g.graph.add(op, left, g.partner(left))


def _types(g: Grower) -> object:
    name = g.pick("fib", exact=True)
    if g.rng.random() < 0.3:
        return g.graph.add("CastLike", name, g.pick("fib"))
    to = (
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.INT32,
        TensorProto.INT8,
        TensorProto.UINT8,
        FLOAT,
        FLOAT,
        INT64,
    )
    return g.graph.add("Cast", name, to=g.rng.choice(to))


def _dropout(g: Grower) -> object:
    outputs = g.rng.choice((1, 2))
    if g.graph.opset < 12:
        return g.graph.add_many("Dropout", g.pick(), outputs=outputs, ratio=0.5)
    training = [g.real(0.5), g.graph.add_weight(np.array(g.rng.random() < 0.2))] if g.rng.random() < 0.4 else []
    return g.graph.add_many("Dropout", g.pick(), *training, outputs=outputs)


def _indices(g: Grower, name: str, length: int) -> str:
    """Integers from 0 to ``length`` - 1, in the shape of a tensor."""
    whole = g.graph.add("Cast", name, to=INT64)
    return g.graph.add("Mod", whole, g.graph.add_scalar(length))


def _elements(g: Grower) -> object:
    name = g.pick("f", least_rank=1, exact=True)
    axis = g.axis_of(name)
    length = g.graph.shape(name)[axis]
    if g.rng.random() < 0.4 and g.graph.opset >= 11:
        count = g.graph.add_ints(g.rng.randint(1, length))
        indices = g.graph.add_many("TopK", name, count, outputs=2, axis=axis)[1]
    else:
        indices = _indices(g, name, length)
    if g.rng.random() < 0.5:
        return g.graph.add("GatherElements", name, indices, axis=g.sign(axis, name))
    op = g.rng.choice(("ScatterElements", "ScatterElements", "Scatter"))
    extra: Attributes = (
        {"reduction": g.rng.choice(("add", "max", "none"))} if g.graph.opset >= 18 and op != "Scatter" else {}
    )
    updates = (
        g.partner(name)
        if g.rng.random() < 0.2
        else g.graph.add("Neg", g.graph.add("GatherElements", name, indices, axis=axis))
    )
    return g.graph.add(op, name, indices, updates, axis=axis, **extra)


def _scatter_nd(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape = g.graph.shape(name)
    extra: Attributes = {"reduction": rng.choice(("add", "none", "mul"))} if g.graph.opset >= 16 else {}
    draw = rng.random()
    if draw < 0.35:  # the same entries of all rows, like an assignment to a slice
        first = rng.randrange(shape[0])
        updates = g.graph.add("Gather", name, g.graph.add_ints(first), axis=0)
        return g.graph.add("ScatterND", name, g.graph.add_weight(np.array([[first]])), updates, **extra)
    numbers = g.numbered(name)
    if rng.random() < 0.1:
        numbers = g.graph.add(rng.choice(("Neg", "Identity", "Abs")), numbers)
    second = g.pick("i", least_rank=1, most_rank=1)
    parts = [g.unsqueeze(numbers, [1]), g.unsqueeze(g.graph.add("Mod", second, g.graph.add_scalar(shape[1])), [1])]
    if rng.random() < 0.15:
        parts.reverse()
    tuples = g.graph.add("Concat", *parts, axis=1)
    if draw < 0.6:
        return g.graph.add("GatherND", name, tuples, domain=_MS if rng.random() < 0.2 else "")
    picked = g.graph.add("GatherND", name, tuples)
    return g.graph.add("ScatterND", name, tuples, g.graph.add("Neg", picked), **extra)


def _axis_walk(g: Grower) -> object:
    rng = g.rng
    op = rng.choice(
        ("Det", "Inverse", "DFT", "STFT", "ReverseSequence", "ReverseSequence", "Trilu", "ReduceLogSum", "CumSum")
    )
    if op == "ReverseSequence":
        name = g.pick("f", least_rank=2)
        batch, time = rng.choice(((0, 1), (1, 0)))
        lengths = _indices(g, g.pick("fi", least_rank=1, most_rank=1, exact=True), g.graph.shape(name)[time])
        lengths = g.graph.add("Add", lengths, g.graph.add_scalar(1))
        if rng.random() < 0.3:
            lengths = g.graph.add_ints(*[1] * g.graph.shape(name)[batch])
        return g.graph.add(op, name, lengths, batch_axis=batch, time_axis=time)
    if op == "ReduceLogSum":
        name = g.graph.add("Add", g.graph.add("Abs", g.pick("f", least_rank=1)), g.real(1))
        axis = g.sign(g.axis_of(name), name)
        if g.graph.opset < 18:
            return g.graph.add(op, name, axes=[axis], keepdims=rng.randint(0, 1))
        return g.graph.add(op, name, g.graph.add_ints(axis), keepdims=rng.randint(0, 1))
    if op == "CumSum":
        name = g.pick("fi", least_rank=1, exact=True)
        along = g.graph.add_weight(np.array(g.sign(g.axis_of(name), name), np.int32))
        return g.graph.add(op, name, along, exclusive=1)
    if op == "STFT":
        name = g.pick("f", least_rank=2, most_rank=3)
        return g.graph.add(op, name, g.graph.add_scalar(1), "", g.graph.add_scalar(rng.choice((2, 4))))
    if op == "DFT":
        name = g.unsqueeze(g.pick("f", least_rank=1, most_rank=3), [-1])
        axis = g.axis_of(name)
        extra: Attributes = {"onesided": rng.randint(0, 1)}
        if g.graph.opset >= 20:
            return g.graph.add(op, name, "", g.graph.add_scalar(axis), **extra)
        return g.graph.add(op, name, axis=axis, **extra)
    name = g.pick("f", least_rank=2, exact=op == "Det")
    if op == "Trilu":
        return g.graph.add(
            op, name, g.graph.add_scalar(rng.choice((-1, 0, 1))), upper=rng.randint(0, 1), domain=rng.choice(("", _MS))
        )
    if op == "Inverse":  # ONNX Runtime 1.31.1 crashes on a matrix that is not square
        if any(shape[-1] != shape[-2] for shape in g.graph.shapes(name)):
            raise Unsuitable
        return g.graph.add(op, name, domain=_MS)
    return g.graph.add(op, name)


def _layer(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape = g.graph.shape(name)
    op, domain = rng.choice(
        (
            ("LayerNormalization", ""),
            ("RMSNormalization", ""),
            ("SimplifiedLayerNormalization", ""),
            ("LayerNormalization", _MS),
            ("SimplifiedLayerNormalization", _MS),
            ("SkipLayerNormalization", _MS),
            ("SkipSimplifiedLayerNormalization", _MS),
            ("GroupNormalization", ""),
            ("BiasSoftmax", _MS),
            ("BiasGelu", _MS),
            ("FastGelu", _MS),
        )
    )
    if op in ("BiasGelu", "FastGelu"):
        return g.graph.add(op, name, g.weight(shape[-1]), domain=domain)
    if op == "BiasSoftmax":
        axis = rng.randint(1, len(shape) - 1)
        bias = [length if rng.random() < 0.5 or k >= axis else 1 for k, length in enumerate(shape)]
        inner = int(rng.random() < 0.5)
        return g.graph.add(op, name, g.weight(*bias), axis=axis, is_inner_broadcast=inner, domain=domain)
    if op == "GroupNormalization":
        groups = rng.choice([count for count in (1, 2, 3) if shape[1] % count == 0])
        size = shape[1] if g.graph.opset >= 21 else groups
        return g.graph.add(op, name, g.weight(size), g.weight(size), num_groups=groups)
    if op.startswith("Skip"):
        skip = g.partner(name) if rng.random() < 0.7 else g.weight(*shape[rng.randint(0, 1) :])
        beta = [g.weight(shape[-1])] if op == "SkipLayerNormalization" else []
        return g.graph.add_many(op, name, skip, g.weight(shape[-1]), *beta, outputs=1, domain=domain)
    axis = rng.randint(0, len(shape) - 1) if rng.random() < 0.4 else len(shape) - 1
    tail = shape[axis:]
    outputs = rng.choice((1, 1, 3)) if op == "LayerNormalization" else 1
    return g.graph.add_many(op, name, g.weight(*tail), outputs=outputs, axis=g.sign(axis, name), domain=domain)


def _spatial(g: Grower) -> object:
    rng = g.rng
    op = rng.choice(
        ("LpPool", "GlobalLpPool", "DepthToSpace", "SpaceToDepth", "GridSample", "FusedConv", "Upsample", "Conv")
    )
    name = g.pick(
        "f", least_rank=3 if op in ("LpPool", "GlobalLpPool", "Upsample", "Conv", "FusedConv") else 4, most_rank=4
    )
    shape = g.graph.shape(name)
    kernel = [rng.choice((1, 2)) for _ in shape[2:]]
    if op == "GlobalLpPool":
        return g.graph.add(op, name, p=rng.choice((1, 2)))
    if op == "LpPool":
        return g.graph.add(op, name, kernel_shape=kernel, auto_pad=rng.choice(("NOTSET", "SAME_UPPER", "VALID")))
    if op in ("DepthToSpace", "SpaceToDepth"):
        order: Attributes = {"mode": rng.choice(("DCR", "CRD"))} if op == "DepthToSpace" and g.graph.opset >= 11 else {}
        return g.graph.add(op, name, blocksize=rng.choice((1, 2)), **order)
    if op == "GridSample":
        like = g.pick("f", least_rank=4, most_rank=4)
        grid = g.graph.add(
            "Tanh", g.graph.add("Slice", like, g.graph.add_ints(0), g.graph.add_ints(2), g.graph.add_ints(3))
        )
        mode = "linear" if g.graph.opset >= 20 else "bilinear"
        return g.graph.add(
            op,
            name,
            grid,
            mode=rng.choice((mode, "nearest")),
            padding_mode=rng.choice(("zeros", "border", "reflection")),
        )
    if op == "Upsample":
        scales = [1.0] * len(shape)
        scales[g.axis_of(name)] = 2.0
        return g.graph.add(
            op, name, g.graph.add_weight(np.array(scales, np.float32)), mode=rng.choice(("nearest", "linear"))
        )
    groups = rng.choice([count for count in (1, 2, 3) if shape[1] % count == 0])
    weights = g.weight(2 * groups, shape[1] // groups, *kernel)
    if op == "Conv":
        same: Attributes = {
            "auto_pad": rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID")),
            "strides": [rng.choice((1, 2)) for _ in kernel],
        }
        return g.graph.add(op, name, weights, kernel_shape=kernel, group=groups, **same)
    return g.graph.add(
        op, name, weights, kernel_shape=kernel, group=groups, activation=rng.choice(("Relu", "Tanh")), domain=_MS
    )


def _samples(g: Grower) -> object:
    """Samples of images at positions of the rows: boxes, grids, offsets."""
    rng, op = g.rng, g.rng.choice(("RoiAlign", "AffineGrid", "Col2Im", "DeformConv"))
    if op == "Col2Im":
        name = g.pick("f", least_rank=3, most_rank=3)
        shape = g.graph.shape(name)
        return g.graph.add(op, name, g.graph.add_ints(1, shape[2]), g.graph.add_ints(1, rng.choice((1, 1, 2))))
    if op == "AffineGrid":
        name = g.pick("f", least_rank=3, most_rank=3)
        return g.graph.add(op, name, g.vector([g.size(name, 0), g.graph.add_ints(2), g.graph.add_ints(2, 3)]))
    name = g.pick("f", least_rank=4, most_rank=4)
    shape = g.graph.shape(name)
    if op == "DeformConv":
        offsets = g.graph.add("Conv", g.partner(name), g.weight(2, shape[1], 1, 1))
        return g.graph.add(op, name, g.weight(2, shape[1], 1, 1), offsets, kernel_shape=[1, 1])
    corners = g.graph.add("Tanh", g.graph.add("MatMul", g.pick("f", least_rank=2, most_rank=2), g.weight(1, 2)))
    boxes = g.graph.add("Concat", corners, g.graph.add("Add", corners, g.real(2)), axis=1)
    numbers = g.numbered(name)
    if rng.random() < 0.2:
        numbers = _indices(g, numbers, shape[0])
    return g.graph.add(op, name, boxes, numbers, output_height=rng.choice((1, 2)))


def _windows(g: Grower) -> object:
    """Pooling and convolution with windows of any stride, dilation and padding."""
    rng, opset = g.rng, g.graph.opset
    op = rng.choice(("MaxPool", "AveragePool", "LpPool", "Conv", "ConvTranspose"))
    name = g.pick("f", least_rank=3, most_rank=4, exact=op == "MaxPool")
    shape = g.graph.shape(name)
    kernel = [rng.choice((1, 2, 3)) for _ in shape[2:]]
    strides = [rng.choice((1, 2, 3)) for _ in kernel]
    attributes: Attributes = {"kernel_shape": kernel, "strides": strides}
    if rng.random() < 0.5:
        attributes["pads"] = [rng.randrange(size) for size in (*kernel, *kernel)]
    else:
        attributes["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"))
    if op.startswith("Conv") or opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]:
        attributes["dilations"] = [rng.choice((1, 1, 2)) for _ in kernel]
    if op.endswith("Pool"):
        if opset >= {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[op]:
            attributes["ceil_mode"] = rng.choice((0, 1))
        if op == "AveragePool" and opset >= 7:
            attributes["count_include_pad"] = rng.choice((0, 1))
        return g.graph.add(op, name, **attributes)
    if op == "Conv":
        return g.graph.add(op, name, g.weight(2, shape[1], *kernel), **attributes)
    if rng.random() < 0.5:
        attributes["output_padding"] = [rng.randrange(stride) for stride in strides]
    return g.graph.add(op, name, g.weight(shape[1], 2, *kernel), **attributes)


def _states(g: Grower) -> object:
    """Operators that keep a state: caches that are updated, linear attention, convolutions of the past."""
    rng = g.rng
    op = rng.choice(("TensorScatter", "CausalConvWithState", "LinearAttention"))
    name = g.pick("f", least_rank=3, most_rank=4 if op == "TensorScatter" else 3)
    shape = g.graph.shape(name)
    if op == "CausalConvWithState":
        size = rng.choice((2, 3))
        past = g.graph.add("Slice", name, g.graph.add_ints(0), g.graph.add_ints(size - 1), g.graph.add_ints(2))
        state = [] if rng.random() < 0.4 else ["", past]
        activation = rng.choice(("none", "silu"))
        weights = g.weight(shape[1], 1, size)
        return g.graph.add_many(op, name, weights, *state, outputs=2, domain=_MS, activation=activation)
    if op == "LinearAttention":
        small = g.graph.add("Tanh", name)
        attributes: Attributes = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear"}
        return g.graph.add_many(op, small, small, small, outputs=2, domain=_MS, **attributes)
    axis = g.axis_of(name)
    others = range(1, len(shape))
    if g.graph.opset < 24:
        raise Unsuitable
    sums = g.graph.add("ReduceSum", name, g.graph.add_ints(*others), keepdims=0)
    mode = rng.choice(("linear", "circular"))
    indices = [] if rng.random() < 0.3 else [_indices(g, g.graph.add("Abs", sums), shape[axis])]
    return g.graph.add(op, name, g.graph.add("Neg", name), *indices, axis=g.sign(axis, name), mode=mode)


def _bytes(g: Grower, least_rank: int = 0, most_rank: int = 6) -> str:
    """A tensor of bytes: an input, or quantized floats."""
    names = [
        name
        for name, runs in g.graph.values.items()
        if runs[-1] is not None and name[0] != "w" and g.graph.alone(name).dtype == np.uint8
        and least_rank <= g.graph.alone(name).ndim <= most_rank
    ]  # fmt: skip
    if names and g.rng.random() < 0.7:
        return g.rng.choice(names)
    name = g.pick("f", exact=True, least_rank=least_rank, most_rank=most_rank)
    if g.graph.alone(name).dtype != np.float32:
        raise Unsuitable
    return g.graph.add("QuantizeLinear", name, _scale(g), _zero(g))


def _scale(g: Grower) -> str:
    return g.graph.add_weight(np.array(g.rng.choice((0.5, 0.25, 2)), np.float32))


def _zero(g: Grower) -> str:
    return g.graph.add_weight(np.array(g.rng.choice((0, 3, 128)), np.uint8))


def _quantized_weight(g: Grower, *shape: int) -> str:
    numbers = [g.rng.randint(0, 9) for _ in range(int(np.prod(shape)))]
    return g.graph.add_weight(np.array(numbers, np.uint8).reshape(shape))


_QUANTIZED: Final = """
    QLinearAdd QLinearMul QLinearLeakyRelu QLinearSigmoid QLinearConcat QLinearSoftmax QLinearWhere QLinearMatMul
    MatMulInteger MatMulIntegerToFloat QGemm QLinearConv ConvInteger QLinearAveragePool QLinearGlobalAveragePool
    NhwcMaxPool DynamicQuantizeMatMul DequantizeLinear QLinearReduceMean
"""


def _quantized(g: Grower) -> object:
    rng = g.rng
    op = rng.choice(_QUANTIZED.split())
    spatial = op in ("QLinearConv", "ConvInteger", "QLinearAveragePool", "QLinearGlobalAveragePool", "NhwcMaxPool")
    if op == "DynamicQuantizeMatMul":
        name = g.pick("f", least_rank=1)
        weights = _quantized_weight(g, g.graph.shape(name)[-1], 2)
        return g.graph.add(op, name, weights, _scale(g), _zero(g), domain=_MS)
    name = _bytes(g, 3 if spatial else 1, 2 if op == "QGemm" else 4)
    shape, here, there = g.graph.shape(name), (_scale(g), _zero(g)), (_scale(g), _zero(g))
    if op in ("QLinearAdd", "QLinearMul"):
        pair = [(name, *here), (g.partner(name), *there)]
        rng.shuffle(pair)
        return g.graph.add(op, *pair[0], *pair[1], *here, domain=_MS)
    if op in ("QLinearLeakyRelu", "QLinearSigmoid"):
        return g.graph.add(op, name, *here, *there, domain=_MS)
    if op == "QLinearWhere":
        return g.graph.add(op, g.pick("b"), name, *here, g.partner(name), *there, *here, domain=_MS)
    if op == "QLinearConcat":
        other = name if rng.random() < 0.5 else _bytes(g, len(shape), len(shape))
        return g.graph.add(op, *here, name, *here, other, *there, axis=g.sign(g.axis_of(name), name), domain=_MS)
    if op == "QLinearSoftmax":
        axis = g.sign(g.axis_of(name), name)
        return g.graph.add(op, name, *here, *there, axis=axis, opset=rng.choice((12, 13)), domain=_MS)
    if op == "QLinearReduceMean":
        return g.graph.add(op, name, *here, *there, axes=[g.axis_of(name)], keepdims=rng.randint(0, 1), domain=_MS)
    if op == "DequantizeLinear":
        if rng.random() < 0.6 or g.graph.opset < 13:
            return g.graph.add(op, name, *here, domain=rng.choice(("", _MS)))
        axis = g.axis_of(name)
        scales = g.graph.add_weight(np.full(shape[axis], 0.5, np.float32))
        return g.graph.add(op, name, scales, _quantized_weight(g, shape[axis]), axis=g.sign(axis, name))
    if op in ("QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"):
        weights = _quantized_weight(g, shape[-1], 2)
        if op == "QLinearMatMul":
            return g.graph.add(op, name, *here, weights, *there, *here)
        if op == "MatMulInteger":
            zero = _quantized_weight(g, 2) if rng.random() < 0.4 else there[1]
            return g.graph.add(op, name, weights, here[1], zero)
        if op == "MatMulIntegerToFloat":
            return g.graph.add(op, name, weights, here[0], there[0], here[1], there[1], domain=_MS)
        return g.graph.add(op, name, *here, weights, *there, "", *here, transA=int(rng.random() < 0.2), domain=_MS)
    kernel = [rng.choice((1, 2)) for _ in shape[2:]]
    if op == "ConvInteger":
        return g.graph.add(op, name, _quantized_weight(g, 2, shape[1], *kernel), here[1])
    if op == "QLinearConv":
        weights = _quantized_weight(g, 2, shape[1], *kernel)
        return g.graph.add(op, name, *here, weights, *there, *here, pads=[1] * 2 * len(kernel))
    if op == "NhwcMaxPool":
        return g.graph.add(op, name, kernel_shape=kernel, domain=_MS)
    last = {"channels_last": rng.randint(0, 1)}
    if op == "QLinearAveragePool":  # ONNX Runtime 1.31.1 crashes on a smaller image
        images = [other[1:-1] if last["channels_last"] else other[2:] for other in g.graph.shapes(name)]
        kernel = [min(sizes) for sizes in zip(kernel, *images, strict=True)]
        return g.graph.add(op, name, *here, *there, kernel_shape=kernel, domain=_MS, **last)
    return g.graph.add(op, name, *here, *there, domain=_MS, **last)


def _fused_products(g: Grower) -> object:
    rng = g.rng
    op = rng.choice(("FusedGemm", "TransposeMatMul", "MatMulNBits", "CDist", "GatherBlockQuantized"))
    if op == "GatherBlockQuantized":
        ids = g.graph.add("Mod", g.pick("i", most_rank=2), g.graph.add_scalar(4))
        table = g.graph.add_weight(np.arange(4 * 32, dtype=np.uint8).reshape(4, 32) % 200)
        scales = g.graph.add_weight(np.full((4, 4), 0.5, np.float32))
        return g.graph.add(op, table, ids, scales, block_size=16, domain=_MS)
    name = g.pick("f", least_rank=2, most_rank=2 if op in ("FusedGemm", "CDist") else 4)
    shape = g.graph.shape(name)
    if op == "CDist":
        other = g.weight(3, shape[1]) if rng.random() < 0.7 else g.pick("f", least_rank=2, most_rank=2)
        return g.graph.add(
            op, *rng.sample((name, other), 2), metric=rng.choice(("euclidean", "sqeuclidean")), domain=_MS
        )
    if op == "TransposeMatMul":
        return g.graph.add(op, name, g.weight(shape[-1], 2), domain=_MS, transA=int(rng.random() < 0.3))
    if op == "MatMulNBits":
        width = shape[-1]
        packed = g.graph.add_weight(np.full((2, 1, 8), 0x5A, np.uint8))
        scales = g.graph.add_weight(np.array([0.5, 0.25], np.float32))
        return g.graph.add(op, name, packed, scales, K=width, N=2, bits=4, block_size=16, domain=_MS)
    flip = int(rng.random() < 0.3)
    bias = g.weight(*rng.choice(((2,), (1,), (1, 2), (1, 1), ())))
    return g.graph.add(op, name, g.weight(shape[0 if flip else 1], 2), bias, transA=flip, activation="Relu", domain=_MS)


def _recurrent(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=3, most_rank=3)
    op, gates = rng.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    shape, layout = g.graph.shape(name), int(rng.random() < 0.3) if g.graph.opset >= 14 else 0
    direction = rng.choice(("forward", "reverse", "bidirectional"))
    count = 2 if direction == "bidirectional" else 1
    weights = g.weight(count, 2 * gates, shape[2]), g.weight(count, 2 * gates, 2)
    time = 1 if layout else 0
    lengths = [""]
    if rng.random() < 0.4:
        like = g.pick("fi", least_rank=1, most_rank=1, exact=True)
        numbers = g.graph.add("Add", _indices(g, like, shape[time]), g.graph.add_scalar(1))
        lengths = [g.graph.add("Cast", numbers, to=TensorProto.INT32)]
    attributes: Attributes = {"layout": layout} if g.graph.opset >= 14 else {}
    if op == "GRU":
        attributes["linear_before_reset"] = rng.randint(0, 1)
    return g.graph.add_many(
        op, name, *weights, "", *lengths, outputs=rng.choice((1, 2)), hidden_size=2, direction=direction, **attributes
    )


def _attention(g: Grower) -> object:
    rng = g.rng
    op, domain = rng.choice(
        (
            ("Attention", _MS),
            ("MultiHeadAttention", _MS),
            ("Attention", ""),
            ("RotaryEmbedding", _MS),
            ("RotaryEmbedding", ""),
            ("EmbedLayerNormalization", _MS),
        )
    )
    if op == "EmbedLayerNormalization":
        ids = g.pick("i", least_rank=2, most_rank=2)
        ids = g.graph.add("Cast", g.graph.add("Mod", ids, g.graph.add_scalar(5)), to=TensorProto.INT32)
        tables = g.weight(5, 4), g.weight(8, 4)
        return g.graph.add_many(op, ids, "", *tables, "", g.weight(4), g.weight(4), outputs=2, domain=domain)
    if op == "RotaryEmbedding":
        name = g.pick("f", least_rank=4, most_rank=4)
        half, length = g.graph.shape(name)[3] // 2, g.graph.shape(name)[2]
        tables = g.weight(8, half), g.weight(8, half)
        if rng.random() < 0.4:
            positions = g.graph.add_weight(
                np.arange(length, dtype=np.int64)[None] if domain == "" else np.array([1], np.int64)
            )
        else:
            positions = _indices(g, g.pick("fi", least_rank=2, most_rank=2, exact=True), 8)
        operands = (positions, *tables) if domain else (*tables, positions)
        return g.graph.add(op, name, *operands, domain=domain, interleaved=rng.randint(0, 1))
    name = g.pick("f", least_rank=3, most_rank=3 if domain else 4)
    shape = g.graph.shape(name)
    if op == "Attention" and domain:
        hidden = 4
        mask = []
        if rng.random() < 0.4:
            ones = g.pick("fi", least_rank=1, most_rank=2, exact=True)
            mask = [
                g.graph.add(
                    "Cast", g.graph.add("Greater", ones, g.graph.add("CastLike", g.real(0), ones)), to=TensorProto.INT32
                )
            ]
        return g.graph.add(
            op,
            name,
            g.weight(shape[2], 3 * hidden),
            g.weight(3 * hidden),
            *mask,
            num_heads=2,
            domain=domain,
            unidirectional=rng.randint(0, 1),
        )
    others = [
        other
        for other, runs in g.graph.values.items()
        if runs[-1] is not None
        and other[0] != "w"
        and g.graph.alone(other).dtype == np.float32
        and len(g.graph.shape(other)) == len(shape)
    ]
    key = rng.choice((name, rng.choice([name, *others])))
    heads = 2 if shape[-1] % 2 == 0 else 1
    if op == "MultiHeadAttention":
        bias = [g.weight(1, rng.choice((1, heads)), shape[1], g.graph.shape(key)[1])] if rng.random() < 0.3 else []
        return g.graph.add(
            op,
            name,
            key,
            key,
            *(["", "", *bias] if bias else []),
            num_heads=heads,
            domain=domain,
            unidirectional=rng.randint(0, 1),
        )
    counts: Attributes = {"q_num_heads": heads, "kv_num_heads": heads} if len(shape) == 3 else {}
    mask = []
    if rng.random() < 0.5:
        lengths = shape[1] if len(shape) == 3 else shape[2], g.graph.shape(key)[1 if len(shape) == 3 else 2]
        full = (shape[0], heads if counts else shape[1], *lengths)
        mask = (
            [g.weight(*full[rng.randint(0, 2) :])] if rng.random() < 0.6 else [g.pick("fb", least_rank=2, most_rank=4)]
        )
    return g.graph.add(op, name, key, key, *mask, is_causal=rng.randint(0, 1), **counts)


def _past(g: Grower) -> object:
    """Attention to a past, with and without outputs for the present, and with positions of rows."""
    rng, name = g.rng, g.pick("f", least_rank=3, most_rank=3, exact=True)
    length, size = g.graph.shape(name)[1:]
    outputs = rng.choice((1, 3, 3))
    if rng.random() < 0.4:
        heads = 2 if size % 2 == 0 else 1
        split = g.graph.add("Reshape", name, g.graph.add_ints(0, 0, heads, size // heads))
        past = g.graph.add("Transpose", split, perm=[0, 2, 1, 3])
        operands = [name, name, name, "", "", "", past, past]
        return g.graph.add_many("MultiHeadAttention", *operands, outputs=outputs, num_heads=heads, domain=_MS)
    queries = g.graph.add("MatMul", name, g.weight(size, 64))
    past, total = "", length
    if length == 1:  # ONNX Runtime 1.32.0 rejects several rows with a past and more than one new token
        past, total = g.unsqueeze(g.graph.add("MatMul", name, g.weight(size, 16)), [1]), 2
    largest = g.graph.add("ArgMax", g.graph.add("Flatten", name, axis=1), axis=1, keepdims=0)
    lengths = g.graph.add("Cast", _indices(g, largest, total), to=TensorProto.INT32)
    operands = [queries, "", "", past, past, lengths, g.graph.add_weight(np.array(total, np.int32))]
    attributes: Attributes = {"num_heads": 2, "kv_num_heads": 1}
    if rng.random() < 0.6:
        operands += [g.weight(9, 8), g.weight(9, 8)]
        attributes["do_rotary"] = 1
        if rng.random() < 0.5:
            operands.append(_indices(g, g.graph.add("Gather", name, g.graph.add_scalar(0), axis=2), 8))
    if rng.random() < 0.3:
        attributes["local_window_size"] = rng.choice((1, 2))
        attributes["sliding_window_cache"] = rng.randint(0, 1)
    return g.graph.add_many("GroupQueryAttention", *operands, outputs=outputs, domain=_MS, **attributes)


def _flags(g: Grower) -> object:
    """Flags that are neither 0 nor 1, and bounds of rows."""
    rng, name = g.rng, g.pick("f", least_rank=1)
    if rng.random() < 0.3:
        return g.graph.add("Clip", name, g.partner(name))
    flag: Attributes = {rng.choice(("keepdims", "noop_with_empty_axes")): rng.choice((-1, 2))}
    return g.graph.add(rng.choice(("ReduceSum", "ReduceMax", "ReduceL2")), name, **flag)


_TREE: Final[Attributes] = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
}


_CLASSICAL: Final = """
    LinearClassifier LinearRegressor SVMClassifier SVMRegressor TreeEnsembleClassifier TreeEnsembleRegressor Normalizer
    Imputer Scaler Binarizer LabelEncoder OneHotEncoder ArrayFeatureExtractor FeatureVectorizer
"""


def _classical(g: Grower) -> object:
    rng = g.rng
    op = rng.choice(_CLASSICAL.split())
    if op in ("LabelEncoder", "OneHotEncoder"):
        name = g.pick("i", least_rank=1, most_rank=3)
        if op == "OneHotEncoder":
            return g.graph.add(op, name, cats_int64s=[0, 1, 2], zeros=1, domain=_ML)
        return g.graph.add(op, name, keys_int64s=[0, 1, 2], values_floats=[0.5, 2.0, -1.0], domain=_ML)
    name = g.pick("f", least_rank=1, most_rank=3, exact=op not in ("Scaler", "LinearRegressor", "FeatureVectorizer"))
    shape = g.graph.shape(name)
    width = shape[-1]
    weights = [float(rng.randint(-2, 3)) for _ in range(2 * width)]
    if op == "LinearRegressor":
        targets = rng.choice((1, 2))
        return g.graph.add(
            op, name, coefficients=weights[: targets * width], intercepts=[0.5] * targets, targets=targets, domain=_ML
        )
    if op == "LinearClassifier":
        return g.graph.add_many(
            op,
            name,
            outputs=2,
            coefficients=weights,
            intercepts=[0.5, -0.25],
            classlabels_ints=[3, 4],
            post_transform=rng.choice(("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")),
            multi_class=rng.randint(0, 1),
            domain=_ML,
        )
    if op.startswith("SVM"):
        svm: Attributes = {
            "kernel_type": rng.choice(("RBF", "LINEAR", "POLY")),
            "kernel_params": [0.5, 0.0, 2.0],
            "coefficients": [1.0, -1.0],
            "support_vectors": weights,
            "rho": [0.3],
        }
        if op == "SVMRegressor":
            return g.graph.add(op, name, n_supports=2, domain=_ML, **svm)
        return g.graph.add_many(
            op, name, outputs=2, vectors_per_class=[1, 1], classlabels_ints=[0, 1], domain=_ML, **svm
        )
    if op == "TreeEnsembleRegressor":
        return g.graph.add(
            op,
            name,
            **_TREE,
            target_ids=[0, 0],
            target_nodeids=[1, 2],
            target_treeids=[0, 0],
            target_weights=[1.0, -2.0],
            n_targets=1,
            domain=_ML,
        )
    if op == "TreeEnsembleClassifier":
        return g.graph.add_many(
            op,
            name,
            outputs=2,
            **_TREE,
            class_ids=[0, 1],
            class_nodeids=[1, 2],
            class_treeids=[0, 0],
            class_weights=[1.0, -2.0],
            classlabels_int64s=[5, 6],
            post_transform=rng.choice(("NONE", "SOFTMAX", "LOGISTIC")),
            domain=_ML,
        )
    if op == "Normalizer":
        return g.graph.add(op, name, norm=rng.choice(("MAX", "L1", "L2")), domain=_ML)
    if op in ("Imputer", "Scaler"):
        numbers = [float(rng.randint(1, 3)) for _ in range(rng.choice((1, width)))]
        if op == "Scaler":
            return g.graph.add(op, name, offset=numbers, scale=numbers, domain=_ML)
        return g.graph.add(op, name, imputed_value_floats=numbers, replaced_value_float=0.0, domain=_ML)
    if op == "Binarizer":
        return g.graph.add(op, name, threshold=1.0, domain=_ML)
    if op == "ArrayFeatureExtractor":
        indices = g.graph.add_ints(0, width - 1) if rng.random() < 0.7 else g.pick("i", least_rank=1, most_rank=2)
        return g.graph.add(op, name, indices, domain=_ML)
    return g.graph.add(op, name, name, inputdimensions=[width, rng.choice((1, width, width + 1))], domain=_ML)


def _texts(g: Grower) -> object:
    rng, name = g.rng, g.pick("O")
    rank = len(g.graph.shape(name))
    op = rng.choice(
        (
            "StringConcat",
            "LabelEncoder",
            "LabelEncoder",
            "Equal",
            "Tokenizer",
            "StringNormalizer",
            "TfIdfVectorizer",
            "OneHotEncoder",
            "MurmurHash3",
            "CategoryMapper",
        )
    )
    if op == "StringConcat":
        return g.graph.add(op, name, g.graph.add_weight(np.array(rng.choice(TEXTS), object)))
    if op == "Equal":
        return g.graph.add(op, name, g.graph.add_weight(np.array(["red"], object)))
    if op == "LabelEncoder":
        values: Attributes = rng.choice(
            ({"values_int64s": [1, 2]}, {"values_floats": [0.5, 2.0]}, {"values_strings": ["x", "y z"]})
        )
        return g.graph.add(op, name, keys_strings=["red", "blue"], domain=_ML, **values)
    if op == "CategoryMapper":
        return g.graph.add(op, name, cats_strings=["red", "blue"], cats_int64s=[1, 2], domain=_ML)
    if op == "OneHotEncoder":
        return g.graph.add(op, name, cats_strings=["red", "blue"], zeros=1, domain=_ML)
    if op == "MurmurHash3":
        return g.graph.add(op, name, domain=_MS)
    if op == "StringNormalizer":
        stop: Attributes = {"stopwords": ["red"], "is_case_sensitive": 1} if rng.random() < 0.3 else {}
        return g.graph.add(op, name, **stop)
    counted: Attributes = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": rng.choice((1, 2)),
        "max_skip_count": rng.choice((0, 1)),
        "ngram_counts": [0, 3],
        "ngram_indexes": [0, 1, 2, 3],
        "pool_strings": ["red", "a", "b", "a", "b"],
    }
    if op == "TfIdfVectorizer":
        return g.graph.add(op, name, **counted)
    tokens = g.graph.add(
        "Tokenizer", name, mark=0, pad_value=rng.choice(("", "#")), separators=[" "], mincharnum=1, domain=_MS
    )
    if rank == 1 or rng.random() < 0.4:
        return g.graph.add("TfIdfVectorizer", tokens, **counted)
    return tokens


def _whole(g: Grower) -> object:
    """Operators whose values determine the size of the result."""
    op = g.rng.choice(("NonZero", "Unique", "Compress"))
    name = g.pick("f", least_rank=1, exact=True)
    if op == "Compress":
        axis = g.axis_of(name)
        keep = g.graph.add_weight(
            np.array([True] + [g.rng.random() < 0.5 for _ in range(g.graph.shape(name)[axis] - 1)])
        )
        return g.graph.add(op, name, keep, axis=axis)
    return g.graph.add(op, name)


def _constant(g: Grower) -> object:
    rng = g.rng
    if rng.random() < 0.5 and g.graph.opset >= 12:
        return g.graph.add("Constant", value_ints=[rng.randint(0, 3) for _ in range(rng.randint(1, 3))])
    name = g.pick("fi", least_rank=1)
    return g.graph.add("ConstantOfShape", g.graph.add("Shape", name))


def _counting(g: Grower) -> object:
    """Counts along an axis, like positions in exported models."""
    name = g.pick("fi", least_rank=1)
    axis = g.axis_of(name)
    length = g.scalar(g.size(name, axis))
    start = g.graph.add_scalar(g.rng.choice((0, 0, 1, -1)))
    if g.rng.random() < 0.3:
        length = g.graph.add("Add", length, start)
    numbers = g.graph.add("Range", start, length, g.graph.add_scalar(g.rng.choice((1, 1, 2))))
    if g.rng.random() < 0.5:
        return g.graph.add("Gather", name, g.graph.add("Abs", numbers), axis=axis)
    shape = g.graph.shape(name)
    like = (
        g.unsqueeze(g.graph.add("Cast", numbers, to=FLOAT), [*range(1, len(shape) - axis)])
        if axis < len(shape) - 1
        else g.graph.add("Cast", numbers, to=FLOAT)
    )
    return g.graph.add("Add", g.graph.add("Cast", name, to=FLOAT), like)


OPERATORS: Final[dict[Step, float]] = {
    _unary: 4,
    _variadic: 2,
    _binary: 2,
    _bits: 1,
    _logic: 3,
    _types: 2,
    _dropout: 1,
    _elements: 3,
    _scatter_nd: 3,
    _axis_walk: 3,
    _layer: 5,
    _spatial: 5,
    _windows: 4,
    _samples: 2,
    _states: 2,
    _quantized: 8,
    _fused_products: 3,
    _recurrent: 3,
    _attention: 6,
    _past: 3,
    _flags: 0.5,
    _classical: 8,
    _texts: 6,
    _whole: 0.5,
    _constant: 1,
    _counting: 1.5,
}
"""The frequency of each step."""

KINDS: Final[dict[int, float]] = {
    FLOAT: 8,
    INT64: 4,
    BOOL: 2,
    TensorProto.UINT8: 2,
    TensorProto.STRING: 2,
    TensorProto.INT32: 1,
    TensorProto.DOUBLE: 1,
}
"""The element types of inputs, and their frequencies."""
