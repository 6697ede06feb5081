"""The rule of masked writes, ``x[mask] = number``, which exporters of PyTorch write as ScatterND at NonZero of a mask.

The positions and their number depend on all rows, so both are mixed. But each position of a row lies in that row, and
every position gets the same number. ``walk`` applies this rule to operators with mixed operands.
"""

from dataclasses import replace
from typing import Final

from ortserve.rows.rules.call import Call, check_no_stride, check_sizes
from ortserve.rows.values import Facts, Kind, Value

OPERATORS: Final = frozenset({("", "Expand"), ("", "Reshape"), ("", "ScatterND"), ("", "Transpose")})


def result_of_mixed(call: Call, mixed: Value) -> Value | None:
    """What is known about the result of one of ``OPERATORS`` with a mixed operand; None if nothing is known.

    Args:
        call: The node. Its operands may be mixed.
        mixed: The claim about a result of which nothing is known.

    Raises:
        RowsMeetError: A position may lie in another row, because a row may have more entries than its claim says.
    """
    first, second = call.operand(0), call.operand(1) if call.has(1) else None
    if call.op == "ScatterND":
        return _written(call)
    if call.op == "Transpose":
        of = first.facts.nonzero_of
        is_turned = of is not None and call.integers("perm") in (None, (1, 0))
        return replace(mixed, facts=Facts(tuples_of=of)) if is_turned else None
    is_number = first.kind is Kind.FREE and first.dims is not None and all(length == 1 for length in first.dims)
    is_repeated = (
        second is not None
        and second.kind is not Kind.UNKNOWN
        and (is_number if call.op == "Expand" else first.facts.is_uniform)
    )
    return replace(mixed, facts=Facts(is_uniform=True)) if is_repeated else None


def _written(call: Call) -> Value | None:
    """The rows after a write of one number at positions of their own. Each coordinate is checked in its own axis."""
    value, indices, updates = call.operand(0), call.operand(1), call.operand(2)
    mask = indices.facts.tuples_of
    if mask is None or not value.is_rows or not updates.facts.is_uniform:
        return None
    if value.axis != mask.axis or not value.carries_like(mask):
        return None
    check_sizes(call)
    check_no_stride([value])
    return call.same_shape(value)
