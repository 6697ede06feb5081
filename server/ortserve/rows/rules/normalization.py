"""Operators that normalize over some axes: softmax and its kind, and the many normalizations."""

from typing import Final

from ortserve.rows.graph import FLOAT
from ortserve.rows.rules.alignment import aligned_axis
from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rules, normal_axis, off_axis, rule
from ortserve.rows.rules.matmul import check_one_number
from ortserve.rows.values import Value

_NORMALIZES: Final = "normalizes"


def softmax(call: Call) -> Output:
    return _softmax(call, call.operand(0), call.opset)


def _softmax(call: Call, value: Value, opset: int) -> Value:
    rank = len(call.dims(value))
    if opset < 13:
        axis = call.integer("axis", 1)
        axis = axis + rank if axis < 0 else axis  # an axis equal to the rank normalizes over nothing
        axes = range(axis, rank)
    else:
        axis = call.axis("axis", -1, rank)
        axes = range(axis, axis + 1)
    off_axis(value, axes, _NORMALIZES)
    return call.same_shape(value)


def qlinear_softmax(call: Call) -> Output:
    for index in (1, 2, 3, 4):
        check_one_number(call, index)
    return _softmax(call, call.operand(0), call.integer("opset", 0))


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
    off_axis(value, (1,), _NORMALIZES)
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
    """The mean and the deviation over the axes from one on."""
    dims = call.dims(value)
    return [call.result((*dims[:axis], *[1] * (len(dims) - axis)), value, value.axis, FLOAT)] * count


def skip_layer_normalization(call: Call) -> Output:
    value, skip = call.operand(0), call.operand(1)
    rank = len(call.dims(value))
    if (value.is_rows is False and skip.is_rows) or len(call.dims(skip)) > rank:
        raise RowsMeetError("adds rows to an operand that has none")
    off_axis(value, (rank - 1,), _NORMALIZES)
    aligned_axis(call, [value, skip])
    return [call.same_shape(value), *_statistics(call, value, rank - 1, 2), call.same_shape(value)]


def skip_group_norm(call: Call) -> Output:
    value, skip = call.operand(0), call.operand(3)
    if value.is_rows and not (value.axis == 0 and skip.is_rows and skip.axis == 0 and skip.carries_like(value)):
        raise RowsMeetError("normalizes along the axis of the rows, or adds a tensor without the same rows")
    if skip.is_rows and not value.is_rows:
        raise RowsMeetError("adds rows to an operand that has none")
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
    **{("", op): rule(softmax) for op in ("Hardmax", "LogSoftmax", "Softmax")},
    ("com.microsoft", "QLinearSoftmax"): rule(qlinear_softmax, parameters=(1, 2, 3, 4)),
    ("com.microsoft", "BiasSoftmax"): rule(bias_softmax),
    ("", "BatchNormalization"): rule(batch_normalization, parameters=(1, 2, 3, 4)),
    ("", "InstanceNormalization"): rule(first_axis_only, parameters=(1, 2)),
    ("", "GroupNormalization"): rule(first_axis_only, parameters=(1, 2)),
    ("com.microsoft", "GroupNorm"): rule(first_axis_only, parameters=(1, 2)),
    ("com.microsoft", "SkipGroupNorm"): rule(skip_group_norm, parameters=(1, 2, 4)),
    **{
        (domain, op): rule(layer_normalization, parameters=(1, 2))
        for domain, op in (
            ("", "LayerNormalization"),
            ("", "RMSNormalization"),
            ("", "SimplifiedLayerNormalization"),
            ("com.microsoft", "LayerNormalization"),
            ("com.microsoft", "SimplifiedLayerNormalization"),
        )
    },
    **{
        ("com.microsoft", op): rule(skip_layer_normalization, parameters=(2, 3, 4))
        for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    ("", "LpNormalization"): rule(lp_normalization),
    ("", "LRN"): rule(local_response),
    ("", "MeanVarianceNormalization"): rule(mean_variance),
}
