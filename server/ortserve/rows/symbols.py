"""Arithmetic on symbolic numbers. A result without a simpler form becomes an atom of the analysis."""

from collections.abc import Hashable, Iterable
from fractions import Fraction
from functools import reduce
from math import ceil, floor, lcm
from typing import Final

from ortserve.model_file.graph import Rational, rational
from ortserve.rows.number import (
    DEPENDENT,
    MAX_TERMS,
    SIZE_BITS,
    UNBOUNDED,
    Atom,
    Dependent,
    Known,
    Number,
    Powers,
    Product,
    atom_alone,
    common_divisor,
    contains_rows,
    exact_quotient,
    factor_of,
    is_inferred,
    is_nonnegative,
    is_positive,
    is_whole,
    key_of,
    largest,
    lowest,
    lowest_of,
    lowest_sum,
    make_product,
    may_be_rounded,
    multiple_of,
    negative,
    powers_of,
    rows_power,
    scaled,
    terms_of,
    varies_by_request,
)

FLOAT_LIMIT: Final = 1 << 24
DOUBLE_LIMIT: Final = 1 << 53
"""The limits below which these types hold integers exactly."""
MOST_FINITE: Final = 1 << 60
"""A product of two floating-point numbers up to this one is finite."""
_LARGEST: Final = 1 << 62
"""Constants from this size on become atoms, because computing on with them could overflow INT64."""
_HIGHEST_POWER: Final = 12
"""Maximum sum of the powers of N and atoms in a product. A product with higher powers becomes one atom."""
_ZERO: Final[Number] = 0
_ONE: Final[Number] = 1


class Symbols:
    """The atoms of one analysis, and arithmetic on numbers, which may create atoms."""

    def __init__(self) -> None:
        self._atoms: dict[tuple[Hashable, ...], Atom] = {}
        self.made = 0
        """Number of created atoms. Later atoms have a higher ``serial``."""
        self.steps = 0
        """Number of computed symbolic results, as a measure of the time of the analysis."""
        self.size_bits = SIZE_BITS
        """The number of bits of free sizes of inputs up to which element types hold all numbers that count as exact."""
        self.has_uncertain_size = False
        """Whether some tensor may have other sizes than its claim (``rules.call.check_sizes``)."""
        self.has_lost_axes = False
        """Whether ONNX Runtime may infer another number of axes for some tensor when it loads the model."""
        self.names: dict[Atom, str] = {}
        """The names of the atoms that are free sizes of inputs; empty for a size without a name."""
        self.fixed_sizes: dict[str, int] = {}
        """The assumed sizes of inputs, by name."""
        self.needed: dict[Atom, int] = {}
        """The sizes that the graph needs for free sizes of inputs, as of the features of a constant matrix."""
        self.declared: dict[str, set[Number]] = {}
        """The sizes that each name in the file denotes."""
        self.replaced: set[tuple[Number, Number]] = set()
        """A size of a target shape and another size of the operand that it replaces (``rules.shapes``)."""

    @property
    def doubts(self) -> tuple[bool, bool]:
        """The doubts about claims so far. Rules that depend on them are stricter afterwards."""
        return self.has_uncertain_size, self.has_lost_axes

    def fresh(
        self, lowest: Rational | None = None, name: str | None = None, *, instead_of: tuple[Number, ...] = ()
    ) -> Number:
        """A new atom; with a name, which may be empty, if it is a free size of an input.

        ``instead_of`` are the sizes for any of which the atom stands.
        """
        self.made += 1
        atom = Atom(self.made, lowest, varies_by_request=name is not None)
        atom.is_inferred = is_inferred(instead_of)
        if name is not None:
            self.names[atom] = name
        return multiple_of(atom)

    def declare(self, name: str, size: Number) -> None:
        """Record that the file calls a size by a name."""
        self.declared.setdefault(name, set()).add(size)

    def confused_name(self) -> str:
        """A name of several sizes, by which ONNX Runtime may take one for another; empty if there is none.

        ONNX Runtime carries names on to tensors without a declaration, where sizes must be equal. Rules require that of
        sizes with N, so that such a size has a name only if it is declared.
        """
        partners: dict[Number, set[Number]] = {}
        for pair in self.replaced:
            with_rows = [size for size in pair if contains_rows(size)] or [1]
            partners.setdefault(with_rows[0], set()).add(with_rows[-1])
        for name, sizes in self.declared.items():
            if len(sizes) > 1 and (1 in partners or any(sizes & partners.get(size, set()) for size in sizes)):
                return name
        return ""

    def fix_size(self, atom: Atom, size: Number) -> bool:
        """Assume the size of an input. Returns False if the atom is no named size, or is assumed to be another."""
        name = self.names.get(atom)
        if not name or not isinstance(size, int):
            return False
        return self.fixed_sizes.setdefault(name, size) == size

    def need(self, size: Number, needed: Number) -> None:
        """Record the size that the graph needs, if ``size`` is a free size of an input and ``needed`` is known."""
        if isinstance(needed, int) and needed > 1 and (atom := atom_alone(size)) in self.names:
            self.needed.setdefault(atom, needed)

    def opaque(
        self, operation: str, *operands: Hashable, lowest: Rational | None = None, is_whole: bool = True
    ) -> Number:
        """The atom of an expression of these operands; ``DEPENDENT`` if an operand depends on N."""
        if any(
            isinstance(operand, (Product, Dependent)) and contains_rows(operand)
            for operand in (*operands, *(inner for each in operands if isinstance(each, frozenset) for inner in each))
        ):
            return DEPENDENT
        return multiple_of(self._atom((operation, *operands), lowest, is_whole=is_whole))

    def _atom(
        self,
        key: tuple[Hashable, ...],
        lowest: Rational | None,
        *,
        terms: tuple[Number, ...] = (),
        is_whole: bool = True,
    ) -> Atom:
        found = self._atoms.get(key)
        if found is None:
            self.made += 1
            found = self._atoms[key] = Atom(
                self.made, lowest, key, terms, is_whole, varies_by_request=any(map(varies_by_request, key))
            )
        return found

    def multiply(self, one: Number, other: Number) -> Number:
        if isinstance(one, int) and isinstance(other, int):
            value = one * other
            return value if abs(value) < _LARGEST else self.opaque(UNBOUNDED, "large", one, other)
        if one == 0 or other == 0:
            return 0
        if isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if one == 1:
            return other
        if other == 1:
            return one
        factor: Rational = rational(factor_of(one) * factor_of(other))
        if not isinstance(one, Product) and not isinstance(other, Product) and not may_be_rounded(factor):
            return factor
        self.steps += 1
        powers = dict(powers_of(one))
        for atom, power in powers_of(other):
            powers[atom] = powers.get(atom, 0) + power
        rows = rows_power(one) + rows_power(other)
        if not -_LARGEST < factor < _LARGEST or sum(powers.values()) + rows > _HIGHEST_POWER or may_be_rounded(factor):
            kind = ("product",) if -_LARGEST < factor < _LARGEST else (UNBOUNDED, "product")
            return self.opaque(*kind, frozenset((one, other)), is_whole=is_whole(one) and is_whole(other))
        return make_product(factor, rows, powers)

    def product(self, numbers: Iterable[Number]) -> Number:
        return reduce(self.multiply, numbers, _ONE)

    def divide_exactly(self, one: Number, other: Number) -> Number | None:
        """``one / other`` if it is a whole multiple for all values of the atoms; otherwise None."""
        if isinstance(one, int) and isinstance(other, int):
            return one // other if other and one % other == 0 else None
        if other == 0 or isinstance(one, Dependent) or isinstance(other, Dependent):
            return None
        if one == 0:
            return 0
        factor = exact_quotient(factor_of(one), factor_of(other))
        rows = rows_power(one) - rows_power(other)
        powers = dict(powers_of(one))
        for atom, power in powers_of(other):
            powers[atom] = powers.get(atom, 0) - power
        if isinstance(factor, Fraction) or rows < 0 or any(power < 0 for power in powers.values()):
            return None
        return make_product(factor, rows, powers)

    def add(self, one: Number, other: Number) -> Number:
        if isinstance(one, int) and isinstance(other, int):
            value = one + other
            return value if abs(value) < _LARGEST else self.opaque(UNBOUNDED, "large sum", one, other)
        if isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if one == 0:
            return other
        if other == 0:
            return one
        self.steps += 1
        terms = terms_of((one, other))
        if len(terms) > MAX_TERMS or any(map(may_be_rounded, terms.values())):
            return self.opaque("long sum", one, other, is_whole=is_whole(one) and is_whole(other))
        return self._from_terms(terms)

    def subtract(self, one: Number, other: Number) -> Number:
        return self.add(one, scaled(other, -1))

    def sum(self, numbers: Iterable[Number]) -> Number:
        return reduce(self.add, numbers, _ZERO)

    def _from_terms(self, terms: dict[tuple[int, Powers], Rational]) -> Number:
        if not terms:
            return 0
        if len({rows for rows, _ in terms}) > 1:
            return DEPENDENT
        ordered = sorted(terms.items(), key=lambda item: [(atom.serial, power) for atom, power in item[0][1]])
        (rows, first), leading = ordered[-1]
        if len(ordered) == 1:
            return make_product(leading, rows, dict(first))
        common = {atom: min(dict(key[1]).get(atom, 0) for key in terms) for atom, _ in first}
        divisor = common_divisor([value for _, value in ordered])
        inner = tuple(
            make_product(
                exact_quotient(value, divisor), 0, {atom: power - common.get(atom, 0) for atom, power in key[1]}
            )
            for key, value in ordered
        )
        atom = self._atom(("sum", inner), lowest_sum(inner), terms=inner, is_whole=all(map(is_whole, inner)))
        return make_product(divisor, rows, {**common, atom: common.get(atom, 0) + 1})

    def floor(self, number: Number) -> Number:
        if isinstance(number, Dependent):
            return DEPENDENT
        if not isinstance(number, Product):
            return floor(number)
        if is_whole(number):
            return number
        if number.rows:
            return DEPENDENT
        parts = [make_product(value, rows, dict(powers)) for (rows, powers), value in terms_of((number,)).items()]
        whole = self.sum(part for part in parts if is_whole(part))
        rest = self.sum(part for part in parts if not is_whole(part))
        if not isinstance(rest, Product):
            return self.add(whole, self.floor(rest))
        divided = key_of(scaled(rest, rest.factor.denominator))
        if divided[:1] == ("floor",) and isinstance(divided[1], Product):  # of a floor, divided by an integer
            return self.add(whole, self.floor(scaled(divided[1], rest.factor)))
        low = lowest(rest)
        return self.add(whole, self.opaque("floor", rest, lowest=floor(low) if low is not None else None))

    def ceil(self, number: Number) -> Number:
        if isinstance(number, (int, Fraction)):
            return ceil(number)
        return scaled(self.floor(scaled(number, -1)), -1)

    def truncate(self, number: Number) -> Number:
        """A number rounded towards 0."""
        if is_whole(number):
            return number
        if (low := lowest(number)) is not None and low >= 0:
            return self.floor(number)
        if (high := lowest(scaled(number, -1))) is not None and high >= 0:
            return self.ceil(number)
        return self.opaque("truncate", number)

    def divide_whole(self, one: Number, other: Number) -> Number:
        """The quotient of two integers, rounded towards 0, as ``Div`` computes it."""
        if (exact := self.divide_exactly(one, other)) is not None:
            return exact
        if other == 0 or isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if isinstance(other, int):
            return self.truncate(self.multiply(one, Fraction(1, other)))
        if common := min(rows_power(one), rows_power(other)):
            one, other = (
                make_product(factor_of(each), rows_power(each) - common, dict(powers_of(each))) for each in (one, other)
            )
        least = 0 if is_nonnegative(one) and is_nonnegative(other) else None
        return self.opaque("divide", one, other, lowest=least)

    def bounded(self, number: Number, limit: int) -> Number:
        """The result of one operation as an element type holds it: an atom if the type may round it or let it overflow.

        The type holds a number exactly if the number's constants, as multiples of 1 / their common denominator, are
        less than the type's ``limit``. An atom that is not whole may already use all digits of the type, so that a sum
        or product with it may be rounded.
        """
        self.steps += 1
        if isinstance(number, Dependent):
            return number
        terms = terms_of((number,))
        finest = lcm(*(value.denominator for value in terms.values()))
        is_held = all(-limit < value * finest < limit for value in terms.values()) and self._holds(
            number, finest, limit
        )
        atoms = [atom for _, powers in terms for atom, _ in powers]
        is_large = limit in (FLOAT_LIMIT, DOUBLE_LIMIT) and largest(number) > MOST_FINITE
        if is_held and not is_large:
            if all(atom.is_whole for atom in atoms):
                return number
            # The two types round the same number to different ones.
            if number in [multiple_of(atom) for atom in atoms if limit != DOUBLE_LIMIT or atom.key[-1:] == (limit,)]:
                return number
        kind = (UNBOUNDED, "bounded") if is_large else ("bounded",)
        return self.opaque(*kind, number, limit, is_whole=is_whole(number))

    def _holds(self, number: Known, finest: int, limit: int) -> bool:
        """Whether a type holds all values of a number, in units of 1 / ``finest``. May lower ``size_bits`` for it.

        Few proofs need exact numbers of FP32, so they lower it less. N has at most as many bits as ``max_rows``. With
        INT32 it counts as at most 2**8, since its products are numbers of elements of a batch, which has fewer.
        """
        least, rows_bits = 16 if limit == FLOAT_LIMIT else 10, 8 if limit == 1 << 31 else 16
        for bits in range(self.size_bits, least - 1, -1):
            if largest(number, bits, rows_bits) * finest < limit:
                self.size_bits = bits
                return True
        return False

    def minimum(self, one: Number, other: Number) -> Number:
        if self.at_least(one, other):
            return other
        if self.at_least(other, one):
            return one
        whole = is_whole(one) and is_whole(other)
        return self.opaque("minimum", frozenset((one, other)), lowest=lowest_of(one, other), is_whole=whole)

    def maximum(self, one: Number, other: Number) -> Number:
        if self.at_least(one, other):
            return one
        if self.at_least(other, one):
            return other
        lows = [low for low in (lowest(one), lowest(other)) if low is not None]
        whole = is_whole(one) and is_whole(other)
        return self.opaque("maximum", frozenset((one, other)), lowest=max(lows, default=None), is_whole=whole)

    def at_least(self, one: Number, other: Number, more: int = 0) -> bool:
        """Whether ``one >= other + more`` certainly holds."""
        if isinstance(one, Dependent) or isinstance(other, Dependent):
            return False
        self.steps += 1
        terms = terms_of((one, negative(other), -more))
        if not terms:
            return True
        low = lowest_sum(make_product(value, rows, dict(powers)) for (rows, powers), value in terms.items())
        if low is None and len({rows for rows, _ in terms}) == 1:
            low = lowest(self._from_terms(terms))
        return low is not None and low >= 0

    def broadcast(self, one: Number, other: Number) -> Number:
        """The length of the axis to which two axes with these lengths broadcast."""
        if one == other or other == 1:
            return one
        if one == 1:
            return other
        for each in (one, other):
            if isinstance(each, int) or ((low := lowest(each)) is not None and low > 1):
                self.need(other if each is one else one, each)
                return each
        for length, wanted in ((one, other), (other, one)):
            # A table that is cut to at most ``wanted`` entries broadcasts to ``wanted`` if it has any.
            if is_positive(length) and _is_result_of("minimum", length, wanted):
                return wanted
            if _is_result_of("broadcast", length, wanted):
                return length
        # An axis of length 1 broadcasts to one of length 0.
        least = 1 if is_positive(one) and is_positive(other) else 0
        return self.opaque("broadcast", frozenset((one, other)), lowest=least)


def _is_result_of(operation: str, number: Number, operand: Number) -> bool:
    """Whether a number is the result of a symmetric operation with this operand."""
    key = key_of(number)
    return key[:1] == (operation,) and isinstance(key[1], frozenset) and operand in key[1]
