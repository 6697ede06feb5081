"""Checks in front of operators that end the process on empty tensors, or do not write all of their output then.

They are for tensors that become empty inside a model; ``registry.request_shapes`` rejects its empty
inputs. ``tests/support/empty_operands.py`` finds such operators in ONNX Runtime 1.31.1 and 1.32.0 on the CPU. A check
is added only where ``rows.find_sizes`` does not show that the tensor has elements.
"""

from collections.abc import Callable, Mapping
from typing import Final

import onnxruntime as ort

from ortserve.engine.corrections.checked_node import CheckedNode
from ortserve.engine.provider_options import CPU
from ortserve.model_file.graph import FLOAT16, INT64, Attribute, is_plain_product

_SINCE_1_32: Final = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)
"""Since 1.32, ONNX Runtime writes all products that it does not quantize, and quantizes blocks of empty tensors."""


def computes_empty(provider: str) -> bool:
    """Whether a provider computes products of empty tensors that are not quantized, and blocks of empty tensors."""
    return _SINCE_1_32 and provider == CPU


def _not_empty(*places: int) -> Callable[[CheckedNode], None]:
    def check(node: CheckedNode) -> None:
        for place in places:
            if node.may_be_empty(place):
                size = node.add("Size", node.inputs[place])
                is_empty = node.add("Equal", size, node.constant(INT64, 0))
                node.fail_if(is_empty, place, f"input {place} with at least 1 element, got 0")

    return check


def _fail_if_none_along(node: CheckedNode, place: int, *axes: int) -> None:
    """Fail if an input has no elements along one of the axes."""
    sizes = node.add_sizes(place, axes)
    along = " or ".join(map(str, axes))
    is_empty = node.add("Equal", sizes, node.constant(INT64, 0))
    node.fail_if(is_empty, place, f"input {place} with at least 1 element along axis {along}, got 0")


def _check_summed(product: CheckedNode) -> None:
    """Products over an axis of length 0 are not written if they are quantized or transposed."""
    second = _SECOND_FACTOR.get(product.node.op, 1)
    sizes = product.known_sizes(second)
    summed = sizes[-2:][0] if sizes else None  # of a matrix the rows, of a vector all
    if not summed and (product.may_be_empty(0) or product.may_be_empty(second)):
        _fail_if_none_along(product, 0, -2 if product.attributes.get("transA") else -1)


def _check_product(product: CheckedNode) -> None:
    """Products that ONNX Runtime quantizes are not written.

    Before 1.32, products of a vector are not written either, nor those that ONNX Runtime joins with a Transpose. If the
    Transpose moves the rows, they are divided by the number of rows.
    """
    factors = product.inputs[:2]
    makers = [product.context.makers[name] for name in factors if name in product.context.makers]
    is_quantized = any(maker.op == "DequantizeLinear" for maker in makers)
    turned = [] if _SINCE_1_32 else [maker.attributes.get("perm") for maker in makers if maker.op == "Transpose"]
    if any(map(_moves_rows, turned)):
        _not_empty(0, 1)(product)
    elif is_quantized or turned or (not _SINCE_1_32 and (_may_be_vector(product, 0) or _may_be_vector(product, 1))):
        _check_summed(product)


def _may_be_vector(product: CheckedNode, place: int) -> bool:
    sizes = product.known_sizes(place)
    return sizes is None or len(sizes) == 1


def _check_term(term: CheckedNode) -> None:
    """Quantized sums and products of elements crash on empty tensors, and ONNX Runtime quantizes those of quantized."""
    makers = [term.context.makers.get(name) for name in term.inputs]
    if all(maker is not None and maker.op == "DequantizeLinear" for maker in makers):
        _not_empty(0, 1)(term)


def _check_terms(einsum: CheckedNode) -> None:
    """Einsum divides by 0 if it transposes an empty factor."""
    equation = einsum.attributes.get("equation")
    factors = range(len(einsum.inputs))
    if len(factors) > 1 and not (isinstance(equation, str) and is_plain_product(equation)):
        _not_empty(*factors)(einsum)


def _moves_rows(order: Attribute) -> bool:
    return isinstance(order, tuple) and len(order) > 2 and 0 in order[-2:]


def _check_fused_product(product: CheckedNode) -> None:
    attributes = product.attributes
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        _not_empty(0, 1)(product)
    else:
        _check_summed(product)


def _check_join(concat: CheckedNode) -> None:
    """Concat does not compare the shape of an empty tensor with the others, and writes only a part of its output."""
    axis = concat.attributes.get("axis")
    axis = axis if isinstance(axis, int) else 0
    wrong = False
    # A quantized tensor has a scale and a zero point behind it, and those of the output come first.
    places = range(len(concat.inputs))[slice(2, None, 3) if concat.node.domain else slice(None)]
    for place in places:
        sizes = concat.known_sizes(place)
        if sizes is not None and len(sizes) == 1:
            return  # no other axis
        if concat.may_be_empty(place):
            others = [
                size for at, size in enumerate(sizes or (None, None)) if at not in (axis, axis + len(sizes or ()))
            ]
            wrong |= not all(others)
    if wrong:
        concat.fail_if_not_whole([concat.inputs[place] for place in places], "tensors that differ only along its axis")


def _check_pixels(roi_align: CheckedNode) -> None:
    """RoiAlign reads beyond an image without pixels."""
    if roi_align.may_be_empty(0):
        _fail_if_none_along(roi_align, 0, 2, 3)


def _check_normalized(normalization: CheckedNode) -> None:
    """InstanceNormalization of FP16 writes to unmapped memory if an image has no pixels."""
    values = [normalization.context.value(name) for name in normalization.inputs[:2]]  # of one type
    if not normalization.may_be_empty(0) or any(value and value.dtype not in (0, FLOAT16) for value in values):
        return
    axes = range(2, len(normalization.known_sizes(0) or ()))
    if axes:
        _fail_if_none_along(normalization, 0, *axes)
    else:
        _not_empty(0)(normalization)


def _check_heads(attention: CheckedNode) -> None:
    """Attention divides by the number or the size of heads. That of ONNX may join a past by a Concat."""
    axis = -1 if attention.node.domain or attention.attributes.get("q_num_heads") else 1
    axes = {place: [axis] for place in range(3)}
    if not attention.node.domain and (attention.has(4) or attention.has(5)):
        axes |= {1: [0, axis, -1], 2: [0, axis, -1], 4: [0, 1, 3], 5: [0, 1, 3]}
    for place, needed in axes.items():
        if attention.may_be_empty(place):
            _fail_if_none_along(attention, place, *needed)


def _check_volume(transposed: CheckedNode) -> None:
    """A transposed convolution of volumes reads unmapped memory."""
    kernel = transposed.attributes.get("kernel_shape")
    if not isinstance(kernel, tuple) or len(kernel) > 2:
        _not_empty(0, 1)(transposed)


def _check_blocks(quantize: CheckedNode) -> None:
    if quantize.attributes.get("block_size"):
        _not_empty(0)(quantize)


def _check_slices(scan: CheckedNode) -> None:
    """Scan divides by 0 if it reads or writes slices along another axis than 0 of an empty tensor."""
    chosen = [scan.attributes.get(f"scan_{side}_axes") for side in ("input", "output")]
    if any(isinstance(axes, tuple) and any(axes) for axes in chosen):
        _not_empty(*range(len(scan.inputs)))(scan)


def _check_skipped(normalization: CheckedNode) -> None:
    """SkipLayerNormalization divides by the size of an empty tensor that it adds to others."""
    if normalization.may_be_empty(1):
        zero = normalization.constant(INT64, 0)
        is_empty, is_added = (
            normalization.add("Equal", normalization.add("Size", normalization.inputs[place]), zero) for place in (0, 1)
        )
        wrong = normalization.add("And", is_added, normalization.add("Not", is_empty))
        normalization.fail_if(wrong, 1, "input 1 with at least 1 element, got 0")


def _check_features(vectorizer: CheckedNode) -> None:
    if len(vectorizer.inputs) > 1:
        _not_empty(*range(len(vectorizer.inputs)))(vectorizer)


def _check_hidden(node: CheckedNode) -> None:
    """MoE divides by the last size, and RotaryEmbedding reads heads without elements."""
    if node.may_be_empty(0):
        _fail_if_none_along(node, 0, -1)


def _check_rows(unique: CheckedNode) -> None:
    if "axis" in unique.attributes:
        _not_empty(0)(unique)


_BEFORE_1_32: Final = {
    ("", "QuantizeLinear"): _check_blocks,
    ("com.microsoft", "FusedMatMul"): _check_fused_product,
}
_SECOND_FACTOR: Final = {"QLinearMatMul": 3, "QGemm": 3}
EMPTY_CHECKS: Final[Mapping[tuple[str, str], Callable[[CheckedNode], None]]] = {
    ("", "Add"): _check_term,
    ("", "Attention"): _check_heads,
    ("", "Concat"): _check_join,
    ("", "Conv"): _not_empty(1),
    ("", "ConvInteger"): _not_empty(1),
    ("", "ConvTranspose"): _check_volume,
    ("", "DFT"): _not_empty(2),
    ("", "Einsum"): _check_terms,
    ("", "GRU"): _not_empty(0),
    ("", "InstanceNormalization"): _check_normalized,
    ("", "LSTM"): _not_empty(0),
    ("", "MatMul"): _check_product,
    ("", "Gemm"): _check_product,
    ("", "MatMulInteger"): _check_summed,
    ("", "Mul"): _check_term,
    ("", "QLinearConv"): _not_empty(3),
    ("", "QLinearMatMul"): _check_summed,
    ("", "RoiAlign"): _check_pixels,
    ("", "Scan"): _check_slices,
    ("", "SequenceAt"): _not_empty(1),
    ("", "SequenceErase"): _not_empty(1),
    ("", "SequenceInsert"): _not_empty(2),
    ("", "Unique"): _check_rows,
    ("ai.onnx.ml", "FeatureVectorizer"): _check_features,
    ("com.microsoft", "BeamSearch"): _not_empty(0, 10),
    ("com.microsoft", "DynamicQuantizeLSTM"): _not_empty(0),
    ("com.microsoft", "DynamicQuantizeMatMul"): _check_summed,
    ("com.microsoft", "FusedConv"): _not_empty(1),
    ("com.microsoft", "GreedySearch"): _not_empty(0),
    ("com.microsoft", "GroupQueryAttention"): _not_empty(0),
    ("com.microsoft", "LinearAttention"): _check_heads,
    ("com.microsoft", "MatMulIntegerToFloat"): _check_summed,
    ("com.microsoft", "MoE"): _check_hidden,
    ("com.microsoft", "MultiHeadAttention"): _check_heads,
    ("com.microsoft", "QAttention"): _not_empty(0),
    ("com.microsoft", "QGemm"): _check_summed,
    ("com.microsoft", "QLinearAdd"): _not_empty(0, 3),
    ("com.microsoft", "QLinearConcat"): _check_join,
    ("com.microsoft", "QLinearConv"): _not_empty(3),
    ("com.microsoft", "QLinearMul"): _not_empty(0, 3),
    ("com.microsoft", "QMoE"): _check_hidden,
    ("com.microsoft", "RotaryEmbedding"): _check_hidden,
    ("com.microsoft", "Sampling"): _not_empty(0),
    ("com.microsoft", "SkipLayerNormalization"): _check_skipped,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _check_skipped,
    ("com.microsoft", "WhisperBeamSearch"): _not_empty(0, 10),
    **({} if _SINCE_1_32 else _BEFORE_1_32),
}
