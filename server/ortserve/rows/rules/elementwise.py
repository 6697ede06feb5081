"""Rules of operators that compute each element of their result from one element of each operand.

Arithmetic operators also compute the known elements of small tensors, which become shapes, and strides: the part of a
value that depends on the row's number.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from typing import Final

from ortserve.model_file.graph import BOOL, DOUBLE, FLOAT
from ortserve.rows.number import (
    DEPENDENT,
    Number,
    contains_rows,
    has_atom,
    is_nonnegative,
    is_unbounded,
    is_whole,
)
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RandomError,
    RowsMeetError,
    Rule,
    Rules,
    broadcast,
    check_no_stride,
)
from ortserve.rows.rules.index_bounds import (
    INDICES,
    LIMITS,
    MAX_BELOW,
    dtype_of,
    is_bound_nonnegative,
    is_held,
    is_value_nonnegative,
    scaled_facts,
    sum_below,
)
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import (
    NO_FACTS,
    Facts,
    Value,
    cast_number,
    choice,
    conjunction,
    disjunction,
    equal,
    less,
    negation,
    paired_elements,
    power,
    quotient,
    remainder_of,
    uniform,
)

_UNARY: Final = """
    Acos Acosh Asin Asinh Atan Atanh BitwiseNot Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish
    Reciprocal Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Swish Tan Tanh ThresholdedRelu Affine
    ParametricSoftplus ScaledTanh
"""
_BINARY: Final = "BitShift BitwiseAnd BitwiseOr BitwiseXor Mean StringConcat Xor"
_OF_EQUAL_SHAPES: Final = frozenset({"Max", "Mean", "Min", "Sum"})
_TESTS: Final = "IsInf IsNaN RegexFullMatch"


def plain(call: Call) -> Value:
    """Operators on any number of operands, all of them data."""
    check_broadcast_attribute(call)
    values = call.present()
    return broadcast(call, values, values[0].dtype if values else 0)


def parametric(call: Call) -> Output:
    """PRelu. ONNX Runtime takes the shape of the first operand for that of the result when it infers shapes."""
    value = call.operand(0)
    result = plain(call)
    if result.dims != value.dims:
        raise NotKnownError("has slopes for more entries than its operand certainly has")
    return result


def test(call: Call) -> Output:
    return broadcast(call, call.present(), BOOL)


def bit_cast(call: Call) -> Output:
    """The bits of each element as another type of the same size."""
    return call.same_shape(call.operand(0), call.integer("to", 0))


def relu(call: Call) -> Output:
    value = call.operand(0)
    return broadcast(call, [value], value.dtype, Facts(nonnegative=value.is_integer))


def clip(call: Call) -> Output:
    """Clip: its bounds are attributes before opset 11, and scalar operands since then."""
    values = call.present()
    low, high = call.optional(1), call.optional(2)
    # If the bounds cross, the upper one applies.
    is_bounded = low is not None and is_bound_nonnegative(low) and (high is None or is_bound_nonnegative(high))
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
    """Raise an error if attributes pair axes (before opset 7), or shapes must be equal and are not (before opset 8)."""
    if call.opset < 8 and call.op in _OF_EQUAL_SHAPES and len({call.dims(value) for value in call.present()}) > 1:
        raise NotKnownError("has operands of different shapes, before opset 8")
    if call.opset < 7 and call.node.domain == "":
        if "axis" in call.attributes:
            raise NotKnownError("aligns its operands at the axis of an attribute, as before opset 7")
        if not call.integer("broadcast", 0) and len({len(call.dims(value)) for value in call.present()}) > 1:
            raise NotKnownError("has operands of different ranks, before opset 7")


_FLOATS: Final = frozenset({DOUBLE, FLOAT})


def add(call: Call) -> Output:
    values = call.present()
    below = sum_below(call.symbols, values)
    facts = Facts(
        stride=call.symbols.sum(_stride(value) for value in values),
        nonnegative=below is not None,
        below=below,
    )
    result = _computed(call, values, facts, partial(reduce_over, call.symbols, dtype_of(values), call.symbols.add))
    return _with_summands(values, result)


def _with_summands(values: Sequence[Value], result: Value) -> Value:
    """Note the summands of a number of rows and a constant: exporters compute the sizes of chunks with such sums."""
    if result.elements != (DEPENDENT,) or len(values) != 2 or dtype_of(values) not in INDICES:
        return result
    numbers = [element for value in values for element in value.elements or ()]
    rest = [number for number in numbers if isinstance(number, int) and 0 <= number < MAX_BELOW]
    of_rows = [number for number in numbers if contains_rows(number) and is_nonnegative(number)]
    if len(numbers) != 2 or not rest or not of_rows:
        return result
    return replace(result, facts=Facts(rows_and_rest=(of_rows[0], rest[0])))


def subtract(call: Call) -> Output:
    one, other = call.operand(0), call.operand(1)
    facts = Facts(stride=call.symbols.subtract(_stride(one), _stride(other)))
    return _computed(call, [one, other], facts, call.symbols.subtract)


def multiply(call: Call) -> Output:
    values = call.present()
    facts = scaled_facts(call.symbols, values) if len(values) == 2 else NO_FACTS
    if facts.stride == 0:
        check_no_stride(values)
    return _computed(call, values, facts, call.symbols.multiply)


def divide(call: Call) -> Output:
    values = call.present()
    check_no_stride(values)
    divide_numbers = call.symbols.divide_whole if dtype_of(values) in INDICES else partial(quotient, call.symbols)
    if (rounded_down := _without_rest(call)) is not None:
        return _computed(call, values, NO_FACTS, lambda *_: rounded_down)
    return _computed(call, values, NO_FACTS, divide_numbers)


def _without_rest(call: Call) -> Number | None:
    """The quotient of a sum whose rest is lost by rounding, such as ``(2 * N + 1) / 2``; None for any other."""
    dividend, divisor = call.operand(0), uniform(call.operand(1))
    if dividend.facts.rows_and_rest is None or dividend.elements != (DEPENDENT,) or not isinstance(divisor, int):
        return None
    of_rows, rest = dividend.facts.rows_and_rest
    return call.symbols.divide_exactly(of_rows, divisor) if rest < divisor else None


def remainder(call: Call) -> Output:
    values = call.present()
    check_no_stride(values)
    facts = NO_FACTS
    divisor = uniform(call.operand(1))
    whole = dtype_of(values) in INDICES and not call.integer("fmod", 0)
    if isinstance(divisor, int) and 0 < divisor < MAX_BELOW and whole:
        facts = replace(facts, nonnegative=True, below=divisor)
    return _computed(call, values, facts, partial(remainder_of, call.symbols) if whole else None)


def raise_to_power(call: Call) -> Output:
    """Pow, and Sqrt as a power of a half."""
    values = call.present()
    check_no_stride(values)
    kernel = " ".join([call.op, *(f"{value.dtype}{len(value.elements or ()) == 1}" for value in values)])
    compute = partial(power, call.symbols, kernel)
    return _computed(call, values, NO_FACTS, compute if call.op == "Pow" else partial(compute, other=Fraction(1, 2)))


def minimum(call: Call) -> Output:
    values = call.present()
    check_no_stride(values)
    bounds = [bound for value in values if (bound := value.facts.below) is not None]
    facts = Facts(nonnegative=all(map(is_value_nonnegative, values)), below=bounds[0] if bounds else None)
    return _computed(call, values, facts, partial(reduce_over, call.symbols, dtype_of(values), call.symbols.minimum))


def maximum(call: Call) -> Output:
    values = call.present()
    facts = Facts(nonnegative=any(map(is_value_nonnegative, values)))
    if any(value.facts.stride != 0 for value in values):  # exporters read the shape of such a result
        facts = Facts(stride=DEPENDENT)
    return _computed(call, values, facts, partial(reduce_over, call.symbols, dtype_of(values), call.symbols.maximum))


def negate(call: Call) -> Output:
    value = call.operand(0)
    facts = Facts(stride=call.symbols.multiply(-1, _stride(value)))
    return _computed(call, [value], facts, partial(call.symbols.multiply, -1))


def absolute(call: Call) -> Output:
    value = call.operand(0)
    check_no_stride([value])

    def compute(number: Number) -> Number:
        if is_nonnegative(number):
            return number
        if isinstance(number, (int, Fraction)):
            return -number
        # The smallest integer has no absolute value. A number that a type does not hold may wrap around to it.
        may_wrap = has_atom(number, lambda atom: atom.lowest is None and not atom.terms)
        return call.symbols.opaque("absolute", number, lowest=None if may_wrap else 0, is_whole=is_whole(number))

    return _computed(call, [value], NO_FACTS, compute)


def rounded(call: Call) -> Output:
    value = call.operand(0)
    check_no_stride([value])
    compute = {"Floor": call.symbols.floor, "Ceil": call.symbols.ceil}.get(call.op)
    return _computed(call, [value], NO_FACTS, compute)


def compare(call: Call) -> Output:
    symbols = call.symbols
    compute: dict[str, Callable[[Number, Number], Number]] = {
        "Equal": partial(equal, symbols),
        "Less": partial(less, symbols),
        "Greater": lambda one, other: less(symbols, other, one),
        "LessOrEqual": lambda one, other: negation(symbols, less(symbols, other, one)),
        "GreaterOrEqual": lambda one, other: negation(symbols, less(symbols, one, other)),
        "And": partial(conjunction, symbols),
        "Or": partial(disjunction, symbols),
        "Not": partial(negation, symbols),
    }
    values = call.present()
    check_no_stride(values)
    return _computed(call, values, NO_FACTS, compute[call.op], dtype=BOOL)


def where(call: Call) -> Output:
    choices = [call.operand(1), call.operand(2)]
    values = [call.operand(0), *choices]
    check_no_stride(values)
    facts = Facts(nonnegative=all(map(is_value_nonnegative, choices)))
    return _computed(call, values, facts, partial(choice, call.symbols), dtype=dtype_of(choices))


def cast(call: Call) -> Output:
    value = call.operand(0)
    to = call.operand(1).dtype if call.op == "CastLike" else call.integer("to", 0)
    facts = Facts(padding=value.facts.padding)
    if value.dtype in INDICES and to in INDICES:
        # Without an upper bound, the cast of a nonnegative number may overflow and be negative.
        stays = value.facts.nonnegative and is_held(value.facts.below, to)
        facts = replace(value.facts, columns=(), nonnegative=stays, below=value.facts.below if stays else None)
    check_no_stride([value] if facts.stride != value.facts.stride else [])
    return _computed(call, [value], facts, partial(cast_number, call.symbols, to) if to else None, dtype=to)


def identity(call: Call) -> Output:
    return call.operand(0)


def reduce_over(symbols: Symbols, dtype: int, compute: Callable[[Number, Number], Number], *numbers: Number) -> Number:
    """Combine numbers from left to right, with each result as the type holds it."""
    limit = LIMITS.get(dtype, 0)
    return reduce(lambda one, other: symbols.bounded(compute(one, other), limit), numbers)


def _computed(
    call: Call,
    values: Sequence[Value],
    facts: Facts,
    compute: Callable[..., Number] | None,
    dtype: int | None = None,
) -> Value:
    check_broadcast_attribute(call)
    dtype = dtype_of(values) if dtype is None else dtype
    if facts.stride != 0 and dtype not in INDICES:
        raise RowsMeetError("uses the index of each row in the batch")
    result = broadcast(call, values, dtype, facts)
    if compute is None or result.is_rows or result.dims is None or not all(v.dtype in LIMITS for v in values):
        return result
    if len(values) > 1 and any(is_unbounded(value.elements) for value in values if value.dtype in _FLOATS):
        return result
    known = paired_elements(values, result.dims, compute)
    if known is not None and (limit := LIMITS.get(dtype)):
        known = tuple(call.symbols.bounded(number, limit) for number in known)
    return result if known is None else call.result(result.dims, dtype=dtype, elements=known)


def _stride(value: Value) -> Number:
    return value.facts.stride


RULES: Final[Rules] = {
    **{("", op): Rule(plain) for op in (*_UNARY.split(), *_BINARY.split())},
    ("", "PRelu"): Rule(parametric),
    **{("", op): Rule(test) for op in _TESTS.split()},
    ("", "BitCast"): Rule(bit_cast),
    ("", "Relu"): Rule(relu),
    ("", "Clip"): Rule(clip, parameters=(1, 2)),
    ("", "Dropout"): Rule(dropout, parameters=(1, 2)),
    **{("", op): Rule(add, keeps_stride=True) for op in ("Add", "Sum")},
    ("", "Sub"): Rule(subtract, keeps_stride=True),
    ("", "Mul"): Rule(multiply, keeps_stride=True),
    ("", "Div"): Rule(divide),
    ("", "Mod"): Rule(remainder),
    **{("", op): Rule(raise_to_power) for op in ("Pow", "Sqrt")},
    ("", "Min"): Rule(minimum),
    ("", "Max"): Rule(maximum, keeps_stride=True),
    ("", "Neg"): Rule(negate, keeps_stride=True),
    ("", "Abs"): Rule(absolute),
    **{("", op): Rule(rounded) for op in ("Ceil", "Floor", "Round")},
    **{
        ("", op): Rule(compare)
        for op in ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or")
    },
    ("", "Where"): Rule(where),
    ("", "Cast"): Rule(cast, keeps_stride=True),
    ("", "CastLike"): Rule(cast, arguments=(1,), keeps_stride=True),
    ("", "Identity"): Rule(identity, keeps_stride=True, keeps_padding=True),
}
