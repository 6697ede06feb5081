"""Rules of operators that reduce, search, sort, accumulate or normalize along axes."""

from collections.abc import Callable, Sequence
from typing import Final

from ortserve.model_file.graph import DOUBLE, FLOAT, INT64
from ortserve.rows.number import Number, is_nonnegative, is_unbounded
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    aligned_axis,
    normal_axis,
    off_axis,
)
from ortserve.rows.rules.elementwise import reduce_over
from ortserve.rows.rules.index_bounds import LIMITS
from ortserve.rows.rules.matmul import check_one_number
from ortserve.rows.values import NO_FACTS, Facts, Value

_REDUCTIONS: Final = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def reduce_(call: Call) -> Output:
    value = call.operand(0)
    rank = len(call.dims(value))
    axes = call.axes(1, rank)
    if not axes:
        axes = () if call.integer("noop_with_empty_axes", 0) else tuple(range(rank))
        if not axes and rank:  # the operator still computes squares or absolute values
            return call.same_shape(value)
    return reduced(call, value, axes)


def reduced(call: Call, value: Value, axes: tuple[int, ...]) -> Value:
    off_axis(value, axes, "reduces")
    dims = call.dims(value)
    if value.is_rows and 0 in dims:
        raise NotKnownError("has an operand without entries")
    return _without_axes(call, value, axes, value.dtype, elements=_reduced_elements(call, value))


def _without_axes(
    call: Call,
    value: Value,
    axes: Sequence[int],
    dtype: int,
    *,
    elements: tuple[Number, ...] | None = None,
    facts: Facts = NO_FACTS,
) -> Value:
    """A result with one entry along ``axes``, which keep the length 1 or are removed, as ``keepdims`` says."""
    dims = call.dims(value)
    if call.integer("keepdims", 1):
        lengths = [1 if axis in axes else length for axis, length in enumerate(dims)]
        return call.result(lengths, value, value.axis, dtype, elements, facts)
    kept = [axis for axis in range(len(dims)) if axis not in axes]
    shifted = kept.index(value.axis) if value.is_rows else 0
    return call.result([dims[axis] for axis in kept], value, shifted, dtype, elements, facts)


def _reduced_elements(call: Call, value: Value) -> tuple[Number, ...] | None:
    """The result for a vector of known elements; None if it is unknown.

    ONNX Runtime combines the elements in any order, and INT64 as FP64. If no element is negative, no partial result is
    larger than the final one, so checking the final one for rounding is enough.
    """
    symbols = call.symbols
    known: dict[str, Callable[[Number, Number], Number]] = {
        "ReduceProd": symbols.multiply,
        "ReduceSum": symbols.add,
        "ReduceMax": symbols.maximum,
        "ReduceMin": symbols.minimum,
    }
    compute = known.get(call.op)
    if compute is None or not value.elements or len(value.dims or ()) != 1 or value.dtype not in LIMITS:
        return None
    if not all(map(is_nonnegative, value.elements)) or is_unbounded(value.elements):
        return None
    return (reduce_over(symbols, DOUBLE if value.dtype == INT64 else value.dtype, compute, *value.elements),)


def qlinear_reduce(call: Call) -> Output:
    value = call.operand(0)
    check_one_number(call, 1, 2, 3, 4)
    rank = len(call.dims(value))
    return reduced(call, value, call.axes(9, rank) or tuple(range(rank)))


def arg(call: Call) -> Output:
    """ArgMax and ArgMin, whose results are indices along their axis."""
    value = call.operand(0)
    dims = call.dims(value)
    axis = call.axis("axis", 0, len(dims))
    off_axis(value, (axis,), "compares")
    if value.is_rows and 0 in dims:
        raise NotKnownError("has an operand without entries")
    facts = Facts(nonnegative=True, below=dims[axis])
    return _without_axes(call, value, (axis,), INT64, facts=facts)


def top_k(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    axis = call.axis("axis", -1, len(dims))
    off_axis(value, (axis,), "sorts")
    count: Number = call.number(1, "count") if call.has(1) else call.integer("k", 0)
    lengths = (*dims[:axis], count, *dims[axis + 1 :])
    facts = Facts(nonnegative=True, below=dims[axis])
    return [
        call.result(lengths, value, value.axis, value.dtype),
        call.result(lengths, value, value.axis, INT64, facts=facts),
    ]


def accumulate(call: Call) -> Output:
    value = call.operand(0)
    rank = len(call.dims(value))
    (axis,) = call.constants(1, "axis")
    off_axis(value, (axis + rank if axis < 0 else axis,), "accumulates")
    return call.same_shape(value)


def last_two_axes(call: Call) -> Output:
    """Operators on matrices that keep the shape."""
    value = call.operand(0)
    rank = len(call.dims(value))
    if rank < 2:
        raise NotKnownError("has an operand that is not a matrix")
    off_axis(value, (rank - 2, rank - 1), "takes positions")
    return call.same_shape(value)


def determinant(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) < 2:
        raise NotKnownError("has an operand that is not a matrix")
    off_axis(value, (len(dims) - 2, len(dims) - 1), "computes")
    return call.result(dims[:-2], value, value.axis, value.dtype)


def fourier(call: Call) -> Output:
    value = call.operand(0)
    dims = list(call.dims(value))
    rank = len(dims)
    if call.opset >= 20:
        (axis,) = call.constants(2, "axis") if call.has(2) else (-2,)
    else:
        axis = call.integer("axis", 1)
    axis = axis + rank if axis < 0 else axis
    off_axis(value, (axis, rank - 1), "transforms")
    length: Number = call.number(1, "length") if call.has(1) else dims[axis]
    if call.integer("onesided", 0) and call.integer("inverse", 0):
        dims[axis], dims[-1] = call.symbols.fresh(0), call.symbols.fresh(1)
    else:
        is_half = call.integer("onesided", 0)
        dims[axis] = call.symbols.add(call.symbols.divide_whole(length, 2), 1) if is_half else length
        dims[-1] = 2
    return call.result(dims, value, value.axis, value.dtype)


def short_time_fourier(call: Call) -> Output:
    value = call.operand(0)
    if value.is_rows and value.axis != 0:
        raise RowsMeetError("transforms along the axis of the rows")
    items, samples = call.dims(value)[:2]
    step = _scalar(call, 1)
    length = _scalar(call, 3) if call.optional(2) is None else call.dims(call.operand(2))[0]
    frames, bins = call.symbols.fresh(0), call.symbols.fresh(0)
    if length is not None:
        is_half = call.integer("onesided", 1)
        bins = call.symbols.add(call.symbols.divide_whole(length, 2), 1) if is_half else length
        if isinstance(samples, int) and isinstance(step, int) and isinstance(length, int) and length <= samples:
            frames = (samples - length) // max(step, 1) + 1
    return call.result((items, frames, bins, 2), value, 0, value.dtype)


def _scalar(call: Call, index: int) -> Number | None:
    value = call.optional(index)
    return value.elements[0] if value is not None and value.elements else None


def reverse_sequence(call: Call) -> Output:
    value, lengths = call.operand(0), call.operand(1)
    dims = call.dims(value)
    batch, time = call.axis("batch_axis", 1, len(dims)), call.axis("time_axis", 0, len(dims))
    off_axis(value, (time,), "reverses")
    if value.is_rows and value.axis == batch:
        if not lengths.is_rows or not lengths.carries_like(value):
            raise RowsMeetError("takes lengths without the same rows")
    elif lengths.is_rows:
        raise RowsMeetError("takes lengths from the rows for another axis")
    return call.same_shape(value)


_NORMALIZES: Final = "normalizes"


def softmax(call: Call) -> Output:
    return _softmax(call, call.opset)


def _softmax(call: Call, opset: int) -> Value:
    value = call.operand(0)
    rank = len(call.dims(value))
    is_old = opset < 13
    axis = call.axis("axis", 1 if is_old else -1, rank)
    off_axis(value, range(axis, rank if is_old else axis + 1), _NORMALIZES)
    return call.same_shape(value)


def qlinear_softmax(call: Call) -> Output:
    check_one_number(call, 1, 2, 3, 4)
    return _softmax(call, call.integer("opset", 0))


def bias_softmax(call: Call) -> Output:
    value, bias = call.operand(0), call.operand(1)
    rank = len(call.dims(value))
    if len(call.dims(bias)) != rank or (bias.is_rows and not value.is_rows):
        raise NotKnownError("has a bias with other axes than its operand")
    aligned_axis(call, [value, bias])
    off_axis(value, range(call.axis("axis", 1, rank), rank), _NORMALIZES)
    return call.same_shape(value)


def batch_normalization(call: Call) -> Output:
    value = call.operand(0)
    more = any(call.wants(index) for index in range(1, 5))
    if call.integer("training_mode", 0) or (call.opset < 7 and not call.integer("is_test", 0)) or more:
        raise RowsMeetError("takes its statistics from the whole batch in training mode")
    is_spatial = call.integer("spatial", 1)  # otherwise there are statistics for each entry, before opset 9
    off_axis(value, (1,) if is_spatial else range(1, len(call.dims(value))), _NORMALIZES)
    if len(channels := call.dims(call.operand(1))) == 1 and len(call.dims(value)) > 1:
        call.symbols.need(call.dims(value)[1], channels[0])
    return call.same_shape(value)


def first_axis_only(call: Call) -> Output:
    """Normalizations over the axes after batch and channels, with parameters for each channel."""
    value = call.operand(0)
    if value.is_rows and value.axis != 0:
        raise RowsMeetError("normalizes along the axis of the rows, or treats them as channels")
    return call.same_shape(value)


def layer_normalization(call: Call) -> Output:
    value = call.operand(0)
    rank = len(call.dims(value))
    axis = call.axis("axis", -1, rank)
    off_axis(value, range(axis, rank), _NORMALIZES)
    for parameter in (call.optional(1), call.optional(2)):
        if parameter is not None:
            aligned_axis(call, [value, parameter])
            if len(call.dims(parameter)) > rank:
                raise NotKnownError("has a scale with more axes than its operand")
    return [call.same_shape(value), *_statistics(call, value, axis, 2)]


def _statistics(call: Call, value: Value, axis: int, count: int) -> list[Value]:
    """Mean and deviation over all axes from ``axis`` on."""
    dims = call.dims(value)
    return [call.result((*dims[:axis], *[1] * (len(dims) - axis)), value, value.axis, FLOAT)] * count


def skip_layer_normalization(call: Call) -> Output:
    value, skip = call.operand(0), call.operand(1)
    rank = len(call.dims(value))
    if (skip.is_rows and not value.is_rows) or len(call.dims(skip)) > rank:
        raise RowsMeetError("adds rows to an operand without rows")
    off_axis(value, (rank - 1,), _NORMALIZES)
    if value.is_rows and not skip.is_rows and (rank != 3 or value.axis != 0):
        raise NotKnownError("adds a tensor without rows, which ONNX Runtime rejects for several rows")
    aligned_axis(call, [value, skip])
    return [call.same_shape(value), *_statistics(call, value, rank - 1, 2), call.same_shape(value)]


def skip_group_norm(call: Call) -> Output:
    value, skip = call.operand(0), call.operand(3)
    if value.is_rows and not (value.axis == 0 and skip.is_rows and skip.axis == 0 and skip.carries_like(value)):
        raise RowsMeetError("normalizes along the axis of the rows, or adds a tensor without the same rows")
    if skip.is_rows and not value.is_rows:
        raise RowsMeetError("adds rows to an operand without rows")
    return [call.same_shape(value), call.same_shape(value)]


def lp_normalization(call: Call) -> Output:
    value = call.operand(0)
    off_axis(value, (call.axis("axis", -1, len(call.dims(value))),), _NORMALIZES)
    return call.same_shape(value)


def local_response(call: Call) -> Output:
    value = call.operand(0)
    off_axis(value, (1,), _NORMALIZES)
    return call.same_shape(value)


def mean_variance(call: Call) -> Output:
    value = call.operand(0)
    if call.opset < 9:
        raise NotKnownError("is of a version before opset 9")
    axes = call.integers("axes") or (0, 2, 3)
    rank = len(call.dims(value))
    off_axis(value, [normal_axis(axis, rank) for axis in axes], _NORMALIZES)
    return call.same_shape(value)


RULES: Final[Rules] = {
    **{("", f"Reduce{kind}"): Rule(reduce_, arguments=(1,)) for kind in _REDUCTIONS},
    ("com.microsoft", "QLinearReduceMean"): Rule(qlinear_reduce, parameters=(1, 2, 3, 4)),
    **{("", op): Rule(arg) for op in ("ArgMax", "ArgMin")},
    ("", "TopK"): Rule(top_k, arguments=(1,)),
    **{("", op): Rule(accumulate, arguments=(1,)) for op in ("CumProd", "CumSum")},
    ("", "Trilu"): Rule(last_two_axes, parameters=(1,)),
    ("com.microsoft", "Trilu"): Rule(last_two_axes, parameters=(1,)),
    ("com.microsoft", "Inverse"): Rule(last_two_axes),
    ("", "Det"): Rule(determinant),
    ("", "DFT"): Rule(fourier, arguments=(1, 2)),
    ("", "STFT"): Rule(short_time_fourier, parameters=(1, 2, 3)),
    ("", "ReverseSequence"): Rule(reverse_sequence),
    **{("", op): Rule(softmax) for op in ("Hardmax", "LogSoftmax", "Softmax")},
    ("com.microsoft", "QLinearSoftmax"): Rule(qlinear_softmax, parameters=(1, 2, 3, 4)),
    ("com.microsoft", "BiasSoftmax"): Rule(bias_softmax),
    ("", "BatchNormalization"): Rule(batch_normalization, parameters=(1, 2, 3, 4)),
    ("", "InstanceNormalization"): Rule(first_axis_only, parameters=(1, 2)),
    ("", "GroupNormalization"): Rule(first_axis_only, parameters=(1, 2)),
    ("com.microsoft", "GroupNorm"): Rule(first_axis_only, parameters=(1, 2)),
    ("com.microsoft", "SkipGroupNorm"): Rule(skip_group_norm, parameters=(1, 2, 4)),
    **{
        (domain, op): Rule(layer_normalization, parameters=(1, 2))
        for domain, op in (
            ("", "LayerNormalization"),
            ("", "RMSNormalization"),
            ("", "SimplifiedLayerNormalization"),
        )
    },
    **{
        ("com.microsoft", op): Rule(skip_layer_normalization, parameters=(2, 3, 4))
        for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    ("", "LpNormalization"): Rule(lp_normalization),
    ("", "LRN"): Rule(local_response),
    ("", "MeanVarianceNormalization"): Rule(mean_variance),
}
