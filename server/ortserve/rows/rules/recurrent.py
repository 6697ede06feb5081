"""LSTM, GRU and RNN: rows on the batch axis, which is the second one unless the layout says otherwise."""

from typing import Final

from ortserve.rows.rules.call import Call, NotKnownError, Output, RowsMeetError, Rules, rule
from ortserve.rows.values import Value

_DIRECTIONS: Final = {"forward": 1, "reverse": 1, "bidirectional": 2}


def recurrent(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) != 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    layout = call.integer("layout", 0)
    batch = 0 if layout else 1
    _check_rows(value, batch)
    directions = _DIRECTIONS.get(call.text("direction", "forward").lower())
    if directions is None:
        raise NotKnownError("has a direction that is not known")
    lengths = call.optional(4)
    states = [state for state in (call.optional(5), call.optional(6)) if state is not None]
    for state, axis in [(lengths, 0)] + [(state, batch) for state in states]:
        if state is not None:
            _check_same_rows(value, state, axis)
    hidden = call.integer("hidden_size", 0)
    time = dims[1 if layout else 0]
    if layout:
        return [
            call.result((dims[0], time, directions, hidden), value, 0, value.dtype),
            *[call.result((dims[0], directions, hidden), value, 0, value.dtype)] * 2,
        ]
    return [
        call.result((time, directions, dims[1], hidden), value, 2, value.dtype),
        *[call.result((directions, dims[1], hidden), value, 1, value.dtype)] * 2,
    ]


def _check_rows(value: Value, batch: int) -> None:
    if value.is_rows and value.axis != batch:
        raise RowsMeetError("runs over the rows as over time or features")


def _check_same_rows(value: Value, state: Value, axis: int) -> None:
    """Raise unless lengths or an initial state carry the same rows as the input."""
    if value.is_rows != state.is_rows:
        raise RowsMeetError("has lengths or an initial state that do not carry the same rows")
    if value.is_rows and (state.axis != axis or not state.carries_like(value)):
        raise RowsMeetError("has lengths or an initial state that do not carry the same rows")


RULES: Final[Rules] = {("", op): rule(recurrent, parameters=(1, 2, 3, 7)) for op in ("GRU", "LSTM", "RNN")}
