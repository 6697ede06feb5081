"""Intentionally broken rules: the lists of models and the random graphs detect each of them.

A test that finds no fault in the real rules is only meaningful if it finds the faults of broken ones.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import pytest

from ortserve.model_file.reading import parse_model
from ortserve.rows import Number, Outcome, Value, prove_axes, walk
from ortserve.rows.rules import RULES, call, elementwise, gather, masked_writes, matmul, reduction, shapes
from ortserve.rows.rules.call import Call, Output
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import uniform
from rows.brute_force import Observation, RefusedError
from rows.cases import Case
from rows.claims import check_model
from rows.families import APART, MEET
from rows.growing import GrowingGraph
from rows.random_graphs import grow
from rows.traps import TRAPS

_GRAPHS: Final = 400
Patch = pytest.MonkeyPatch


def _nothing(*_: object, **__: object) -> None:
    """Replaces a check and does nothing."""


def _breaks(op: str, apply: Callable[[Call], Output]) -> Callable[[Patch], None]:
    """Replace the rule of an operator."""
    return lambda patch: patch.setitem(RULES, ("", op), replace(RULES["", op], apply=apply))


def _never_checks(module: object, name: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, name, _nothing)


def _never_checks_axes(verb: str) -> Callable[[Patch], None]:
    """Remove the check of axes from reductions or normalizations, which are selected by the verb of their error."""
    off_axis = call.off_axis

    def check(value: Value, axes: Iterable[int], what: str) -> None:
        if what != verb:
            off_axis(value, axes, what)

    return lambda patch: patch.setattr(reduction, "off_axis", check)


def _rows_only(call: Call, values: list[Value]) -> tuple[int, Value] | None:
    """Like ``aligned_axis``, but accepts any pairing of operands without rows."""
    return _aligned_axis(call, [value for value in values if value.is_rows] or values)


_aligned_axis: Final = call.aligned_axis


def _any_rows(call: Call, values: list[Value]) -> tuple[int, Value] | None:
    """Like ``aligned_axis``, but accepts any order of the operands' rows."""
    first = next((value for value in values if value.is_rows), None)
    rank = max(len(call.dims(value)) for value in values)
    return None if first is None else (rank - len(call.dims(first)) + first.axis, first)


def _summed_rows(value: Value, rank: int, result_rank: int, *, is_left: bool) -> int | None:
    """Like ``_matrix_axis``, without a check of the summed axis."""
    del is_left
    return value.axis + result_rank - rank if value.is_rows else None


def _in_other_order(call: Call) -> Value:
    value = shapes.reshape(call)
    assert isinstance(value, Value)
    return replace(value, outer=value.inner, inner=value.outer) if value.is_rows else value


def _one_scale(call: Call) -> list[Value]:
    return [call.same_shape(call.operand(0), 2), call.result((), dtype=1), call.result((), dtype=2)]


def _of_any_version(call: Call) -> Output:
    return reduction.softmax(replace(call, opset=13))


def _never_negative(call: Call) -> Value:
    value = _subtract(call)
    assert isinstance(value, Value)
    return replace(value, facts=replace(value.facts, nonnegative=True))


_subtract: Final = RULES["", "Sub"].apply


def _of_any_image(call: Call) -> Value:
    """Boxes of images without a check of their indices."""
    boxes = call.operand(1)
    return call.result((call.dims(boxes)[0], call.dims(call.operand(0))[1], 1, 1), boxes, dtype=1)


def _written_anywhere(call: Call) -> Value | None:
    """The rows after a masked write, with any mask."""
    value = call.operand(0)
    return call.same_shape(value) if value.is_rows and call.operand(2).facts.is_uniform else None


def _without_any_rest(call: Call) -> Number | None:
    """A quotient of a number of rows, without its other summand."""
    summands, divisor = call.operand(0).facts.rows_and_rest, uniform(call.operand(1))
    return None if summands is None or divisor is None else call.symbols.divide_exactly(summands[0], divisor)


def _then(call: Call) -> Output:
    """Take the first branch, whatever the condition."""
    return call.scope.run_graph(call.attributes["then_branch"], [])  # type: ignore[arg-type]


def _equal_lengths(patch: Patch) -> None:
    """Treat all unknown lengths as one length."""
    make = Symbols.fresh
    shared: dict[tuple[int, object], Number] = {}

    def fresh(self: Symbols, lowest: Any = None, _: str = "") -> Number:
        key = id(self), lowest
        if key not in shared:
            shared[key] = make(self, lowest)
        return shared[key]

    patch.setattr(Symbols, "fresh", fresh)


BROKEN: Final[dict[str, Callable[[Patch], None]]] = {
    "element-wise operators pair rows with anything": lambda p: p.setattr(call, "aligned_axis", _rows_only),
    "element-wise operators pair rows in any order": lambda p: p.setattr(call, "aligned_axis", _any_rows),
    "normalizations run along any axis": _never_checks_axes("normalizes"),
    "reductions run along any axis": _never_checks_axes("reduces"),
    "Gather picks along any axis": _never_checks(gather, "off_axis"),
    "rows pick from rows by any index": _never_checks(gather, "_check_own_rows"),
    "index tuples begin with anything": _never_checks(gather, "_check_own_number"),
    "products are summed over rows": lambda p: p.setattr(matmul, "_matrix_axis", _summed_rows),
    "Reshape confuses the order of rows": _breaks("Reshape", _in_other_order),
    "dynamic quantization has a free scale": _breaks("DynamicQuantizeLinear", _one_scale),
    "Softmax is the same in all versions": _breaks("Softmax", _of_any_version),
    "differences are never negative": _breaks("Sub", _never_negative),
    "RoiAlign reads any image": _breaks("RoiAlign", _of_any_image),
    "masked writes have any mask": lambda p: p.setattr(masked_writes, "_written", _written_anywhere),
    "what is known about a mask holds for all rounds": lambda p: p.setattr(walk, "_without_facts", lambda value: value),
    "every rest is lost by rounding": lambda p: p.setattr(elementwise, "_without_rest", _without_any_rest),
    "If takes its first branch": _breaks("If", _then),
    "the number of a row is a value like others": _never_checks(walk, "_check_operands"),
    "transpositions stay where they are": lambda p: p.setattr(
        walk, "_with_transpositions", lambda _, __, results: results
    ),
    "random operators are like others": lambda p: p.setattr(walk, "RANDOM", frozenset()),
    "every type holds every number": lambda p: p.setattr(Symbols, "_holds", lambda *_: True),
    "fractions are whole": lambda p: p.setattr(Symbols, "floor", lambda _, number: number),
    "unknown lengths are equal": _equal_lengths,
}


@dataclass(frozen=True, slots=True)
class _Tried:
    """A case with ONNX Runtime's results."""

    case: Case
    seen: dict[str, Observation] | None


@cache
def _cases() -> list[_Tried]:
    tried: list[_Tried] = []
    for case in APART + MEET + TRAPS:
        try:
            tried.append(_Tried(case, case.observe(inside=True)))
        except RefusedError:
            tried.append(_Tried(case, None))
    return tried


@cache
def _graphs() -> list[GrowingGraph]:
    return [grow(seed) for seed in range(_GRAPHS)]


def _found_by_cases() -> Iterator[str]:
    apart = {case.name for case in APART}
    for tried in _cases():  # all proofs first, which take less time than all claims
        outcome = prove_axes(parse_model(memoryview(tried.case.model.SerializeToString())), tried.case.axes).outcome
        if outcome is Outcome.PROVEN and tried.case.name not in apart:
            yield f"{tried.case.name} is proven"
    for tried in _cases():
        case = tried.case
        if tried.seen is not None and (findings := check_model(case.model, case.axes, tried.seen).findings):
            yield f"{case.name}: {findings}"


def _found_by_graphs() -> Iterator[str]:
    for number, graph in enumerate(_graphs()):
        axes = {name: one.axis for name, one in graph.inputs.items()}
        seen = {name: graph.observation(name) for name in graph.values}
        if findings := check_model(graph.model(), axes, seen, node_by_node=True).findings:
            yield f"graph {number}: {findings}"


def test_unbroken_rules_have_no_findings() -> None:
    assert not list(_found_by_cases())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str, monkeypatch: Patch) -> None:
    _cases()  # the graphs grow without the rules, and only if no case finds the fault
    BROKEN[name](monkeypatch)
    found = next(_found_by_cases(), None) or next(_found_by_graphs(), None)
    assert found is not None
