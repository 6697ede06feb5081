"""Describes the content of a model file. Weights are not read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from ortserve.core.signature import TensorSpec
from ortserve.model_file.graph import Model, Node, Tensor, all_graphs, all_nodes
from ortserve.tools.inspect.result import Content, TensorInfo, Weights
from ortserve.tools.opening import OpenModel

_ELEMENTS: Final = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 0), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64), 12: ("uint32", 32),
    13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16), 17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8), 19: ("float8e5m2", 8), 20: ("float8e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4e2m1", 4), 24: ("float8e8m0", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""Name and bits of element types, by their numbers in ``TensorProto.DataType``."""


def describe_content(opened: OpenModel) -> Content:
    """The content of a model's file."""
    path, model, session = opened.subject.path, opened.graph, opened.session
    external = {name: path.parent / name for name in sorted(model.external_files)}
    return Content(
        file_nbytes=path.stat().st_size,
        # A file that only unused weights refer to may be missing.
        external_nbytes={name: file.stat().st_size for name, file in external.items() if file.is_file()},
        producer=session.get_modelmeta().producer_name,
        opsets={domain or "ai.onnx": version for domain, version in model.opsets.items()},
        operators=count_operators(model),
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


def count_operators(model: Model) -> dict[str, int]:
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
        name, bits = _ELEMENTS.get(dtype, (f"type {dtype}", 0))
        nbytes = sum(-(-count * bits // 8) for count in counts)  # each tensor begins at a byte of its own
        found.append(Weights(name, len(counts), sum(counts), nbytes))
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
            yield from (value for value in node.attributes.values() if isinstance(value, Tensor))
