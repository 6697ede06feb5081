"""Bounds of indices: which results of integers are certainly not negative, and below which number they stay."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ortserve.model_file.graph import BOOL, DOUBLE, FLOAT, INT32, INT64
from ortserve.rows.number import Dependent, Number, is_nonnegative, largest
from ortserve.rows.symbols import DOUBLE_LIMIT, FLOAT_LIMIT, Symbols
from ortserve.rows.values import NO_FACTS, Facts, Kind, Value, uniform

LIMITS: Final = {BOOL: 2, DOUBLE: DOUBLE_LIMIT, FLOAT: FLOAT_LIMIT, INT32: 1 << 31, INT64: 1 << 63}
"""Element types that may hold sizes of tensors, and for each type the limit below which it holds integers exactly."""
INDICES: Final = frozenset({INT32, INT64})
MAX_BELOW: Final = 1 << 31
"""Constants in bounds are below this limit, so that INT32 holds the values."""


def dtype_of(values: Sequence[Value]) -> int:
    """The element type of operands, which all have the same; 0 if it is unknown."""
    return next((value.dtype for value in values if value.dtype), 0)


def is_bound_nonnegative(bound: Value) -> bool:
    """Whether a tensor has only known elements, none of which is negative."""
    return bound.elements is not None and all(isinstance(each, int) and each >= 0 for each in bound.elements)


def is_value_nonnegative(value: Value) -> bool:
    """Whether certainly no element of a tensor is negative."""
    if value.is_rows or value.facts.nonnegative:
        return value.facts.nonnegative
    # Sums and products of free inputs may overflow, so only constants are certain.
    known = value.elements if value.is_integer else None
    return known is not None and all(isinstance(each, int) and each >= 0 for each in known)


def _below(value: Value, symbols: Symbols) -> Number | None:
    """A number below which all elements of a tensor stay; None if it is unknown."""
    if value.is_rows or value.facts.below is not None:
        return value.facts.below
    known = uniform(value)
    return None if known is None else symbols.add(known, 1)


def sum_below(symbols: Symbols, values: Sequence[Value]) -> Number | None:
    """An upper bound of a sum of nonnegative integers; None if a term has no bound, because the sum may overflow."""
    total: Number = 1
    dtype = dtype_of(values)
    for value in values:
        bound = _below(value, symbols)
        if bound is None or not is_value_nonnegative(value):
            return None
        total = symbols.add(total, symbols.subtract(bound, 1))
        if not is_held(total, dtype):
            return None
    return total


def is_held(bound: Number | None, dtype: int) -> bool:
    """Whether an integer type holds all numbers below a bound of indices, for all values of the sizes in the bound."""
    return (
        bound is not None and not isinstance(bound, Dependent) and dtype in INDICES and largest(bound) <= LIMITS[dtype]
    )


def scaled_facts(symbols: Symbols, values: Sequence[Value]) -> Facts:
    """The facts of rows multiplied by a known number."""
    facts = NO_FACTS
    for value, other in (values, reversed(values)):
        factor = uniform(other)
        if other.kind is not Kind.FREE or factor is None or not value.is_integer or value.kind is Kind.SIZE:
            continue
        facts = replace(facts, stride=symbols.multiply(value.facts.stride, factor))
        if value.facts.below is not None and is_value_nonnegative(value) and is_nonnegative(factor):
            below = symbols.add(symbols.multiply(factor, symbols.subtract(value.facts.below, 1)), 1)
            if is_held(factor, value.dtype) and is_held(below, value.dtype):
                facts = replace(facts, nonnegative=True, below=below)
    return facts
