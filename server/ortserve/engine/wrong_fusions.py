"""Fusions of ONNX Runtime that change the results of a model."""

from typing import Final

from ortserve.model_file.graph import Model, Tensor, all_graphs, all_nodes

_TRANSPOSED_PRODUCT: Final = "MatmulTransposeFusion"
_OF_ONE_OPERAND: Final = frozenset(
    {"Abs", "Cast", "Exp", "Identity", "Neg", "Relu", "Sigmoid", "Softmax", "Sqrt", "Tanh"}
)
"""Operators whose result has the axes of their operand."""


def wrong_fusions(model: Model) -> tuple[str, ...]:
    """The names of the optimizers that must not run for this model.

    ONNX Runtime 1.31.1 joins Transpose and MatMul from the level "extended" on, also where other optimizers have moved
    the Transpose. If the second operand is a vector, as in the attention pooling of texts, the product is wrong,
    because it reads the matrix in its old order. Vectors are found where the file declares them, as weights, constants
    and inputs, and behind a few operators.
    """
    nodes = list(all_nodes(model))
    if not any(node.op == "Transpose" for node in nodes):
        return ()
    vectors: set[str] = set()
    for graph in all_graphs(model):
        vectors.update(name for name, tensor in graph.constants.items() if _is_vector(tensor))
        vectors.update(declared.name for declared in graph.inputs if len(declared.dims or ()) == 1)
    for node in nodes:
        value = node.attributes.get("value")
        is_constant = node.op == "Constant" and (_is_vector(value) or "value_floats" in node.attributes)
        if is_constant or node.op == "Squeeze" or (node.op in _OF_ONE_OPERAND and vectors.issuperset(node.inputs)):
            vectors.update(node.outputs)
        elif node.op == "MatMul" and not vectors.isdisjoint(node.inputs[1:]):
            return (_TRANSPOSED_PRODUCT,)
    return ()


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.dims is not None and len(value.dims) == 1
