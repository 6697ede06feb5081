"""The claims of the proof in numbers; a symbol takes its value from the first tensors that contain it.

A symbol that stands for two different numbers is a finding too, because proofs of reshapes rely on equal symbols.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import isfinite

import numpy as np
import onnx

from ortserve.model_file.reading import parse_model
from ortserve.rows import DEPENDENT, Facts, Kind, Number, Product, Value, claims
from rows import brute_force
from rows.brute_force import Claim, Observation, disagreement

_KINDS = {Kind.ROWS: brute_force.Kind.ROWS, Kind.FREE: brute_force.Kind.FREE, Kind.SIZE: brute_force.Kind.SIZE}


class Check:
    """Compares claims about the tensors of one model with the observed tensors.

    Attributes:
        findings: Contradictions, by tensor.
        checked: Number of compared claims; ``with_rows`` of them are about rows.
    """

    def __init__(self, claimed: Mapping[str, Value]) -> None:
        self.findings: dict[str, str] = {}
        self.checked = self.with_rows = 0
        self._claimed = claimed
        self._numbers = _Numbers()

    def look(self, name: str, seen: Observation) -> None:
        """Compare one tensor. Inputs come first, then nodes in their order."""
        value = self._claimed.get(name)
        if value is None or any(array is None for array in seen.alone):
            return
        claim = self._in_numbers(value, seen)
        if claim.kind is brute_force.Kind.NONE:
            return
        self.checked += 1
        self.with_rows += claim.kind is brute_force.Kind.ROWS
        text = disagreement(claim, seen) or self._contradicts_symbols(value, seen)
        if text:
            self.findings[name] = f"{claim.kind.value} {value}: {text}"

    def _in_numbers(self, value: Value, seen: Observation) -> Claim:
        kind = _KINDS.get(value.kind)
        if kind is None or value.facts.padding is not None:
            return Claim(brute_force.Kind.NONE)
        facts: Facts = value.facts
        if kind is not brute_force.Kind.ROWS:
            return Claim(kind)
        stride = self._numbers.value(facts.stride, 1)
        return Claim(
            kind,
            value.axis,
            _whole(self._numbers.value(value.outer, 1)),
            _whole(self._numbers.value(value.inner, 1)),
            None if stride is None else float(stride),
            facts.stride is DEPENDENT,
            nonneg=facts.nonnegative,
            below=None if facts.below is None else _whole(self._numbers.value(facts.below, 1)),
        )

    def _contradicts_symbols(self, value: Value, seen: Observation) -> str:
        for count, array in _by_count(seen):
            if value.dims is not None:
                if len(value.dims) != array.ndim:
                    return f"{count} rows have shape {array.shape}, claimed {value.dims}"
                for axis, (number, length) in enumerate(zip(value.dims, array.shape, strict=True)):
                    if text := self._numbers.contradicts(number, count, length):
                        return f"axis {axis} of {count} rows: {text}"
            if value.elements is not None and value.kind is not Kind.ROWS:
                flat = array.ravel().tolist()
                if len(flat) != len(value.elements):
                    return f"{len(flat)} elements, claimed {value.elements}"
                for number, element in zip(value.elements, flat, strict=True):
                    if isinstance(element, float) and not isfinite(element):
                        if not (isinstance(number, Product) and any(atom.is_unbounded for atom, _ in number.atoms)):
                            return f"elements {flat} of {count} rows: {number} is finite"
                        continue
                    if text := self._numbers.contradicts(number, count, Fraction(element)):
                        return f"elements {flat} of {count} rows: {text}"
        return ""


def check_model(
    model: onnx.ModelProto,
    axes: Mapping[str, int | None],
    seen: Mapping[str, Observation],
    *,
    believe_names: bool = True,
    node_by_node: bool = False,
) -> Check:
    """Compare all observed tensors of a model with the claims.

    Args:
        model: The model.
        axes: The hypothesis.
        seen: The result of ``observe``, or a ``GrowingGraph``.
        believe_names: Whether sizes of equal names are equal in the observations.
        node_by_node: Whether nodes ran one at a time, so that each rejected batch is due to one node.
    """
    parsed = parse_model(memoryview(model.SerializeToString()))
    claimed = claims(parsed, axes, believe_names=believe_names)
    if not node_by_node and any(
        value.cause is not None for value in claimed.values()
    ):  # without a claim, a batch may be rejected
        seen = {name: _without_refused(one) for name, one in seen.items()}
    check = Check(claimed)
    for name in [*axes, *(name for node in model.graph.node for name in node.output)]:
        if name in seen:
            check.look(name, seen[name])
    return check


def _without_refused(seen: Observation) -> Observation:
    return Observation(seen.alone, {rows: array for rows, array in seen.batches.items() if array is not None})


class _Numbers:
    """The known values of symbols."""

    def __init__(self) -> None:
        self._atoms: dict[object, Fraction] = {}

    def value(self, number: Number, count: int) -> Fraction | None:
        """The value for a batch of ``count`` rows, or None if it is unknown."""
        if isinstance(number, (int, Fraction)):
            return Fraction(number)
        if not isinstance(number, Product):
            return None
        result: Fraction = Fraction(number.factor) * count**number.rows
        for atom, power in number.atoms:
            known = self._atoms.get(atom)
            if known is None and atom.terms:
                known = self._sum(atom.terms)
            if known is None:
                return None
            result *= known**power
        return result

    def contradicts(self, number: Number, count: int, seen: "int | Fraction") -> str:
        """The reason why a number differs from the observation.

        A symbol without a value receives it from the observation.
        """
        value = self.value(number, count)
        if value is not None:
            return "" if value == seen else f"{number} is {value}, but {seen} is there"
        if not isinstance(number, Product):
            return ""
        unknown = [(atom, power) for atom, power in number.atoms if self.value(Product(1, 0, ((atom, 1),)), 1) is None]
        if len(unknown) != 1 or unknown[0][1] != 1:
            return ""
        atom = unknown[0][0]
        rest = self.value(
            Product(number.factor, number.rows, tuple(p for p in number.atoms if p[0] is not atom)), count
        )
        if not rest:
            return "" if rest is None or seen == 0 else f"{number} is 0, but {seen} is there"
        known = Fraction(seen) / rest
        if atom.is_whole and known.denominator != 1:
            return f"{atom} of {number} is {known}, which is no integer"
        if atom.lowest is not None and known < atom.lowest:
            return f"{atom} of {number} is {known}, but at least {atom.lowest} was claimed"
        self._atoms[atom] = known
        return ""

    def _sum(self, terms: Iterable[Number]) -> Fraction | None:
        values = [self.value(term, 1) for term in terms]
        return (
            None if any(value is None for value in values) else sum((v for v in values if v is not None), Fraction(0))
        )


def _by_count(seen: Observation) -> Iterable[tuple[int, np.ndarray]]:
    for alone in seen.alone:
        if alone is not None:
            yield 1, alone
    for rows, array in seen.batches.items():
        if array is not None:
            yield len(rows), array


def _whole(value: Fraction | None) -> int | None:
    return int(value) if value is not None and value.denominator == 1 else None
