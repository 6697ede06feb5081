"""Computes the arithmetic and the bytes of a node from its shapes. Pure.

A multiplication and an addition count as two operations; integer operations count as floating-point ones. Bytes are
those that a kernel must read and write at least once. Caches may hold some of them. Convolutions in a blocked layout
compute whole blocks of channels, and all of these count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from ortserve.model_file.graph import ELEMENT_TYPES, Attribute, Node, Tensor
from ortserve.tools.profile.trace import TensorShape, TracedNode

_ITEM_BYTES: Final = {name: bits // 8 for name, bits in ELEMENT_TYPES.values() if bits >= 8}
_MOVES_NOTHING: Final = frozenset(
    ("Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "If", "Loop", "Scan", "Constant")
)
"""Operators that read only a shape, return a view, or run other nodes."""
_READS_ROWS: Final = frozenset(("Gather", "GatherElements", "GatherND", "Slice", "EmbedLayerNormalization"))
"""Operators that read at most as much of a table as they write."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call of a node. None where the shapes do not determine it."""

    operations: int | None
    nbytes: int | None


def find_work(traced: TracedNode, node: Node | None, constants: Mapping[str, Tensor]) -> Work:
    """The work of a node.

    Args:
        traced: The node with its shapes in runs.
        node: The node of the optimized graph; None if unknown. Prepacked weights are then unknown, too.
        constants: The constants of the optimized graph.
    """
    inputs = list(traced.inputs) if node is None else _all_inputs(traced, node, constants)
    operations = None
    if (count := _COUNTS.get(traced.op)) is not None:
        try:
            read, made = [dims for _, dims in inputs], traced.outputs[0][1]
            operations = count(read, made, node.attributes if node else {})
        except (IndexError, ValueError):  # an input is unknown, or prepacked in another shape
            pass
    return Work(operations, _count_bytes(traced, inputs))


def _all_inputs(traced: TracedNode, node: Node, constants: Mapping[str, Tensor]) -> list[TensorShape]:
    """The shapes of all inputs in order, with the prepacked ones that the trace leaves out."""
    seen = list(traced.inputs)
    missing = sum(name != "" for name in node.inputs) - len(seen)
    found: list[TensorShape] = []
    for name in filter(None, node.inputs):
        tensor = constants.get(name)
        if tensor is not None and tensor.dims is not None:
            shape = (ELEMENT_TYPES.get(tensor.dtype, ("", 0))[0], tensor.dims)
            if missing > 0 and seen[:1] != [shape]:
                found.append(shape)
                missing -= 1
                continue
        found += seen[:1]
        del seen[:1]
    return found


def _count_bytes(traced: TracedNode, inputs: Sequence[TensorShape]) -> int | None:
    if traced.op in _MOVES_NOTHING or not traced.outputs:
        return None
    made, read = traced.outputs[0], inputs
    if traced.op in _READS_ROWS:
        read = [min(one, made, key=lambda shape: prod(shape[1])) if one[0] == made[0] else one for one in inputs]
    shapes = [*traced.outputs, *read]
    if not all(dtype in _ITEM_BYTES for dtype, _ in shapes):
        return None
    return sum(_ITEM_BYTES[dtype] * prod(dims) for dtype, dims in shapes) or None


_PAST: Final = "past keys, whose number is not known"

_Dims: TypeAlias = tuple[int, ...]
_Count: TypeAlias = Callable[[Sequence[_Dims], _Dims, Mapping[str, Attribute]], int]
"""Counts operations, given the shapes of the inputs, the shape of the first output, and the attributes."""


def _matmul(read: Sequence[_Dims], made: _Dims, attributes: Mapping[str, Attribute]) -> int:
    """Each output element is a sum of as many products as the first input has columns."""
    is_transposed = attributes.get("transA") and len(read[0]) > 1
    return 2 * prod(made) * read[0][-2 if is_transposed else -1]


def _convolution(weight: int) -> _Count:
    """Weights are [out, in per group, kernel…]; blocked layouts keep the order of these axes."""
    return lambda read, made, _: 2 * prod(made) * prod(read[weight][1:])


def _transposed_convolution(read: Sequence[_Dims], made: _Dims, _: Mapping[str, Attribute]) -> int:
    return 2 * prod(read[0]) * prod(read[1][1:])


def _recurrent(gates: int, *, is_transposed: bool = False) -> _Count:
    """The weights of each direction are [gates x hidden, input], or [input, gates x hidden]."""

    def count(read: Sequence[_Dims], made: _Dims, _: Mapping[str, Attribute]) -> int:
        (length, batch, _width), (directions, rows, width) = read[0], read[1]
        if is_transposed:
            rows, width = width, rows
        if rows % gates:
            raise ValueError("prepacked in another layout")
        return 2 * length * batch * directions * rows * (width + rows // gates)

    return count


def _attention(read: Sequence[_Dims], made: _Dims, _: Mapping[str, Attribute]) -> int:
    """``Attention`` of com.microsoft: three projections by one weight, then the scores and the weighted sum of values.

    ``Attention`` of ONNX gets keys instead of the weight, and has no projections.
    """
    if len(read[1]) > 2:
        if len(read) > 4:
            raise ValueError(_PAST)
        return 2 * (prod(read[0]) + prod(made)) * read[1][-2]
    if any(len(dims) > 4 for dims in read):
        raise ValueError(_PAST)
    batch, length, width = read[0]
    return 2 * batch * length * width * read[1][-1] + 4 * batch * length * length * made[-1]


def _multi_head_attention(read: Sequence[_Dims], made: _Dims, _: Mapping[str, Attribute]) -> int:
    """Without projections, which are other nodes."""
    if len(read[1]) not in (3, 4):
        raise ValueError("keys and values in one tensor, or queries, too")
    if sum(len(dims) == 4 for dims in read[3:]) > 1:
        raise ValueError(_PAST)
    return 4 * prod(made) * read[1][-2]


_COUNTS: Final[Mapping[str, _Count]] = {
    **dict.fromkeys(
        (
            "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger",
            "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "GemmFloat8", "MatMulNBits",
        ),
        _matmul,
    ),
    **dict.fromkeys(("Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger"), _convolution(weight=1)),
    "QLinearConv": _convolution(weight=3),
    "ConvTranspose": _transposed_convolution,
    "LSTM": _recurrent(4),
    "DynamicQuantizeLSTM": _recurrent(4, is_transposed=True),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
    "Attention": _attention,
    "MultiHeadAttention": _multi_head_attention,
}  # fmt: skip
