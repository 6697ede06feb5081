"""How many axes the inputs of a model need where the file declares no shape.

ONNX Runtime 1.31.1 does not compare the number of axes with what an operator reads, for the operators in ``_LEAST``:
it ends the process on a tensor of fewer axes. Each was run on tensors of 0 to 7 axes.
"""

from collections.abc import Mapping
from typing import Final

from ortserve.model_file.graph import Model, Node

_LEAST: Final[Mapping[str, tuple[int, ...]]] = {
    "AffineGrid": (3, 1),
    "Attention": (3, 3, 3, 0, 4, 4),
    "AttnLSTM": (3,),
    "Conv": (3, 3),
    "ConvInteger": (3, 3),
    "CropAndResize": (4, 2, 1),
    "DFT": (2,),
    "EmbedLayerNormalization": (2, 2, 0, 0, 0, 0, 0, 0, 2),
    "FusedConv": (3, 3),
    "GridSample": (4, 4),
    "MaxRoiPool": (4, 2),
    "Multinomial": (2,),
    "QLinearConv": (3, 0, 0, 3),
    "ReverseSequence": (2, 1),
    "RoiAlign": (4, 2, 1),
    "STFT": (2, 0, 1),
    "SparseAttention": (0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2),
}
"""Operators, with the least axes of their inputs that ONNX, or ``docs/ContribOperators.md``, allows."""
_KEEPING: Final = frozenset(
    {"Abs", "Cast", "Clip", "DequantizeLinear", "DynamicQuantizeLinear", "Exp", "Gelu", "Identity", "LeakyRelu", "Log"}
    | {"Neg", "QuantizeLinear", "Relu", "Sigmoid", "Softmax", "Sqrt", "Tanh"}
)
"""Operators whose first output has the axes of their first input."""


def least_axes(model: Model) -> Mapping[str, int]:
    """The least number of axes of tensors of the main graph that such an operator reads, directly or behind others."""
    least: dict[str, int] = {}
    for node in reversed(model.graph.nodes):
        needed = list(axes_needed_by(node))
        if node.op in _KEEPING and not node.domain and node.outputs:
            needed = [least.get(node.outputs[0], 0)]
        for name, axes in zip(node.inputs, needed, strict=False):
            least[name] = max(axes, least.get(name, 0))
    return least


def axes_needed_by(node: Node) -> tuple[int, ...]:
    """The least number of axes of each input that such an operator reads; no numbers for other operators."""
    equation = node.attributes.get("equation")
    if node.op == "Einsum" and isinstance(equation, str):
        terms = equation.partition("->")[0].split(",")
        return tuple(sum(letter.isalpha() for letter in term) for term in terms)
    is_another = node.domain not in ("", "com.microsoft") or (node.op == "Attention" and node.domain)
    return () if is_another else _LEAST.get(node.op, ())
