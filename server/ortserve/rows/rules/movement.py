"""Rules of operators that join, cut, pad and repeat tensors along axes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ortserve.rows.number import (
    DEPENDENT,
    N,
    Number,
    Product,
    atoms_of,
    contains_rows,
    is_nonnegative,
    is_positive,
    key_of,
)
from ortserve.rows.rules.call import (
    OTHER_AXIS,
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    check_sizes,
    normal_axis,
)
from ortserve.rows.values import MAX_ELEMENTS, Facts, Value, element_count, rows, taken_elements, uniform

TO_THE_END: Final = 10**9
"""Converters write a number of at least this value to denote the end of the axis."""


def concat(call: Call) -> Output:
    return joined(call, call.present(), call.integer("axis", 1 if call.opset < 4 else 0))


def joined(call: Call, values: Sequence[Value], axis: int) -> Value:
    """The concatenation of tensors along an axis."""
    if not values:
        raise NotKnownError("has no operands")
    symbols = call.symbols
    shapes = [call.dims(value) for value in values]
    rank = len(shapes[0])
    axis = normal_axis(axis, rank)
    if any(len(dims) != rank for dims in shapes):
        raise NotKnownError("joins tensors of different ranks")
    lengths = [
        next((each for each in column if isinstance(each, int)), column[0]) for column in zip(*shapes, strict=True)
    ]
    lengths[axis] = symbols.sum(dims[axis] for dims in shapes)
    first = values[0]
    if not any(value.is_rows for value in values):
        elements = None
        if rank == 1 and all(value.elements is not None for value in values):
            elements = tuple(element for value in values for element in value.elements or ())
            elements = elements if len(elements) <= MAX_ELEMENTS else None
        return call.result(lengths, dtype=first.dtype, elements=elements)
    if not all(value.is_rows and value.axis == first.axis and value.inner == first.inner for value in values):
        raise RowsMeetError("joins rows with a tensor that does not have them along the same axis")
    facts = _joined_facts(values)
    if axis == first.axis:
        outer = symbols.sum(value.outer for value in values)
        return rows(symbols, tuple(lengths), axis, outer=outer, inner=first.inner, dtype=first.dtype, facts=facts)
    if any(value.outer != first.outer for value in values):
        raise RowsMeetError("joins rows that lie in different orders")
    if axis == rank - 1 and all(dims[axis] == 1 for dims in shapes):
        facts = replace(facts, columns=tuple(values))
    return call.result(lengths, first, first.axis, first.dtype, facts=facts)


def _joined_facts(values: Sequence[Value]) -> Facts:
    first = values[0].facts
    return Facts(
        stride=first.stride if all(value.facts.stride == first.stride for value in values) else DEPENDENT,
        nonnegative=all(value.facts.nonnegative for value in values),
        below=first.below if all(value.facts.below == first.below for value in values) else None,
    )


def split(call: Call) -> Output:
    value = call.operand(0)
    symbols = call.symbols
    dims = call.dims(value)
    axis = call.axis("axis", 0, len(dims))
    sizes = _part_sizes(call, dims[axis])
    facts = replace(value.facts, columns=())
    results: list[Value] = []
    for size in sizes:
        lengths = [*dims[:axis], size, *dims[axis + 1 :]]
        if value.is_rows and axis == value.axis:
            outer = symbols.divide_exactly(size, symbols.multiply(N, value.inner))
            if outer is None or contains_rows(outer):
                raise RowsMeetError("splits the axis of the rows")
            check_sizes(call)
            part = rows(symbols, tuple(lengths), axis, outer=outer, inner=value.inner, dtype=value.dtype, facts=facts)
            results.append(part)
        else:
            results.append(call.result(lengths, value, value.axis, value.dtype, facts=facts))
    if value.elements is not None and len(dims) == 1:
        start = 0
        for position, size in enumerate(sizes):
            if not isinstance(size, int):
                break
            known = value.elements[start : start + size]
            results[position] = call.result((size,), dtype=value.dtype, elements=known)
            start += size
    return results


def _part_sizes(call: Call, length: Number) -> list[Number]:
    given: Sequence[Number] | None = call.integers("split")
    if given is None and call.has(1):
        given = call.numbers(1, "sizes")
    if given is not None:
        return list(given)
    count = len(call.node.outputs)
    if call.integer("num_outputs", count) != count:
        raise NotKnownError("has another number of outputs than its attribute")
    exact = call.symbols.divide_exactly(length, count)
    if exact is not None:
        return [exact] * count
    if not isinstance(length, int):
        if contains_rows(length):
            raise RowsMeetError("splits the axis of the rows")
        least = int(is_positive(length))
        last = least if call.opset < 18 else 0  # 6 entries in 4 parts: 2, 2, 2 and 0
        lows = (*[least] * (count - 1), last)
        return [call.symbols.opaque("part", length, count, index, lowest=low) for index, low in enumerate(lows)]
    part = -(-length // count)
    return [*[part] * (count - 1), length - part * (count - 1)]


def slice_(call: Call) -> Output:
    value = call.operand(0)
    dims = list(call.dims(value))
    starts: Sequence[Number] | None = call.integers("starts")
    ends: Sequence[Number] | None = call.integers("ends")
    axes = call.axes(3, len(dims))
    if starts is None or ends is None:
        starts, ends = call.numbers(1, "start"), call.numbers(2, "end")
    if axes is None:
        axes = tuple(range(len(starts)))
    steps = call.constants(4, "steps") if call.has(4) else (1,) * len(starts)
    outer = value.outer
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if value.is_rows and axis == value.axis:
            outer = _cut_rows(call, replace(value, outer=outer), dims[axis], start, end, step)
            dims[axis] = call.symbols.product((outer, N, value.inner))
            continue
        if contains_rows(start) or contains_rows(end):
            raise RowsMeetError("cuts a tensor at a position that depends on the number of rows")
        dims[axis] = _cut_length(call, dims[axis], start, end, step)
    elements = None
    if value.elements is not None and len(axes) == 1:
        length, start, end, step = call.dims(value)[axes[0]], starts[0], ends[0], steps[0]
        if (
            isinstance(length, int)
            and isinstance(start, int)
            and isinstance(end, int)
            and (step > 0 or end < TO_THE_END)
        ):
            elements = taken_elements(value, axes[0], _positions(length, start, end, step))
    like = replace(value, outer=outer)
    return call.result(dims, like, value.axis, value.dtype, elements, replace(value.facts, columns=()))


def _cut_rows(call: Call, value: Value, length: Number, start: Number, end: Number, step: int) -> Number:
    """The new ``outer`` after a cut along the axis of the rows, which must keep whole repetitions of all rows."""
    symbols = call.symbols
    block = symbols.multiply(N, value.inner)
    first = symbols.divide_exactly(start, block)
    is_end = end == length or (isinstance(end, int) and end >= TO_THE_END)
    last = value.outer if is_end else symbols.divide_exactly(end, block)
    if not isinstance(end, int):  # an end that is no number of entries may be less than all of them
        check_sizes(call)
    if step == 1 and first == 0 and last == value.outer:
        return value.outer
    if (
        step == 1
        and isinstance(first, int)
        and isinstance(last, int)
        and isinstance(value.outer, int)
        and 0 <= first < last <= value.outer
    ):
        return last - first
    raise RowsMeetError("cuts the axis of the rows")


def _positions(length: int, start: int, end: int, step: int) -> range:
    """The positions of a slice. With a negative step, it begins at the first entry if ``start`` is before it."""
    if step < 0:
        start = max(start, -length)
    return range(*slice(start, end, step).indices(length))


def _cut_length(call: Call, length: Number, start: Number, end: Number, step: int) -> Number:
    """The length of an axis after a cut."""
    symbols = call.symbols
    if step < 0 and isinstance(end, int) and end >= TO_THE_END:
        # ONNX Runtime 1.31.1 continues to the first entry, but infers an empty result at the load.
        raise NotKnownError("goes back to an end behind the axis")
    if isinstance(length, int) and isinstance(start, int) and isinstance(end, int):
        return len(_positions(length, start, end, step))
    if step != 1:
        return symbols.opaque("strided", length, start, end, step, lowest=0)
    if isinstance(end, int) and end >= TO_THE_END:
        end = length
    given = start, end
    if isinstance(start, int) and start < 0:
        start = symbols.add(length, start)
    if isinstance(end, int) and end < 0:
        end = symbols.add(length, end)
    if not is_nonnegative(start) or not is_nonnegative(end):
        # -5 of 3 entries is the first one, but the computed position 3 - 5 is the second one, counted from the end.
        return symbols.opaque("cut", length, *given, lowest=0)
    if symbols.at_least(start, end):
        return 0
    stop = symbols.minimum(length, end)
    if start == 0:
        return stop
    if stop in (length, end) and symbols.at_least(stop, start):
        return symbols.subtract(stop, start)
    return symbols.opaque("slice", length, start, end, lowest=0)


def pad(call: Call) -> Output:
    value = call.operand(0)
    dims = list(call.dims(value))
    given: Sequence[Number] | None = call.integers("pads") or call.integers("paddings")
    given = call.numbers(1, "padding") if given is None else given
    axes: Sequence[int] = range(len(dims))
    if call.has(3):
        axes = [normal_axis(axis, len(dims)) for axis in call.constants(3, "axes")]
    if len(given) != 2 * len(axes):
        raise NotKnownError("has padding that does not fit its operand")
    for axis, before, after in zip(axes, given[: len(axes)], given[len(axes) :], strict=True):
        if before == 0 and after == 0:
            continue
        if value.is_rows and axis == value.axis:
            raise RowsMeetError("pads along the axis of the rows")
        dims[axis] = length_of(call, call.symbols.sum((dims[axis], before, after)))
    return call.result(dims, value, value.axis, value.dtype)


def length_of(call: Call, number: Number) -> Number:
    """A number as the length of an axis, which is never negative."""
    if is_nonnegative(number):
        return number
    return call.symbols.opaque("length", number, lowest=0)


def as_length(call: Call, value: Value, length: Number) -> Number:
    """A size of a target shape, as the length of an axis if a size of the operand contains that length.

    As a number, it may be negative: then the operand is empty, or the operator that makes the axis rejects the request.
    """
    if length == -1 or is_nonnegative(length):
        return length
    same = length_of(call, length)
    known = {atom for size in value.dims or () for atom in atoms_of(size)}
    return length if known.isdisjoint(atoms_of(same)) else same


def number_of(length: Number) -> Number:
    """The number that ``length_of`` made a length, which differs from the length if it is negative."""
    key = key_of(length)
    return key[1] if key[:1] == ("length",) and isinstance(key[1], Product) else length


def expand(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    target = tuple(as_length(call, value, length) for length in call.numbers(1, "shape"))
    rank = max(len(dims), len(target))
    dims = (1,) * (rank - len(dims)) + dims
    target = (1,) * (rank - len(target)) + target
    axis = value.axis + rank - len(call.dims(value)) if value.is_rows else -1
    lengths: list[Number] = []
    made: int | None = None
    for position, (length, wanted) in enumerate(zip(dims, target, strict=True)):
        if position == axis:
            if wanted not in (1, length):
                raise RowsMeetError("repeats the rows along their axis")
            lengths.append(length)
        elif contains_rows(wanted):
            if made is not None or axis >= 0 or length != 1:
                raise RowsMeetError(OTHER_AXIS)
            made = position
            lengths.append(wanted)
        else:
            lengths.append(call.symbols.broadcast(length, wanted))
    if made is not None:
        return rows_of_copies(call, value, lengths, made)
    elements = value.elements
    if elements is not None and element_count(lengths) != len(elements):
        known, count = uniform(value), element_count(lengths)
        elements = (known,) * count if known is not None and count is not None and count <= MAX_ELEMENTS else None
    return call.result(lengths, value, axis, value.dtype, elements, replace(value.facts, columns=()))


def tile(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    repeats = call.numbers(1, "repeats")
    if len(repeats) != len(dims):
        raise NotKnownError("has repeats that do not fit its operand")
    lengths: list[Number] = []
    outer = value.outer
    made: int | None = None
    for position, (length, count) in enumerate(zip(dims, repeats, strict=True)):
        lengths.append(call.symbols.multiply(length, count))
        if value.is_rows and position == value.axis:
            if contains_rows(count):
                raise RowsMeetError("repeats the rows by their number")
            outer = call.symbols.multiply(outer, count)
        elif contains_rows(count):
            if made is not None or value.is_rows:
                raise RowsMeetError(OTHER_AXIS)
            made = position
    if made is not None:
        return rows_of_copies(call, value, lengths, made)
    elements = None
    if value.elements is not None and len(dims) == 1 and isinstance(repeats[0], int):
        elements = value.elements * repeats[0] if len(value.elements) * repeats[0] <= MAX_ELEMENTS else None
    like = replace(value, outer=outer)
    return call.result(lengths, like, value.axis, value.dtype, elements, replace(value.facts, columns=()))


def rows_of_copies(call: Call, value: Value, lengths: Sequence[Number], axis: int) -> Value:
    """Copies of the elements of a tensor without rows, in as many entries along an axis for each row."""
    inner = call.symbols.divide_exactly(lengths[axis], N)
    if inner is None or contains_rows(inner):
        raise RowsMeetError(OTHER_AXIS)
    known = value.elements if value.is_integer else None
    below = known[0] + 1 if known and isinstance(known[0], int) and uniform(value) is not None else None
    facts = Facts(nonnegative=known is not None and all(map(is_nonnegative, known)), below=below)
    return rows(call.symbols, tuple(lengths), axis, inner=inner, dtype=value.dtype, facts=facts)


RULES: Final[Rules] = {
    ("", "Concat"): Rule(concat, keeps_stride=True),
    ("", "Split"): Rule(split, arguments=(1,), keeps_stride=True),
    ("", "Slice"): Rule(slice_, arguments=(1, 2, 3, 4), keeps_stride=True),
    ("", "Pad"): Rule(pad, arguments=(1, 3), parameters=(2,)),
    ("com.microsoft", "Pad"): Rule(pad, arguments=(1,), parameters=(2,)),
    ("", "Expand"): Rule(expand, arguments=(1,), keeps_stride=True),
    ("", "Tile"): Rule(tile, arguments=(1,), keeps_stride=True),
}
