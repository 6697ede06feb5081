"""What a model file contains, from its record: no weights are read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Final

from ortserve.core.signature import TensorSpec
from ortserve.errors import invalid_input
from ortserve.model_file.graph import Graph, Model, Node, Tensor
from ortserve.model_file.protobuf import VARINT, fields, mapped_file, varint
from ortserve.model_file.reading import read_model
from ortserve.tools.inspect.result import Content, ExternalFile, OperatorCount, TensorInfo, Weights

_ELEMENTS: Final = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 0), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64), 12: ("uint32", 32),
    13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16), 17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8), 19: ("float8e5m2", 8), 20: ("float8e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4e2m1", 4), 24: ("float8e8m0", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""Name and bits of an element, by ``TensorProto.DataType``."""


def read_file(path: Path) -> Model:
    """Read a model file and check that it is complete.

    Raises:
        ServeError: invalid_input, if the file is no model, or external data are missing.
    """
    model = read_model(path)
    if not model.is_readable:
        raise invalid_input(f"{path}: expected an ONNX model, it is not one or is truncated")
    for name in sorted(model.external_files):
        if not (path.parent / name).is_file():
            raise invalid_input(f"{path}: expected its external data in {path.parent / name}, which does not exist")
    return model


def describe_content(path: Path, model: Model) -> Content:
    """The content of a file."""
    ir_version, producer = _read_head(path)
    nodes = list(all_nodes(model))
    counts = Counter((node.domain or "ai.onnx", node.op) for node in nodes)
    weights = count_weights(model)
    return Content(
        nbytes=path.stat().st_size,
        ir_version=ir_version,
        producer=producer,
        opsets={domain or "ai.onnx": version for domain, version in model.opsets.items()},
        functions=len(model.functions),
        nodes=len(nodes),
        operators=[OperatorCount(domain, op, count) for (domain, op), count in counts.most_common()],
        parameters=sum(one.parameters for one in weights if one.datatype != "string"),
        weights=weights,
        weights_nbytes=sum(one.nbytes for one in weights),
        external_files=[
            ExternalFile(name, (path.parent / name).stat().st_size) for name in sorted(model.external_files)
        ],
        free_dimensions=_free_dimensions(model),
        # Before version 4 of the format all initializers had to be inputs; ONNX Runtime treats these as constants.
        initializers_as_inputs=[
            declared.name for declared in model.graph.inputs if declared.name in model.graph.constants
        ]
        if ir_version >= 4
        else [],
    )


def describe_tensors(specs: Sequence[TensorSpec]) -> list[TensorInfo]:
    """The tensors of a signature."""
    return [
        TensorInfo(
            spec.name,
            spec.datatype.value,
            None
            if spec.has_any_shape
            else [name or size for size, name in zip(spec.shape, spec.dim_names, strict=True)],
            spec.batch_axis,
            spec.is_optional,
        )
        for spec in specs
    ]


def count_weights(model: Model) -> list[Weights]:
    """The constants by element type: initializers and the values of ``Constant`` nodes, the most bytes first.

    Weights of tree ensembles and support vector machines, which are attributes, are not counted.
    """
    tensors, parameters, bits = Counter[str](), Counter[str](), Counter[str]()
    for tensor in _constants(model):
        name, width = _ELEMENTS.get(tensor.dtype, (f"type {tensor.dtype}", 0))
        count = prod(tensor.dims or ())
        tensors[name] += 1
        parameters[name] += count
        bits[name] += count * width
    found = [Weights(name, tensors[name], parameters[name], -(-bits[name] // 8)) for name in tensors]
    return sorted(found, key=lambda one: one.nbytes, reverse=True)


def all_graphs(model: Model) -> Iterator[Graph]:
    """The main graph, and all graphs that nodes run."""
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        yield graph
        pending += [value for node in graph.nodes for value in node.attributes.values() if isinstance(value, Graph)]


def all_nodes(model: Model) -> Iterator[Node]:
    """The nodes of all graphs and functions."""
    for graph in all_graphs(model):
        yield from graph.nodes
    for function in model.functions.values():
        yield from function.nodes


def described(node: Node) -> str:
    """A node for people: operator, and its name or that of its first output."""
    operator = f"{node.domain}.{node.op}" if node.domain else node.op
    name = node.name or next((output for output in node.outputs if output), "")
    return f"{operator} '{name}'" if name else operator


def _constants(model: Model) -> Iterator[Tensor]:
    for graph in all_graphs(model):
        yield from graph.constants.values()
    for node in all_nodes(model):
        if node.op == "Constant":
            yield from (value for value in node.attributes.values() if isinstance(value, Tensor))


def _free_dimensions(model: Model) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for declared in model.graph.inputs:
        if declared.name in model.graph.constants:
            continue
        for axis, size in enumerate(declared.dims or ()):
            if not isinstance(size, int):
                found.setdefault(size or "-1", []).append(f"{declared.name}[{axis}]")
    return found


def _read_head(path: Path) -> tuple[int, str]:
    """The version of the format, and the program that wrote the file. Field numbers are those of onnx.proto."""
    ir_version, texts = 0, {2: "", 3: ""}
    with mapped_file(path) as data:
        for number, wire_type, (start, end) in fields(data, 0, len(data)):
            if number == 1 and wire_type == VARINT:
                ir_version = varint(data, start)[0]
            elif number in texts:
                texts[number] = str(data[start:end], "utf-8", "replace")
    return ir_version, " ".join(texts.values()).strip()
