"""The arithmetic and the bytes of a node, from its shapes. Pure.

A multiplication and an addition count as two operations; integer operations count as floating-point ones. Bytes are
those that a kernel must read and write at least once; caches may hold some of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from ortserve.model_file.graph import Attribute, Node, Tensor
from ortserve.tools.profile.trace import Shape, TracedNode

_ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1, "int8": 1, "uint8": 1, "float8e4m3fn": 1, "float8e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
_ELEMENT_TYPES: Final = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "double", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
"""ONNX's numbers of element types."""

_MOVES_NOTHING: Final = frozenset(
    ("Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "If", "Loop", "Scan", "Constant")
)
"""They read a shape only, return a view, or run other nodes."""
_READS_ROWS: Final = frozenset(("Gather", "GatherElements", "GatherND", "Slice", "Split"))
"""They read as much of their first input as they write, not all of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a node does; None where shapes do not say."""

    operations: int | None
    nbytes: int | None


_Count: TypeAlias = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Attribute]], int]


def find_work(traced: TracedNode, node: Node | None, constants: Mapping[str, Tensor]) -> Work:
    """The work of a node.

    Args:
        traced: Its shapes in runs.
        node: The node of the optimized graph; None if unknown. Then weights that a kernel has prepacked are unknown.
        constants: Of the optimized graph.
    """
    inputs = all_inputs(traced, node, constants)
    try:
        count = _COUNTS.get(traced.op)
        operations = count(inputs, traced.outputs, node.attributes if node else {}) if count else None
    except (IndexError, ZeroDivisionError):  # an input is unknown
        operations = None
    return Work(operations, _count_bytes(traced, inputs))


def all_inputs(traced: TracedNode, node: Node | None, constants: Mapping[str, Tensor]) -> list[Shape]:
    """The shapes of all inputs in their order, with those that the trace leaves out because they are prepacked."""
    if node is None:
        return list(traced.inputs)
    traced_inputs = list(traced.inputs)
    missing = sum(name != "" for name in node.inputs) - len(traced_inputs)
    found: list[Shape] = []
    for name in node.inputs:
        tensor = constants.get(name)
        if tensor is None or tensor.dims is None:
            if name and traced_inputs:
                found.append(traced_inputs.pop(0))
            continue
        shape = (_ELEMENT_TYPES.get(tensor.dtype, ""), tensor.dims)
        if traced_inputs and (missing <= 0 or traced_inputs[0] == shape):
            found.append(traced_inputs.pop(0))
        else:
            found.append(shape)
            missing -= 1
    return found


def tensor_bytes(tensor: Tensor) -> int:
    """The size of a constant; 0 if unknown."""
    return _ITEM_BYTES.get(_ELEMENT_TYPES.get(tensor.dtype, ""), 0) * (0 if tensor.dims is None else prod(tensor.dims))


def _count_bytes(traced: TracedNode, inputs: Sequence[Shape]) -> int | None:
    if traced.op in _MOVES_NOTHING or not traced.outputs:
        return None
    shapes = [*traced.outputs, *(traced.outputs[:1] + tuple(inputs[1:]) if traced.op in _READS_ROWS else inputs)]
    sizes: list[int] = [_ITEM_BYTES.get(dtype, 0) * prod(dims) for dtype, dims in shapes]
    known = all(dtype in _ITEM_BYTES for dtype, _ in shapes)
    nbytes = sum(sizes)
    return nbytes if known and nbytes else None


def _matmul(inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Attribute]) -> int:
    """Each output element takes as many products as the first input has columns."""
    dims = inputs[0][1]
    inner = dims[-2] if attributes.get("transA") and len(dims) > 1 else dims[-1]
    return 2 * prod(outputs[0][1]) * inner


def _convolution(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Attribute], weight: int = 1) -> int:
    """Weights are [out, in per group, kernel…]; blocked layouts keep the order of these axes."""
    return 2 * prod(outputs[0][1]) * prod(inputs[weight][1][1:])


def _quantized_convolution(
    inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Attribute]
) -> int:
    return _convolution(inputs, outputs, attributes, weight=3)


def _transposed_convolution(inputs: Sequence[Shape], _: Sequence[Shape], __: Mapping[str, Attribute]) -> int:
    return 2 * prod(inputs[0][1]) * prod(inputs[1][1][1:])


def _recurrent(gates: int) -> _Count:
    def count(inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Attribute]) -> int:
        length, batch, _ = inputs[0][1]
        directions, rows, width = inputs[1][1]
        if rows % gates:  # prepacked in another layout
            raise IndexError
        return 2 * length * batch * directions * rows * (width + rows // gates)

    return count


def _attention(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Attribute]) -> int:
    """``Attention`` of com.microsoft: three projections by one weight, then scores and their sum of values."""
    batch, length, width = inputs[0][1]
    projected = inputs[1][1][-1]
    return 2 * batch * length * width * projected + 4 * batch * length * length * outputs[0][1][-1]


def _multi_head_attention(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Attribute]) -> int:
    """Without projections, which are other nodes."""
    key_length = inputs[1][1][-2]
    return 4 * prod(outputs[0][1]) * key_length


def _blocked_weights(inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Attribute]) -> int:
    return 2 * prod(outputs[0][1]) * inputs[0][1][-1]


_COUNTS: Final[Mapping[str, _Count]] = {
    **dict.fromkeys(
        (
            "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger",
            "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "GemmFloat8",
        ),
        _matmul,
    ),
    "MatMulNBits": _blocked_weights,
    **dict.fromkeys(("Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger"), _convolution),
    "QLinearConv": _quantized_convolution,
    "ConvTranspose": _transposed_convolution,
    "LSTM": _recurrent(4),
    "DynamicQuantizeLSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
    "Attention": _attention,
    "MultiHeadAttention": _multi_head_attention,
}  # fmt: skip
