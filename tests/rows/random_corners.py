"""Steps of random graphs with attributes and operands at the ends of their ranges."""

from typing import Any, Final

import numpy as np
from onnx import TensorProto

from rows.grower import Grower
from rows.growing import FLOAT, Unsuitable

_SMALLEST: Final = -(2**63)
_LARGEST: Final = 2**63 - 1


def _empty_axes(g: Grower) -> object:
    """Reductions over no axes: over all, or over none with ``noop_with_empty_axes``."""
    rng, name = g.rng, g.pick("f", least_rank=1)
    op = rng.choice(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare"))
    flags: dict[str, Any] = {"keepdims": rng.randint(0, 1)}
    if g.graph.opset < (13 if op == "ReduceSum" else 18):
        return g.graph.add(op, name, **flags)
    axes = [g.graph.add_weight(np.array([], np.int64))] if rng.random() < 0.7 else []
    return g.graph.add(op, name, *axes, noop_with_empty_axes=rng.randint(0, 1), **flags)


def _many_axes(g: Grower) -> object:
    """Axes in any order, counted from both ends: of reductions, Squeeze and Unsqueeze."""
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape = g.graph.shape(name)
    rank = len(shape)
    op = rng.choice(("ReduceSum", "ReduceMin", "Squeeze", "Unsqueeze", "MeanVarianceNormalization"))
    choices = [axis for axis in range(rank) if shape[axis] == 1] if op == "Squeeze" else [*range(rank)]
    if not choices:
        raise Unsuitable
    axes = [axis - rng.choice((0, rank)) for axis in rng.sample(choices, rng.randint(1, len(choices)))]
    if op == "Unsqueeze":
        count = rng.randint(1, 2)
        axes = [axis - rng.choice((0, rank + count)) for axis in rng.sample(range(rank + count), count)]
    flags: dict[str, Any] = {"keepdims": rng.randint(0, 1)} if op.startswith("Reduce") else {}
    if op == "MeanVarianceNormalization" or g.graph.opset < {"ReduceMin": 18}.get(op, 13):
        return g.graph.add(op, name, axes=axes, **flags)
    return g.graph.add(op, name, g.graph.add_ints(*axes), **flags)


def _far_slice(g: Grower) -> object:
    """Slices that begin or end far outside, go backwards, or name no axes."""
    rng, name = g.rng, g.pick("fib", least_rank=1)
    rank = len(g.graph.shape(name))
    if rng.random() < 0.3:
        count = rng.randint(1, rank)
        starts = [rng.choice((0, _SMALLEST, -9)) for _ in range(count)]
        return g.graph.add("Slice", name, g.graph.add_ints(*starts), g.graph.add_ints(*[_LARGEST] * count))
    axis = g.axis_of(name, rarely_rows=rng.random() < 0.5)
    start, end, step = rng.choice(
        (
            (_LARGEST, _SMALLEST, -1),
            (-1, _SMALLEST, -1),
            (_SMALLEST, _LARGEST, 1),
            (0, 10**9, 1),
            (-1, -9, -2),
            (0, 2**31 - 1, 1),
        )
    )
    bounds = [g.graph.add_ints(each) for each in (start, end, g.sign(axis, name), step)]
    return g.graph.add("Slice", name, *bounds)


def _shape_part(g: Grower) -> object:
    """A part of a shape with bounds outside of it, as a target shape."""
    rng, name = g.rng, g.pick("f", least_rank=2)
    if g.graph.opset < 15:
        raise Unsuitable
    rank = len(g.graph.shape(name))
    cut = rng.randint(1, rank)
    before = g.graph.add(
        "Shape", name, start=rng.choice((0, -rank, -99)), end=cut - rng.choice((0, rank)) if cut < rank else 99
    )
    target = g.graph.add("Concat", before, g.graph.add_ints(-1), axis=rng.choice((0, -1)))
    flat = g.graph.add("Reshape", name, target, allowzero=rng.randint(0, 1))
    return g.graph.add("Softmax", flat, axis=rng.choice((-1, 0, 1)))


def _flattened(g: Grower) -> object:
    """Flatten at each axis, also behind the last one, and back."""
    rng, name = g.rng, g.pick("f", least_rank=1)
    rank = len(g.graph.shape(name))
    axis = rng.randint(0, rank) if g.graph.opset < 11 else rng.randint(-rank, rank)
    flat = g.graph.add("Flatten", name, axis=axis)
    if rng.random() < 0.5:
        flat = g.graph.add(rng.choice(("Softmax", "Relu", "Hardmax")), flat)
    return g.graph.add("Reshape", flat, g.graph.add("Shape", name))


def _diagonal(g: Grower) -> object:
    """Einsum with a letter twice in a term, without a result, or with all axes summed."""
    rng, name = g.rng, g.pick("f", least_rank=2, most_rank=3)
    letters = "abc"[: len(g.graph.shape(name))]
    swapped = letters[1] + letters[0] + letters[2:]
    twice = letters[:-1] + letters[-2]
    terms = rng.choice(
        (f"{twice}->{twice[:-1]}", letters, swapped, f"{letters}->", f"{twice}->", "...a->...", "a...->...a")
    )
    return g.graph.add("Einsum", name, equation=terms)


def _counts(g: Grower) -> object:
    """CumSum, TopK, ArgMax and OneHot with their less usual flags."""
    rng, name = g.rng, g.pick("f", least_rank=1, exact=True)
    axis = g.sign(g.axis_of(name), name)
    op = rng.choice(("CumSum", "TopK", "ArgMax", "OneHot"))
    if op == "CumSum":
        flags: dict[str, Any] = {"exclusive": rng.randint(0, 1), "reverse": rng.randint(0, 1)}
        return g.graph.add(op, name, g.graph.add_weight(np.array(axis, np.int32)), **flags)
    if op == "TopK":
        count = g.size(name, axis) if axis >= 0 and rng.random() < 0.4 else g.graph.add_ints(1)
        return g.graph.add_many(op, name, count, outputs=2, axis=axis, largest=rng.randint(0, 1), sorted=1)
    if op == "ArgMax":
        return g.graph.add(op, name, axis=axis, keepdims=rng.randint(0, 1), select_last_index=rng.randint(0, 1))
    values = g.graph.add_weight(np.array([0, 1], np.float32))
    ids = g.graph.add("Cast", name, to=TensorProto.INT64)
    return g.graph.add(op, ids, g.size(name, 0), values, axis=rng.choice((0, -1, 1)))


def _padded(g: Grower) -> object:
    """Pad in all modes, of named axes, and by sizes that cancel out."""
    rng, name = g.rng, g.pick("f", least_rank=1)
    rank = len(g.graph.shape(name))
    modes = ["constant", "reflect", "edge"] + ["wrap"] * (g.graph.opset >= 19)
    if g.graph.opset >= 18 and rng.random() < 0.6:
        axis = g.sign(g.axis_of(name), name)
        pads = rng.choice(((1, -1), (0, 0), (1, 1), (-1, 1)))
        return g.graph.add("Pad", name, g.graph.add_ints(*pads), "", g.graph.add_ints(axis), mode=rng.choice(modes))
    numbers = [0] * (2 * rank)
    axis = g.axis_of(name)
    numbers[axis], numbers[axis + rank] = rng.choice(((1, -1), (0, 0), (-1, 1), (1, 0)))
    return g.graph.add("Pad", name, g.graph.add_ints(*numbers), mode=rng.choice(modes))


def _one_part(g: Grower) -> object:
    """Operators on a single operand or of a single part, which optimizers remove."""
    rng, name = g.rng, g.pick("f", least_rank=1)
    rank = len(g.graph.shape(name))
    op = rng.choice(("Concat", "Split", "Sum", "Max", "Expand", "Tile", "Identity", "Transpose"))
    if op == "Split":
        extra: dict[str, Any] = {"num_outputs": 1} if g.graph.opset >= 18 else {}
        return g.graph.add(op, name, axis=g.sign(g.axis_of(name, rarely_rows=False), name), **extra)
    if op == "Concat":
        return g.graph.add(op, name, axis=g.sign(g.axis_of(name, rarely_rows=False), name))
    if op in ("Expand", "Tile"):
        return g.graph.add(op, name, g.graph.add_ints(*[1] * rank))
    if op == "Transpose":
        return g.graph.add(op, g.graph.add(op, name))
    return g.graph.add(op, name)


def _casts(g: Grower) -> object:
    """Sizes that take a detour over other types before they become a target shape."""
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape = g.graph.add("Shape", name)
    for kind in rng.sample((TensorProto.INT32, FLOAT, TensorProto.DOUBLE, TensorProto.UINT8), rng.randint(1, 2)):
        shape = g.graph.add("Cast", shape, to=kind)
    half = rng.random() < 0.4
    if half:
        two = g.graph.add_weight(np.array(2, g.graph.alone(shape).dtype))
        shape = g.graph.add("Div", g.graph.add("Mul", shape, two), two)
    return g.graph.add("Reshape", name, g.graph.add("Cast", shape, to=TensorProto.INT64))


CORNERS: Final[dict[Any, float]] = {
    _empty_axes: 1.5,
    _many_axes: 2,
    _far_slice: 2,
    _shape_part: 2,
    _flattened: 1.5,
    _diagonal: 1,
    _counts: 1.5,
    _padded: 1.5,
    _one_part: 1.5,
    _casts: 1,
}
"""The frequency of each step."""
