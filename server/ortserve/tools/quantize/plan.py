"""Chooses the settings and the nodes of a quantization, for a processor with given instruction sets. Pure."""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Final

from ortserve.errors import invalid_input
from ortserve.model_file.graph import FLOAT, Model, Node, Tensor, all_graphs, all_nodes
from ortserve.tools.quantize.result import Settings
from ortserve.tools.speed import Speed

_FLOAT16: Final = 10
_NORMALIZATIONS: Final = ("LayerNormalization", "SkipLayerNormalization", "RMSNormalization", "EmbedLayerNormalization")
_DYNAMIC: Final = ("MatMul", "Gather", "LSTM", "Attention", "EmbedLayerNormalization")
"""Operators of mode ``dynamic``. Conv is not one: a dynamically quantized ResNet-18 ran at a third of the speed of
floating point."""
_MULTIPLICATIONS: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PASSING: Final = (
    *("Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Reshape", "Flatten", "Transpose", "Squeeze"),
    *("Unsqueeze", "Concat", "Split", "Slice", "Pad", "Resize"),
)
"""Operators that pass quantized values on. They cost little accuracy, so the ranking leaves them out."""
_WEIGHTS: Final = ("MatMul", "Gather")
_QUANTIZED: Final = re.compile("[Qq]uantize|Integer|^Q(Linear|Ordered|Attention|Gemm|Embed)|MatMulNBits|MatMulBnb4")
"""Matches names of operators that only quantized models have."""
_NCHWC: Final = "com.microsoft.nchwc"
_VNNI: Final = ("avx_vnni", "avx512_vnni", "amx_int8")
_OLDEST_OPSET: Final = 7
"""The oldest opset that ONNX Runtime promises to support."""
_SLOW: Final = ("LSTM", "GRU", "RNN", "Conv")
"""Operators that some modes have no fast kernel for."""
_GEMM_SUFFIX: Final = "_MatMul"
"""Suffix that the library appends to the name of a Gemm that it turns into MatMul and Add."""
_WEIGHT_INPUT: Final = {"Gather": 0, "EmbedLayerNormalization": 2}
"""Index of the weight among the inputs of an operator. Other operators have it as their second input."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes that are quantized at first.

    Attributes:
        nodes: Operators by the names of nodes whose cost is measured, in the order of the graph.
        passing: Names of nodes that are quantized if their inputs are.
        excluded: Names of nodes that the user excluded.
    """

    nodes: Mapping[str, str]
    passing: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


def choose_settings(given: Namespace, model: Model, instruction_sets: Mapping[str, bool]) -> Settings:
    """The settings for a model on a processor. Arguments that are None or empty mean the defaults of the processor.

    On x86 only unsigned activations with signed weights have fast kernels: a static ResNet-18 ran 2.6 times as fast
    with them, and 1.0 times with signed activations, ONNX Runtime's default. On ARM both are fast.

    Raises:
        ServeError: invalid_input: an option does not fit the mode.
    """
    _check_options(given)
    is_arm = "asimd" in instruction_sets
    lacks_vnni = not is_arm and bool(instruction_sets) and not any(instruction_sets.get(name) for name in _VNNI)
    operators = given.operators or _usual_operators(given.mode, model)
    if given.mode == "weights":
        bits = given.bits or 4
        return Settings(
            mode="weights",
            bits=bits,
            block=given.block or 32,
            calibrator="",
            per_channel=True,
            activations="",
            weights=f"uint{bits}",
            reduce_range=False,
            operators=operators,
        )
    is_static = given.mode == "static"
    return Settings(
        mode=given.mode,
        bits=8,
        block=None,
        calibrator=(given.calibrator or "minmax") if is_static else "",
        per_channel=given.per_channel is not False,
        activations=given.activations or ("int8" if is_arm and is_static else "uint8"),
        weights=given.weights or "int8",
        reduce_range=lacks_vnni if given.reduce_range == "auto" else given.reduce_range == "on",
        operators=operators,
    )


def _check_options(given: Namespace) -> None:
    belongs = {
        "--bits": (given.bits, ("weights",)),
        "--block": (given.block, ("weights",)),
        "--calibrator": (given.calibrator, ("static",)),
        "--activations": (given.activations, ("static",)),
        "--weights": (given.weights, ("dynamic", "static")),
        "--per-channel and --per-tensor": (given.per_channel, ("dynamic", "static")),
        "--reduce-range": (given.reduce_range if given.reduce_range != "auto" else None, ("dynamic", "static")),
    }
    for flag, (value, modes) in belongs.items():
        if value is not None and given.mode not in modes:
            raise invalid_input(f"{flag}: expected --mode {' or '.join(modes)}, got {given.mode}")
    if given.block is not None and (given.block < 16 or given.block & (given.block - 1)):
        raise invalid_input(f"--block: expected a power of two from 16, got {given.block}")
    if given.mode == "weights" and (others := [name for name in given.operators if name not in _WEIGHTS]):
        raise invalid_input(f"--ops: expected {' or '.join(_WEIGHTS)} with --mode weights, got {', '.join(others)}")


def _usual_operators(mode: str, model: Model) -> tuple[str, ...]:
    """The default operators of a mode.

    Networks with layer normalization keep additions in floating point: their outliers do not fit 8 bits per tensor.
    """
    if mode == "dynamic":
        return _DYNAMIC
    if mode == "weights":
        return _WEIGHTS
    is_transformer = any(node.op in _NORMALIZATIONS for node in all_nodes(model))
    return _MULTIPLICATIONS if is_transformer else (*_MULTIPLICATIONS, "Add", *_PASSING)


def check_source(model: Model, name: str) -> None:
    """Reject models that cannot be quantized well.

    Raises:
        ServeError: invalid_input, with the reason and a remedy.
    """
    quantized = sorted({node.op for node in all_nodes(model) if _QUANTIZED.search(node.op)})
    if quantized:
        raise invalid_input(f"{name}: expected a floating-point model, it is quantized already: {', '.join(quantized)}")
    if any(node.domain == _NCHWC for node in all_nodes(model)):
        raise invalid_input(
            f"{name}: expected a model as exported, ONNX Runtime has optimized its layout for one processor (operators "
            f"of {_NCHWC}); quantize the model that it was made from"
        )
    constants = [tensor for graph in all_graphs(model) for tensor in graph.constants.values()]
    dtypes = {tensor.dtype for tensor in constants if prod(tensor.dims or ()) > 1}
    if _FLOAT16 in dtypes and FLOAT not in dtypes:
        raise invalid_input(f"{name}: expected weights in float32, got float16; quantize the float32 model instead")
    opset = model.opsets.get("", 0)
    if 0 < opset < _OLDEST_OPSET:
        raise invalid_input(f"{name}: expected opset {_OLDEST_OPSET} or newer, got {opset}; export the model again")


def needed_opset(settings: Settings) -> int:
    """The oldest opset whose operators can represent the result. Models of older opsets are converted."""
    if settings.activations.endswith("16") or (settings.mode == "weights" and "Gather" in settings.operators):
        return 21
    return 13 if settings.per_channel else 11


def find_candidates(
    model: Model, settings: Settings, dtypes: Mapping[str, int], exclude: Iterable[str], name: str
) -> Candidates:
    """The nodes to quantize.

    Args:
        model: The prepared model, in which all nodes have names.
        settings: The settings, with the operators to quantize.
        dtypes: Known element types of the values of the main graph.
        exclude: Names of nodes to leave in floating point.
        name: Name of the source, for errors.

    Raises:
        ServeError: invalid_input: ``exclude`` names no node of the model, or no node can be quantized.
    """
    excluded = {one for asked in exclude for one in _find_node(model, asked)}
    found: dict[str, str] = {}
    passing: list[str] = []
    constants = {name: one for graph in all_graphs(model) for name, one in graph.constants.items()}
    graphs = all_graphs(model) if settings.mode == "weights" else (model.graph,)  # other modes skip inner graphs
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op not in settings.operators or node.name in excluded:
            continue
        if settings.mode == "static" and node.op in _PASSING:
            passing.append(node.name)
        elif _fits(node, settings.mode, constants, dtypes):
            found[node.name] = node.op
    if not found:
        present = sorted({node.op for node in all_nodes(model)})
        shown = ", ".join(present[:12]) + (" and others" if len(present) > 12 else "")
        raise invalid_input(
            f"{name}: nothing to quantize: expected {', '.join(settings.operators)} with constant weights in floating "
            f"point that are not excluded; the model has {shown}"
        )
    return Candidates(found, tuple(passing), tuple(sorted(excluded)))


def _find_node(model: Model, asked: str) -> list[str]:
    names = [node.name for node in all_nodes(model)]
    matching = [name for name in names if name in (asked, f"{asked}{_GEMM_SUFFIX}")]
    if not matching:
        near = ", ".join(get_close_matches(asked, names, 3, 0.4)) or "none with a similar name"
        raise invalid_input(f"--exclude: expected nodes of the model, got '{asked}'; it has {near}")
    return matching


def _fits(node: Node, mode: str, constants: Mapping[str, Tensor], dtypes: Mapping[str, int]) -> bool:
    if mode == "static" and node.op != "Gather":  # also products of two activations
        return any(dtypes.get(output) == FLOAT for output in node.outputs)
    index = _WEIGHT_INPUT.get(node.op, 1)
    weight = constants.get(node.inputs[index]) if index < len(node.inputs) else None
    return weight is not None and weight.dtype == FLOAT and (mode != "weights" or len(weight.dims or ()) == 2)


def left_out(model: Model, settings: Settings) -> list[str]:
    """Notes about nodes that unexpectedly stay in floating point."""
    nodes = list(all_nodes(model))
    notes = []
    if fused := sum(node.domain == "com.microsoft" and node.op not in settings.operators for node in nodes):
        notes.append(
            f"{fused} fused nodes stay in floating point: quantize the model as exported, and optimize it then"
        )
    slow = Counter(node.op for node in nodes if node.op in _SLOW and node.op not in settings.operators)
    text = f"stay in floating point: mode {settings.mode} has no fast kernel for them"
    notes.extend(f"{count} {operator} {text}" for operator, count in slow.items())
    inner = sum(len(graph.nodes) for graph in all_graphs(model)) - len(model.graph.nodes)
    if inner and settings.mode != "weights":
        notes.append(f"{inner} nodes inside of If, Loop and Scan stay in floating point; --mode weights reaches them")
    return notes


def consequences(settings: Settings, share: float, speed: Speed | None, batching_lost: str) -> list[str]:
    """Notes about the properties of a quantized model.

    Args:
        settings: How it was quantized.
        share: Its size divided by the size of the source.
        speed: Its speed compared with the source; None if it was not measured.
        batching_lost: As ``Workbench.batching_lost``.
    """
    notes = []
    if settings.reduce_range:
        notes.append("weights have 7 bits, for processors without VNNI")
    if share >= 1:
        notes.append("the model is not smaller than its source, which has too few weights for a gain")
    if speed is not None and not speed.is_faster:
        how = "slower than" if speed.is_slower else "not faster than"
        gain = "" if share >= 1 else ", and only takes less space"
        notes.append(f"on this machine the model is {how} its source{gain}")
    if batching_lost:
        notes.append(f"the server batches requests for the source, but not for this model: {batching_lost}")
    return notes
