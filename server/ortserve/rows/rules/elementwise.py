"""Operators that compute each element of their result from one element of each operand."""

from typing import Final

from ortserve.rows.graph import BOOL
from ortserve.rows.rules.alignment import broadcast
from ortserve.rows.rules.call import Call, NotKnownError, Output, RandomError, Rules, rule
from ortserve.rows.values import Facts, Value

_UNARY: Final = """
    Acos Acosh Asin Asinh Atan Atanh BitwiseNot Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish
    Reciprocal Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Affine
    ParametricSoftplus ScaledTanh
"""
_BINARY: Final = "BitShift BitwiseAnd BitwiseOr BitwiseXor Mean PRelu Pow StringConcat Xor"
_TESTS: Final = "IsInf IsNaN RegexFullMatch"


def plain(call: Call) -> Output:
    """Any number of operands, all of which are data."""
    check_broadcast_attribute(call)
    values = call.present()
    return broadcast(call, values, values[0].dtype if values else 0)


def test(call: Call) -> Output:
    return broadcast(call, call.present(), BOOL)


def relu(call: Call) -> Output:
    value = call.operand(0)
    return broadcast(call, [value], value.dtype, Facts(nonnegative=value.is_integer))


def clip(call: Call) -> Output:
    """Bounds are attributes before opset 11, and scalars since then."""
    values = call.present()
    low, high = call.optional(1), call.optional(2)
    # Where the bounds cross, the upper one holds.
    is_bounded = low is not None and _is_nonnegative(low) and (high is None or _is_nonnegative(high))
    facts = Facts(nonnegative=values[0].is_integer and is_bounded)
    return broadcast(call, values, values[0].dtype, facts)


def dropout(call: Call) -> Output:
    value = call.operand(0)
    if call.opset < 7 and not call.integer("is_test", 0):
        raise RandomError("draws random numbers in training mode")
    if call.opset >= 12 and call.has(2) and call.operand(2).elements != (0,):
        raise RandomError("may draw random numbers in training mode")
    return [call.same_shape(value, facts=value.facts), call.same_shape(value, BOOL)]


def check_broadcast_attribute(call: Call) -> None:
    """Before opset 7, an attribute says which axes are paired."""
    if call.opset < 7 and call.node.domain == "":
        if "axis" in call.attributes:
            raise NotKnownError("aligns its operands by an axis, as before opset 7")
        if not call.integer("broadcast", 0) and len({len(call.dims(value)) for value in call.present()}) > 1:
            raise NotKnownError("has operands of different ranks, before opset 7")


def _is_nonnegative(bound: Value) -> bool:
    return bound.elements is not None and all(isinstance(each, int) and each >= 0 for each in bound.elements)


RULES: Final[Rules] = {
    **{("", op): rule(plain) for op in (*_UNARY.split(), *_BINARY.split())},
    **{("", op): rule(test) for op in _TESTS.split()},
    ("", "Relu"): rule(relu),
    ("", "Clip"): rule(clip),
    ("", "Dropout"): rule(dropout, parameters=(1, 2)),
}
