"""Fused element-wise operators of ONNX Runtime (com.microsoft)."""

from typing import Final

from ortserve.rows.rules.alignment import aligned_axis, broadcast
from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rules, off_axis, rule
from ortserve.rows.rules.gather import gather


def plain(call: Call) -> Output:
    values = call.present()
    return broadcast(call, values, values[0].dtype)


def with_bias(call: Call) -> Output:
    """A bias along the last axis is added before an activation."""
    value, bias = call.operand(0), call.optional(1)
    if bias is not None:
        if len(call.dims(bias)) != 1:
            raise NotKnownError("has a bias of more than one axis")
        aligned_axis(call, [value, bias])
    return call.same_shape(value)


def bias_split(call: Call) -> Output:
    """``BiasSplitGelu`` multiplies one half of the last axis with the other."""
    value = call.operand(0)
    dims = call.dims(value)
    off_axis(value, (len(dims) - 1,), "splits")
    half = call.symbols.divide_whole(dims[-1], 2)
    return call.result((*dims[:-1], half), value, value.axis, value.dtype)


def bias_add(call: Call) -> Output:
    value, skip = call.operand(0), call.operand(2)
    if value.is_rows != skip.is_rows:
        raise RowsMeetError("adds a tensor that does not carry the same rows")
    aligned_axis(call, [value, skip])
    off_axis(value, (len(call.dims(value)) - 1,), "adds a bias")
    return call.same_shape(value)


def distances(call: Call) -> Output:
    """``CDist``: from each entry of one tensor to each of the other."""
    one, other = call.operand(0), call.operand(1)
    off_axis(one, (1,), "adds up")
    off_axis(other, (1,), "adds up")
    if one.is_rows and other.is_rows:
        raise RowsMeetError("computes distances from rows to other rows")
    like, axis = (other, 1) if other.is_rows else (one, 0)
    return call.result((call.dims(one)[0], call.dims(other)[0]), like, axis, one.dtype)


def gather_block(call: Call) -> Output:
    """``GatherBlockQuantized`` from a table of weights."""
    if not call.is_free(0):
        raise NotKnownError("picks from a table that depends on the rows")
    if call.integer("bits", 4) != 4 or call.operand(0).dtype in (2, 3):
        raise NotKnownError("has a packed table")
    result = gather(call)
    assert not isinstance(result, (list, tuple))
    return result


RULES: Final[Rules] = {
    **{("com.microsoft", op): rule(plain) for op in ("Gelu", "MurmurHash3", "QuickGelu")},
    **{("com.microsoft", op): rule(with_bias, parameters=(1,)) for op in ("BiasGelu", "FastGelu")},
    ("com.microsoft", "BiasSplitGelu"): rule(bias_split, parameters=(1,)),
    ("com.microsoft", "BiasAdd"): rule(bias_add, parameters=(1,)),
    ("com.microsoft", "CDist"): rule(distances),
    ("com.microsoft", "GatherBlockQuantized"): rule(gather_block, parameters=(2, 3)),
}
