"""Rules of operators that create tensors: constants, and tensors of a given shape or range."""

from fractions import Fraction
from math import isfinite
from typing import Final

from ortserve.model_file.graph import FLOAT, INT32, INT64, STRING, Tensor, rational
from ortserve.rows.number import N, Number, contains_rows, is_nonnegative
from ortserve.rows.rules.call import OTHER_AXIS, Call, NotKnownError, Output, RowsMeetError, Rule, Rules
from ortserve.rows.rules.index_bounds import LIMITS
from ortserve.rows.rules.movement import length_of, rows_of_copies
from ortserve.rows.symbols import DOUBLE_LIMIT
from ortserve.rows.values import MAX_ELEMENTS, Facts, Kind, Value, element_count, rows


def constant(call: Call) -> Output:
    for name, value in call.attributes.items():
        if isinstance(value, Tensor):
            elements = value.elements
            return (
                call.result(value.dims, dtype=value.dtype, elements=elements)
                if value.dims is not None
                else Value(kind=Kind.FREE, dtype=value.dtype)
            )
        if name in ("value_int", "value_ints", "value_float", "value_floats", "value_string", "value_strings"):
            return _literal(call, name, value if isinstance(value, tuple) else (value,))
    raise NotKnownError("has a value that cannot be read")


def _literal(call: Call, name: str, values: tuple[object, ...]) -> Value:
    dims = (len(values),) if name.endswith("s") else ()
    dtype = INT64 if "_int" in name else FLOAT if "_float" in name else STRING
    known: list[Number] = []
    for value in values[: MAX_ELEMENTS + 1]:
        if isinstance(value, int):
            known.append(value)
        elif isinstance(value, float) and isfinite(value):
            known.append(rational(Fraction(value)))
    is_known = len(known) == len(values) <= MAX_ELEMENTS
    return call.result(dims, dtype=dtype, elements=tuple(known) if is_known else None)


def constant_of_shape(call: Call) -> Output:
    lengths = call.numbers(0, "shape")
    content = call.attributes.get("value")
    dtype, fill = FLOAT, (0,)
    if isinstance(content, Tensor):
        dtype = content.dtype
        fill = content.elements  # type: ignore[assignment]
    carriers = [axis for axis, length in enumerate(lengths) if contains_rows(length)]
    if len(carriers) > 1:
        raise RowsMeetError(OTHER_AXIS)
    if carriers:
        copied = Value(kind=call.operand(0).kind, dtype=dtype, elements=fill)
        return rows_of_copies(call, copied, lengths, carriers[0])
    lengths = tuple(length_of(call, length) for length in lengths)
    count = element_count(lengths)
    known = fill * count if fill and count is not None and count <= MAX_ELEMENTS else None
    return call.result(lengths, dtype=dtype, elements=known)


def range_(call: Call) -> Output:
    start, limit, delta = (call.number(index, what) for index, what in enumerate(("start", "limit", "step")))
    dtype = call.operand(0).dtype
    symbols = call.symbols
    if contains_rows(start) or contains_rows(delta):
        raise RowsMeetError("takes the start or the step of its range from the number of rows")
    if contains_rows(limit):
        inner = symbols.divide_exactly(limit, N)
        if start != 0 or delta != 1 or inner is None or dtype not in (INT32, INT64):
            raise RowsMeetError("takes the limit of its range from the number of rows")
        facts = Facts(stride=inner, nonnegative=True, below=inner)
        return rows(symbols, (limit,), 0, inner=inner, dtype=dtype, facts=facts)
    if (
        isinstance(start, int)
        and isinstance(limit, int)
        and isinstance(delta, int)
        and delta
        and max(abs(start), abs(limit), abs(limit - start)) < LIMITS.get(dtype, DOUBLE_LIMIT)
    ):
        count = len(range(start, limit, delta))
        known = tuple(range(start, limit, delta)) if count <= MAX_ELEMENTS else None
        return call.result((count,), dtype=dtype, elements=known)
    if delta == 1 and dtype in (INT32, INT64):
        facts = Facts(nonnegative=is_nonnegative(start), below=limit)
        return call.result((length_of(call, symbols.subtract(limit, start)),), dtype=dtype, facts=facts)
    return call.result((symbols.opaque("count", start, limit, delta, lowest=0),), dtype=dtype)


def eye_like(call: Call) -> Output:
    value = call.operand(0)
    if value.is_rows:
        raise RowsMeetError("returns a matrix that depends on the index of each row in the batch")
    return call.result(call.dims(value), dtype=call.integer("dtype", value.dtype))


RULES: Final[Rules] = {
    ("", "Constant"): Rule(constant),
    ("", "ConstantOfShape"): Rule(constant_of_shape, arguments=(0,)),
    ("", "Range"): Rule(range_, arguments=(0, 1, 2)),
    ("", "EyeLike"): Rule(eye_like),
}
