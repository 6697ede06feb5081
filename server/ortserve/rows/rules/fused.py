"""Rules of ONNX Runtime's fused element-wise operators (com.microsoft), quantization, and quantized operators."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ortserve.model_file.graph import FLOAT, INT8, UINT8
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    aligned_axis,
    broadcast,
    normal_axis,
    off_axis,
)
from ortserve.rows.rules.gather import gathered
from ortserve.rows.rules.matmul import check_one_number
from ortserve.rows.rules.movement import joined
from ortserve.rows.values import NO_FACTS, Value, element_count


def plain(call: Call) -> Output:
    values = call.present()
    return broadcast(call, values, values[0].dtype)


def with_bias(call: Call) -> Output:
    """Operators that add a bias along the last axis before an activation."""
    value, bias = call.operand(0), call.optional(1)
    if bias is not None:
        if len(call.dims(bias)) != 1:
            raise NotKnownError("has a bias of more than one axis")
        off_axis(value, (len(call.dims(value)) - 1,), "adds a bias")
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
        raise RowsMeetError("adds a tensor without the same rows")
    aligned_axis(call, [value, skip])
    off_axis(value, (len(call.dims(value)) - 1,), "adds a bias")
    return call.same_shape(value)


def distances(call: Call) -> Output:
    """``CDist``: the distance from each entry of one tensor to each entry of the other."""
    one, other = call.operand(0), call.operand(1)
    off_axis(one, (1,), "adds up")
    off_axis(other, (1,), "adds up")
    if one.is_rows and other.is_rows:
        raise RowsMeetError("computes distances from rows to other rows")
    like, axis = (other, 1) if other.is_rows else (one, 0)
    return call.result((call.dims(one)[0], call.dims(other)[0]), like, axis, one.dtype)


def gather_block(call: Call) -> Output:
    """``GatherBlockQuantized``: picks entries from a table of weights."""
    if not call.is_free(0):
        raise NotKnownError("looks up entries in a table that depends on the rows")
    if call.integer("bits", 4) != 4 or call.operand(0).dtype in (UINT8, INT8):
        raise NotKnownError("has a packed table")
    return replace(gathered(call, "gather_axis"), dtype=call.operand(2).dtype)


def quantize(call: Call) -> Output:
    value = call.operand(0)
    _check_scale(call, value)
    given = call.optional(2)
    dtype = call.integer("output_dtype", 0) or (given.dtype if given is not None else UINT8)
    return call.same_shape(value, dtype)


def dequantize(call: Call) -> Output:
    value = call.operand(0)
    _check_scale(call, value)
    return call.same_shape(value, call.integer("output_dtype", 0) or call.operand(1).dtype or FLOAT)


def _check_scale(call: Call, value: Value) -> None:
    """Raise an error unless scale and zero point are single numbers, or vary along another axis than the rows."""
    rank = len(call.dims(value))
    has_blocks = call.integer("block_size", 0) > 0
    for parameter in (call.operand(1), call.optional(2)):
        if parameter is None or (element_count(call.dims(parameter)) == 1 and not has_blocks):
            continue
        if len(call.dims(parameter)) != 1:
            if value.is_rows:
                raise NotKnownError("has scales for blocks of rows")
            continue
        off_axis(value, (normal_axis(call.integer("axis", 1), rank),), "has a scale for each entry")


def dynamic(call: Call) -> Output:
    """Operators that compute one scale from a whole tensor."""
    if any(value.is_rows for value in call.present()):
        raise RowsMeetError("quantizes all rows with one scale, which depends on the values of all rows")
    value = call.operand(0)
    if call.op != "DynamicQuantizeLinear":
        raise NotKnownError("returns an unknown shape")
    return [call.same_shape(value, UINT8), call.result((), dtype=FLOAT), call.result((), dtype=UINT8)]


def _paired(call: Call, data: Sequence[int], parameters: Sequence[int]) -> Output:
    check_one_number(call, *parameters)
    values = [call.operand(index) for index in data]
    return broadcast(call, values, values[-1].dtype)


def pair(call: Call) -> Output:
    return _paired(call, (0, 3), (1, 2, 4, 5, 6, 7))


def single(call: Call) -> Output:
    return _paired(call, (0,), (1, 2, 3, 4))


def choice(call: Call) -> Output:
    return _paired(call, (0, 1, 4), (2, 3, 5, 6, 7, 8))


def concat(call: Call) -> Output:
    data = range(2, len(call.operands), 3)
    for index in range(len(call.operands)):
        if index not in data:
            check_one_number(call, index)
            if not call.is_free(index):
                raise RowsMeetError("takes a scale or zero point from the rows")
    result = joined(call, [call.operand(index) for index in data], call.integer("axis", 0))
    # Each operand is quantized anew. Its numbers, and the bounds on them, are not those of the result.
    return replace(result, elements=None, facts=replace(NO_FACTS, transposed=result.facts.transposed))


RULES: Final[Rules] = {
    **{("com.microsoft", op): Rule(plain) for op in ("Gelu", "MurmurHash3", "QuickGelu")},
    **{("com.microsoft", op): Rule(with_bias, parameters=(1,)) for op in ("BiasGelu", "FastGelu")},
    ("com.microsoft", "BiasSplitGelu"): Rule(bias_split, parameters=(1,)),
    ("com.microsoft", "BiasAdd"): Rule(bias_add, parameters=(1,)),
    ("com.microsoft", "CDist"): Rule(distances),
    ("com.microsoft", "GatherBlockQuantized"): Rule(gather_block, parameters=(2, 3)),
    **{(domain, "QuantizeLinear"): Rule(quantize, parameters=(1, 2)) for domain in ("", "com.microsoft")},
    **{(domain, "DequantizeLinear"): Rule(dequantize, parameters=(1, 2)) for domain in ("", "com.microsoft")},
    ("", "DynamicQuantizeLinear"): Rule(dynamic),
    ("com.microsoft", "DynamicQuantizeMatMul"): Rule(dynamic),
    ("com.microsoft", "DynamicQuantizeLSTM"): Rule(dynamic),
    **{("com.microsoft", op): Rule(pair, parameters=(1, 2, 4, 5, 6, 7)) for op in ("QLinearAdd", "QLinearMul")},
    **{("com.microsoft", op): Rule(single, parameters=(1, 2, 3, 4)) for op in ("QLinearLeakyRelu", "QLinearSigmoid")},
    ("com.microsoft", "QLinearWhere"): Rule(choice, parameters=(2, 3, 5, 6, 7, 8)),
    ("com.microsoft", "QLinearConcat"): Rule(concat),
}
