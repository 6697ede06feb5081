"""Steps, which make a model file from another one. Each returns notes for people, and imports its libraries itself."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import GraphProto, ValueInfoProto

from ortserve.errors import invalid_input
from ortserve.tools.optimize.files import (
    MIN_EXTERNAL_BYTES,
    data_file,
    drop_empty_data,
    from_proto,
    load,
    needs_data_file,
    save,
)
from ortserve.tools.speed import Timed

_LEFT_TO_RUNTIME: Final = ["FusionGemm", "FusionGemmMul", "FusionGemmAdd"]
"""Fusions of ``onnxslim`` that hide biases from ONNX Runtime's own fusions."""

Notes = tuple[str, ...]


def keep_outputs(source: Path, target: Path, names: Sequence[str]) -> Notes:
    """Keep some outputs. Remove the others, and the nodes, weights and inputs that only they need.

    Raises:
        ServeError: invalid_input: the model has no output of such a name.
    """
    from onnx_ir.passes import common

    model = load(source)
    graph = model.graph
    known = [output.name or "" for output in graph.outputs]
    if unknown := [name for name in names if name not in known]:
        raise invalid_input(f"--outputs: expected outputs out of {', '.join(known)}, got {unknown[0]}")
    for output in [output for output in graph.outputs if output.name not in names]:
        graph.outputs.remove(output)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    # Graphs of removed nodes still count as users of what they read.
    used = {value for inner in (graph, *graph.subgraphs()) for value in inner.outputs}
    used.update(value for node in graph.all_nodes() for value in node.inputs if value is not None)
    unused = [value for value in graph.inputs if value not in used]
    for value in unused:
        graph.inputs.remove(value)
    for name in [name for name, value in graph.initializers.items() if value not in used]:
        del graph.initializers[name]
    save(model, target, source)
    if not unused:
        return ()
    return (f"inputs that no node needs any more are removed: {', '.join(value.name or '' for value in unused)}",)


def set_dimensions(source: Path, target: Path, fixed: Mapping[str, int], named: Mapping[tuple[str, int], str]) -> Notes:
    """Name dimensions, and give named ones a size. The new file shares its external data with the old one.

    Args:
        source: The model.
        target: The new file.
        fixed: Sizes by the names of dimensions.
        named: Names of dimensions, by input or output and axis.

    Raises:
        ServeError: invalid_input: the model has no such dimension, or the dimension already has a size.
    """
    model = onnx.load(source, load_external_data=False)
    for (name, axis), word in named.items():
        _name_dimension(model.graph, name, axis, word)
    dims = [dim for value in (*model.graph.input, *model.graph.output) for dim in _dims(value)]
    known = dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param)
    if unknown := [word for word in fixed if word not in known]:
        raise invalid_input(f"--dim: expected dimensions out of {', '.join(known) or 'none'}, got {unknown[0]}")
    for dim in dims:
        if dim.dim_param in fixed:
            dim.dim_value = fixed[dim.dim_param]
    del model.graph.value_info[:]  # sizes of inner values may be those of the free dimensions
    onnx.save(model, target)
    if data_file(source).exists():
        os.link(data_file(source), data_file(target))
    return ()


def _dims(value: ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _name_dimension(graph: GraphProto, name: str, axis: int, word: str) -> None:
    values = {value.name: value for value in (*graph.input, *graph.output)}
    option = f"--name-dim {name}:{axis}={word}"
    if name not in values:
        raise invalid_input(f"{option}: expected an input or output out of {', '.join(values)}")
    dims = _dims(values[name])
    if axis >= len(dims):
        raise invalid_input(f"{option}: expected an axis below {len(dims)}")
    if dims[axis].HasField("dim_value"):
        raise invalid_input(f"{option}: expected a free dimension, its size is {dims[axis].dim_value}")
    before, dims[axis].dim_param = dims[axis].dim_param, word
    for other in (dim for value in values.values() for dim in _dims(value)):
        if before and other.dim_param == before:
            other.dim_param = word


def set_opset(source: Path, target: Path, opset: int) -> Notes:
    """Convert the standard operators to another opset.

    ``onnxscript`` only converts to newer opsets and keeps external data out of memory. ``onnx`` converts the rest.

    Raises:
        ServeError: invalid_input: ``onnx`` cannot convert an operator.
    """
    from onnxscript.version_converter import convert_version

    model = load(source)
    with suppress(ValueError):  # onnxscript does not support the opset
        convert_version(model, opset)
        if model.opset_imports.get("") == opset and all(
            one.version in (None, opset) for one in model.graph.all_nodes()
        ):
            save(model, target, source)
            return ("converted by onnxscript",)
    try:
        converted = onnx.version_converter.convert_version(onnx.load(source), opset)
    except (RuntimeError, ValueError) as error:
        raise invalid_input(f"--opset {opset}: {str(error).splitlines()[0]}") from None
    save(from_proto(converted), target, source)
    return ("converted by onnx",)


def fuse_by_transformers(source: Path, target: Path, kind: str, heads: int, hidden: int) -> Notes:
    """Fuse by ``onnxruntime.transformers``, which recognizes graphs of PyTorch's TorchScript exporter."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions(kind)
    options.use_raw_attention_mask(True)  # the default only keeps the number of ones, which assumes padding at the end
    made = optimize_model(str(source), kind, heads, hidden, optimization_options=options, opt_level=0)
    made.save_model_to_file(str(target), use_external_data_format=needs_data_file(source))
    return ()


def fuse_by_onnxscript(source: Path, target: Path) -> Notes:
    """Fuse by ``onnxscript``, which recognizes graphs of PyTorch's newer exporter."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    save(optimize_for_ort(load(source))[0], target, source)
    return ()


def fold(source: Path, target: Path) -> Notes:
    """Fold constants and remove dead and duplicate nodes by ``onnxscript``'s optimizer, which fuses nothing."""
    from onnxscript import optimizer

    model = load(source)
    optimizer.optimize(model)
    save(model, target, source)
    return ()


def slim(source: Path, target: Path) -> Notes:
    """As ``fold``, by ``onnxslim``, which also merges shape computations, and normalizations into convolutions."""
    import onnxslim

    model = onnxslim.slim(onnx.load(source), skip_fusion_patterns=_LEFT_TO_RUNTIME)
    save(from_proto(model), target, source)
    return ()


def share_weights(source: Path, target: Path) -> Notes:
    """Store equal weights once. Digests decide whether weights are equal."""
    from onnx_ir.passes.common import DeduplicateHashedInitializersPass

    model = load(source)
    before = len(model.graph.initializers)
    DeduplicateHashedInitializersPass()(model)
    save(model, target, source)
    merged = before - len(model.graph.initializers)
    return (f"{merged} duplicate weights",) if merged else ()


def save_optimized(source: Path, target: Path, level: str, opening: Timed, has_data: bool) -> Notes:
    """Save a model as ONNX Runtime optimizes it here.

    Args:
        source: The model.
        target: The new file.
        level: Level of graph optimization.
        opening: How to open the model; its own model is not used.
        has_data: Whether large weights go into ``data_file``. They always do if the source has one: without that key,
            ONNX Runtime would make the new model refer to the data of the old one.
    """
    settings: dict[str, Any] = {"graph_optimization": level, "optimized_model_file": str(target.absolute())}
    if has_data or data_file(source).exists():
        entries = {
            "session.optimized_model_external_initializers_file_name": data_file(target).name,
            "session.optimized_model_external_initializers_min_size_in_bytes": str(MIN_EXTERNAL_BYTES),
        }
        settings["entries"] = {**opening.subject.options.session.entries, **entries}
    replace(opening.at(source), settings=settings).open()
    drop_empty_data(target)
    return ()
