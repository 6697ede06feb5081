"""Steps that change what callers see, as asked: outputs left out, dimensions fixed or named, another opset."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, ValueInfoProto

from ortserve.errors import invalid_input
from ortserve.tools.optimize.files import Made, edit, names_read, save, save_ir


def keep_outputs(source: Path, target: Path, names: Sequence[str]) -> Made:
    """Keep some outputs; nodes, weights and inputs that only the others needed are removed.

    Raises:
        ServeError: invalid_input: there is no such output.
    """
    return Made(edit(source, target, lambda model: _prune(model.graph, names)))


def _prune(graph: GraphProto, names: Sequence[str]) -> tuple[str, ...]:
    outputs = {output.name: output for output in graph.output}
    for name in names:
        if name not in outputs:
            raise invalid_input(f"--outputs: expected outputs out of {', '.join(outputs)}, got {name}")
    needed, kept = set(names), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(names_read(node))
            kept.append(node)
    unused = tuple(value.name for value in graph.input if value.name not in needed)
    _replace(graph.node, kept[::-1])
    _replace(graph.output, [outputs[name] for name in outputs if name in names])
    made = needed.union(*(node.output for node in kept))
    for field in (graph.initializer, graph.input, graph.value_info):
        _replace(field, [one for one in field if one.name in made])
    _replace(graph.sparse_initializer, [one for one in graph.sparse_initializer if one.values.name in needed])
    return (f"inputs that nothing needs any more are removed: {', '.join(unused)}",) if unused else ()


def _replace(field: object, values: Sequence[object]) -> None:
    copies = list(values)
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


def set_dimensions(source: Path, target: Path, fixed: Mapping[str, int], named: Mapping[tuple[str, int], str]) -> Made:
    """Name dimensions, and give named ones a size.

    Args:
        source: The model.
        target: The new one.
        fixed: Sizes by name.
        named: Names by input or output and axis.

    Raises:
        ServeError: invalid_input: there is no such dimension, or it already has a size.
    """

    def change(model: ModelProto) -> None:
        graph = model.graph
        for (name, axis), word in named.items():
            _name(graph, name, axis, word)
        values = (*graph.input, *graph.output)
        known = dict.fromkeys(dim.dim_param for value in values for dim in _dims(value) if dim.dim_param)
        for word, size in fixed.items():
            if word not in known:
                raise invalid_input(f"--dim: expected dimensions out of {', '.join(known) or 'none'}, got {word}")
            for value in values:
                for dim in _dims(value):
                    if dim.dim_param == word:
                        dim.dim_value = size
        del graph.value_info[:]  # sizes of inner values may be those of the free dimensions

    edit(source, target, change)
    return Made()


def _dims(value: ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _name(graph: GraphProto, name: str, axis: int, word: str) -> None:
    values = {value.name: value for value in (*graph.input, *graph.output)}
    option = f"--name-dim {name}:{axis}={word}"
    if name not in values:
        raise invalid_input(f"{option}: expected an input or output out of {', '.join(values)}")
    dims = _dims(values[name])
    if not 0 <= axis < len(dims):
        raise invalid_input(f"{option}: expected an axis below {len(dims)}")
    dim = dims[axis]
    if dim.HasField("dim_value"):
        raise invalid_input(f"{option}: expected a free dimension, its size is {dim.dim_value}")
    before = dim.dim_param
    dim.dim_param = word
    if before:
        for other in (dim for value in values.values() for dim in _dims(value)):
            if other.dim_param == before:
                other.dim_param = word


def set_opset(source: Path, target: Path, opset: int) -> Made:
    """Convert the standard operators to another opset.

    ``onnxscript`` only converts upwards and keeps external data out of memory; ``onnx`` converts the rest.

    Raises:
        ServeError: invalid_input: a converter is missing.
    """
    import onnx_ir  # only the process of this step needs these
    from onnxscript.version_converter import convert_version

    model = onnx_ir.load(source)
    with suppress(ValueError):  # it does not know the opset
        convert_version(model, opset)
        if model.opset_imports.get("") == opset and all(node.version in (None, opset) for node in model.graph):
            save_ir(model, target, source)
            return Made(("converted by onnxscript",), ("onnxscript", "onnx_ir"))
    try:
        converted = onnx.version_converter.convert_version(onnx.load(source), opset)
    except (RuntimeError, ValueError) as error:
        raise invalid_input(f"--opset {opset}: {str(error).splitlines()[0]}") from None
    save(converted, target, source)
    return Made(("converted by onnx",))
