"""Random graphs of operators with rules in the proof, biased towards hard proofs.

A step tries to add the result of one of ``STEPS``. Some results are meaningless, but ONNX Runtime rejects none of them
for a single row.
"""

import random
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper

from rows.grower import KINDS, Grower
from rows.growing import BOOL, FLOAT, INT64, GrowingGraph, Unsuitable
from rows.random_corners import CORNERS
from rows.random_operators import KINDS as MORE_KINDS
from rows.random_operators import OPERATORS

Step: TypeAlias = Callable[["Grower"], object]

OPSETS: Final = (12, 13, 17, 18, 21)
ALL_OPSETS: Final = (7, 9, 11, 12, 13, 15, 17, 18, 20, 21, 23, 24, 26)
_END: Final = 2**63 - 1
_TRIES: Final = 3


def grow(seed: int, most_nodes: int = 16) -> GrowingGraph:
    """The graph of a seed, from operators that exporters write; equal seeds give equal graphs."""
    rng = random.Random(seed)
    return _grown(Grower(rng, GrowingGraph(rng, rng.choice(OPSETS))), KINDS, STEPS, most_nodes)


def grow_widely(seed: int, most_nodes: int = 12) -> GrowingGraph:
    """The graph of a seed, from all operators with rules; equal seeds give equal graphs."""
    rng = random.Random(seed)
    return _grown(
        Grower(rng, GrowingGraph(rng, rng.choice(ALL_OPSETS))), MORE_KINDS, STEPS | OPERATORS | CORNERS, most_nodes
    )


def _grown(grower: Grower, kinds: Mapping[int, float], steps: Mapping[Step, float], most_nodes: int) -> GrowingGraph:
    rng, choices, weights = grower.rng, list(steps), list(steps.values())
    grower.add_inputs(kinds)
    target = rng.randint(2, most_nodes)
    for _ in range(_TRIES * target):
        if len(grower.graph.nodes) >= target:
            break
        before = len(grower.graph.nodes)
        try:
            rng.choices(choices, weights)[0](grower)
        except Unsuitable:
            grower.graph.drop(before)
    return grower.graph


def _unary(g: Grower) -> object:
    op = g.rng.choice(("Relu", "Neg", "Abs", "Sigmoid", "Tanh", "Identity", "Softplus", "Elu", "Erf", "Selu"))
    return g.graph.add(op, g.pick())


def _rounding(g: Grower) -> object:
    return g.graph.add(g.rng.choice(("Floor", "Ceil", "Round", "Sign")), g.pick(exact=True))


def _binary(g: Grower) -> object:
    op = g.rng.choice(("Add", "Sub", "Mul", "Add", "Sub", "Mul", "Max", "Min"))
    left = g.pick("fi")
    pair = [left, g.partner(left)]
    g.rng.shuffle(pair)
    return g.graph.add(op, *pair)


def _divide(g: Grower) -> object:
    left = g.pick("i" if g.rng.random() < 0.5 else "f")
    divisor = g.graph.add_weight(np.array(g.rng.choice((2, 3, 4)), g.graph.alone(left).dtype))
    return g.graph.add(
        "Mod" if g.graph.alone(left).dtype.kind == "i" and g.rng.random() < 0.4 else "Div", left, divisor
    )


def _compare(g: Grower) -> object:
    left = g.pick("fi", exact=True)
    right = g.partner(left)
    if not g.graph.is_exact(right):
        raise Unsuitable
    condition = g.graph.add(g.rng.choice(("Less", "Greater", "Equal", "GreaterOrEqual")), left, right)
    if g.rng.random() < 0.5:
        return condition
    chosen = g.pick("fi")
    return g.graph.add("Where", condition, chosen, g.partner(chosen))


def _where(g: Grower) -> object:
    chosen = g.pick("fi")
    return g.graph.add("Where", g.pick("b"), chosen, g.partner(chosen))


def _cast(g: Grower) -> object:
    return g.graph.add("Cast", g.pick("fib", exact=True), to=g.rng.choice((FLOAT, INT64, INT64, BOOL)))


def _clip(g: Grower) -> object:
    return g.graph.add("Clip", g.pick(), g.weight(low=-2, high=0), g.weight(low=1, high=3))


def _matmul(g: Grower) -> object:
    left = g.pick(least_rank=1)
    shape = g.graph.shape(left)
    if g.rng.random() < 0.6:
        return g.graph.add("MatMul", left, g.weight(shape[-1], g.rng.randint(1, 4)))
    if g.rng.random() < 0.3 and len(shape) > 1:
        return g.graph.add("MatMul", g.weight(g.rng.randint(1, 3), shape[-2]), left)
    right = g.pick(least_rank=1)
    if g.rng.random() < 0.5 and len(g.graph.shape(right)) >= 2:
        perm = list(range(len(g.graph.shape(right))))
        perm[-2:] = perm[:-3:-1]
        right = g.graph.add("Transpose", right, perm=perm)
    return g.graph.add("MatMul", left, right)


def _turned(g: Grower) -> object:
    """Move the rows to the front, and multiply by a vector behind an operator that ONNX Runtime may swap or drop."""
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape, axis = g.graph.shape(name), g.graph.rows_axis(name)
    if axis is None or g.graph.alone(name).dtype != np.float32:
        raise Unsuitable
    turned = g.graph.add("Transpose", name, perm=[axis, *(each for each in range(len(shape)) if each != axis)])
    if len(shape) > 2 and rng.random() < 0.7:
        last = len(shape) - 1
        turned = g.graph.add("Gather", turned, g.graph.add_scalar(0), axis=rng.randint(1, last))
    else:
        turned = g.graph.add(rng.choice(("Mul", "Div")), turned, g.real(rng.choice((1, 2))))
    return g.graph.add("MatMul", turned, g.weight(g.graph.shape(turned)[-1]))


def _gemm(g: Grower) -> object:
    left = g.pick(least_rank=2, most_rank=2)
    shape, flip, turn = g.graph.shape(left), g.rng.random() < 0.25, g.rng.random() < 0.5
    inner, outer = shape[0 if flip else 1], g.rng.randint(1, 4)
    right = g.weight(*((outer, inner) if turn else (inner, outer))) if g.rng.random() < 0.8 else g.pick(most_rank=2)
    bias = [g.weight(g.rng.choice((1, outer)))] if g.rng.random() < 0.5 else []
    return g.graph.add("Gemm", left, right, *bias, transA=int(flip), transB=int(turn))


def _fused_matmul(g: Grower) -> object:
    left = g.pick(least_rank=2)
    flags = {flag: int(g.rng.random() < 0.3) for flag in ("transA", "transBatchA", "transB", "transBatchB")}
    right = g.pick(least_rank=2) if g.rng.random() < 0.5 else g.weight(*g.graph.shape(left)[-2:])
    return g.graph.add("FusedMatMul", left, right, domain="com.microsoft", **flags)


def _einsum(g: Grower) -> object:
    left = g.pick(least_rank=2, most_rank=3)
    letters = "bijk"[: len(g.graph.shape(left))]
    right = g.pick(least_rank=1, most_rank=3) if g.rng.random() < 0.5 else ""
    terms = letters
    if right:
        pool = letters + "xy"
        terms += "," + "".join(g.rng.sample(pool, len(g.graph.shape(right))))
    if g.rng.random() < 0.3:
        cuts = [(term, g.rng.randint(0, len(term))) for term in terms.split(",")]
        terms = ",".join(f"...{term[cut:]}" if cut else term for term, cut in cuts)
    used = sorted(set(terms) - {",", "."}) or ["b"]
    output = g.rng.sample(used, g.rng.randint(1, len(used)))
    if "b" not in output and g.rng.random() < 0.6:
        output.insert(0, "b")
    output = [letter for letter in output if letter in terms]
    if "..." in terms:
        output.insert(g.rng.randint(0, len(output)), "...")
    return g.graph.add("Einsum", *filter(None, (left, right)), equation=f"{terms}->{''.join(output)}")


def _softmax(g: Grower) -> object:
    name = g.pick(least_rank=1)
    exact = ("Hardmax",) if g.graph.is_exact(name) else ()
    op = g.rng.choice(("Softmax", "LogSoftmax", *exact))
    if g.rng.random() < 0.3:
        return g.graph.add(op, name)
    return g.graph.add(op, name, axis=g.sign(g.axis_of(name), name))


def _reduce(g: Grower) -> object:
    ops = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
    op = f"Reduce{g.rng.choice(ops)}"
    name = g.pick("f" if g.rng.random() < 0.8 else "i", least_rank=1)
    if g.graph.alone(name).dtype.kind == "i":
        op = g.rng.choice(("ReduceSum", "ReduceMax", "ReduceProd", "ReduceMin"))
    keep = g.rng.randint(0, 1)
    if g.rng.random() < 0.05:
        return g.graph.add(op, name, keepdims=keep)
    axes = sorted({g.axis_of(name) for _ in range(g.rng.randint(1, 2))})
    signed = [g.sign(axis, name) for axis in axes]
    if g.graph.opset >= (13 if op == "ReduceSum" else 18):
        return g.graph.add(op, name, g.graph.add_ints(*signed), keepdims=keep)
    return g.graph.add(op, name, axes=signed, keepdims=keep)


def _arg(g: Grower) -> object:
    name = g.pick("fi", least_rank=1, exact=True)
    op = g.rng.choice(("ArgMax", "ArgMin"))
    return g.graph.add(op, name, axis=g.sign(g.axis_of(name), name), keepdims=g.rng.randint(0, 1))


def _top_k(g: Grower) -> object:
    name = g.pick("fi", least_rank=1, exact=True)
    axis = g.axis_of(name)
    count = g.rng.randint(1, max(1, g.graph.shape(name)[axis]))
    return g.graph.add_many("TopK", name, g.graph.add_ints(count), outputs=2, axis=g.sign(axis, name))


def _along(g: Grower) -> object:
    name = g.pick("fi", least_rank=1, exact=True)
    op = g.rng.choice(("CumSum", "CumSum", "Trilu", "OneHot"))
    if op == "CumSum":
        axis = g.graph.add_scalar(g.sign(g.axis_of(name), name))
        return g.graph.add("CumSum", name, axis, reverse=g.rng.randint(0, 1))
    if op == "Trilu":
        return g.graph.add("Trilu", name)
    rank = len(g.graph.shape(name))
    values = g.graph.add_weight(np.array([0, 1], np.float32))
    return g.graph.add("OneHot", name, g.graph.add_scalar(4), values, axis=g.rng.randint(-1, rank))


def _transpose(g: Grower) -> object:
    name = g.pick("fib", least_rank=2)
    perm = list(range(len(g.graph.shape(name))))
    if g.rng.random() < 0.2:
        return g.graph.add("Transpose", name)
    if g.rng.random() < 0.5:
        first = g.rng.randrange(len(perm) - 1)
        perm[first], perm[first + 1] = perm[first + 1], perm[first]
    else:
        g.rng.shuffle(perm)
    return g.graph.add("Transpose", name, perm=perm)


def _squeeze(g: Grower) -> object:
    name = g.pick("fi", least_rank=1)
    shape = g.graph.shape(name)
    ones = [axis for axis, length in enumerate(shape) if length == 1]
    if g.rng.random() < 0.1:
        return g.graph.add("Squeeze", name)
    ones = [axis for axis in ones if axis != g.graph.rows_axis(name)] or ones
    if not ones:
        raise Unsuitable
    axis = g.sign(g.rng.choice(ones), name)
    if g.graph.opset < 13:
        return g.graph.add("Squeeze", name, axes=[axis])
    return g.graph.add("Squeeze", name, g.graph.add_ints(axis))


def _unsqueeze(g: Grower) -> object:
    name = g.pick("fi")
    return g.unsqueeze(name, [g.rng.randint(-1, len(g.graph.shape(name)))])


def _flatten(g: Grower) -> object:
    name = g.pick("fi", least_rank=1)
    return g.graph.add("Flatten", name, axis=g.rng.randint(0, len(g.graph.shape(name))))


def _reshape(g: Grower) -> object:
    """Merge and split axes, as exporters do, with computed targets."""
    name = g.pick("fib", least_rank=1)
    shape, rng = g.graph.shape(name), g.rng
    groups: list[list[int]] = [[0]]
    for axis in range(1, len(shape)):
        if rng.random() < 0.4:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    parts: list[str] = []
    rest = rng.randrange(len(groups)) if rng.random() < 0.6 else -1
    for index, group in enumerate(groups):
        if index == rest:
            length = prod(shape[axis] for axis in group)
            if rng.random() < 0.4 and length % 2 == 0:
                parts += rng.sample([g.graph.add_ints(-1), g.graph.add_ints(2)], 2)
            else:
                parts.append(g.graph.add_ints(-1))
        elif len(group) == 1 and rng.random() < 0.2 and group[0] == len(parts):
            parts.append(g.graph.add_ints(0))
        elif len(group) == 1 and shape[group[0]] % 2 == 0 and rng.random() < 0.3:
            half = g.graph.add("Div", g.size(name, group[0]), g.graph.add_ints(2))
            parts += [half, g.graph.add_ints(2)] if rng.random() < 0.5 else [g.graph.add_ints(2), half]
        else:
            product = g.length(name, group[0])
            for axis in group[1:]:
                product = g.graph.add("Mul", product, g.length(name, axis))
            parts.append(product)
    if rng.random() < 0.15:
        parts.insert(rng.randint(0, len(parts)), g.graph.add_ints(1))
    return g.graph.add("Reshape", name, g.vector(parts))


def _reshape_like(g: Grower) -> object:
    """Reshape to the shape of another tensor with as many elements, or to a constant shape."""
    name = g.pick("fib")
    count = g.graph.alone(name).size
    if not count:
        raise Unsuitable
    if g.rng.random() < 0.5:
        others = [
            other
            for other, runs in g.graph.values.items()
            if other[0] != "w" and runs[-1] is not None and g.graph.alone(other).size == count
        ]
        return g.graph.add("Reshape", name, g.graph.add("Shape", g.rng.choice([name, *others])))
    divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
    first = g.rng.choice(divisors)
    return g.graph.add("Reshape", name, g.graph.add_ints(*g.rng.choice(((-1, first), (first, -1), (-1,), (1, -1)))))


def _frozen(g: Grower) -> object:
    """Merge all axes but that of the rows into a size that an exporter froze, and split them again."""
    name, rng = g.pick("fi", least_rank=2), g.rng
    rows = g.graph.rows_axis(name)
    if rows is None:
        raise Unsuitable
    lengths = [g.size(name, axis) if axis == rows else g.length(name, axis) for axis in range(len(g.graph.shape(name)))]
    target = [g.size(name, rows), g.graph.add_ints(g.graph.alone(name).size)]
    merged = g.graph.add("Reshape", name, g.vector(target if rng.random() < 0.7 else target[::-1]))
    if rng.random() < 0.3:
        merged = g.graph.add("Transpose", merged)
    if rng.random() < 0.5:
        rng.shuffle(lengths)
    if rng.random() < 0.5:
        lengths[rng.randrange(len(lengths))] = g.graph.add_ints(-1)
    return g.graph.add("Reshape", merged, g.vector(lengths))


def _round_trip(g: Grower) -> object:
    """Merge rows and another axis, apply an operation, and split them again."""
    name = g.pick("f", least_rank=2)
    shape = g.graph.add("Shape", name)
    folded = g.graph.add("Reshape", name, g.graph.add_ints(-1, g.graph.shape(name)[-1]))
    draw = g.rng.random()
    if draw < 0.4:
        folded = g.graph.add("MatMul", folded, g.weight(g.graph.shape(folded)[-1], g.graph.shape(folded)[-1]))
    elif draw < 0.8:
        folded = g.graph.add("Softmax", folded, axis=g.rng.choice((1, 1, 1, 0)))
    return g.graph.add("Reshape", folded, shape)


def _expand(g: Grower) -> object:
    rng = g.rng
    if rng.random() < 0.4:
        name = g.pick("fi", least_rank=1)
        rank = len(g.graph.shape(name))
        target = [g.graph.add_ints(rng.choice((1, 1, 2, 3))) for _ in range(rank)]
        return g.graph.add("Expand", name, g.vector(target))
    like = g.pick("fib", least_rank=1)
    rank = len(g.graph.shape(like))
    weight = g.weight(*(rng.choice((1, g.graph.shape(like)[axis])) for axis in range(rank)))
    target = [g.length(like, axis) for axis in range(rank)]
    if rng.random() < 0.3:
        return g.graph.add("ConstantOfShape", g.vector(target))
    return g.graph.add("Expand", weight, g.vector(target))


def _tile(g: Grower) -> object:
    name = g.pick("fi", least_rank=1)
    rank = len(g.graph.shape(name))
    repeats = [g.graph.add_ints(g.rng.choice((1, 1, 1, 2))) for _ in range(rank)]
    if g.rng.random() < 0.15:
        other = g.pick("fi", least_rank=1)
        repeats[g.rng.randrange(rank)] = g.size(other, g.axis_of(other, rarely_rows=False))
    return g.graph.add("Tile", name, g.vector(repeats))


def _slice(g: Grower) -> object:
    name, rng = g.pick("fib", least_rank=1), g.rng
    axis = g.axis_of(name)
    length = g.graph.shape(name)[axis]
    start = rng.choice((0, 0, 1, -1, -2, rng.randint(0, length)))
    end = g.graph.add_ints(rng.choice((_END, _END, -1, length, rng.randint(1, length + 1))))
    if rng.random() < 0.25:
        other = g.pick("fib", least_rank=1)
        end = g.size(other, g.axis_of(other, rarely_rows=False))
    steps = [g.graph.add_ints(rng.choice((1, 2, -1)))] if rng.random() < 0.3 else []
    axes = g.graph.add_ints(g.sign(axis, name))
    return g.graph.add("Slice", name, g.graph.add_ints(start), end, axes, *steps)


def _table(g: Grower) -> object:
    """Add a table that is sliced to a length, like positions in exported models."""
    name = g.pick("f", least_rank=1)
    axis = g.axis_of(name)
    shape = [1] * len(g.graph.shape(name))
    shape[axis] = 16
    table = g.weight(*shape)
    cut = g.graph.add("Slice", table, g.graph.add_ints(0), g.size(name, axis), g.graph.add_ints(axis))
    return g.graph.add("Add", name, cut)


def _split(g: Grower) -> object:
    name = g.pick("fi", least_rank=1)
    axis = g.axis_of(name, rarely_rows=g.rng.random() < 0.7)
    length = g.graph.shape(name)[axis]
    counts = [count for count in (2, 3, 4) if length % count == 0]
    if not counts:
        raise Unsuitable
    count = g.rng.choice(counts)
    extra: dict[str, Any] = {"num_outputs": count} if g.graph.opset >= 18 else {}
    if g.rng.random() < 0.4 and g.graph.opset >= 13:
        sizes = g.vector([g.graph.add("Div", g.size(name, axis), g.graph.add_ints(count))] * count)
        return g.graph.add_many("Split", name, sizes, outputs=count, axis=axis)
    return g.graph.add_many("Split", name, outputs=count, axis=g.sign(axis, name), **extra)


def _pad(g: Grower) -> object:
    name = g.pick("f", least_rank=1)
    pads = [0] * (2 * len(g.graph.shape(name)))
    axis = g.axis_of(name)
    pads[axis + g.rng.choice((0, len(pads) // 2))] = g.rng.choice((1, 1, 2, -1))
    return g.graph.add("Pad", name, g.graph.add_ints(*pads))


def _concat(g: Grower) -> object:
    first = g.pick("fi", least_rank=1)
    axis = g.axis_of(first, rarely_rows=g.rng.random() < 0.6)
    shape, rng = g.graph.shape(first), g.rng
    others = [
        name
        for name, runs in g.graph.values.items()
        if runs[-1] is not None and name[0] != "w"
        and g.graph.alone(name).dtype == g.graph.alone(first).dtype and len(g.graph.shape(name)) == len(shape)
        and all(a == b or k == axis for k, (a, b) in enumerate(zip(g.graph.shape(name), shape, strict=True)))
    ]  # fmt: skip
    parts = [first, *(rng.choice(others) for _ in range(rng.randint(1, 2)))]
    if rng.random() < 0.3 and g.graph.alone(first).dtype == np.float32:
        target = [g.length(first, k) if k != axis else g.graph.add_ints(1) for k in range(len(shape))]
        parts.insert(0, g.graph.add("Expand", g.weight(*[1] * len(shape)), g.vector(target)))
    return g.graph.add("Concat", *parts, axis=g.sign(axis, first))


def _stack_and_split(g: Grower) -> object:
    """Stack two tensors along the rows, apply an operation, and separate them, as models of stereo images do."""
    first = g.pick("f", least_rank=1)
    axis = g.graph.rows_axis(first)
    same = [
        name
        for name, runs in g.graph.values.items()
        if runs[-1] is not None and name[0] != "w" and g.graph.alone(name).dtype == np.float32
        and g.graph.shape(name) == g.graph.shape(first)
    ]  # fmt: skip
    if axis is None:
        raise Unsuitable
    stacked = g.graph.add("Concat", first, g.rng.choice(same or [first]), axis=axis)
    if g.rng.random() < 0.5:
        stacked = g.graph.add("Relu", stacked)
    if g.rng.random() < 0.4:
        return _chunks(g, stacked, axis)
    extra: dict[str, Any] = {"num_outputs": 2} if g.graph.opset >= 18 else {}
    return g.graph.add_many("Split", stacked, outputs=2, axis=axis, **extra)


def _chunks(g: Grower, name: str, axis: int) -> object:
    """Cut a tensor in halves, or at a wrong length, as exporters write the chunks of PyTorch."""
    parts, start = g.graph.add_ints(2), g.graph.add_ints(0)
    rest = g.graph.add_ints(1 if g.rng.random() < 0.8 else g.rng.choice((-1, 2, 3)))
    size = g.graph.add("Div", g.graph.add("Add", g.size(name, axis), rest), parts)
    end = g.graph.add("Mul", size, parts)
    g.graph.add("Slice", name, start, size, g.graph.add_ints(axis))
    return g.graph.add("Slice", name, size, end, g.graph.add_ints(axis))


def _gather(g: Grower) -> object:
    name, rng = g.pick("fib", least_rank=1), g.rng
    axis = g.axis_of(name)
    length = g.graph.shape(name)[axis]
    if not length:
        raise Unsuitable
    if rng.random() < 0.25:
        return g.graph.add("Gather", name, g.pick("i", most_rank=2), axis=axis)
    indices = [rng.randint(-length, length - 1) for _ in range(rng.randint(1, 3))]
    weight = g.graph.add_scalar(indices[0]) if rng.random() < 0.5 else g.graph.add_ints(*indices)
    return g.graph.add("Gather", name, weight, axis=g.sign(axis, name))


def _embed(g: Grower) -> object:
    ids = g.pick("i", most_rank=3)
    return g.graph.add("Gather", g.weight(24, g.rng.choice((1, 2, 4))), ids, axis=0)


def _elements(g: Grower) -> object:
    name = g.pick("f", least_rank=1)
    axis = g.axis_of(name)
    indices = g.pick("i", least_rank=1)
    if g.rng.random() < 0.3:
        return g.graph.add("ScatterElements", name, indices, g.partner(name), axis=axis)
    return g.graph.add("GatherElements", name, indices, axis=axis)


def _numbered(g: Grower) -> str:
    return g.numbered(g.pick("fib", least_rank=1))


def _flat_index(g: Grower) -> object:
    """Gather(Reshape(x, [-1, D]), Range(0, N) * L + i), with indices that are right, wrong by one, or negative."""
    rng, name = g.rng, g.pick("fi", least_rank=2, most_rank=4)
    shape = g.graph.shape(name)
    if g.graph.rows_axis(name) != 0:
        raise Unsuitable
    numbers, length = _numbered(g), shape[1]
    draw = rng.random()
    if draw < 0.5:
        of = g.pick("fi", least_rank=2, exact=True)
        index = g.graph.add("ArgMax", of, axis=1, keepdims=0)
    elif draw < 0.7:
        index = g.pick("i", most_rank=1)
    elif draw < 0.85:  # some entries of each row, as with masks
        other = g.pick("fib", least_rank=2) if rng.random() < 0.3 else name
        end = g.scalar(g.size(other, 1)) if rng.random() < 0.7 else g.graph.add_scalar(rng.randint(1, length))
        index = g.graph.add("Range", g.graph.add_scalar(rng.choice((0, 0, -1))), end, g.graph.add_scalar(1))
        numbers = g.unsqueeze(numbers, [1])
    else:
        index = g.graph.add_scalar(rng.randint(-1, length))
    if rng.random() < 0.25:
        index = g.graph.add(rng.choice(("Sub", "Add", "Mul")), index, g.graph.add_scalar(rng.choice((1, 2))))
    stride = (
        g.scalar(g.size(name, 1))
        if rng.random() < 0.5
        else g.graph.add_scalar(max(1, length + rng.choice((0, 0, 0, 1, -1))))
    )
    flat = g.graph.add("Add", g.graph.add("Mul", numbers, stride), index)
    rest = [g.length(name, axis) for axis in range(2, len(shape))]
    table = g.graph.add("Reshape", name, g.vector([g.graph.add_ints(-1), *rest]))
    return g.graph.add("Gather", table, flat, axis=0)


def _gather_nd(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=2)
    if rng.random() < 0.4:
        return g.graph.add("GatherND", name, g.pick("i", least_rank=2), batch_dims=rng.choice((0, 1, 1)))
    first = g.unsqueeze(_numbered(g), [1])
    if rng.random() < 0.2:
        first = g.graph.add(rng.choice(("Sub", "Neg")), first, *([g.graph.add_scalar(1)] if rng.random() < 0.5 else []))
    second = g.pick("i", least_rank=1, most_rank=2)
    if len(g.graph.shape(second)) == 1:
        second = g.unsqueeze(second, [1])
    return g.graph.add("GatherND", name, g.graph.add("Concat", first, second, axis=-1))


def _numbers_used(g: Grower) -> object:
    """Use the numbers of rows as a feature: wrong, unless a later operation removes them."""
    numbers = _numbered(g)
    draw = g.rng.random()
    if draw < 0.3:
        return g.graph.add("Sub", numbers, _numbered(g))
    if draw < 0.5:
        return g.graph.add("Mul", numbers, g.graph.add_scalar(g.rng.choice((0, 2))))
    if draw < 0.7:
        return g.unsqueeze(numbers, [g.rng.choice((0, 1))])
    return numbers


def _size_arithmetic(g: Grower) -> object:
    rng = g.rng
    if rng.random() < 0.4:
        name = g.pick("fib", least_rank=1)
        return g.size(name, g.axis_of(name, rarely_rows=False))
    left = g.numbers()
    if rng.random() < 0.25:
        real = g.graph.add("Cast", left, to=FLOAT)
        half = g.graph.add("Mul", real, g.graph.add_weight(np.array(rng.choice((0.5, 2, 1.5)), np.float32)))
        if rng.random() < 0.5:
            half = g.graph.add("Add", half, g.graph.add_weight(np.array(0.5, np.float32)))
        return g.graph.add("Cast", g.graph.add(rng.choice(("Floor", "Ceil", "Identity")), half), to=INT64)
    right = g.numbers() if rng.random() < 0.5 else g.graph.add_scalar(rng.choice((1, 2, 3)))
    op = rng.choice(("Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Less", "Greater"))
    if op in ("Max", "Min", "Equal", "Less", "Greater", "Add", "Sub", "Mul"):
        return g.graph.add(op, left, right)
    return g.graph.add("Div", left, g.graph.add_scalar(rng.choice((2, 3))))


def _size_as_data(g: Grower) -> object:
    """Combine tensors computed from shapes with data."""
    real = g.graph.add("Cast", g.numbers(), to=FLOAT)
    name = g.pick("f")
    return g.graph.add(g.rng.choice(("Add", "Mul")), name, real)


def _reduce_sizes(g: Grower) -> object:
    shape = g.graph.add("Shape", g.pick("fib", least_rank=1))
    return g.graph.add("ReduceProd", shape, keepdims=g.rng.randint(0, 1))


def _normalize(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=2)
    shape = g.graph.shape(name)
    op = rng.choice(("LayerNormalization", "InstanceNormalization", "LpNormalization", "BatchNormalization", "LRN"))
    if op == "LayerNormalization":
        if g.graph.opset < 17:
            raise Unsuitable
        return g.graph.add(op, name, g.weight(shape[-1]), axis=-1)
    if op == "LpNormalization":
        return g.graph.add(op, name, axis=g.sign(g.axis_of(name), name))
    channels = shape[1]
    if op == "InstanceNormalization":
        return g.graph.add(op, name, g.weight(channels), g.weight(channels))
    if op == "BatchNormalization":
        variance = g.graph.add_weight(np.ones(channels, np.float32))
        return g.graph.add(op, name, g.weight(channels), g.weight(channels), g.weight(channels), variance)
    return g.graph.add("LRN", name, size=3, alpha=0.1)


def _mean_variance(g: Grower) -> object:
    name = g.pick("f", least_rank=2)
    axes = sorted({g.axis_of(name) for _ in range(2)})
    return g.graph.add("MeanVarianceNormalization", name, axes=axes)


def _conv(g: Grower) -> object:
    name = g.pick("f", least_rank=3, most_rank=4)
    shape = g.graph.shape(name)
    kernel = [g.rng.choice((1, 2, 3)) for _ in shape[2:]]
    pads = [g.rng.choice((0, 1)) if size > 1 else 0 for size in kernel] * 2
    draw = g.rng.random()
    if draw < 0.5:
        return g.graph.add(
            "Conv", name, g.weight(g.rng.randint(1, 3), shape[1], *kernel), kernel_shape=kernel, pads=pads
        )
    if draw < 0.65:
        return g.graph.add("ConvTranspose", name, g.weight(shape[1], 2, *kernel), kernel_shape=kernel)
    if draw < 0.75:
        return g.graph.add(g.rng.choice(("GlobalAveragePool", "GlobalMaxPool")), name)
    op = g.rng.choice(("MaxPool", "AveragePool", "MaxPool"))
    outputs = 2 if op == "MaxPool" and g.rng.random() < 0.3 and g.graph.is_exact(name) else 1
    return g.graph.add_many(op, name, outputs=outputs, kernel_shape=kernel, pads=pads)


def _recurrent(g: Grower) -> object:
    name = g.pick("f", least_rank=3, most_rank=3)
    op, gates = g.rng.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    weights = g.weight(1, 2 * gates, g.graph.shape(name)[2]), g.weight(1, 2 * gates, 2)
    state = [g.pick("f", least_rank=3, most_rank=3)] if g.rng.random() < 0.2 else []
    extra = ["", "", *state] if state else []
    return g.graph.add_many(op, name, *weights, *extra, outputs=2, hidden_size=2)


def _quantize(g: Grower) -> object:
    rng = g.rng
    if rng.random() < 0.2:
        name = g.pick("f", exact=True)
        return g.graph.add_many("DynamicQuantizeLinear", name, outputs=3)
    bytes_ = [n for n, runs in g.graph.values.items() if runs[-1] is not None and g.graph.alone(n).dtype == np.uint8]
    zero = g.graph.add_weight(np.array(3, np.uint8))
    scale = g.graph.add_weight(np.array(0.5, np.float32))
    if bytes_ and rng.random() < 0.6:
        name = rng.choice(bytes_)
        if rng.random() < 0.4 and g.graph.shape(name):
            weight = g.graph.add_weight(np.arange(2 * g.graph.shape(name)[-1], dtype=np.uint8).reshape(-1, 2) % 5)
            return g.graph.add("MatMulInteger", name, weight, zero)
        return g.graph.add("DequantizeLinear", name, scale, zero)
    name = g.pick("f", exact=True)
    if rng.random() < 0.2 and len(g.graph.shape(name)) > 1 and g.graph.opset >= 13:
        axis = g.axis_of(name)
        length = g.graph.shape(name)[axis]
        scales = g.graph.add_weight(np.full(length, 0.5, np.float32))
        return g.graph.add("QuantizeLinear", name, scales, g.graph.add_weight(np.zeros(length, np.uint8)), axis=axis)
    if rng.random() < 0.1:
        scale = g.graph.add("ReduceMax", g.graph.add("Abs", name), keepdims=0)
    return g.graph.add("QuantizeLinear", name, scale, zero)


def _resize(g: Grower) -> object:
    name = g.pick("f", least_rank=3, most_rank=4)
    rank = len(g.graph.shape(name))
    mode = g.rng.choice(("nearest", "nearest", "linear"))
    if g.rng.random() < 0.5:
        scales = [1.0] * rank
        scales[g.axis_of(name)] = g.rng.choice((2.0, 1.5, 0.5))
        return g.graph.add("Resize", name, "", g.graph.add_weight(np.array(scales, np.float32)), mode=mode)
    target = [g.length(name, axis) for axis in range(rank)]
    axis = g.axis_of(name)
    target[axis] = g.graph.add_ints(g.graph.shape(name)[axis] + 1)
    return g.graph.add("Resize", name, "", "", g.vector(target), mode=mode)


def _data_dependent(g: Grower) -> object:
    name = g.pick("fi", least_rank=1, exact=True)
    return g.graph.add(g.rng.choice(("NonZero", "EyeLike", "Size")), name)


def _masked_write(g: Grower) -> object:
    """An assignment of a number to masked entries, as exporters write it; sometimes of other numbers or entries."""
    graph, rng = g.graph, g.rng
    name = g.pick("f", least_rank=1)
    compared = g.partner(name)
    if not graph.is_exact(name) or not graph.is_exact(compared):
        raise Unsuitable
    mask = graph.add("Less", name, compared)
    end = graph.add_ints(-1)
    count = graph.add("ReduceSum", graph.add("Cast", graph.add("Reshape", mask, end), to=INT64))
    number = g.weight() if rng.random() < 0.8 else g.pick("f", most_rank=1)
    updates = graph.add("Reshape", graph.add("Expand", number, count), end)
    if rng.random() < 0.15:
        updates = graph.add("CumSum", updates, graph.add_scalar(0))
    places = graph.add("Transpose", graph.add("NonZero", mask), perm=[1, 0])
    return graph.add("ScatterND", name if rng.random() < 0.6 else g.pick("f", least_rank=1), places, updates)


def _body_nodes(g: Grower, start: str, outer: str, count: int) -> tuple[list[NodeProto], str]:
    """A few element-wise, reducing or moving nodes on ``start``, sometimes with a tensor from outside."""
    nodes: list[NodeProto] = []
    for _ in range(count):
        result = g.graph.new_name("b")
        op = g.rng.choice(("Tanh", "Relu", "Neg", "Softmax", "Add", "Add", "ReduceSum", "Sigmoid"))
        if op == "Add":
            nodes.append(helper.make_node(op, [start, g.rng.choice((start, outer))], [result]))
        elif op == "Softmax":
            nodes.append(helper.make_node(op, [start], [result], axis=g.rng.choice((-1, -1, 0, 1))))
        elif op == "ReduceSum":
            axes = g.rng.choice((0, 1, 1))
            if g.graph.opset < 13:
                nodes.append(helper.make_node("ReduceSum", [start], [result], axes=[axes], keepdims=1))
            else:
                nodes.append(helper.make_node(op, [start, g.graph.add_ints(axes)], [result], keepdims=1))
        else:
            nodes.append(helper.make_node(op, [start], [result]))
        start = result
    return nodes, start


def _if(g: Grower) -> object:
    rng, name = g.rng, g.pick("f", least_rank=1)
    condition = rng.choice((_free_condition, _size_condition, _row_condition))(g)
    bodies = []
    for label in ("then", "else"):
        source = name if rng.random() < 0.7 else g.pick("f", least_rank=1)
        nodes, result = _body_nodes(g, source, name, rng.randint(1, 2))
        bodies.append(helper.make_graph(nodes, label, [], [ValueInfoProto(name=result)]))
    return g.graph.add("If", condition, then_branch=bodies[0], else_branch=bodies[1])


def _free_condition(g: Grower) -> str:
    names = [name for name, one in g.graph.inputs.items() if one.axis is None]
    if not names:
        return g.graph.add_weight(np.array(g.rng.random() < 0.5))
    total = g.graph.add("ReduceMax", g.graph.add("Cast", g.rng.choice(names), to=FLOAT), keepdims=0)
    return g.graph.add("Greater", total, g.weight(low=0, high=3))


def _size_condition(g: Grower) -> str:
    like = g.pick("fib", least_rank=1)
    size = g.scalar(g.size(like, g.axis_of(like)))
    return g.graph.add(g.rng.choice(("Equal", "Greater", "Less")), size, g.graph.add_scalar(g.rng.choice((1, 2, 3))))


def _row_condition(g: Grower) -> str:
    if g.rng.random() < 0.6:
        return _free_condition(g)
    total = g.graph.add("ReduceMax", g.pick("f", exact=True), keepdims=0)
    return g.graph.add("Greater", total, g.weight(low=0, high=5))


def _loop(g: Grower) -> object:
    rng, start = g.rng, g.pick("f", least_rank=1)
    outer = g.pick("f", least_rank=1)
    step, go, state, go_on = (g.graph.new_name("b") for _ in range(4))
    nodes, result = _body_nodes(g, state, outer, rng.randint(1, 2))
    nodes.append(helper.make_node("Identity", [go], [go_on]))
    outputs = [ValueInfoProto(name=go_on), ValueInfoProto(name=result)]
    if rng.random() < 0.4:
        extra = g.graph.new_name("b")
        nodes.append(helper.make_node("Neg", [state], [extra]))
        outputs.append(ValueInfoProto(name=extra))
    if rng.random() < 0.2:
        nodes[-1 if len(outputs) < 3 else -2] = helper.make_node("Less", [step, g.graph.add_scalar(1)], [go_on])
    inputs = [
        helper.make_tensor_value_info(step, INT64, []),
        helper.make_tensor_value_info(go, BOOL, []),
        helper.make_tensor_value_info(state, FLOAT, None),
    ]
    count = g.graph.add_scalar(rng.randint(1, 3))
    if rng.random() < 0.3:
        like = g.pick("fib", least_rank=1)
        count = g.scalar(g.size(like, g.axis_of(like)))
    body = helper.make_graph(nodes, "step", inputs, outputs)
    begins = g.graph.add_weight(np.array(rng.random() < 0.8)) if rng.random() < 0.4 else ""
    return g.graph.add_many("Loop", count, begins, start, outputs=len(outputs) - 1, body=body)


def _is_like_slices(g: Grower, name: str, scanned: str, axis: int) -> bool:
    """Whether a state has the shape of a scanned slice in all runs; otherwise ONNX Runtime 1.31 writes past its end."""
    return all(
        state is not None and whole is not None and state.shape == (*whole.shape[:axis], *whole.shape[axis + 1 :])
        for state, whole in zip(g.graph.values[name], g.graph.values[scanned], strict=True)
    )


def _scan(g: Grower) -> object:
    rng, scanned = g.rng, g.pick("f", least_rank=2)
    axis = g.axis_of(scanned, rarely_rows=rng.random() < 0.5)
    element, taken = g.graph.new_name("b"), g.graph.new_name("b")
    shape = [length for k, length in enumerate(g.graph.shape(scanned)) if k != axis]
    nodes = [helper.make_node("Abs", [element], [taken])]
    more, result = _body_nodes(g, taken, taken, rng.randint(1, 2))
    inputs = [helper.make_tensor_value_info(element, FLOAT, [None] * len(shape))]
    outputs = [ValueInfoProto(name=result)]
    states: list[str] = []
    if rng.random() < 0.6:
        state, carried = g.graph.new_name("b"), g.graph.new_name("b")
        op = rng.choice(("Add", "Identity", "Add"))
        nodes.append(helper.make_node(op, [state, taken] if op == "Add" else [state], [carried]))
        inputs.insert(0, helper.make_tensor_value_info(state, FLOAT, [None] * len(shape)))
        outputs.insert(0, ValueInfoProto(name=carried))
        others = [
            name
            for name, runs in g.graph.values.items()
            if runs[-1] is not None and name[0] != "w" and g.graph.alone(name).dtype == np.float32
            and _is_like_slices(g, name, scanned, axis)
        ]  # fmt: skip
        if not others:
            others = [g.weight(*shape)]
        if not _is_like_slices(g, others[0], scanned, axis):
            raise Unsuitable
        states = [rng.choice(others)]
    body = helper.make_graph([*nodes, *more], "step", inputs, outputs)
    backwards: dict[str, Any] = {"scan_input_directions": [1]} if rng.random() < 0.15 else {}
    return g.graph.add_many(
        "Scan",
        *states,
        scanned,
        outputs=len(outputs),
        num_scan_inputs=1,
        body=body,
        scan_input_axes=[axis],
        **backwards,
    )


STEPS: Final[dict[Step, float]] = {
    _unary: 3,
    _rounding: 1,
    _binary: 8,
    _divide: 1,
    _compare: 2,
    _where: 1,
    _cast: 1.5,
    _clip: 0.5,
    _matmul: 4,
    _turned: 1,
    _gemm: 1.5,
    _fused_matmul: 1,
    _einsum: 1.5,
    _softmax: 2.5,
    _reduce: 4,
    _arg: 2,
    _top_k: 1.5,
    _along: 1.5,
    _transpose: 5,
    _squeeze: 2,
    _unsqueeze: 3,
    _flatten: 1.5,
    _reshape: 8,
    _reshape_like: 2.5,
    _frozen: 2,
    _round_trip: 2,
    _expand: 3,
    _tile: 1.5,
    _slice: 3,
    _table: 1,
    _split: 2,
    _pad: 1,
    _concat: 3,
    _stack_and_split: 2,
    _gather: 3,
    _embed: 2,
    _elements: 1,
    _flat_index: 3,
    _gather_nd: 2,
    _numbers_used: 1,
    _size_arithmetic: 3,
    _size_as_data: 0.5,
    _reduce_sizes: 0.5,
    _normalize: 1.5,
    _mean_variance: 0.4,
    _conv: 2,
    _recurrent: 1,
    _quantize: 1.5,
    _resize: 1,
    _data_dependent: 0.4,
    _masked_write: 1,
    _if: 1.5,
    _loop: 1.5,
    _scan: 1.5,
}
"""The frequency of each step."""
