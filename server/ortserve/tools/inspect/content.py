"""Describes the content of a model file. Weights are not read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ortserve.core.signature import TensorSpec
from ortserve.model_file.graph import ELEMENT_TYPES, FLOAT, INT64, STRING, Model, Node, Tensor, all_graphs, all_nodes
from ortserve.paths import is_file
from ortserve.tools.inspect.result import Content, TensorInfo, Weights
from ortserve.tools.opening import OpenModel

_VALUES: Final = {
    **dict.fromkeys(("value_float", "value_floats"), FLOAT),
    **dict.fromkeys(("value_int", "value_ints"), INT64),
    **dict.fromkeys(("value_string", "value_strings"), STRING),
}
"""Element types of the values of ``Constant`` that are no tensors, by attribute."""
_NUMPY_NAMES: Final = {"float": "float32", "double": "float64"}


def describe_content(opened: OpenModel) -> Content:
    """The content of a model's file."""
    path, model, session = opened.subject.path, opened.graph, opened.session
    external = {name: path.parent / name for name in sorted(model.external_files)}
    return Content(
        file_nbytes=path.stat().st_size,
        # A file that only unused weights refer to may be missing.
        external_nbytes={name: file.stat().st_size for name, file in external.items() if is_file(file)},
        producer=session.get_modelmeta().producer_name,
        opsets={domain or "ai.onnx": version for domain, version in model.opsets.items()},
        operators=nodes_by_operator(model),
        weights=count_weights(model),
        initializers_as_inputs=[one.name for one in session.get_overridable_initializers()],
    )


def describe_tensors(specs: Sequence[TensorSpec]) -> list[TensorInfo]:
    """The tensors of a signature."""
    found = []
    for spec in specs:
        sizes = [name or size for size, name in zip(spec.shape, spec.dim_names, strict=True)]
        shape = None if spec.has_any_shape else sizes
        found.append(TensorInfo(spec.name, spec.datatype.value, shape, spec.batch_axis, spec.is_optional))
    return found


def nodes_by_operator(model: Model) -> dict[str, int]:
    """Nodes by operator, the most frequent first."""
    return dict(Counter(operator_name(node) for node in all_nodes(model)).most_common())


def count_weights(model: Model) -> list[Weights]:
    """The constants by element type: initializers and the values of ``Constant`` nodes, the most bytes first.

    Weights of tree ensembles and support vector machines, which are attributes, are not counted.
    """
    sizes: dict[int, list[int]] = {}
    for tensor in _constants(model):
        sizes.setdefault(tensor.dtype, []).append(prod(tensor.dims or ()))
    found = []
    for dtype, counts in sizes.items():
        name, bits = ELEMENT_TYPES.get(dtype, (f"type {dtype}", 0))
        nbytes = sum(-(-count * bits // 8) for count in counts)  # each tensor begins at a byte of its own
        found.append(Weights(_NUMPY_NAMES.get(name, name), len(counts), sum(counts), nbytes))
    return sorted(found, key=lambda one: one.nbytes, reverse=True)


def operator_name(node: Node) -> str:
    """The operator of a node, with its domain unless this is ONNX's."""
    return f"{node.domain}.{node.op}" if node.domain else node.op


def described(node: Node) -> str:
    """The operator of a node, and its name or the name of its first output."""
    name = node.name or next((output for output in node.outputs if output), "")
    return f"{operator_name(node)} '{name}'" if name else operator_name(node)


def _constants(model: Model) -> Iterator[Tensor]:
    for graph in all_graphs(model):
        yield from graph.constants.values()
    for node in all_nodes(model):
        if node.op == "Constant":
            for name, value in node.attributes.items():
                if isinstance(value, Tensor):
                    yield value
                elif name in _VALUES:
                    yield Tensor(_VALUES[name], (len(value),) if isinstance(value, tuple) else ())
