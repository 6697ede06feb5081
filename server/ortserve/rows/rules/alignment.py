"""Operands that are paired element by element: their axes are aligned from the right."""

from collections.abc import Sequence

from ortserve.rows.rules.call import Call, NotKnownError, RowsMeetError
from ortserve.rows.symbols import Number
from ortserve.rows.values import NO_FACTS, Facts, Value


def broadcast_shape(call: Call, shapes: Sequence[tuple[Number, ...]]) -> tuple[Number, ...]:
    """The shape that operands with these shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    lengths: list[Number] = [1] * rank
    for shape in shapes:
        for position, length in enumerate(shape, rank - len(shape)):
            lengths[position] = call.symbols.broadcast(lengths[position], length)
    return tuple(lengths)


def without_rows(value: Value, dims: tuple[Number, ...]) -> tuple[Number, ...]:
    """Dimensions of a value with 1 for that of the rows, so that the others can be broadcast."""
    return (*dims[: value.axis], 1, *dims[value.axis + 1 :]) if value.is_rows else dims


def aligned_axis(call: Call, values: Sequence[Value]) -> tuple[int, Value] | None:
    """The axis of the broadcast result that carries the rows, and an operand that has them; None without rows.

    Raises:
        RowsMeetError: A row would be paired with an entry of another row, or with an entry that its number picks.
        NotKnownError: The shape of an operand is not known.
    """
    carriers = [value for value in values if value.is_rows]
    if not carriers:
        return None
    rank = max(len(call.dims(value)) for value in values)
    first = carriers[0]
    axis = rank - len(call.dims(first)) + first.axis
    for value in values:
        dims = call.dims(value)
        position = axis - (rank - len(dims))
        if value.is_rows:
            if position != value.axis or not value.carries_like(first):
                raise RowsMeetError("pairs rows that lie along different axes or in different orders")
        elif position >= 0 and dims[position] != 1:
            raise RowsMeetError("pairs the rows with the entries of a tensor that has no rows")
    return axis, first


def broadcast(call: Call, values: Sequence[Value], dtype: int = 0, facts: Facts = NO_FACTS) -> Value:
    """The result of an operator that pairs the elements of its operands."""
    if not values:
        raise NotKnownError("has no operands")
    found = aligned_axis(call, values)
    if len(values) == 1 or (len(values) == 2 and values[0].dims == values[1].dims):
        dims = call.dims(values[0])
    else:
        dims = broadcast_shape(call, [without_rows(value, call.dims(value)) for value in values])
    if found is None:
        return call.result(dims, dtype=dtype)
    axis, like = found
    return call.result(dims, like, axis, dtype, facts=facts)
