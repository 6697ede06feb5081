"""Rules of If, Loop and Scan. A claim about results of If holds for both branches.

The bodies of Loop and Scan are analysed until the claims about their states no longer change.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Final

from ortserve.model_file.graph import BOOL, INT64, Graph
from ortserve.rows.number import (
    DEPENDENT,
    Number,
    atom_alone,
    atoms_of,
    contains_rows,
    has_atom,
    is_nonnegative,
    is_positive,
)
from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rule, Rules, normal_axis
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import Facts, Kind, Value, free


def if_(call: Call) -> Output:
    condition = call.operand(0)
    if condition.is_rows:
        raise RowsMeetError("chooses one branch for all rows by a value of the rows")
    then, other = graph_of(call, "then_branch"), graph_of(call, "else_branch")
    known = condition.elements[0] if condition.elements else None
    if isinstance(known, int):
        return call.scope.run_graph(then if known else other, [])
    if condition.kind is not Kind.FREE:
        raise RowsMeetError("chooses a branch by the number of rows")
    pairs = zip(call.scope.run_graph(then, []), call.scope.run_graph(other, []), strict=True)
    return [_joined(call, one, two) for one, two in pairs]


def graph_of(call: Call, name: str) -> Graph:
    graph = call.attributes.get(name)
    if not isinstance(graph, Graph):
        raise NotKnownError(f"has no graph '{name}'")
    return graph


def _joined(call: Call, one: Value, other: Value) -> Value:
    """The claim about a tensor for which one of two claims holds."""
    for value in sorted((one, other), key=lambda each: each.kind is not Kind.MIXED):
        if value.cause is not None:  # a trial that follows an unknown result may take the other branch
            return value
    if one.is_rows != other.is_rows:
        raise RowsMeetError("returns rows in one branch and a tensor without rows in the other")
    dims = _joined_dims(call, one, other)
    dtype = one.dtype if one.dtype == other.dtype else 0
    if not one.is_rows:
        kind = Kind.SIZE if Kind.SIZE in (one.kind, other.kind) else Kind.FREE
        if one.elements is not None and one.elements == other.elements and dims == one.dims == other.dims:
            return Value(kind, dims, dtype=dtype, elements=one.elements, has_elements=one.has_elements)
        return Value(kind, dims, dtype=dtype, has_elements=one.has_elements and other.has_elements)
    if dims is None or one.axis != other.axis or not one.carries_like(other):
        raise RowsMeetError("returns rows along different axes or in different orders in its two branches")
    if one.facts.stride != other.facts.stride or one.facts.padding != other.facts.padding:
        raise RowsMeetError("returns the index or the padding of rows in one branch only")
    facts = Facts(
        stride=one.facts.stride,
        nonnegative=one.facts.nonnegative and other.facts.nonnegative,
        below=one.facts.below if one.facts.below == other.facts.below else None,
        padding=one.facts.padding,
        # If the condition is a constant, of which the analysis need not know, ONNX Runtime inlines a branch.
        transposed=one.facts.transposed | other.facts.transposed,
    )
    return call.result(dims, one, one.axis, dtype, facts=facts)


def _joined_dims(call: Call, one: Value, other: Value) -> tuple[Number, ...] | None:
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        if one.is_rows or other.is_rows:
            raise NotKnownError("returns tensors of different ranks in its two branches")
        return None
    dims: list[Number] = []
    for axis, (length, wanted) in enumerate(zip(one.dims, other.dims, strict=True)):
        is_same = length == wanted or (one.is_rows and axis == one.axis)
        dims.append(length if is_same else call.symbols.fresh(0, instead_of=(length, wanted)))
    return tuple(dims)


MAX_ROUNDS: Final = 12
"""Maximum number of rounds until the claims about the states of a loop are stable. Each round only weakens claims."""


class _CausedError(Exception):
    """A tensor of the body is mixed or unknown. Then all results are."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


def loop(call: Call) -> Output:
    """Loop. Operands: trip count, condition, states.

    The body maps round, condition and states to condition, states and scanned results.
    """
    body = graph_of(call, "body")
    for index, what in ((0, "number of iterations"), (1, "condition")):
        value = call.optional(index)
        if value is not None and value.kind is not Kind.FREE:
            raise RowsMeetError(f"takes its {what} from the rows or from their number")
    begins = call.optional(1)
    condition = _scalar(BOOL, (1,) if begins is None else begins.elements)
    states = [call.operand(index) for index in range(2, len(call.operands))]
    claims = _States(call.symbols, [condition, *states])
    iteration = _scalar(INT64, (call.symbols.fresh(0),))

    def run(current: list[Value]) -> list[Value]:
        outputs = call.scope.run_graph(body, [iteration, *current])
        if outputs[0].cause is None and outputs[0].kind is not Kind.FREE:
            raise RowsMeetError("ends on a condition that depends on all rows")
        return outputs

    try:
        outputs = claims.settle(run)
    except _CausedError as caused:
        return [caused.value] * len(call.node.outputs)
    trips = call.symbols.fresh(0)
    limit = call.optional(0)
    condition, *after = claims.after()
    if condition.elements == (1,) and limit is not None and limit.elements:
        trips = limit.elements[0] if is_nonnegative(limit.elements[0]) else trips
    return [*after, *(claims.stacked(value, trips, 0) for value in outputs)]


def _scalar(dtype: int, elements: tuple[Number, ...] | None) -> Value:
    return replace(free((), dtype, elements), has_elements=True)


def scan(call: Call) -> Output:
    """Scan. Operands: states and scanned tensors.

    The body maps states and slices of the scanned tensors to states and slices of the results.
    """
    if call.opset < 9:
        raise NotKnownError("is of a version before opset 9")
    body = graph_of(call, "body")
    count = call.integer("num_scan_inputs", 0)
    operands = [call.operand(index) for index in range(len(call.operands))]
    if not 0 < count <= len(operands):
        raise NotKnownError("scans nothing")
    states, scanned = operands[: len(operands) - count], operands[len(operands) - count :]
    given = call.integers("scan_input_axes") or (0,) * count
    axes = [normal_axis(axis, len(call.dims(value))) for axis, value in zip(given, scanned, strict=True)]
    if any(value.facts.padding is not None for value in scanned):
        raise RowsMeetError("iterates over rows whose padding depends on the longest row of the batch")
    if any(value.is_rows and value.axis == axis for value, axis in zip(scanned, axes, strict=True)):
        return _scan_rows(call, body, states, scanned, axes)
    claims = _States(call.symbols, states)
    slices = [_slice(call, value, axis) for value, axis in zip(scanned, axes, strict=True)]
    try:
        outputs = claims.settle(lambda current: call.scope.run_graph(body, [*current, *slices]))
    except _CausedError as caused:
        return [caused.value] * len(call.node.outputs)
    trips = call.dims(scanned[0])[axes[0]]
    into = call.integers("scan_output_axes") or (0,) * len(outputs)
    stacked = [claims.stacked(value, trips, axis) for value, axis in zip(outputs, into, strict=True)]
    return [*claims.after(), *stacked]


def _slice(call: Call, value: Value, axis: int) -> Value:
    """One entry of a tensor along an axis that carries no rows."""
    dims = call.dims(value)
    facts = replace(value.facts, columns=())
    shifted = value.axis - 1 if value.axis > axis else value.axis
    one = call.result((*dims[:axis], *dims[axis + 1 :]), value, shifted, value.dtype, facts=facts)
    return replace(one, kind=value.kind, has_elements=value.has_elements)


def _scan_rows(call: Call, body: Graph, states: list[Value], scanned: list[Value], axes: list[int]) -> Output:
    """A scan over the rows: each run of the body gets the entries of one row, and the states never change.

    So an entry is treated as a free tensor: a result that depends only on it and on free tensors belongs to its row.
    """
    like = scanned[0]
    for value, axis in zip(scanned, axes, strict=True):
        if not value.is_rows or value.axis != axis or not value.carries_like(like):
            raise RowsMeetError("iterates over rows together with a tensor without these rows")
        if value.facts.stride != 0:
            raise RowsMeetError("uses the index of each row in the batch")
    directions = (call.integers("scan_input_directions") or ()) + (call.integers("scan_output_directions") or ())
    if any(directions):
        raise RowsMeetError("iterates over the rows in reverse")
    if len(body.inputs) != len(states) + len(scanned):
        raise NotKnownError("has a body with other inputs than its operands")
    for index, state in enumerate(states):
        if state.kind is not Kind.FREE or not _passes_on(body, index):
            raise RowsMeetError("passes a state from row to row")
    mark = call.symbols.made
    entries = []
    for value, axis in zip(scanned, axes, strict=True):
        dims = call.dims(value)
        entries.append(free((*dims[:axis], *dims[axis + 1 :]), value.dtype))
    outputs = call.scope.run_graph(body, [*states, *entries], hide_rows=True)[len(states) :]
    into = call.integers("scan_output_axes") or (0,) * len(outputs)
    results = list(states)
    for value, axis in zip(outputs, into, strict=True):
        if value.cause is not None:
            return [value] * len(call.node.outputs)
        if value.kind is not Kind.FREE or value.dims is None or not all(_is_before(each, mark) for each in value.dims):
            raise NotKnownError("returns results of unknown shape for each row")
        position = normal_axis(axis, len(value.dims) + 1)
        lengths = (*value.dims[:position], 1, *value.dims[position:])
        results.append(call.result(lengths, like, position, value.dtype))
    return results


def _passes_on(body: Graph, index: int) -> bool:
    """Whether the body returns a state unchanged."""
    sources = {node.outputs[0]: node.inputs[0] for node in body.nodes if node.op == "Identity" and not node.domain}
    name = body.outputs[index].name
    for _ in range(len(sources) + 1):
        if name == body.inputs[index].name:
            return name not in {output for node in body.nodes for output in node.outputs}
        name = sources.get(name, "")
    return False


def _is_before(number: Number, mark: int) -> bool:
    """Whether all atoms of a number were created before the loop, so that the number is the same in every round."""
    return number is not DEPENDENT and all(atom.serial <= mark for atom in atoms_of(number))


class _States:
    """The claims about the states of a loop, weakened until they hold before and after each round.

    A length that changes between rounds becomes an atom of the loop. Each axis of each state has its own atom, because
    another state may have the length of the previous round.
    """

    def __init__(self, symbols: Symbols, initial: list[Value]) -> None:
        self._symbols = symbols
        self._mark = symbols.made
        self._own: dict[tuple[int, str, int], Number] = {}
        self._current = [replace(value, facts=replace(value.facts, columns=())) for value in initial]

    def settle(self, run: Callable[[list[Value]], list[Value]]) -> list[Value]:
        """Run the body until the claims about the states are stable. Returns the scanned results of the last run."""
        for _ in range(MAX_ROUNDS):
            doubts = self._symbols.doubts
            outputs = run(self._current)
            states = outputs[: len(self._current)]
            if len(states) < len(self._current):
                raise NotKnownError("has a body with fewer results than states")
            weaker = [self._weaker(i, *pair) for i, pair in enumerate(zip(self._current, states, strict=True))]
            # A node may have raised a doubt about tensors that an earlier node reads in the next round.
            if weaker == self._current and doubts == self._symbols.doubts:
                return outputs[len(states) :]
            self._current = weaker
        raise NotKnownError("has states whose shapes keep changing")

    def after(self) -> list[Value]:
        """The claims about the states after the last round."""
        return [self._outside(value) for value in self._current]

    def stacked(self, value: Value, trips: Number, axis: int) -> Value:
        """The claim about the results of all rounds, concatenated along a new axis."""
        if value.cause is not None:
            return value
        if value.dims is None:
            return free(None, value.dtype) if value.kind is Kind.FREE else value
        outside = self._outside(replace(value, elements=None))
        dims = outside.dims or ()
        position = normal_axis(axis, len(dims) + 1)
        shifted = outside.axis + 1 if outside.axis >= position else outside.axis
        has_elements = value.has_elements and is_positive(trips)
        dims = (*dims[:position], trips, *dims[position:])
        return replace(outside, dims=dims, axis=shifted, has_elements=has_elements)

    def _outside(self, value: Value) -> Value:
        """A claim without atoms of the loop, because their values differ between rounds."""
        if value.is_rows and not all(
            _is_before(each, self._mark) for each in (value.outer, value.inner, value.facts.stride)
        ):
            raise NotKnownError("returns rows whose layout changes between iterations")
        below = value.facts.below
        facts = replace(
            value.facts, columns=(), below=below if below is not None and _is_before(below, self._mark) else None
        )
        dims = None if value.dims is None else tuple(self._renewed(length, 0) for length in value.dims)
        elements = None if value.elements is None else tuple(self._renewed(each, None) for each in value.elements)
        return replace(value, dims=dims, elements=elements, facts=facts)

    def _renewed(self, number: Number, least: int | None) -> Number:
        if number is DEPENDENT or _is_before(number, self._mark):
            return number
        return DEPENDENT if contains_rows(number) else self._symbols.fresh(least, instead_of=(number,))

    def _weaker(self, index: int, current: Value, new: Value) -> Value:
        """The strongest known claim that holds for a state both before and after a round."""
        if new.cause is not None:
            raise _CausedError(new)
        if current.is_rows != new.is_rows:
            raise RowsMeetError("has a state with rows in some iterations only")
        dims = self._weaker_dims(index, current, new)
        dtype = current.dtype if current.dtype == new.dtype else 0
        if current.is_rows:
            return replace(current, dims=dims, dtype=dtype, facts=_weaker_facts(current, new))
        elements = None
        if current.elements == new.elements and all(_is_before(each, self._mark) for each in current.elements or ()):
            elements = current.elements
        elif (
            current.elements is not None
            and new.elements is not None
            and len(current.elements) == len(new.elements)
            and (
                current.dtype == BOOL or (current.is_integer and self._may_count(index, current.elements, new.elements))
            )
        ):
            elements = tuple(
                self._weaker_number((index, "element", i), one, two, None)
                for i, (one, two) in enumerate(zip(current.elements, new.elements, strict=True))
            )
        is_size = Kind.SIZE in (current.kind, new.kind) or (elements is not None and any(map(contains_rows, elements)))
        kind = Kind.SIZE if is_size else Kind.FREE
        has_elements = current.has_elements and new.has_elements
        return Value(kind, dims, dtype=dtype, elements=elements, has_elements=has_elements)

    def _may_count(self, index: int, current: Sequence[Number], new: Sequence[Number]) -> bool:
        """Whether a round adds to each number of a state what does not depend on it, so that no number overflows."""
        for i, (one, two) in enumerate(zip(current, new, strict=True)):
            own = self._own.get((index, "element", i))
            atom = None if own is None or one != own else atom_alone(own)
            if atom is not None and has_atom(self._symbols.subtract(two, one), partial(is_, atom)):
                return False
        return True

    def _weaker_dims(self, index: int, current: Value, new: Value) -> tuple[Number, ...] | None:
        if current.dims is None or new.dims is None or len(current.dims) != len(new.dims):
            if current.is_rows:
                raise NotKnownError("has a state whose number of axes changes between iterations")
            return None
        if current.is_rows and (current.axis != new.axis or not current.carries_like(new)):
            raise RowsMeetError("has a state whose rows lie in another order after an iteration")
        return tuple(
            one if current.is_rows and axis == current.axis else self._weaker_number((index, "axis", axis), one, two, 0)
            for axis, (one, two) in enumerate(zip(current.dims, new.dims, strict=True))
        )

    def _weaker_number(self, key: tuple[int, str, int], current: Number, new: Number, least: int | None) -> Number:
        own = self._own.get(key)
        if current is DEPENDENT or (current == new and new is not DEPENDENT) or (own is not None and current == own):
            return current if not contains_rows(new) or current == new else DEPENDENT
        if contains_rows(current) or contains_rows(new):
            return DEPENDENT
        if own is None:
            own = self._own[key] = self._symbols.fresh(least, instead_of=(current, new))
        return own


def _weaker_facts(current: Value, new: Value) -> Facts:
    one, other = current.facts, new.facts
    if one.stride != other.stride or one.padding != other.padding:
        raise RowsMeetError("has a state whose index or padding of rows changes between iterations")
    return Facts(
        stride=one.stride,
        nonnegative=one.nonnegative and other.nonnegative,
        below=one.below if one.below == other.below else None,
        padding=one.padding,
    )


RULES: Final[Rules] = {
    ("", "If"): Rule(if_, has_graphs=True),
    ("", "Loop"): Rule(loop, has_graphs=True),
    ("", "Scan"): Rule(scan, has_graphs=True),
}
