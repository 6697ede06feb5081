"""The operator If: a claim about its results holds for either branch. ``loops`` has Loop and Scan."""

from typing import Final

from ortserve.rows.graph import Graph
from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rule, Rules
from ortserve.rows.symbols import Number
from ortserve.rows.values import Facts, Kind, Value


def if_(call: Call) -> Output:
    condition = call.operand(0)
    if condition.is_rows:
        raise RowsMeetError("takes a branch for all rows by a value of the rows")
    then, other = graph_of(call, "then_branch"), graph_of(call, "else_branch")
    known = condition.elements[0] if condition.elements else None
    if isinstance(known, int):
        return call.scope.run_graph(then if known else other, [])
    if condition.kind is not Kind.FREE:
        raise RowsMeetError("takes a branch by the number of rows")
    pairs = zip(call.scope.run_graph(then, []), call.scope.run_graph(other, []), strict=True)
    return [_joined(call, one, two) for one, two in pairs]


def graph_of(call: Call, name: str) -> Graph:
    graph = call.attributes.get(name)
    if not isinstance(graph, Graph):
        raise NotKnownError(f"has no graph '{name}'")
    return graph


def _joined(call: Call, one: Value, other: Value) -> Value:
    """What holds for a tensor of which either claim holds."""
    for value in (one, other):
        if value.cause is not None:
            return value
    if one.is_rows != other.is_rows:
        raise RowsMeetError("gives rows in one case and a tensor without rows in the other")
    dims = _joined_dims(call, one, other)
    dtype = one.dtype if one.dtype == other.dtype else 0
    if not one.is_rows:
        kind = Kind.SIZE if Kind.SIZE in (one.kind, other.kind) else Kind.FREE
        if one.elements is not None and one.elements == other.elements and dims == one.dims == other.dims:
            return Value(kind, dims, dtype=dtype, elements=one.elements)
        return Value(kind, dims, dtype=dtype)
    if dims is None or one.axis != other.axis or not one.carries_like(other):
        raise RowsMeetError("gives rows along different axes or in different orders")
    if one.facts.stride != other.facts.stride or one.facts.padding != other.facts.padding:
        raise RowsMeetError("gives the number of the row in one case only")
    facts = Facts(
        stride=one.facts.stride,
        nonnegative=one.facts.nonnegative and other.facts.nonnegative,
        below=one.facts.below if one.facts.below == other.facts.below else None,
        padding=one.facts.padding,
    )
    return call.result(dims, one, one.axis, dtype, facts=facts)


def _joined_dims(call: Call, one: Value, other: Value) -> tuple[Number, ...] | None:
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        if one.is_rows or other.is_rows:
            raise NotKnownError("gives tensors of different ranks in its two cases")
        return None
    dims: list[Number] = []
    for axis, (length, wanted) in enumerate(zip(one.dims, other.dims, strict=True)):
        is_same = length == wanted or (one.is_rows and axis == one.axis)
        dims.append(length if is_same else call.symbols.fresh(0))
    return tuple(dims)


RULES: Final[Rules] = {("", "If"): Rule(if_, has_graphs=True)}
