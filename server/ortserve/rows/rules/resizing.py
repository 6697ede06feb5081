"""Resize and Upsample: sizes and scales are given for all axes, and must leave the axis of the rows as it is."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rules, normal_axis, rule
from ortserve.rows.symbols import Number, contains_rows
from ortserve.rows.values import Value


def resize(call: Call) -> Output:
    value = call.operand(0)
    rank = len(call.dims(value))
    if call.text("coordinate_transformation_mode", "half_pixel") in ("tf_crop_and_resize", "tf_half_pixel_for_nn"):
        raise NotKnownError("moves entries even where sizes stay as they are")
    is_old = call.opset < 11
    given = call.integers("axes")
    axes = tuple(range(rank)) if given is None else tuple(normal_axis(axis, rank) for axis in given)
    if not is_old and _has_elements(call, 3):
        if call.text("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise NotKnownError("chooses sizes by the ratio of its axes")
        return _with_sizes(call, value, axes, call.numbers(3, "sizes"))
    return _with_scales(call, value, axes, call.numbers(1 if is_old else 2, "scales"))


def upsample(call: Call) -> Output:
    value = call.operand(0)
    scales = call.attributes.get("scales")
    rank = len(call.dims(value))
    if not isinstance(scales, tuple):
        return _with_scales(call, value, tuple(range(rank)), call.numbers(1, "scales"))
    known = [Fraction(scale) for scale in scales if isinstance(scale, (int, float))]
    return _with_scales(call, value, tuple(range(rank)), known)


def _has_elements(call: Call, index: int) -> bool:
    """Whether an operand is given and not the empty tensor that stands for one that is left out."""
    value = call.optional(index)
    return value is not None and value.dims != (0,)


def _with_sizes(call: Call, value: Value, axes: Sequence[int], sizes: Sequence[Number]) -> Value:
    dims = list(call.dims(value))
    for axis, size in zip(axes, sizes, strict=True):
        if value.is_rows and axis == value.axis:
            if size != dims[axis]:
                raise RowsMeetError("resizes the axis of the rows")
        elif contains_rows(size):
            raise RowsMeetError("gives a length that depends on the number of rows where the rows do not lie")
        else:
            dims[axis] = size
    return call.result(dims, value, value.axis, value.dtype)


def _with_scales(call: Call, value: Value, axes: Sequence[int], scales: Sequence[Number]) -> Value:
    dims = list(call.dims(value))
    symbols = call.symbols
    for axis, scale in zip(axes, scales, strict=True):
        if value.is_rows and axis == value.axis:
            if scale != 1:
                raise RowsMeetError("resizes the axis of the rows")
        elif isinstance(scale, int):
            dims[axis] = symbols.multiply(dims[axis], scale)
        elif isinstance(scale, Fraction) and scale.denominator in (2, 4, 8):
            dims[axis] = symbols.floor(symbols.multiply(dims[axis], scale))
        else:  # the product is rounded
            dims[axis] = symbols.opaque("scaled", dims[axis], scale, lowest=0)
    return call.result(dims, value, value.axis, value.dtype)


RULES: Final[Rules] = {
    ("", "Resize"): rule(resize, arguments=(2, 3), parameters=(1,)),
    ("", "Upsample"): rule(upsample, parameters=(1,)),
}
