"""Finds optimizers of ONNX Runtime that would change the results of a model or make it crash."""

from collections.abc import Mapping, Sequence
from itertools import islice, permutations
from typing import Final

from ortserve.model_file.graph import (
    BFLOAT16,
    FLOAT16,
    Model,
    Node,
    Tensor,
    all_graphs,
    all_nodes,
    makers_of,
    names_read,
)

_AVERAGES: Final = frozenset({"AveragePool", "QLinearAveragePool"})
_QUANTIZED: Final = frozenset({"DequantizeLinear", "QLinearAveragePool", "QLinearConv"})
_NEVER_NEGATIVE: Final = frozenset({"Abs", "Exp", "Relu", "Sigmoid", "Softmax", "Softplus"})
_PRODUCTS: Final = frozenset({"FusedMatMul", "MatMul"})
_KNOWN: Final = frozenset({"", "ai.onnx.ml", "com.microsoft"})
"""The domains of operators that ONNX Runtime does not replace by the nodes of a function of the model."""
_HALF: Final = frozenset({FLOAT16, BFLOAT16})
_REMOVABLE: Final = frozenset(
    {"Add", "Concat", "Div", "Dropout", "Expand", "Identity", "Mul", "Pad", "Pow", "Reshape", "Slice", "Squeeze", "Sub"}
    | {"Sum", "Tile", "Unsqueeze", "Where"}
)
"""Operators whose result may be one of their operands."""
_KEEPS_AXES: Final = frozenset(
    {"Abs", "Add", "Cast", "Clip", "Concat", "DequantizeLinear", "Div", "Dropout", "Erf", "Exp", "Expand", "Gelu"}
    | {"Identity", "LayerNormalization", "Max", "Min", "Mul", "Neg", "Pad", "Pow", "QuantizeLinear", "Relu", "Sigmoid"}
    | {"Slice", "Softmax", "Split", "Sqrt", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Unsqueeze", "Where"}
)
"""Operators whose results have at least as many axes as each of their operands."""


def harmful_optimizers(model: Model, *, on_gpu: bool = False) -> tuple[str, ...]:
    """The names of the optimizers that must not run for this model.

    From the level "extended" on, ONNX Runtime 1.31.1 fuses Transpose and MatMul, also where other optimizers have moved
    the Transpose. If the second operand is a vector, as in the attention pooling of texts, the product is wrong,
    because it reads the matrix in its old order (``MatmulTransposeFusion``). Without the fusion, a Transpose copies.
    If a Cast is between the two, ONNX Runtime 1.32.0 moves it in front of the Transpose, and ends the process if that
    was in vain, because the Transpose exchanges other axes than the last two. On the CPU it adds such a Cast in front
    of each product of half precision.

    It also moves the channels of quantized images to the last axis (``NhwcTransformer``). In this layout, average
    pooling ends the process if an image is smaller than the kernel.

    And it joins products of quantized matrices with their scales (``MatMulIntegerToFloatFusion``), and writes beyond
    the product if the scales have more axes or rows.

    Gather with a Range as indices becomes a Slice (``GatherToSliceFusion``). That leaves out entries beyond the end,
    which Gather rejects, and returns others, usually none, for a Range that starts below 0.

    MaxPool takes over the padding of a Pad before it (``Pad_Fusion``), but ignores padding, instead of comparing the
    entries with 0.

    Behind a DequantizeLinear, operators that move elements are quantized too (``QDQPropagationTransformer``). That ends
    the process if a graph of an If, Loop or Scan reads their result from outside, also after other optimizers.
    ``QDQFinalCleanupTransformer`` ends it if the graph reads what a QuantizeLinear makes of a dequantized tensor.
    """
    nodes = list(all_nodes(model))
    found = []
    operators = {node.op for node in nodes}
    if "Transpose" in operators and (
        (_has_half_precision(model, nodes) and not on_gpu)
        or _multiplies_cast(model, nodes)
        or _may_multiply_by_vector(model, nodes)
    ):
        found.append("MatmulTransposeFusion")
    if not operators.isdisjoint(_AVERAGES) and not operators.isdisjoint(_QUANTIZED) and _takes_any_image(model):
        found.append("NhwcTransformer")
    if "MatMulInteger" in operators and _has_wide_scales(model, nodes):
        found.append("MatMulIntegerToFloatFusion")
    if {"Range", "Gather"} <= operators:
        found.append("GatherToSliceFusion")
    if _compares_with_padding(nodes):
        found.append("Pad_Fusion")
    if "DequantizeLinear" in operators and _has_graph_that_reads_results(model, nodes):
        found += ["QDQPropagationTransformer", "QDQFinalCleanupTransformer"]
    return tuple(found)


def _may_multiply_by_vector(model: Model, nodes: Sequence[Node]) -> bool:
    """Whether the second operand of a product may be a vector.

    It is none if the file declares it with several axes, or if an operator certainly gives it several.
    """
    matrices: set[str] = set()
    shapes: set[str] = set()  # vectors of several numbers
    for graph in all_graphs(model):
        declared = {each.name: each.dims for each in (*graph.inputs, *graph.outputs)} | {**graph.inner_dims}
        declared |= {name: tensor.dims for name, tensor in graph.constants.items()}
        matrices.update(name for name, dims in declared.items() if len(dims or ()) > 1)
        shapes.update(name for name, tensor in graph.constants.items() if _is_shape(tensor))
    for function in model.functions.values():
        matrices.difference_update(function.inputs)
    for node in nodes:
        if node.op in _PRODUCTS and matrices.isdisjoint(node.inputs[1:2]):
            return True
        value = node.attributes.get("value")
        if _is_shape(value) or (node.op == "Concat" and len(node.inputs) > 1):
            shapes.update(node.outputs)
        order = node.attributes.get("perm")
        if (
            node.op in ("Flatten", "Gemm")
            or (isinstance(value, Tensor) and len(value.dims or ()) > 1)
            or (isinstance(order, tuple) and len(order) > 1)
            or (node.op in _KEEPS_AXES and not matrices.isdisjoint(node.inputs))
            or (node.op in _PRODUCTS and matrices.issuperset(node.inputs))
            or (node.op in ("Expand", "Reshape") and not shapes.isdisjoint(node.inputs[1:]))
        ):
            matrices.update(node.outputs)
    return False


def _has_half_precision(model: Model, nodes: Sequence[Node]) -> bool:
    """Whether an input, a constant or the result of a Cast has half precision."""
    graphs = list(all_graphs(model))
    return (
        any(given.dtype in _HALF for graph in graphs for given in graph.inputs)
        or any(constant.dtype in _HALF for graph in graphs for constant in graph.constants.values())
        or any(node.op == "Cast" and node.attributes.get("to") in _HALF for node in nodes)
    )


def _multiplies_cast(model: Model, nodes: Sequence[Node]) -> bool:
    """Whether an operand of a product may be the result of a Cast after other optimizers removed nodes between."""
    makers = makers_of(nodes)
    passed = {name for function in model.functions.values() for name in function.inputs}
    pending = [name for node in nodes if node.op in _PRODUCTS for name in node.inputs]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        maker = makers.get(name)
        if name in seen:
            continue
        seen.add(name)
        if name in passed or (maker is not None and (maker.op in ("Cast", "If") or maker.domain not in _KNOWN)):
            return True
        if maker is not None and maker.op in _REMOVABLE:
            pending += maker.inputs
    return False


def _compares_with_padding(nodes: Sequence[Node]) -> bool:
    """Whether a MaxPool may find that its padding, which an operator Pad adds, is larger than the entries beside it."""
    makers = makers_of(nodes)
    for node in nodes:
        pad = _made_by("Pad", node.inputs, makers) if node.op == "MaxPool" else None
        if pad is not None:
            padded = makers.get(pad.inputs[0])
            if padded is None or padded.op not in _NEVER_NEGATIVE:
                return True
    return False


def _has_graph_that_reads_results(model: Model, nodes: Sequence[Node]) -> bool:
    """Whether a graph of a node reads from outside what another node makes, or what a call passes to a function."""
    made = {name for node in nodes for name in node.outputs}
    made.update(name for function in model.functions.values() for name in function.inputs)
    return any(not made.isdisjoint(islice(names_read(node), len(node.inputs), None)) for node in nodes)


def _has_wide_scales(model: Model, nodes: Sequence[Node]) -> bool:
    """Whether a product of quantized matrices may have scales other than one number, or one for each column."""
    constants = {name: tensor for graph in all_graphs(model) for name, tensor in graph.constants.items()}
    for node in nodes:
        value = node.attributes.get("value")
        if node.op == "Constant" and isinstance(value, Tensor):
            constants[node.outputs[0]] = value
    makers = makers_of(nodes)

    def is_narrow(scale: str, product: Node) -> bool:
        if scale not in constants:
            return _made_by("DynamicQuantizeLinear", (scale,), makers) is not None
        matrix = constants.get(product.inputs[1])
        columns = () if matrix is None else (matrix.dims or ())[-1:]
        *rows, last = (1, *(constants[scale].dims or ()))
        return set(rows) <= {1} and last in (1, *columns)

    for node in nodes:
        for scaled, scales in permutations(node.inputs, 2) if node.op == "Mul" else ():
            cast, product_of_scales = _made_by("Cast", (scaled,), makers), _made_by("Mul", (scales,), makers)
            product = None if cast is None else _made_by("MatMulInteger", cast.inputs, makers)
            if product is None or product_of_scales is None:
                continue
            if not all(is_narrow(scale, product) for scale in product_of_scales.inputs):
                return True
    return False


def _made_by(operator: str, names: Sequence[str], makers: Mapping[str, Node]) -> Node | None:
    """The node that makes the first of these tensors, if it has this operator."""
    maker = makers.get(names[0]) if names else None
    return maker if maker is not None and maker.op == operator else None


def _takes_any_image(model: Model) -> bool:
    """Whether an input may be an image of any size."""
    return any(not isinstance(size, int) for declared in model.graph.inputs for size in (declared.dims or ())[2:])


def _is_shape(value: object) -> bool:
    return isinstance(value, Tensor) and value.dims is not None and len(value.dims) == 1 and value.dims[0] > 1
