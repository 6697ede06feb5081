"""The step that converts a model to 16 bits. Nodes whose conversion would make the error too large stay in fp32."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ortserve.core.agreement import ErrorBound
from ortserve.errors import ServeError, invalid_input
from ortserve.tools.compare.measure import measure_agreement
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.opening import OpenModel
from ortserve.tools.optimize.files import from_proto, save
from ortserve.tools.speed import Timed

if TYPE_CHECKING:
    import onnx_ir

_LARGEST_HALF: Final = 65504.0
_MAX_TRIALS: Final = 40
_MAX_NAMED: Final = 10
"""Maximum number of nodes that notes name."""
_DELICATE: Final = frozenset(
    {
        *("Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceL2"),
        *("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"),
        *("SkipSimplifiedLayerNormalization", "EmbedLayerNormalization", "InstanceNormalization", "CumSum"),
    }
)
"""Operators that amplify small errors or sum many numbers. The search tries to keep these in fp32 first."""


def convert(
    source: Path, target: Path, inputs: Path | None, *, name: str, bound: ErrorBound, opening: Timed
) -> tuple[str, ...]:
    """Convert a model to 16 bits, keeping as few nodes in fp32 as the search finds.

    Args:
        source: The model.
        target: The new file.
        inputs: Samples; None for synthetic ones.
        name: ``fp16`` or ``bf16``.
        bound: The largest error that is accepted.
        opening: How to open models; its own model is not used.

    Returns:
        Notes for people: the nodes that stay in fp32, and why.

    Raises:
        ServeError: invalid_input: ONNX Runtime cannot run a converted model here, or no node can be converted.
    """
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST  # only this process needs it

    first = opening.at(source).open()
    samples = choose_inputs(first, inputs)
    model = _with_names(onnx.load(source))
    types, largest = _observe(model, target, source, opening, first, samples.take(1, 0))
    overflowing: dict[str, float] = {}
    candidates = {}
    for node in model.graph.node:
        values = {*node.input, *node.output}
        most = max((largest.get(value, 0.0) for value in values), default=0.0)
        if name == "fp16" and not most <= _LARGEST_HALF:
            overflowing[node.name] = most
        elif values & types and node.op_type not in DEFAULT_OP_BLOCK_LIST:
            candidates[node.name] = node.op_type
    if not candidates:
        raise invalid_input(f"--precision {name}: no node computes with fp32 numbers that {name} can hold")

    operators = {node.name: node.op_type for node in model.graph.node}

    def make(half: Collection[str]) -> None:
        kept = [node for node in operators if node not in half]
        save(_converted(model, kept, types, name), target, source)

    def error_of(half: Collection[str]) -> float:
        make(half)
        converted = opening.at(target).open()
        return measure_agreement(first, converted, samples).error(bound.measure)

    try:
        delicate = {node for node, operator in candidates.items() if operator in _DELICATE}
        half, reasons = search(list(candidates), delicate, error_of, bound.most, _MAX_TRIALS)
    except ServeError as error:
        text = error.message.removeprefix(f"{target}: ")
        raise invalid_input(
            f"--precision {name}: cannot run on this machine, so it cannot be checked: {text}"
        ) from None
    if not half:
        raise invalid_input(f"--precision {name}: no node can be converted within {bound}")
    make(half)
    kept = {
        node: f"values up to {value:.3g}, above the maximum 65,504 of {name}" for node, value in overflowing.items()
    }
    kept |= {node: f"error {error:.2g} in {name}" for node, error in reasons.items()}
    notes = [f"{len(half)} nodes in {name}, {len(kept)} kept in fp32"]
    notes += [f"fp32: {operators[node]} '{node}', {why}" for node, why in list(kept.items())[:_MAX_NAMED]]
    return (*notes, *([f"and {len(kept) - _MAX_NAMED} more in fp32"] if len(kept) > _MAX_NAMED else ()))


def search(
    names: Sequence[str],
    delicate: Collection[str],
    error_of: Callable[[Collection[str]], float],
    most: float,
    trials: int,
) -> tuple[set[str], dict[str, float]]:
    """Find nodes that can be converted together within the bound.

    The search tries all nodes first, then the robust and the delicate ones apart. A set that fails is divided in half,
    in the order of the graph. Each accepted set was measured together with those accepted before, so the result is
    within the bound.

    Args:
        names: The nodes, in the order of the graph.
        delicate: The nodes of these that are likely to need fp32.
        error_of: Computes the error with a set of nodes converted.
        most: The bound.
        trials: Maximum number of calls of ``error_of``.

    Returns:
        The nodes to convert, and for each other node that was tried the error with the smallest set that contained it.
    """
    half: set[str] = set()
    reasons: dict[str, float] = {}
    robust, rest = ([name for name in names if (name in delicate) is wanted] for wanted in (False, True))
    waiting = [list(names)]
    is_first = True
    while waiting and trials:
        part = waiting.pop(0)
        trials -= 1
        error = error_of(half.union(part))
        if error <= most:
            half.update(part)
        else:
            reasons |= dict.fromkeys(part, error)
            if is_first and robust and rest:
                waiting = [robust, rest]
            elif len(part) > 1:
                waiting[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
        is_first = False
    return half, {name: error for name, error in reasons.items() if name not in half}


def _with_names(model: ModelProto) -> ModelProto:
    """Give each node a unique name, by which the search chooses it."""
    taken: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{number}_{node.name}"
        taken.add(node.name)
    return model


def _observe(
    model: ModelProto, path: Path, source: Path, opening: Timed, first: OpenModel, arrays: Sequence[np.ndarray]
) -> tuple[set[str], dict[str, float]]:
    """The fp32 values of a model, as ONNX Runtime types them, and their largest absolute elements for some inputs."""
    observed = ModelProto()
    observed.CopyFrom(model)
    outputs = {output.name for output in model.graph.output}
    values = dict.fromkeys(name for node in model.graph.node for name in node.output if name and name not in outputs)
    observed.graph.output.extend(ValueInfoProto(name=name) for name in values)
    save(from_proto(observed), path, source)
    session = replace(opening.at(path), settings={"graph_optimization": "none"}).open().session
    feeds = dict(zip((spec.name for spec in first.signature.inputs), first.for_model(arrays), strict=True))
    floats = [output.name for output in session.get_outputs() if output.type == "tensor(float)"]
    values_by_input = {one.name: feeds[one.name] for one in session.get_inputs()}
    results = session.run(floats, values_by_input) if floats else []  # no names mean all outputs
    largest = {name: float(np.abs(result).max(initial=0)) for name, result in zip(floats, results, strict=True)}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            largest[tensor.name] = float(np.abs(numpy_helper.to_array(tensor)).max(initial=0))
    return {*largest} | {one.name for one in session.get_inputs() if one.type == "tensor(float)"}, largest


def _converted(model: ModelProto, kept: Sequence[str], types: Collection[str], name: str) -> "onnx_ir.Model":
    """A copy in which all nodes except ``kept`` compute with 16 bits. Inputs and outputs of the model do not change."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copy = ModelProto()
    copy.CopyFrom(model)
    known = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    known.update(tensor.name for tensor in copy.graph.initializer)
    del copy.graph.value_info[:]  # the converter inserts casts at known types; onnx infers fewer than ONNX Runtime
    copy.graph.value_info.extend(
        helper.make_tensor_value_info(one, TensorProto.FLOAT, None) for one in sorted({*types} - known)
    )
    copy = convert_float_to_float16(copy, keep_io_types=True, disable_shape_infer=True, node_block_list=kept)
    # The converter adds a cast of one name for each node with a shared input. Keep one; sorting restores the order.
    nodes = list({tuple(node.output): node for node in reversed(copy.graph.node)}.values())
    del copy.graph.node[:], copy.graph.value_info[:]
    copy.graph.node.extend(nodes[::-1])
    if name == "bf16":
        _to_bfloat16(copy, model)
    converted = from_proto(copy)
    converted.graph.sort()
    return converted


def _to_bfloat16(model: ModelProto, source: ModelProto) -> None:
    """Replace FP16 by BF16. Weights are rounded from those of the source."""
    originals = {tensor.name: tensor for tensor in source.graph.initializer}
    for node in source.graph.node:
        originals |= {f"{node.name}:{one.name}": one.t for one in node.attribute if one.HasField("t")}
    for tensor in model.graph.initializer:
        _round(tensor, originals.get(tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _round(attribute.t, originals.get(f"{node.name}:{attribute.name}"))
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16


def _round(tensor: TensorProto, original: TensorProto | None) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        values = numpy_helper.to_array(original if original is not None else tensor).astype(np.float32)
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.BFLOAT16, values.shape, values.ravel()))
