"""Rules of matrix products: plain, fused and quantized."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Final

from ortserve.model_file.graph import FLOAT, INT32
from ortserve.rows.number import Number
from ortserve.rows.rules.call import (
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    aligned_axis,
    broadcast_shape,
    without_rows,
)
from ortserve.rows.values import Value, element_count

_MIXED_TERMS: Final = "sums products over all rows"


def matmul(call: Call) -> Output:
    return product(call, call.operand(0), call.operand(1), call.operand(0).dtype)


def product(call: Call, one: Value, other: Value, dtype: int) -> Value:
    """``one @ other``: sums over the last axis of ``one`` and the second to last of ``other``; other axes broadcast."""
    left, right = call.dims(one), call.dims(other)
    if not left or not right:
        raise NotKnownError("has an operand without axes")
    if -1 in one.facts.transposed and len(right) == 1:
        raise NotKnownError("multiplies a transposed matrix by a vector, for which ONNX Runtime may read other entries")
    if left[-1] == 0:
        raise NotKnownError("multiplies along an axis of length 0")
    terms = right[max(len(right) - 2, 0)]
    call.symbols.need(left[-1], terms)
    call.symbols.need(terms, left[-1])
    rank = max(len(left), len(right), 2)
    one_axis = _matrix_axis(one, len(left), rank, is_left=True)
    other_axis = _matrix_axis(other, len(right), rank, is_left=False)
    batch = broadcast_shape(call, [without_rows(one, left)[:-2], without_rows(other, right)[:-2]])
    left = (1, *left) if len(left) == 1 else left
    right = (*right, 1) if len(right) == 1 else right
    lengths = [*batch, left[-2], right[-1]]
    axis, like = _product_axis(_Factor(one, left, one_axis), _Factor(other, right, other_axis), rank)
    dropped = [rank - 2] if len(call.dims(one)) == 1 else []
    dropped += [rank - 1] if len(call.dims(other)) == 1 else []
    kept = [position for position in range(rank) if position not in dropped]
    return call.result([lengths[i] for i in kept], like, kept.index(axis) if like is not None else 0, dtype)


def _matrix_axis(value: Value, rank: int, result_rank: int, *, is_left: bool) -> int | None:
    """The axis of the product that carries the rows of an operand; None without rows."""
    if not value.is_rows:
        return None
    if rank == 1 or value.axis == rank - (1 if is_left else 2):
        raise RowsMeetError(_MIXED_TERMS)
    return value.axis + result_rank - rank


@dataclass(frozen=True, slots=True)
class _Factor:
    """An operand of a product, its shape as a matrix, and the axis of the product with its rows; None without rows."""

    value: Value
    dims: tuple[Number, ...]
    axis: int | None


def _product_axis(one: _Factor, other: _Factor, rank: int) -> tuple[int, Value | None]:
    """The axis of a product of ``rank`` axes that carries the rows, and an operand with them; None without rows."""
    if one.axis is not None and other.axis is not None:
        if one.axis != other.axis or one.axis >= rank - 2 or not one.value.carries_like(other.value):
            raise RowsMeetError("multiplies rows with other rows")
        return one.axis, one.value
    carrier, table = (one, other) if one.axis is not None else (other, one)
    if carrier.axis is None:
        return 0, None
    position = carrier.axis - (rank - len(table.dims))
    if carrier.axis < rank - 2 and position >= 0 and table.dims[position] != 1:
        raise RowsMeetError("pairs each row by its index with a matrix of a tensor without rows")
    return carrier.axis, carrier.value


def gemm(call: Call) -> Output:
    one, other = call.operand(0), call.operand(1)
    return _gemm(call, one, other, call.optional(2), one.dtype)


def _gemm(call: Call, one: Value, other: Value, bias: Value | None, dtype: int) -> Value:
    one = _transposed(call, one, call.integer("transA", 0))
    other = _transposed(call, other, call.integer("transB", 0))
    result = product(call, one, other, dtype)
    if bias is None:
        return result
    if call.opset < 7 and call.node.domain == "" and len(call.dims(bias)) > 2:
        raise NotKnownError("has a bias that does not fit")
    return _with_bias(call, result, bias)


def _with_bias(call: Call, result: Value, bias: Value) -> Value:
    """A result plus a bias that broadcasts to it."""
    if len(call.dims(bias)) > len(call.dims(result)):
        raise NotKnownError("has a bias with more axes than its result")
    if bias.is_rows and not result.is_rows:
        raise RowsMeetError("adds rows to a result without rows")
    aligned_axis(call, [result, bias])
    return result


def _transposed(call: Call, value: Value, flag: int) -> Value:
    """A matrix, transposed if ``flag`` is not 0."""
    dims = call.dims(value)
    if len(dims) != 2:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    return replace(value, dims=(dims[1], dims[0]), axis=1 - value.axis) if flag else value


def fused_matmul(call: Call) -> Output:
    one, other = call.operand(0), call.operand(1)
    if call.integer("transBatchA", 0) or call.integer("transBatchB", 0):
        raise NotKnownError("transposes the first axis of an operand")
    one, other = (
        _swapped(call, value) if call.integer(flag, 0) else value
        for value, flag in ((one, "transA"), (other, "transB"))
    )
    return product(call, one, other, one.dtype)


def _swapped(call: Call, value: Value) -> Value:
    """A tensor with its last two axes exchanged. Raises NotKnownError for a vector."""
    dims = call.dims(value)
    rank = len(dims)
    if rank < 2:
        raise NotKnownError("transposes a vector")
    axis = {rank - 1: rank - 2, rank - 2: rank - 1}.get(value.axis, value.axis)
    has_turned = value.axis == rank - 1 or value.facts.transposed
    facts = replace(value.facts, transposed=frozenset({-1, -2}) if has_turned else frozenset())
    return replace(value, dims=(*dims[:-2], dims[-1], dims[-2]), axis=axis, facts=facts)


def matmul_integer(call: Call) -> Output:
    one, other = call.operand(0), call.operand(1)
    check_one_number(call, 2)
    check_columns(call, other, 3)
    return product(call, one, other, INT32)


def qlinear_matmul(call: Call) -> Output:
    one, other = call.operand(0), call.operand(3)
    check_one_number(call, 1, 2, 6, 7)
    check_columns(call, other, 4, 5)
    return product(call, one, other, one.dtype if not call.has(7) else call.operand(7).dtype)


def matmul_integer_to_float(call: Call) -> Output:
    one, other = call.operand(0), call.operand(1)
    check_one_number(call, 2, 4)
    check_columns(call, other, 3, 5, 6)
    return product(call, one, other, FLOAT)


def qgemm(call: Call) -> Output:
    one, other = call.operand(0), call.operand(3)
    check_one_number(call, 1, 2, 7, 8)
    check_columns(call, other, 4, 5)
    return _gemm(call, one, other, call.optional(6), one.dtype if call.has(7) else FLOAT)


def check_one_number(call: Call, *indices: int) -> None:
    """Raise an error unless scales and zero points, as far as they are given, are single numbers."""
    for index in indices:
        value = call.optional(index)
        if value is not None and element_count(call.dims(value)) != 1:
            raise NotKnownError("has a scale or zero point of more than one number for the rows")


def check_columns(call: Call, weights: Value, *indices: int) -> None:
    """Raise an error unless parameters are single numbers, or have one for each column of weights without rows."""
    for index in indices:
        value = call.optional(index)
        if value is None or element_count(call.dims(value)) == 1:
            continue
        if weights.is_rows or len(call.dims(value)) != 1:
            raise NotKnownError("has a scale, zero point or bias for each column of rows")


def matmul_nbits(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if value.is_rows and value.axis == len(dims) - 1:
        raise RowsMeetError(_MIXED_TERMS)
    if not dims or not call.is_free(1):
        raise NotKnownError("has operands that its rule does not expect")
    return call.result((*dims[:-1], call.integer("N", 0)), value, value.axis, value.dtype)


def einsum(call: Call) -> Output:
    equation = call.text("equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if not arrow:
        letters = terms.replace(",", "").replace("...", "")
        result = "..." + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    values = call.present()
    if len(operands) != len(values):
        raise NotKnownError("has an equation that does not fit its operands")
    operands, result = _without_ellipses(operands, result, [len(call.dims(value)) for value in values])
    lengths: dict[str, Number] = {}
    carried: tuple[str, Value] | None = None
    for term, value in zip(operands, values, strict=True):
        dims = call.dims(value)
        if len(term) != len(dims):
            raise NotKnownError("has an equation that does not fit its operands")
        for position, (letter, length) in enumerate(zip(term, dims, strict=True)):
            if not value.is_rows or position != value.axis:
                lengths[letter] = call.symbols.broadcast(lengths.get(letter, 1), length)
        if value.is_rows:
            letter = term[value.axis]
            if carried is not None and (carried[0] != letter or not carried[1].carries_like(value)):
                raise RowsMeetError("multiplies rows with other rows")
            carried = letter, value
    if carried is None:
        return call.result([lengths[letter] for letter in result], dtype=values[0].dtype)
    letter, like = carried
    if any(term.count(letter) > 1 for term in operands) or lengths.get(letter, 1) != 1:
        raise RowsMeetError("pairs each row by its index with an entry of a tensor without rows, or takes a diagonal")
    if result.count(letter) != 1:
        raise RowsMeetError(_MIXED_TERMS)
    return call.result([lengths.get(each, 1) for each in result], like, result.index(letter), values[0].dtype)


def _without_ellipses(operands: Sequence[str], result: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The terms of an equation with a letter for each axis of its ellipses, which are aligned from the right."""
    used = "".join((*operands, result))
    unused = "".join(letter for letter in ascii_letters if letter not in used)
    counts = [rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(operands, ranks, strict=True)]
    most = max(counts)
    if min(counts) < 0 or most > len(unused):
        raise NotKnownError("has an equation that does not fit its operands")
    letters = unused[:most]
    terms = [term.replace("...", letters[most - count :], 1) for term, count in zip(operands, counts, strict=True)]
    return terms, result.replace("...", letters, 1)


RULES: Final[Rules] = {
    ("", "MatMul"): Rule(matmul),
    ("", "Gemm"): Rule(gemm),
    ("", "Einsum"): Rule(einsum),
    ("", "MatMulInteger"): Rule(matmul_integer, parameters=(2, 3)),
    ("", "QLinearMatMul"): Rule(qlinear_matmul, parameters=(1, 2, 4, 5, 6, 7)),
    ("com.microsoft", "FusedMatMul"): Rule(fused_matmul),
    ("com.microsoft", "TransposeMatMul"): Rule(fused_matmul),
    ("com.microsoft", "FusedGemm"): Rule(gemm),
    ("com.microsoft", "MatMulIntegerToFloat"): Rule(matmul_integer_to_float, parameters=(2, 3, 4, 5, 6)),
    ("com.microsoft", "QGemm"): Rule(qgemm, parameters=(1, 2, 4, 5, 7, 8)),
    **{("com.microsoft", op): Rule(matmul_nbits, parameters=(1, 2, 3, 4, 5)) for op in ("MatMulBnb4", "MatMulNBits")},
}
