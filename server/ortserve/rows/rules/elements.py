"""Arithmetic on the known elements of small tensors: what shapes are computed with."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

from ortserve.rows.graph import BOOL, DOUBLE, FLOAT, INT32, INT64
from ortserve.rows.symbols import (
    DEPENDENT,
    Number,
    Symbols,
    contains_rows,
    is_nonnegative,
    is_positive,
    is_whole,
    lowest,
)
from ortserve.rows.values import Value

MOST_ELEMENTS: Final = 64
"""Elements that are computed with; a larger tensor has no known elements."""
_EXACT_FLOATS: Final = frozenset({FLOAT, DOUBLE})

Compute = Callable[..., Number]


def paired(values: Sequence[Value], dims: Sequence[Number], compute: Compute) -> tuple[Number, ...] | None:
    """The elements of a result of these dimensions, from those of its operands; None where they are not known."""
    count = element_count(dims)
    if count is None or count > MOST_ELEMENTS:
        return None
    columns = []
    for value in values:
        if value.elements is None:
            return None
        if len(value.elements) == 1:
            columns.append(value.elements * count)
        elif value.dims == tuple(dims):
            columns.append(value.elements)
        else:
            return None
    return tuple(compute(*each) for each in zip(*columns, strict=True))


def element_count(dims: Sequence[Number]) -> int | None:
    """How many elements a tensor has; None where that is not known."""
    count = 1
    for length in dims:
        if not isinstance(length, int):
            return None
        count *= length
    return count


def taken(value: Value, axis: int, positions: Sequence[int]) -> tuple[Number, ...] | None:
    """The known elements at some positions along an axis; None where they are not known."""
    dims = value.dims or ()
    if value.elements is None or element_count(dims) != len(value.elements):
        return None
    after = element_count(dims[axis + 1 :]) or 0
    along = element_count(dims[axis : axis + 1]) or 0
    if not after or not along or len(positions) * len(value.elements) > MOST_ELEMENTS * along:
        return None
    blocks = range(0, len(value.elements), along * after)
    starts = (block + position * after for block in blocks for position in positions)
    return tuple(element for start in starts for element in value.elements[start : start + after])


def transposed(value: Value, order: Sequence[int]) -> tuple[Number, ...] | None:
    """The known elements with their axes in another order; None where they are not known."""
    dims = [length for length in value.dims or () if isinstance(length, int)]
    if value.elements is None or len(value.elements) > MOST_ELEMENTS or len(dims) != len(order):
        return None
    offsets = [0]
    for axis in order:
        step = element_count(dims[axis + 1 :]) or 0
        offsets = [offset + index * step for offset in offsets for index in range(dims[axis])]
    return tuple(value.elements[offset] for offset in offsets)


def uniform(value: Value) -> Number | None:
    """The number that all elements of a tensor are; None where they differ or are not known."""
    if not value.elements or any(element != value.elements[0] for element in value.elements):
        return None
    return value.elements[0]


def quotient(symbols: Symbols, one: Number, other: Number) -> Number:
    """A quotient of floating-point numbers."""
    if (exact := symbols.divide_exactly(one, other)) is not None:
        return exact
    if isinstance(other, (int, Fraction)) and other:
        inverse = Fraction(1) / other
        if inverse.denominator & (inverse.denominator - 1) == 0:
            return symbols.multiply(one, inverse)
    return symbols.opaque("quotient", one, other, is_whole=False)


def remainder(symbols: Symbols, one: Number, other: Number) -> Number:
    """``Mod`` of integers."""
    if isinstance(one, int) and isinstance(other, int) and other:
        return one % other
    if symbols.divide_exactly(one, other) is not None:
        return 0
    return symbols.opaque("remainder", one, other, lowest=0 if is_positive(other) else None)


def equal(symbols: Symbols, one: Number, other: Number) -> Number:
    if DEPENDENT in (one, other):
        return DEPENDENT
    if one == other:
        return 1
    if isinstance(one, (int, Fraction)) and isinstance(other, (int, Fraction)):
        return 0
    if symbols.at_least(one, other, 1) or symbols.at_least(other, one, 1):
        return 0
    return symbols.opaque("equal", frozenset((one, other)), lowest=0)


def less(symbols: Symbols, one: Number, other: Number) -> Number:
    if isinstance(one, (int, Fraction)) and isinstance(other, (int, Fraction)):
        return int(one < other)
    if symbols.at_least(other, one, 1):
        return 1
    if symbols.at_least(one, other):
        return 0
    return symbols.opaque("less", one, other, lowest=0)


def negation(symbols: Symbols, one: Number) -> Number:
    """``Not`` of 0 or 1."""
    return symbols.subtract(1, one) if isinstance(one, int) else symbols.opaque("not", one, lowest=0)


def conjunction(symbols: Symbols, one: Number, other: Number) -> Number:
    if 0 in (one, other):
        return 0
    if one == 1 or one == other:
        return other
    return one if other == 1 else symbols.opaque("and", frozenset((one, other)), lowest=0)


def disjunction(symbols: Symbols, one: Number, other: Number) -> Number:
    if 1 in (one, other):
        return 1
    if one == 0 or one == other:
        return other
    return one if other == 0 else symbols.opaque("or", frozenset((one, other)), lowest=0)


def choice(symbols: Symbols, condition: Number, one: Number, other: Number) -> Number:
    if isinstance(condition, int):
        return one if condition else other
    if contains_rows(condition):
        return DEPENDENT
    if one == other:
        return one
    lows = [lowest(one), lowest(other)]
    least = min(low for low in lows if low is not None) if None not in lows else None
    return symbols.opaque("choice", condition, one, other, lowest=least, is_whole=is_whole(one) and is_whole(other))


def cast(symbols: Symbols, to: int, number: Number) -> Number:
    if to == BOOL:
        if isinstance(number, (int, Fraction)):
            return int(number != 0)
        return 1 if is_positive(number) else symbols.opaque("bool", number, lowest=0)
    if to in (INT32, INT64):
        return symbols.truncate(number)
    if to in _EXACT_FLOATS and not (isinstance(number, (int, Fraction)) and not -(1 << 24) < number < 1 << 24):
        return number
    if isinstance(number, int) and 0 <= number < 128:
        return number
    return symbols.opaque("cast", to, number, is_whole=False, lowest=0 if is_nonnegative(number) else None)
