"""Symbolic numbers: sizes of axes, and elements of small tensors, as expressions in the number of rows.

A number is an integer or fraction, a product of atoms and a power of the number of rows N, or ``DEPENDENT``. An atom is
a number that depends neither on N nor on the values of the rows, such as the length of a sequence. Of N the analysis
assumes only ``N >= 1``. ``symbols`` computes with numbers.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd, lcm, prod
from typing import Final, TypeAlias

from ortserve.model_file.graph import Rational, rational

MAX_TERMS: Final = 16
"""Maximum number of terms of a sum. A longer sum becomes one atom."""


class Atom:
    """A number that is the same for every N. Atoms are compared by identity.

    Attributes:
        serial: The position in the order in which an analysis creates atoms.
        terms: The terms of the sum that the atom represents; empty for any other atom.
        lowest: A lower bound; None if none is known.
        is_whole: Whether the number is certainly an integer.
        key: The expression that the atom represents; empty for a fresh atom.
        varies_by_request: Whether the number follows from free sizes of inputs.
        is_inferred: Whether ONNX Runtime may infer another number for this size of a tensor when it loads the model.
        is_unbounded: Whether the number may be too large for an element type, infinite or not a number.
        magnitude: A bound of the absolute value (``_magnitude_of``).
    """

    __slots__ = (
        "is_inferred",
        "is_unbounded",
        "is_whole",
        "key",
        "lowest",
        "magnitude",
        "serial",
        "terms",
        "varies_by_request",
    )

    def __init__(
        self,
        serial: int,
        lowest: Rational | None,
        key: tuple[Hashable, ...] = (),
        terms: "tuple[Number, ...]" = (),
        is_whole: bool = True,
        varies_by_request: bool = False,
    ) -> None:
        self.serial = serial
        self.lowest = lowest
        self.key = key
        self.terms = terms
        self.is_whole = is_whole
        self.varies_by_request = varies_by_request
        self.is_inferred = key[:1] == (WINDOWS,) or any(map(is_inferred, key))
        self.is_unbounded = key[:1] == (UNBOUNDED,) or any(map(is_unbounded, key))
        self.magnitude = _magnitude_of_expression(key) if key else (1, 1) if varies_by_request else (1 << SIZE_BITS, 0)

    def __repr__(self) -> str:
        return f"a{self.serial}"


Powers: TypeAlias = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True, slots=True)
class Product:
    """``factor * N ** rows * atoms``, where ``factor`` is not 0, and ``rows`` is positive or ``atoms`` is not empty."""

    factor: Rational
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
"""A number that depends on N in another way than by a power of N as a factor."""
N: Final = Product(1, 1, ())
"""The number of rows in the batch."""

Known: TypeAlias = Rational | Product
"""A number whose dependence on N is known: any but ``DEPENDENT``."""
Number: TypeAlias = Known | Dependent


def contains_rows(number: Number) -> bool:
    """Whether a number depends on N."""
    return not isinstance(number, int) and ((isinstance(number, Product) and number.rows > 0) or number is DEPENDENT)


def varies_by_request(operand: object) -> bool:
    """Whether a number, or one of several in a collection, follows from N or from free sizes of inputs.

    Requests then differ in it, so ONNX Runtime cannot know it at the load.
    """
    if isinstance(operand, (frozenset, tuple)):
        return any(map(varies_by_request, operand))
    return operand is DEPENDENT or (
        isinstance(operand, Product) and (operand.rows > 0 or any(atom.varies_by_request for atom, _ in operand.atoms))
    )


WINDOWS: Final = "windows"
"""The expression of a size for which ONNX Runtime may infer another one when it loads the model."""


def is_inferred(operand: object) -> bool:
    """Whether ONNX Runtime may infer another number, or another one of several, when it loads the model.

    The result of Shape is then the inferred size.
    """
    if isinstance(operand, (frozenset, tuple)):
        return any(map(is_inferred, operand))
    return isinstance(operand, Product) and any(atom.is_inferred for atom, _ in operand.atoms)


UNBOUNDED: Final = "unbounded"
"""The beginning of an expression that is computed with floating-point numbers and may have no finite result."""


def is_unbounded(operand: object) -> bool:
    """Whether a number, or one of several, may be too large for an element type, infinite or not a number.

    Its difference from itself may then be other than 0.
    """
    if isinstance(operand, (frozenset, tuple)):
        return any(map(is_unbounded, operand))
    return isinstance(operand, Product) and any(atom.is_unbounded for atom, _ in operand.atoms)


SIZE_BITS: Final = 30
"""Sizes have at most so many bits, as tensors with longer axes do not fit into a request."""
_ENDLESS: Final = (1 << 4096, 0)
"""The magnitude of a number without a bound."""
_DECIDING: Final = frozenset({"and", "bool", "equal", "less", "not", "or"})
_ADDING: Final = frozenset({"count", "large sum", "long sum", "sum", WINDOWS})
_MULTIPLYING: Final = frozenset({"large", "product", "quotient", "scaled"})
"""Expressions with other bounds than the largest operand. A divisor is at least 2**-20,
and counts as a factor."""


def largest(number: Known, size_bits: int = SIZE_BITS, rows_bits: int = SIZE_BITS) -> Rational:
    """The largest absolute value of a number if free sizes of inputs, and N, have at most so many bits."""
    total: Rational = 0
    for (rows, powers), factor in terms_of((number,)).items():
        bound, sizes = _magnitude_of(make_product(factor, rows, dict(powers)))
        total = total + bound * (1 << rows * rows_bits + sizes * size_bits)
    return total


def _magnitude_of(number: object) -> tuple[Rational, int]:
    """A bound of an absolute value: a factor, and the power of the longest free size of an input."""
    if isinstance(number, Product):
        bound: Rational = max(number.factor, -number.factor)
        sizes = 0
        for atom, power in number.atoms:
            for _ in range(power):
                bound, sizes = min(bound * atom.magnitude[0], _ENDLESS[0]), sizes + atom.magnitude[1]
        return bound, sizes
    return (max(number, -number), 0) if isinstance(number, (int, Fraction)) else (0, 0)


def _magnitude_of_expression(key: tuple[Hashable, ...]) -> tuple[Rational, int]:
    """``_magnitude_of`` the number that an atom's key expresses."""
    operands = key[1:-1] if key[0] == "bounded" else key[1:]  # not the limit of the type
    numbers = [each for one in operands for each in (one if isinstance(one, (frozenset, tuple)) else (one,))]
    if key[0] == UNBOUNDED or any(map(is_unbounded, numbers)):
        return _ENDLESS
    if key[0] in _DECIDING:
        return 1, 0
    if key[0] == "sum" and (low := lowest_sum(numbers)) is not None and low >= 0:
        numbers = [each for each in numbers if not is_nonnegative(scaled(each, -1))]
    bounds = list(map(_magnitude_of, numbers))
    factors, sizes = [bound for bound, _ in bounds], [power for _, power in bounds]
    if key[0] in _MULTIPLYING:
        return prod(factors) * (1 << 40), sum(sizes)
    bound: Rational = sum(factors) if key[0] in _ADDING else max(factors)
    # The numbers of a floor are rounded away from 0 if they are negative. Fractions with large divisors take time.
    is_even = key[0] == "floor" and is_nonnegative(numbers[0])
    return Fraction(ceil(bound * 16), 16) if is_even or key[0] in _ADDING else ceil(bound), max(sizes)


def is_whole(number: Number) -> bool:
    """Whether a number is certainly an integer."""
    if isinstance(number, int):
        return True
    if isinstance(number, Product):
        return isinstance(number.factor, int) and all(atom.is_whole for atom, _ in number.atoms)
    return False


def has_atom(number: Number, is_wanted: Callable[[Atom], bool]) -> bool:
    """Whether a number is computed from such an atom."""
    found: set[Atom] = set()
    pending: list[object] = [number]
    while pending:
        each = pending.pop()
        if isinstance(each, (frozenset, tuple)):
            pending.extend(each)
        elif isinstance(each, Product):
            new = [atom for atom, _ in each.atoms if atom not in found]
            if any(map(is_wanted, new)):
                return True
            found.update(new)
            pending.extend(atom.key for atom in new)
    return False


def atoms_of(number: Number) -> Iterable[Atom]:
    """The atoms of a number, but not the atoms in the terms of a sum."""
    return (atom for atom, _ in number.atoms) if isinstance(number, Product) else ()


def lowest(number: Number) -> Rational | None:
    """A lower bound of a number; None if none is known."""
    if isinstance(number, Product):
        if number.factor < 0:
            return -bound if (bound := _highest(number)) is not None else None
        bound = number.factor
        for atom, power in number.atoms:
            if atom.lowest is None:
                return None
            if atom.lowest < 0:  # a bound for the product needs this atom as the only factor
                return atom.lowest * bound if number == multiple_of(atom, bound) else None
            bound = bound * atom.lowest**power
        return bound
    return None if isinstance(number, Dependent) else number


def lowest_of(one: Number, other: Number) -> Rational | None:
    """A lower bound of both numbers; None if one of them has none."""
    low, other_low = lowest(one), lowest(other)
    return None if low is None or other_low is None else min(low, other_low)


def _highest(number: Product) -> Rational | None:
    """An upper bound of a product with a negative factor; known only if its atom is a sum."""
    if number.rows or len(number.atoms) != 1 or number.atoms[0][1] != 1 or not number.atoms[0][0].terms:
        return None
    least = lowest_sum([scaled(term, number.factor) for term in number.atoms[0][0].terms])
    return -least if least is not None else None


def atom_alone(number: Number) -> Atom | None:
    """The atom of a number that is nothing else."""
    if isinstance(number, Product) and number.factor == 1 and not number.rows and len(number.atoms) == 1:
        atom, power = number.atoms[0]
        return atom if power == 1 else None
    return None


def key_of(number: Number) -> tuple[Hashable, ...]:
    """The expression of a number that is a single atom; empty for others."""
    atom = atom_alone(number)
    return () if atom is None else atom.key


def multiple_of(atom: Atom, factor: Rational = 1) -> Product:
    """``factor * atom``."""
    return Product(factor, 0, ((atom, 1),))


def scaled(number: Number, factor: Rational) -> Number:
    if isinstance(number, Product):
        return Product(rational(number.factor * factor), number.rows, number.atoms)
    return number if isinstance(number, Dependent) else rational(number * factor)


def negative(number: Known) -> Known:
    return Product(-number.factor, number.rows, number.atoms) if isinstance(number, Product) else -number


def lowest_sum(terms: Iterable[Number]) -> Rational | None:
    """A lower bound of a sum; None if a term has none, such as a product with a negative factor."""
    total: Rational = 0
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


def is_nonnegative(number: Number) -> bool:
    return (low := lowest(number)) is not None and low >= 0


def is_positive(number: Number) -> bool:
    return (low := lowest(number)) is not None and low > 0


def may_be_rounded(factor: Rational) -> bool:
    """Whether a factor is a fraction of so many bits that a product with it may be rounded."""
    return isinstance(factor, Fraction) and (factor.denominator > 1 << 20 or abs(factor.numerator) > 1 << 20)


def common_divisor(values: list[Rational]) -> Rational:
    """The largest number by which all values are divisible with integer quotients, with the sign of the last value."""
    if all(isinstance(value, int) for value in values):
        divisor: Rational = gcd(*(value.numerator for value in values))
    else:
        divisor = Fraction(gcd(*(value.numerator for value in values)), lcm(*(value.denominator for value in values)))
    return divisor if values[-1] > 0 else -divisor


def exact_quotient(value: Rational, divisor: Rational) -> Rational:
    if isinstance(value, int) and isinstance(divisor, int) and value % divisor == 0:
        return value // divisor
    return rational(Fraction(value) / divisor)


def factor_of(number: Known) -> Rational:
    """The constant factor of a number, which for a constant is the number itself."""
    return number.factor if isinstance(number, Product) else number


def rows_power(number: Number) -> int:
    return number.rows if isinstance(number, Product) else 0


def powers_of(number: Number) -> Powers:
    return number.atoms if isinstance(number, Product) else ()


def make_product(factor: Rational, rows: int, powers: dict[Atom, int]) -> Number:
    """``factor * N ** rows * atoms``; atoms with the power 0 are left out."""
    atoms = tuple(sorted(((a, p) for a, p in powers.items() if p), key=lambda item: item[0].serial))
    return Product(factor, rows, atoms) if rows or atoms else factor


def terms_of(numbers: Iterable[Known]) -> dict[tuple[int, Powers], Rational]:
    """The terms of a sum: the factor of each product of N and atoms. Nested sums are expanded."""
    terms: dict[tuple[int, Powers], Rational] = {}
    for number in numbers:
        for term in _expand(number):
            key = rows_power(term), powers_of(term)
            value = rational(terms.get(key, 0) + factor_of(term))
            if value:
                terms[key] = value
            else:
                terms.pop(key, None)
    return terms


def _expand(number: Known) -> list[Known]:
    """The terms of a number. A product with sums is expanded to a sum of products, unless that has too many terms."""
    sums = [atom for atom, power in powers_of(number) if atom.terms and power == 1]
    if not sums or prod(len(atom.terms) for atom in sums) > MAX_TERMS:
        return [number]
    assert isinstance(number, Product)
    first = sums[0]
    rest = {atom: power for atom, power in number.atoms if atom is not first}
    expanded: list[Known] = []
    for term in first.terms:
        assert not isinstance(term, Dependent)
        powers = dict(rest)
        for atom, power in powers_of(term):
            powers[atom] = powers.get(atom, 0) + power
        merged = make_product(rational(number.factor * factor_of(term)), number.rows + rows_power(term), powers)
        assert not isinstance(merged, Dependent)
        expanded += _expand(merged)
    return expanded
