"""Rules of operators that read or change a shape."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ortserve.model_file.graph import INT64
from ortserve.rows.number import (
    DEPENDENT,
    Atom,
    N,
    Number,
    atoms_of,
    contains_rows,
    is_inferred,
    is_nonnegative,
    is_positive,
    multiple_of,
    varies_by_request,
)
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    check_sizes,
    normal_axis,
    off_axis,
)
from ortserve.rows.rules.movement import as_length
from ortserve.rows.values import Value, element_count, free, transposed_elements


def shape(call: Call) -> Output:
    value = call.operand(0)
    if value.facts.padding is not None:
        raise RowsMeetError("returns the length of the longest row of the batch")
    dims = _read_sizes(call, value)
    rank = len(dims)
    start, end = (
        min(max(position + rank if position < 0 else position, 0), rank)
        for position in (call.integer("start", 0), call.integer("end", rank))
    )
    known = dims[start:end]
    return free((len(known),), INT64, known)


def size(call: Call) -> Output:
    value = call.operand(0)
    if value.facts.padding is not None:
        raise RowsMeetError("returns a number of elements that depends on the longest row of the batch")
    return free((), INT64, (call.symbols.product(_read_sizes(call, value)),))


def _read_sizes(call: Call, value: Value) -> tuple[Number, ...]:
    """The sizes of an operand as Shape returns them: ONNX Runtime may use those that it inferred at the load.

    It infers them for some of the tensors of one size, so an inferred size has a symbol of its own each time.
    """
    if call.symbols.has_lost_axes:
        raise NotKnownError("may return the shape that ONNX Runtime infers behind a ConvTranspose with an output_shape")
    return tuple(
        call.symbols.fresh(0, instead_of=(length,)) if is_inferred(length) else length for length in call.dims(value)
    )


def reshape(call: Call) -> Output:
    value = call.operand(0)
    given = call.integers("shape")  # before opset 5
    target: Sequence[Number] = call.numbers(1, "shape") if given is None else given
    return reshaped(call, value, _without_copies(call, value, target))


def flatten(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    axis = call.integer("axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    if not 0 <= axis <= len(dims):
        raise NotKnownError(f"has axis {axis} for {len(dims)} dimensions")
    return reshaped(call, value, [call.symbols.product(dims[:axis]), call.symbols.product(dims[axis:])])


def _without_copies(call: Call, value: Value, target: Sequence[Number]) -> list[Number]:
    """The target with each 0 replaced by the size that it copies."""
    if 0 in target and call.integer("allowzero", 0):
        raise NotKnownError("returns a tensor without elements")
    dims = value.dims
    copied: list[Number] = []
    for position, length in enumerate(target):
        if length == 0:
            if dims is None or position >= len(dims):
                raise NotKnownError("copies a size that is not known")
            copied.append(dims[position])
        else:
            copied.append(length)
    return copied


def reshaped(call: Call, value: Value, target: list[Number]) -> Value:
    """A tensor with another shape. The elements keep their flat order: axes before the rows, rows, axes after them."""
    symbols = call.symbols
    target = [as_length(call, value, length) for length in target]
    if any(length != -1 and not is_nonnegative(length) for length in target):
        raise NotKnownError("has a target shape whose sizes may be negative")
    if target.count(-1) > 1:
        raise NotKnownError("has a target shape with two sizes to be inferred")
    if value.dims is None:
        if -1 in target:
            raise NotKnownError("has an operand whose shape is not known")
        symbols.has_uncertain_size = True
        return call.result(target, dtype=value.dtype)
    total = symbols.product(value.dims)
    is_certain = -1 in target or _has_several_computed(value.dims, target)
    symbols.replaced |= _replaced_sizes(value.dims, target)
    if -1 in target:
        others = symbols.product(length for length in target if length != -1)
        target[target.index(-1)] = _inferred(call, total, others)
    wanted = symbols.product(target)
    solved = None if wanted == total else _solved(call, total, wanted)
    if wanted != total and not is_certain and (solved is None or not symbols.fix_size(*solved)):
        symbols.has_uncertain_size = True
    if value.is_rows:
        return _reshaped_rows(call, value, target, solved)
    elements = value.elements if element_count(target) == len(value.elements or ()) else None
    return call.result(target, dtype=value.dtype, elements=elements)


def _reshaped_rows(call: Call, value: Value, target: Sequence[Number], solved: tuple[Atom, Number] | None) -> Value:
    """A tensor with rows in the shape ``target``, in which one axis must hold the rows as whole entries.

    ``solved`` is the size that must have a certain value so that the shape holds all elements, from ``_solved``.
    """
    assert value.dims is not None
    symbols = call.symbols
    carriers = [position for position, length in enumerate(target) if contains_rows(length)]
    if not carriers:
        raise RowsMeetError("has a target shape without the number of rows")
    if len(carriers) > 1:
        raise RowsMeetError("has a target shape with the number of rows in two sizes")
    (axis,) = carriers
    if value.axis != axis and value.axis < len(target) and not _is_copied_harmlessly(call, value, target[value.axis]):
        raise RowsMeetError("has a target shape that copies the number of rows if one of its sizes is 0")
    before = symbols.product((*value.dims[: value.axis], value.outer))
    after = symbols.product(value.dims[value.axis + 1 :])
    if before != 1 or axis:
        check_sizes(call)
    if solved is not None:
        before, after = (_substituted(call, number, *solved) for number in (before, after))
    outer = symbols.divide_exactly(before, symbols.product(target[:axis]))
    if outer is None:
        raise RowsMeetError("does not keep the rows on one axis")
    inner = symbols.divide_exactly(target[axis], symbols.multiply(N, outer))
    if inner is None or contains_rows(inner) or contains_rows(outer):
        raise RowsMeetError("does not keep the rows on one axis")
    if outer != 1 and symbols.multiply(inner, symbols.product(target[axis + 1 :])) != symbols.multiply(
        value.inner, after
    ):
        raise RowsMeetError("does not keep the rows on one axis")
    like = replace(value, outer=outer, inner=inner)
    if value.facts.padding is not None and not (_ends_in_padding(value) and axis == 0 and like.is_plain):
        raise RowsMeetError("reads rows whose padding depends on the longest row of the batch")
    return call.result(target, like, axis, value.dtype, facts=replace(value.facts, columns=(), transposed=frozenset()))


def _is_copied_harmlessly(call: Call, value: Value, length: Number) -> bool:
    """Whether a size of a target shape at the operand's axis of rows is never 0, or only if that axis is empty.

    ONNX Runtime replaces a 0 by the size of the operand, here that axis.
    """
    assert value.dims is not None
    if is_positive(length):
        return True
    check_sizes(call)  # otherwise the axis may have entries although its claimed length is 0
    return call.symbols.divide_exactly(value.dims[value.axis], length) is not None


def _has_several_computed(dims: Sequence[Number], target: Sequence[Number]) -> bool:
    """Whether several sizes of a target shape are computed, so that ONNX Runtime infers none of them.

    A size of the operand or of an input may be copied instead, and one that does not follow from the inputs' free sizes
    may be a constant.
    """
    computed = 0
    for position, length in enumerate(target):
        is_size = length == N or any(length == multiple_of(atom) and not atom.key for atom in atoms_of(length))
        is_copied = is_size or length in dims[position : position + 1]
        computed += varies_by_request(length) and not is_copied
    return computed > 1


def _replaced_sizes(dims: Sequence[Number], target: Sequence[Number]) -> set[tuple[Number, Number]]:
    """Computed sizes that take the place of other ones of the operand.

    If such a size is read from the shape of a tensor whose sizes have the names of those of the operand, ONNX Runtime
    1.31.1 copies the size of the operand, without a check that the two are equal.
    """
    return {
        (wanted, length)
        for wanted, length in zip(target, dims, strict=False)
        if wanted != length and not isinstance(wanted, int) and not isinstance(length, int)
    }


def _solved(call: Call, total: Number, wanted: Number) -> tuple[Atom, Number] | None:
    """A free size, and the only value for which the target shape holds all elements; None if there is none.

    Exporters fix a size in some places and leave it free in others.
    """
    for atom in atoms_of(total):
        rest = call.symbols.divide_exactly(total, multiple_of(atom))
        value = None if rest is None else call.symbols.divide_exactly(wanted, rest)
        if value is not None and not contains_rows(value):
            return atom, value
    return None


def _substituted(call: Call, number: Number, atom: Atom, value: Number) -> Number:
    rest = call.symbols.divide_exactly(number, multiple_of(atom))
    return number if rest is None else call.symbols.multiply(rest, value)


def _ends_in_padding(value: Value) -> bool:
    """Whether all padding of a padded row is at its end: the axes between the rows and the last have length 1."""
    return value.axis == 0 and value.is_plain and all(length == 1 for length in (value.dims or ())[1:-1])


def _inferred(call: Call, total: Number, others: Number) -> Number:
    """The size, written as -1, with which a target shape holds all elements."""
    symbols = call.symbols
    exact = symbols.divide_exactly(total, others)
    if exact is not None:
        return exact
    if contains_rows(others):
        total, others = (symbols.divide_exactly(each, N) or DEPENDENT for each in (total, others))
    rowless = symbols.divide_exactly(total, N)
    if rowless is None:
        if isinstance(total, int) and isinstance(others, int):
            raise RowsMeetError("has a target shape that its elements do not fill")
        return symbols.opaque("inferred", total, others, lowest=0)
    if isinstance(rowless, int) and isinstance(others, int):
        raise RowsMeetError("does not keep the rows on one axis")
    return symbols.multiply(N, symbols.opaque("inferred", rowless, others, lowest=0))


def transpose(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    order = call.integers("perm") or tuple(reversed(range(len(dims))))
    if sorted(order) != list(range(len(dims))):
        raise NotKnownError("has an order of axes that does not fit its operand")
    elements = transposed_elements(value, order)
    axis = order.index(value.axis) if value.is_rows else 0
    rank, turned = len(dims), value.facts.transposed
    overtaken = {at - rank for at, old in enumerate(order) if at > axis and (old < value.axis or old - rank in turned)}
    facts = replace(value.facts, columns=(), transposed=frozenset(overtaken))
    return call.result([dims[axis] for axis in order], value, axis, value.dtype, elements, facts)


def _check_signs(call: Call) -> None:
    """Raise an error for negative axes before opset 11.

    ONNX Runtime 1.31.1 counts them from the end, but disregards them in the shapes that it infers at the load, and the
    result of Shape may be such a shape.
    """
    if call.opset < 11 and any(axis < 0 for axis in call.integers("axes") or ()):
        raise NotKnownError("has negative axes, as they are allowed from opset 11 on")


def squeeze(call: Call) -> Output:
    _check_signs(call)
    value = call.operand(0)
    dims = call.dims(value)
    axes = call.axes(1, len(dims))
    if axes == ():  # ONNX Runtime removes none in the shapes that it infers at the load
        raise NotKnownError("has an empty list of axes")
    if axes is None:
        if not all(isinstance(length, int) for length in dims):
            raise NotKnownError("removes every axis of size 1, which may be the axis of the rows")
        axes = tuple(position for position, length in enumerate(dims) if length == 1)
    off_axis(value, axes, "removes the size")
    if value.is_rows and any(isinstance(dims[axis], int) and dims[axis] != 1 for axis in axes):
        raise NotKnownError("removes an axis that is longer than 1")
    kept = [position for position in range(len(dims)) if position not in axes]
    axis = kept.index(value.axis) if value.is_rows else 0
    facts = replace(value.facts, columns=())
    return call.result([dims[i] for i in kept], value, axis, value.dtype, value.elements, facts)


def unsqueeze(call: Call) -> Output:
    _check_signs(call)
    value = call.operand(0)
    dims = call.dims(value)
    given = call.integers("axes")
    given = call.constants(1, "axes") if given is None else given
    rank = len(dims) + len(given)
    axes = {normal_axis(axis, rank) for axis in given}
    if len(axes) != len(given):
        raise NotKnownError("adds an axis twice")
    kept = [position for position in range(rank) if position not in axes]
    lengths: list[Number] = [1] * rank
    for position, length in zip(kept, dims, strict=True):
        lengths[position] = length
    axis = kept[value.axis] if value.is_rows else 0
    facts = replace(value.facts, columns=())
    return call.result(lengths, value, axis, value.dtype, value.elements, facts)


RULES: Final[Rules] = {
    ("", "Shape"): Rule(shape, arguments=(0,), keeps_stride=True, keeps_padding=True),
    ("", "Size"): Rule(size, arguments=(0,), keeps_stride=True, keeps_padding=True),
    ("", "Reshape"): Rule(reshape, arguments=(1,), keeps_stride=True, keeps_padding=True),
    ("", "Flatten"): Rule(flatten, keeps_stride=True, keeps_padding=True),
    ("", "Transpose"): Rule(transpose, keeps_stride=True),
    ("", "Squeeze"): Rule(squeeze, arguments=(1,), keeps_stride=True),
    ("", "Unsqueeze"): Rule(unsqueeze, arguments=(1,), keeps_stride=True),
}
