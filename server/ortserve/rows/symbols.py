"""Symbolic numbers: sizes of axes, and elements of small tensors, as expressions in the number of rows.

A number is an integer or a fraction, a product of atoms and a power of the number of rows N, or ``DEPENDENT``. An atom
is a number that depends neither on N nor on the values of the rows, such as the length of a sequence. The analysis
never compares N with a constant; it only assumes ``N >= 1``.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import ceil, floor, gcd, lcm, prod
from typing import Final, TypeAlias

from ortserve.model_file.graph import Constant, constant

MOST_TERMS: Final = 16
"""The most terms of a sum. A longer sum becomes one atom."""
_LARGEST: Final = 1 << 62
_HIGHEST_POWER: Final = 12


class Atom:
    """A number that is the same for every N. Atoms are compared by identity.

    Attributes:
        serial: The order in which atoms of one analysis are made.
        terms: The sum that the atom stands for; empty for any other atom.
        lowest: A lower bound; None if there is none.
        is_whole: Whether it is an integer.
        key: The expression that made it; empty for a fresh atom.
    """

    __slots__ = ("is_whole", "key", "lowest", "serial", "terms")

    def __init__(
        self,
        serial: int,
        lowest: "int | Fraction | None",
        key: tuple[Hashable, ...] = (),
        terms: "tuple[Number, ...]" = (),
        is_whole: bool = True,
    ) -> None:
        self.serial = serial
        self.lowest = lowest
        self.key = key
        self.terms = terms
        self.is_whole = is_whole

    def __repr__(self) -> str:
        return f"a{self.serial}"


Powers: TypeAlias = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True, slots=True)
class Product:
    """``factor * N ** rows * atoms``, with ``rows`` or ``atoms`` or both, and a ``factor`` that is not 0."""

    factor: int | Fraction
    rows: int
    atoms: Powers

    def __repr__(self) -> str:
        parts = [str(self.factor)] if self.factor != 1 else []
        parts += ["N" if self.rows == 1 else f"N^{self.rows}"] if self.rows else []
        parts += [repr(atom) if power == 1 else f"{atom}^{power}" for atom, power in self.atoms]
        return "*".join(parts)


class Dependent:
    """The class of ``DEPENDENT``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "f(N)"


DEPENDENT: Final = Dependent()
"""A number that depends on N other than by a factor."""
N: Final = Product(1, 1, ())
"""The number of rows in the batch."""

Number: TypeAlias = int | Fraction | Product | Dependent
_ZERO: Final[Number] = 0
_ONE: Final[Number] = 1


def contains_rows(number: Number) -> bool:
    """Whether a number depends on N."""
    return not isinstance(number, int) and ((isinstance(number, Product) and number.rows > 0) or number is DEPENDENT)


def is_whole(number: Number) -> bool:
    """Whether a number is certainly an integer."""
    if isinstance(number, int):
        return True
    if isinstance(number, Product):
        return isinstance(number.factor, int) and all(atom.is_whole for atom, _ in number.atoms)
    return False


def atoms_of(number: Number) -> Iterable[Atom]:
    """The atoms of a number, without the atoms in terms of sums."""
    return (atom for atom, _ in number.atoms) if isinstance(number, Product) else ()


def lowest(number: Number) -> Constant | None:
    """A lower bound of a number; None if there is none."""
    if isinstance(number, Product):
        if number.factor < 0:
            return -bound if (bound := _highest(number)) is not None else None
        bound = number.factor
        for atom, power in number.atoms:
            if atom.lowest is None:
                return None
            if atom.lowest < 0:  # another factor could only make it lower
                return atom.lowest * bound if number == _single(atom, bound) else None
            bound = bound * atom.lowest**power
        return bound
    return None if isinstance(number, Dependent) else number


def _highest(number: Product) -> Constant | None:
    """An upper bound of a product with a negative factor; known only if its atom is a sum."""
    if number.rows or len(number.atoms) != 1 or number.atoms[0][1] != 1 or not number.atoms[0][0].terms:
        return None
    least = _least([_scaled(term, number.factor) for term in number.atoms[0][0].terms])
    return -least if least is not None else None


def _single(atom: Atom, factor: Constant) -> Product:
    return Product(factor, 0, ((atom, 1),))


def _scaled(number: Number, factor: Constant) -> Number:
    if isinstance(number, Product):
        return Product(constant(number.factor * factor), number.rows, number.atoms)
    return number if isinstance(number, Dependent) else constant(number * factor)


def _negative(number: "int | Fraction | Product") -> "int | Fraction | Product":
    return Product(-number.factor, number.rows, number.atoms) if isinstance(number, Product) else -number


def _least(terms: Iterable[Number]) -> Constant | None:
    total: Constant = 0
    for term in terms:
        bound = None
        if isinstance(term, Product):
            if term.factor > 0:
                bound = lowest(term)
        elif not isinstance(term, Dependent):
            bound = term
        if bound is None:
            return None
        total = total + bound
    return total


class Symbols:
    """The atoms of one analysis, and arithmetic on numbers, which may make atoms."""

    def __init__(self) -> None:
        self._atoms: dict[tuple[Hashable, ...], Atom] = {}
        self.made = 0
        """How many atoms were made. Later atoms have a higher ``serial``."""
        self.steps = 0
        """How many symbolic results were computed, as a measure of the time of the analysis."""

    def fresh(self, lowest: Constant | None = None) -> Number:
        """A new atom."""
        self.made += 1
        return _single(Atom(self.made, lowest), 1)

    def opaque(
        self, operation: str, *operands: Hashable, lowest: Constant | None = None, is_whole: bool = True
    ) -> Number:
        """The atom of an expression of these operands; ``DEPENDENT`` if an operand depends on N."""
        if any(
            isinstance(operand, (Product, Dependent)) and contains_rows(operand)
            for operand in (*operands, *(inner for each in operands if isinstance(each, frozenset) for inner in each))
        ):
            return DEPENDENT
        return _single(self._atom((operation, *operands), lowest, is_whole=is_whole), 1)

    def _atom(
        self,
        key: tuple[Hashable, ...],
        lowest: Constant | None,
        *,
        terms: tuple[Number, ...] = (),
        is_whole: bool = True,
    ) -> Atom:
        found = self._atoms.get(key)
        if found is None:
            self.made += 1
            found = self._atoms[key] = Atom(self.made, lowest, key, terms, is_whole)
        return found

    def multiply(self, one: Number, other: Number) -> Number:
        if isinstance(one, int) and isinstance(other, int):
            value = one * other
            return value if abs(value) < _LARGEST else self.opaque("large", one, other)
        if one == 0 or other == 0:
            return 0
        if isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if one == 1:
            return other
        if other == 1:
            return one
        factor: Constant = constant(_factor(one) * _factor(other))
        if not isinstance(one, Product) and not isinstance(other, Product) and not _is_fine(factor):
            return factor
        self.steps += 1
        powers = dict(_powers(one))
        for atom, power in _powers(other):
            powers[atom] = powers.get(atom, 0) + power
        rows = _rows(one) + _rows(other)
        if not -_LARGEST < factor < _LARGEST or sum(powers.values()) + rows > _HIGHEST_POWER or _is_fine(factor):
            return self.opaque("product", frozenset((one, other)), is_whole=is_whole(one) and is_whole(other))
        return _product(factor, rows, powers)

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
        factor = _quotient(_factor(one), _factor(other))
        rows = _rows(one) - _rows(other)
        powers = dict(_powers(one))
        for atom, power in _powers(other):
            powers[atom] = powers.get(atom, 0) - power
        if isinstance(factor, Fraction) or rows < 0 or any(power < 0 for power in powers.values()):
            return None
        return _product(factor, rows, powers)

    def add(self, one: Number, other: Number) -> Number:
        if isinstance(one, int) and isinstance(other, int):
            value = one + other
            return value if abs(value) < _LARGEST else self.opaque("large sum", one, other)
        if isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if one == 0:
            return other
        if other == 0:
            return one
        self.steps += 1
        terms = _sum((one, other))
        if len(terms) > MOST_TERMS or any(map(_is_fine, terms.values())):
            return self.opaque("long sum", one, other, is_whole=is_whole(one) and is_whole(other))
        return self._from_terms(terms)

    def subtract(self, one: Number, other: Number) -> Number:
        return self.add(one, _scaled(other, -1))

    def sum(self, numbers: Iterable[Number]) -> Number:
        return reduce(self.add, numbers, _ZERO)

    def _from_terms(self, terms: "dict[tuple[int, Powers], Constant]") -> Number:
        if not terms:
            return 0
        if len({rows for rows, _ in terms}) > 1:
            return DEPENDENT
        ordered = sorted(terms.items(), key=lambda item: [(atom.serial, power) for atom, power in item[0][1]])
        (rows, first), leading = ordered[-1]
        if len(ordered) == 1:
            return _product(leading, rows, dict(first))
        common = {atom: min(dict(key[1]).get(atom, 0) for key in terms) for atom, _ in first}
        divisor = _common_divisor([value for _, value in ordered])
        inner = tuple(
            _product(_quotient(value, divisor), 0, {atom: power - common.get(atom, 0) for atom, power in key[1]})
            for key, value in ordered
        )
        atom = self._atom(("sum", inner), _least(inner), terms=inner, is_whole=all(map(is_whole, inner)))
        return _product(divisor, rows, {**common, atom: common.get(atom, 0) + 1})

    def floor(self, number: Number) -> Number:
        if isinstance(number, Dependent):
            return DEPENDENT
        if not isinstance(number, Product):
            return floor(number)
        if is_whole(number):
            return number
        if number.rows:
            return DEPENDENT
        parts = [_product(value, rows, dict(powers)) for (rows, powers), value in _sum((number,)).items()]
        whole = self.sum(part for part in parts if is_whole(part))
        rest = self.sum(part for part in parts if not is_whole(part))
        if not isinstance(rest, Product):
            return self.add(whole, self.floor(rest))
        low = lowest(rest)
        return self.add(whole, self.opaque("floor", rest, lowest=floor(low) if low is not None else None))

    def ceil(self, number: Number) -> Number:
        if isinstance(number, (int, Fraction)):
            return ceil(number)
        return _scaled(self.floor(_scaled(number, -1)), -1)

    def truncate(self, number: Number) -> Number:
        """A number rounded towards 0."""
        if is_whole(number):
            return number
        if (low := lowest(number)) is not None and low >= 0:
            return self.floor(number)
        if (high := lowest(_scaled(number, -1))) is not None and high >= 0:
            return self.ceil(number)
        return self.opaque("truncate", number)

    def divide_whole(self, one: Number, other: Number) -> Number:
        """The quotient of two integers, rounded towards 0, as ``Div`` does it."""
        if (exact := self.divide_exactly(one, other)) is not None:
            return exact
        if other == 0 or isinstance(one, Dependent) or isinstance(other, Dependent):
            return DEPENDENT
        if isinstance(other, int):
            return self.truncate(self.multiply(one, Fraction(1, other)))
        if common := min(_rows(one), _rows(other)):
            one, other = (_product(_factor(each), _rows(each) - common, dict(_powers(each))) for each in (one, other))
        least = 0 if is_nonnegative(one) and is_nonnegative(other) else None
        return self.opaque("divide", one, other, lowest=least)

    def minimum(self, one: Number, other: Number) -> Number:
        if self.at_least(one, other):
            return other
        if self.at_least(other, one):
            return one
        lows = [lowest(one), lowest(other)]
        least = min(low for low in lows if low is not None) if None not in lows else None
        whole = is_whole(one) and is_whole(other)
        return self.opaque("minimum", frozenset((one, other)), lowest=least, is_whole=whole)

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
        terms = _sum((one, _negative(other), -more))
        if not terms:
            return True
        low = _least(_product(value, rows, dict(powers)) for (rows, powers), value in terms.items())
        if low is None and len({rows for rows, _ in terms}) == 1:
            low = lowest(self._from_terms(terms))
        return low is not None and low >= 0

    def at_most_broadcast(self, length: Number, other: Number) -> bool:
        """Whether an axis is a table cut to a length of at most ``other``, so that it broadcasts to ``other``."""
        for atom in atoms_of(length):
            if length == _single(atom, 1) and atom.key:
                if atom.key[0] == "minimum" and isinstance(atom.key[1], frozenset):
                    return other in atom.key[1]
                if atom.key[0] == "slice":
                    return other in atom.key[-1:]
        return False

    def broadcast(self, one: Number, other: Number) -> Number:
        """The length of an axis that two operands with these lengths broadcast to."""
        if one == other or other == 1:
            return one
        if one == 1:
            return other
        if isinstance(one, int):
            return one
        if isinstance(other, int):
            return other
        if self.at_most_broadcast(one, other):
            return other
        if self.at_most_broadcast(other, one):
            return one
        lows = [low for low in (lowest(one), lowest(other)) if low is not None]
        return self.opaque("broadcast", frozenset((one, other)), lowest=max(lows, default=0))


def is_nonnegative(number: Number) -> bool:
    return (low := lowest(number)) is not None and low >= 0


def is_positive(number: Number) -> bool:
    return (low := lowest(number)) is not None and low > 0


def _is_fine(factor: Constant) -> bool:
    """Whether a fraction has so many bits that a product with it is rounded."""
    return isinstance(factor, Fraction) and (factor.denominator > 1 << 20 or abs(factor.numerator) > 1 << 20)


def _common_divisor(values: list[Constant]) -> Constant:
    """The largest number that divides all of them to integers, with the sign of the last."""
    if all(isinstance(value, int) for value in values):
        divisor: Constant = gcd(*(value.numerator for value in values))
    else:
        divisor = Fraction(gcd(*(value.numerator for value in values)), lcm(*(value.denominator for value in values)))
    return divisor if values[-1] > 0 else -divisor


def _quotient(value: Constant, divisor: Constant) -> Constant:
    if isinstance(value, int) and isinstance(divisor, int) and value % divisor == 0:
        return value // divisor
    return constant(Fraction(value) / divisor)


def _factor(number: "int | Fraction | Product") -> Constant:
    return number.factor if isinstance(number, Product) else number


def _rows(number: Number) -> int:
    return number.rows if isinstance(number, Product) else 0


def _powers(number: Number) -> Powers:
    return number.atoms if isinstance(number, Product) else ()


def _product(factor: Constant, rows: int, powers: dict[Atom, int]) -> Number:
    atoms = tuple(sorted(((a, p) for a, p in powers.items() if p), key=lambda item: item[0].serial))
    return Product(factor, rows, atoms) if rows or atoms else factor


def _sum(numbers: "Iterable[int | Fraction | Product]") -> "dict[tuple[int, Powers], Constant]":
    """The terms of a sum by their products, with nested sums expanded."""
    terms: dict[tuple[int, Powers], Constant] = {}
    for number in numbers:
        for term in _expand(number):
            key = _rows(term), _powers(term)
            value = constant(terms.get(key, 0) + _factor(term))
            if value:
                terms[key] = value
            else:
                terms.pop(key, None)
    return terms


def _expand(number: "int | Fraction | Product") -> "list[int | Fraction | Product]":
    """The terms of a number: a product with sums is a sum of products, unless these are too many."""
    sums = [atom for atom, power in _powers(number) if atom.terms and power == 1]
    if not sums or prod(len(atom.terms) for atom in sums) > MOST_TERMS:
        return [number]
    assert isinstance(number, Product)
    first = sums[0]
    rest = {atom: power for atom, power in number.atoms if atom is not first}
    expanded: list[int | Fraction | Product] = []
    for term in first.terms:
        assert not isinstance(term, Dependent)
        powers = dict(rest)
        for atom, power in _powers(term):
            powers[atom] = powers.get(atom, 0) + power
        merged = _product(constant(number.factor * _factor(term)), number.rows + _rows(term), powers)
        assert not isinstance(merged, Dependent)
        expanded += _expand(merged)
    return expanded
