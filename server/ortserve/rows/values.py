"""Claims of the analysis about one tensor of a graph, and arithmetic on the known elements of small tensors."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Final

from ortserve.model_file.graph import BOOL, DOUBLE, FLOAT, INT32, INT64, INTEGERS
from ortserve.rows.number import (
    DEPENDENT,
    UNBOUNDED,
    Dependent,
    N,
    Number,
    Product,
    atoms_of,
    contains_rows,
    is_nonnegative,
    is_positive,
    is_unbounded,
    is_whole,
    largest,
    lowest,
    lowest_of,
)
from ortserve.rows.symbols import DOUBLE_LIMIT, MOST_FINITE, Symbols


class Kind(enum.Enum):
    """How a tensor depends on the rows of the batch and on their number N."""

    ROWS = "rows"
    """Axis ``axis`` has ``outer * N * inner`` entries; the entries of row r depend only on row r."""
    FREE = "free"
    """Value and shape do not depend on N or on the rows."""
    SIZE = "size"
    """The value depends on N but not on the rows; the shape depends on neither."""
    MIXED = "mixed"
    """The value may depend on several rows."""
    UNKNOWN = "unknown"
    """No rule applied."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The first node with a mixed or unknown result on which a tensor depends, and the reason."""

    order: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Further facts about the values of a tensor. A free tensor has only bounds.

    The last four facts are for tensors of kind size or mixed.

    Attributes:
        stride: An entry in the batch is the entry of the row alone plus the row's number times ``stride``. If it is
            ``DEPENDENT``, entries in the batch are unknown, except for ``columns``.
        nonnegative: Whether no entry of a row alone is negative.
        below: An upper bound, itself excluded, of the entries of a row alone, which are integers; None if unknown.
        columns: The operands of a Concat of columns along the last axis.
        padding: The text that pads rows to the longest row; None if rows are not padded.
        transposed: The axes, counted from the end, that lay before the rows until a transposition. ONNX Runtime may
            move the transposition behind later operators, and fuse it with a product.
        nonzero_of: The rows of which the tensor is the result of ``NonZero``: a column for each position.
        tuples_of: The same for the transposed result: an index tuple for each position.
        rows_and_rest: For a tensor of kind size with one element, which is a sum: the term with N, and a constant.
        is_uniform: Whether all elements equal the element of a free tensor. Only their number depends on the rows.
    """

    stride: Number = 0
    nonnegative: bool = False
    below: Number | None = None
    columns: "tuple[Value, ...]" = ()
    padding: str | None = None
    transposed: frozenset[int] = frozenset()
    nonzero_of: "Value | None" = None
    tuples_of: "Value | None" = None
    rows_and_rest: tuple[Number, int] | None = None
    is_uniform: bool = False


NO_FACTS: Final = Facts()


@dataclass(frozen=True, slots=True)
class Value:
    """A claim about a tensor.

    Attributes:
        dims: The shape in the batch; None if it is unknown, which is possible only for free and size tensors.
        axis: The axis that carries the rows. ``axis``, ``outer`` and ``inner`` apply to rows only.
        outer: Number of times that the sequence of all rows is repeated along the axis.
        inner: Number of neighbouring entries along the axis that belong to one row.
        dtype: The element type; 0 if it is unknown.
        elements: The elements of a small tensor without rows, in the order of memory.
        cause: The reason why a tensor is mixed or unknown.
        has_elements: Whether the tensor is certainly not empty. Only ``sizes`` finds that out.
    """

    kind: Kind
    dims: tuple[Number, ...] | None = None
    axis: int = 0
    outer: Number = 1
    inner: Number = 1
    dtype: int = 0
    elements: tuple[Number, ...] | None = None
    facts: Facts = NO_FACTS
    cause: Cause | None = None
    has_elements: bool = False

    @property
    def is_rows(self) -> bool:
        return self.kind is Kind.ROWS

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    def carries_like(self, other: "Value") -> bool:
        """Whether both have rows with the same layout along their axes."""
        return self.outer == other.outer and self.inner == other.inner

    @property
    def is_plain(self) -> bool:
        """Whether each row is one entry of its axis."""
        return self.outer == 1 and self.inner == 1


def free(
    dims: tuple[Number, ...] | None,
    dtype: int = 0,
    elements: tuple[Number, ...] | None = None,
    facts: Facts = NO_FACTS,
) -> Value:
    """A tensor without rows, of kind size if its elements depend on N. Only the bounds in ``facts`` are used."""
    if elements is not None and any(map(contains_rows, elements)):
        return Value(Kind.SIZE, dims, dtype=dtype, elements=elements)
    if facts.nonnegative or facts.below is not None:
        facts = Facts(nonnegative=facts.nonnegative, below=facts.below)
    else:
        facts = NO_FACTS
    return Value(Kind.FREE, dims, dtype=dtype, elements=elements, facts=facts)


def rows(
    symbols: Symbols,
    dims: tuple[Number, ...],
    axis: int,
    *,
    outer: Number = 1,
    inner: Number = 1,
    dtype: int = 0,
    facts: Facts = NO_FACTS,
) -> Value:
    """A tensor with rows along an axis. The size of the axis follows from ``outer`` and ``inner``."""
    along = symbols.product((outer, N, inner))
    shape = (*dims[:axis], along, *dims[axis + 1 :])
    return Value(Kind.ROWS, shape, axis, outer, inner, dtype, facts=facts)


MAX_ELEMENTS: Final = 64
"""Maximum number of elements that are computed. Larger tensors have no known elements."""
_EXACT_FLOATS: Final = frozenset({FLOAT, DOUBLE})

Compute = Callable[..., Number]

_LEAST_DIVISOR: Final = Fraction(1, 1 << 20)
_LARGEST_DIVIDEND: Final = 1 << 40
"""Quotients of such numbers are at most ``MOST_FINITE``."""


def paired_elements(values: Sequence[Value], dims: Sequence[Number], compute: Compute) -> tuple[Number, ...] | None:
    """Compute the elements of a result of these dimensions from the operands' elements; None if they are unknown."""
    count = element_count(dims)
    if count is None or count > MAX_ELEMENTS:
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
    """The number of elements of a tensor; None if it is unknown."""
    count = 1
    for length in dims:
        if not isinstance(length, int):
            return None
        count *= length
    return count


def taken_elements(value: Value, axis: int, positions: Sequence[int]) -> tuple[Number, ...] | None:
    """The known elements at some positions along an axis; None if they are unknown."""
    dims = value.dims or ()
    if value.elements is None or element_count(dims) != len(value.elements):
        return None
    after = element_count(dims[axis + 1 :]) or 0
    along = element_count(dims[axis : axis + 1]) or 0
    if not after or not along or len(positions) * len(value.elements) > MAX_ELEMENTS * along:
        return None
    blocks = range(0, len(value.elements), along * after)
    starts = (block + position * after for block in blocks for position in positions)
    return tuple(element for start in starts for element in value.elements[start : start + after])


def transposed_elements(value: Value, order: Sequence[int]) -> tuple[Number, ...] | None:
    """The known elements with their axes in another order; None if they are unknown."""
    dims = [length for length in value.dims or () if isinstance(length, int)]
    if value.elements is None or len(value.elements) > MAX_ELEMENTS or len(dims) != len(order):
        return None
    offsets = [0]
    for axis in order:
        step = element_count(dims[axis + 1 :]) or 0
        offsets = [offset + index * step for offset in offsets for index in range(dims[axis])]
    return tuple(value.elements[offset] for offset in offsets)


def uniform(value: Value) -> Number | None:
    """The common value of all elements of a tensor; None if they differ or are unknown."""
    if not value.elements or any(element != value.elements[0] for element in value.elements):
        return None
    return value.elements[0]


def quotient(symbols: Symbols, one: Number, other: Number) -> Number:
    """A quotient of floating-point numbers. If the divisor may be 0 or almost 0, it may be infinite or not a number."""
    if isinstance(one, Dependent) or isinstance(other, Dependent):
        return DEPENDENT
    least = max(other, -other) if isinstance(other, (int, Fraction)) else lowest(other)
    is_apart = least is not None and least >= _LEAST_DIVISOR
    if is_apart and (exact := symbols.divide_exactly(one, other)) is not None:
        return exact
    if not is_apart or largest(one) > _LARGEST_DIVIDEND:
        return symbols.opaque(UNBOUNDED, "quotient", one, other, is_whole=False)
    if isinstance(other, (int, Fraction)):
        inverse = Fraction(1) / other
        if inverse.denominator & (inverse.denominator - 1) == 0:
            return symbols.multiply(one, inverse)
    return symbols.opaque("quotient", one, other, is_whole=False)


def remainder_of(symbols: Symbols, one: Number, other: Number) -> Number:
    """``Mod`` of integers."""
    if isinstance(one, int) and isinstance(other, int) and other:
        return one % other
    if symbols.divide_exactly(one, other) is not None:
        return 0
    return symbols.opaque("remainder", one, other, lowest=0 if is_positive(other) else None)


def power(symbols: Symbols, kernel: str, one: Number, other: Number) -> Number:
    """A power. Known only for squares, and for roots of squares, such as the width of a square grid.

    ``kernel`` names the code that computes it: another one may round the same power to another number. Most compute
    integers as FP64.
    """
    if other == 2 and is_whole(one):
        return symbols.bounded(symbols.multiply(one, one), DOUBLE_LIMIT)
    if other == Fraction(1, 2) and isinstance(one, int) and one >= 0 and (root := isqrt(one)) ** 2 == one:
        return root
    is_finite = is_nonnegative(one) and isinstance(other, (int, Fraction)) and 0 <= other <= 1
    return symbols.opaque(*(() if is_finite else (UNBOUNDED,)), "power", kernel, one, other, is_whole=False)


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
    whole = is_whole(one) and is_whole(other)
    return symbols.opaque("choice", condition, one, other, lowest=lowest_of(one, other), is_whole=whole)


def cast_number(symbols: Symbols, to: int, number: Number) -> Number:
    if to == BOOL:
        if isinstance(number, (int, Fraction)):
            return int(number != 0)
        return 1 if is_positive(number) else symbols.opaque("bool", number, lowest=0)
    if to in (INT32, INT64):
        if is_whole(number) and not is_unbounded(number):
            return number
        if is_unbounded(number) or (to == INT32 and isinstance(number, Product)):  # the two types overflow differently
            return symbols.opaque("cast", to, number, lowest=0 if is_nonnegative(number) else None)
        return symbols.truncate(number)
    is_exact = symbols.bounded(number, 1 << 24) == number and all(atom.is_whole for atom in atoms_of(number))
    if to in _EXACT_FLOATS and is_exact:
        return number
    if isinstance(number, int) and 0 <= number < 128:
        return number
    is_large = isinstance(number, Dependent) or largest(number) > MOST_FINITE
    return symbols.opaque(
        *((UNBOUNDED,) if is_large else ()),
        "cast",
        to,
        number,
        is_whole=False,
        lowest=0 if is_nonnegative(number) else None,
    )
