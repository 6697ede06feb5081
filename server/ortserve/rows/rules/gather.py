"""Rules of operators that pick entries by indices, or write entries at indices."""

from dataclasses import replace
from typing import Final

from ortserve.model_file.graph import INT64, STRING
from ortserve.rows.number import Number
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    check_no_stride,
    check_sizes,
    off_axis,
)
from ortserve.rows.values import MAX_ELEMENTS, NO_FACTS, Facts, Kind, Value, taken_elements

_WRONG_ROWS: Final = "has operands that do not all have the same rows along the same axis"


def gather(call: Call) -> Output:
    return gathered(call, "axis")


def gathered(call: Call, name: str) -> Value:
    """Entries of the first operand, picked by indices in the second, along the axis that attribute ``name`` gives."""
    value, indices = call.operand(0), call.operand(1)
    dims, picked = call.dims(value), call.dims(indices)
    axis = call.axis(name, 0, len(dims))
    lengths = (*dims[:axis], *picked, *dims[axis + 1 :])
    if value.dtype == STRING and any(length != 1 for length in dims[axis + 1 :]):
        raise NotKnownError("selects slices of texts, of which ONNX Runtime may copy only the first text")
    if indices.is_rows:
        if value.is_rows:
            _check_own_rows(call, value, indices, axis)
        elif indices.facts.stride != 0:
            raise RowsMeetError("selects an entry by the index of the row in the batch")
        facts = replace(value.facts, columns=()) if value.is_rows else NO_FACTS
        return call.result(lengths, indices, axis + indices.axis, value.dtype, facts=facts)
    off_axis(value, (axis,), "selects an entry")
    if not value.is_rows:
        return call.result(lengths, dtype=value.dtype, elements=_picked(value, indices, axis))
    shifted = value.axis if value.axis < axis else value.axis + len(picked) - 1
    return call.result(lengths, value, shifted, value.dtype, facts=replace(value.facts, columns=()))


def _check_own_rows(call: Call, value: Value, indices: Value, axis: int) -> None:
    """Raise an error unless each row certainly picks only entries of itself."""
    check_sizes(call)
    if axis != value.axis:
        raise RowsMeetError("selects from all rows by indices that depend on the rows")
    facts = indices.facts
    if value.outer != 1 or facts.stride != value.inner:
        raise RowsMeetError("selects entries of other rows")
    if not facts.nonnegative:
        raise RowsMeetError("may select an entry of the previous row, because an index may be negative")
    # An execution provider may not check indices. One bound may be written as a product, the other as its sum.
    if facts.below is None or not call.symbols.at_least(value.inner, facts.below):
        raise RowsMeetError("may select an entry of the next row, because an index may be too large")


def _picked(value: Value, indices: Value, axis: int) -> tuple[Number, ...] | None:
    """The elements that known indices pick; None if elements or indices are unknown."""
    count = (value.dims or ())[axis]
    if value.elements is None or indices.elements is None or not isinstance(count, int):
        return None
    positions: list[int] = []
    for index in indices.elements:
        if not isinstance(index, int) or not -count <= index < count:
            return None
        positions.append(index % count)
    return taken_elements(value, axis, positions)


def gather_elements(call: Call) -> Output:
    value, indices = call.operand(0), call.operand(1)
    dims = call.dims(indices)
    axis = call.axis("axis", 0, len(dims))
    like = _same_rows(call, axis)
    return call.result(dims, like, like.axis if like is not None else 0, value.dtype)


def scatter_elements(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    like = _same_rows(call, call.axis("axis", 0, len(dims)))
    return call.result(dims, like, like.axis if like is not None else 0, value.dtype)


def tensor_scatter(call: Call) -> Output:
    """An update that is written into the cache of each batch entry, at positions of the entry."""
    value = call.operand(0)
    dims = call.dims(value)
    like = _same_rows(call, call.axis("axis", -2, len(dims)))
    return call.result(dims, like, like.axis if like is not None else 0, value.dtype)


def _same_rows(call: Call, axis: int) -> Value | None:
    """An operand with rows; None without rows.

    Raises an error unless all operands have the same rows, and not on ``axis``.
    """
    values = call.present()
    like = next((value for value in values if value.is_rows), None)
    if like is None:
        return None
    if not all(value.is_rows and value.axis == like.axis and value.carries_like(like) for value in values):
        raise RowsMeetError(_WRONG_ROWS)
    off_axis(like, (axis,), "selects by indices")
    check_sizes(call)
    return like


def gather_nd(call: Call) -> Output:
    value, indices = call.operand(0), call.operand(1)
    dims, picked = call.dims(value), call.dims(indices)
    batch = call.integer("batch_dims", 0)
    depth = _tuple_length(picked)
    if not 0 <= batch < len(picked) or batch + depth > len(dims):
        raise NotKnownError("has batch_dims that do not fit its operands")
    lengths = (*picked[:-1], *dims[batch + depth :])
    if indices.is_rows:
        if indices.axis == len(picked) - 1:
            raise RowsMeetError("has index tuples that lie along the axis of the rows")
        if value.is_rows and value.axis < batch:
            if value.axis != indices.axis or not value.carries_like(indices):
                raise RowsMeetError(_WRONG_ROWS)
            check_no_stride([value, indices])
            check_sizes(call)
        elif value.is_rows:
            _check_own_number(call, value, indices, batch)
        else:
            check_no_stride([value, indices])
            if indices.axis < batch:
                raise RowsMeetError(_WRONG_ROWS)
        return call.result(lengths, indices, indices.axis, value.dtype)
    if not value.is_rows:
        return call.result(lengths, dtype=value.dtype)
    if value.axis < batch + depth or batch:
        raise RowsMeetError("selects an entry along the axis of the rows")
    check_no_stride([value, indices])
    return call.result(lengths, value, len(picked) - 1 + value.axis - depth, value.dtype)


def scatter_nd(call: Call) -> Output:
    value, indices, updates = call.operand(0), call.operand(1), call.operand(2)
    dims, picked = call.dims(value), call.dims(indices)
    depth = _tuple_length(picked)
    if not (value.is_rows or indices.is_rows or updates.is_rows):
        return call.result(dims, dtype=value.dtype)
    if not value.is_rows or not updates.is_rows or not value.carries_like(updates):
        raise RowsMeetError(_WRONG_ROWS)
    check_no_stride([value, updates])
    if indices.is_rows:
        _check_own_number(call, value, indices, 0)
        if updates.axis != indices.axis or not updates.carries_like(indices):
            raise RowsMeetError(_WRONG_ROWS)
    elif value.axis < depth or updates.axis != len(picked) - 1 + value.axis - depth:
        raise RowsMeetError("writes entries along the axis of the rows")
    return call.result(dims, value, value.axis, value.dtype)


def _tuple_length(picked: tuple[object, ...]) -> int:
    if not picked or not isinstance(picked[-1], int):
        raise NotKnownError("has index tuples of a length that is not known")
    return picked[-1]


def _check_own_number(call: Call, value: Value, indices: Value, batch: int) -> None:
    """Raise an error unless the first part of each index tuple is the number of the row to which the tuple belongs."""
    check_sizes(call)
    check_no_stride([value])
    if batch or value.axis != 0 or not value.is_plain or not indices.facts.columns:
        raise RowsMeetError("selects from all rows by indices that depend on the rows")
    first, *others = indices.facts.columns
    facts = first.facts
    if facts.stride != 1 or facts.below != 1 or not facts.nonnegative or first.axis == len(first.dims or ()) - 1:
        raise RowsMeetError("selects entries of other rows")
    check_no_stride(others)


def one_hot(call: Call) -> Output:
    indices = call.operand(0)
    dims = call.dims(indices)
    depth = call.number(1, "depth")
    axis = call.axis("axis", -1, len(dims) + 1)
    lengths = (*dims[:axis], depth, *dims[axis:])
    shifted = indices.axis + (1 if axis <= indices.axis else 0)
    known = _one_hot_elements(indices, depth, call.operand(2)) if axis == len(dims) else None
    return call.result(lengths, indices, shifted, call.operand(2).dtype, known)


def _one_hot_elements(indices: Value, depth: Number, values: Value) -> tuple[Number, ...] | None:
    """The elements of a OneHot along a new last axis; None if an operand is not known. Exporters compute repeats so."""
    if indices.elements is None or values.elements is None or len(values.elements) != 2 or not isinstance(depth, int):
        return None
    if not all(isinstance(index, int) for index in indices.elements) or len(indices.elements) * depth > MAX_ELEMENTS:
        return None
    off, on = values.elements
    return tuple(
        on if position in (index, index + depth) else off
        for index in indices.elements
        if isinstance(index, int)
        for position in range(depth)
    )


def compress(call: Call) -> Output:
    """``Compress`` keeps the entries of an axis for which a vector is true."""
    value = call.operand(0)
    if "axis" not in call.attributes or value.kind is Kind.SIZE or not call.is_free(1):
        return whole_tensor(call)
    dims = list(call.dims(value))
    axis = call.axis("axis", 0, len(dims))
    off_axis(value, (axis,), "picks entries")
    dims[axis] = call.symbols.fresh(0)
    return call.result(dims, value, value.axis, value.dtype)


def nonzero(call: Call) -> Output:
    value = call.operand(0)
    if value.kind is not Kind.FREE or not call.dims(value):
        return whole_tensor(call)
    return call.result((len(call.dims(value)), call.symbols.fresh(0)), dtype=INT64)


def whole_tensor(call: Call) -> Output:
    """Operators whose number of results depends on all elements."""
    if any(value.is_rows for value in call.present()):
        facts = Facts(nonzero_of=call.operand(0)) if call.op == "NonZero" else NO_FACTS
        raise RowsMeetError("returns the results of all rows together, without their numbers per row", facts)
    raise NotKnownError("returns an unknown number of results")


RULES: Final[Rules] = {
    ("", "Gather"): Rule(gather, keeps_stride=True),
    ("", "GatherElements"): Rule(gather_elements),
    ("", "ScatterElements"): Rule(scatter_elements),
    ("", "Scatter"): Rule(scatter_elements),
    ("", "TensorScatter"): Rule(tensor_scatter),
    ("", "GatherND"): Rule(gather_nd, keeps_stride=True),
    ("com.microsoft", "GatherND"): Rule(gather_nd, keeps_stride=True),
    ("", "ScatterND"): Rule(scatter_nd, keeps_stride=True),
    ("", "OneHot"): Rule(one_hot, arguments=(1,), parameters=(2,)),
    ("", "Compress"): Rule(compress),
    ("", "NonZero"): Rule(nonzero),
    **{("", op): Rule(whole_tensor) for op in ("NonMaxSuppression", "Unique")},
    ("com.microsoft", "Unique"): Rule(whole_tensor),
}
