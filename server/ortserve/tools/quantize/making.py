"""Makes quantized models by ``onnxruntime.quantization``.

Runs in a process of its own: the library prints, writes to the root logger, and uses three times the memory of the
weights.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import chdir
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, numpy_helper, version_converter
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    create_calibrator,
    quant_pre_process,
    quantize_dynamic,
    quantize_static,
    save_tensors_data,
)
from onnxruntime.quantization.onnx_model import ONNXModel

from ortserve.errors import invalid_input
from ortserve.tools.quantize.plan import needed_opset
from ortserve.tools.quantize.result import Settings

LARGE_NBYTES: Final = 1 << 30
"""Models from this size on get a separate file of weights: protobuf is limited to 2 GiB, and some steps enlarge a
model."""

_TYPES: Final = {
    "int8": QuantType.QInt8,
    "uint8": QuantType.QUInt8,
    "int16": QuantType.QInt16,
    "uint16": QuantType.QUInt16,
}
_METHODS: Final = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
_ENTROPY_BINS: Final = 512
"""Bins of the histograms. ONNX Runtime's default, 128, is also the number that it merges them into, so the whole range
would be the only choice. The search takes time in proportion to the square of the number."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready for quantization.

    Attributes:
        path: The file.
        is_large: Whether its weights are in a separate file.
        dtypes: Known element types of the values of the main graph.
        notes: Changes that the user should know.
    """

    path: Path
    is_large: bool
    dtypes: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def ranges(self) -> Path:
        """The file for the ranges of activations."""
        return self.path.with_name("ranges.json")


def prepare(source: Path, folder: Path, settings: Settings, nbytes: int) -> PreparedModel:
    """Bring a model into the form that the library expects: names for all nodes, constants folded, shapes inferred.

    Opsets that cannot hold the result are converted. Gemm becomes MatMul and Add, except in mode ``static``.

    Args:
        source: The model.
        folder: An empty folder with an absolute path, for the prepared model.
        settings: The settings of the quantization.
        nbytes: Size of the weights.

    Raises:
        ServeError: invalid_input: the model cannot be converted.
    """
    is_large = nbytes >= LARGE_NBYTES
    notes: list[str] = []
    model = onnx.load(source)
    opset = needed_opset(settings)
    own = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), opset)
    if own < opset:
        model = _converted(model, own, opset)
        notes.append(f"converted from opset {own} to {opset}")
    for graph in _graphs(model.graph):
        del graph.value_info[:]  # wrong shapes from exporters break the inference of other shapes
    _name_nodes(model)
    ends = {value.name: deepcopy(value) for value in (*model.graph.input, *model.graph.output)}
    named = folder / "named.onnx"
    _save(model, named, is_large=is_large)
    del model  # the inference has copies of its own
    path = _infer_shapes(named, is_large=is_large)
    if path == named:
        notes.append("quantized without inference of shapes, which failed")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        if value.name in ends:  # old IR versions list weights as inputs, also those that the inference has folded
            value.CopyFrom(ends[value.name])  # it renames free dimensions, by which the server finds the rows
    if settings.mode != "static":
        _untie_weights(model)
        ONNXModel(model).replace_gemm_with_matmul()
    _name_nodes(model)
    used = {node.domain for graph in _graphs(model.graph) for node in graph.node} | {"", "ai.onnx"}
    used |= {node.domain for function in model.functions for node in function.node}
    kept = [one for one in model.opset_import if one.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    for file in folder.iterdir():
        file.unlink()
    ready = folder / "prepared.onnx"
    _save(model, ready, is_large=is_large)
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    dtypes = {value.name: value.type.tensor_type.elem_type for value in values}
    return PreparedModel(ready, is_large, dtypes, tuple(notes))


def _infer_shapes(named: Path, *, is_large: bool) -> Path:
    """Write a file with inferred shapes and folded constants. Returns ``named`` if inference fails in both ways."""
    path = named.with_name("inferred.onnx")
    ways: tuple[dict[str, bool], ...] = ({}, {"skip_symbolic_shape": True})
    for options in ways[is_large:]:  # the symbolic inference fails on many newer exports, and takes memory
        try:
            with chdir(named.parent):  # a failed inference leaves its model in the current folder
                quant_pre_process(named, path, save_as_external_data=is_large, **options)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - the library raises errors of any class
            path.unlink(missing_ok=True)
        else:
            return path
    return named


def _untie_weights(model: ModelProto) -> None:
    """Replace transposed weights of Gemm that have other uses, too, by a copy that is not transposed.

    The library transposes a weight in place, once for each Gemm that it turns into MatMul.
    """
    graphs = list(_graphs(model.graph))
    uses = Counter(name for graph in graphs for node in graph.node for name in node.input)
    uses.update(value.name for graph in graphs for value in graph.output)
    tied = {name for name, count in uses.items() if count > 1}
    weights = {tensor.name: (tensor, graph) for graph in graphs for tensor in graph.initializer if tensor.name in tied}
    for node in (node for graph in graphs for node in graph.node if node.op_type == "Gemm"):
        transposed = next((one for one in node.attribute if one.name == "transB" and one.i), None)
        if transposed is None or node.input[1] not in weights:
            continue
        name = node.input[1]
        tensor, graph = weights[name]
        own = f"{name}_untied"
        if own not in weights:
            graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(tensor).T, own))
            weights[own] = graph.initializer[-1], graph
        node.input[1] = own
        transposed.i = 0
        uses[name] -= 1
        if not uses[name]:
            graph.initializer.remove(tensor)
            for value in [one for one in graph.input if one.name == name]:  # old IR versions list weights as inputs
                graph.input.remove(value)


def calibrate(prepared: PreparedModel, settings: Settings, samples: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Run the model with samples and write the ranges of its activations to ``PreparedModel.ranges``.

    Only the activations of one sample are in memory at a time.

    Raises:
        ServeError: invalid_input: the model rejects the inputs.
    """
    calibrator = create_calibrator(
        prepared.path,
        list(settings.operators),
        augmented_model_path=str(prepared.path.with_name("augmented.onnx")),
        calibrate_method=_METHODS[settings.calibrator],
        use_external_data_format=prepared.is_large,
        extra_options={"num_bins": _ENTROPY_BINS} if settings.calibrator == "entropy" else {},
    )
    for sample in samples:
        calibrator.collect_data(_OneSample(sample))
    save_tensors_data(calibrator.compute_data(), prepared.ranges)


class _OneSample:
    """A data reader of the library, with one sample."""

    def __init__(self, sample: Mapping[str, np.ndarray]) -> None:
        self._left: Final = [dict(sample)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def make(
    prepared: PreparedModel, target: Path, settings: Settings, nodes: Mapping[str, str], passing: Iterable[str] = ()
) -> None:
    """Write a quantized model.

    Args:
        prepared: The model, after ``calibrate`` in mode ``static``.
        target: The new file. The weights of a large model go to a file beside it.
        settings: How to quantize.
        nodes: Operators of the nodes to quantize, by the names of the nodes; at least one.
        passing: Names of nodes that are quantized, too, if their inputs are.
    """
    if settings.mode == "weights":
        _make_weights(prepared, target, settings, nodes)
        return
    common = {
        "weight_type": _TYPES[settings.weights],
        "per_channel": settings.per_channel,
        "op_types_to_quantize": list(settings.operators),
        "nodes_to_quantize": [*nodes, *passing],
        "reduce_range": settings.reduce_range,
        "use_external_data_format": prepared.is_large,
    }
    if settings.mode == "dynamic":
        quantize_dynamic(prepared.path, target, **common)
        return
    quantize_static(
        prepared.path,
        target,
        None,
        activation_type=_TYPES[settings.activations],
        calibrate_method=_METHODS[settings.calibrator],
        calibration_cache_path=prepared.ranges,
        extra_options={"ActivationSymmetric": settings.activations.startswith("int")},
        **common,
    )


def _make_weights(prepared: PreparedModel, target: Path, settings: Settings, nodes: Mapping[str, str]) -> None:
    # Imported here: it takes 0.3 s, and only weights in blocks need it.
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    gathers = [name for name, operator in nodes.items() if operator == "Gather"]
    operators = ("MatMul", "Gather") if settings.bits == 4 else ("MatMul",)
    if settings.bits == 8 and gathers:  # the block quantizer supports 8 bits for MatMul only
        with TemporaryDirectory() as folder:
            path = Path(folder) / "gathers.onnx"
            chosen = {"op_types_to_quantize": ["Gather"], "nodes_to_quantize": gathers}
            quantize_dynamic(prepared.path, path, use_external_data_format=prepared.is_large, **chosen)
            model = onnx.load(path)
    else:
        model = onnx.load(prepared.path)
    every = (node for graph in _graphs(model.graph) for node in graph.node)
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=settings.bits,
        block_size=settings.block,
        accuracy_level=4 if settings.bits == 8 else None,  # 8 bits in fp32 ran at half the speed
        nodes_to_exclude=[node.name for node in every if node.op_type in operators and node.name not in nodes],
        quant_format=QuantFormat.QOperator,
        op_types_to_quantize=operators,
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), prepared.is_large)


def _converted(model: ModelProto, own: int, opset: int) -> ModelProto:
    try:
        return version_converter.convert_version(model, opset)
    except Exception as error:  # noqa: BLE001 - the converter has no class of errors
        reason = str(error).strip().splitlines()
        raise invalid_input(
            f"expected opset {opset} for these settings, the model has {own}, and cannot be converted: "
            f"{reason[0] if reason else type(error).__name__}; export it again, or give --per-tensor or --ops MatMul"
        ) from None


def _name_nodes(model: ModelProto) -> None:
    """Give each node a unique name. New names are made of the operator and a number, as those of ONNX Runtime."""
    nodes = [node for graph in _graphs(model.graph) for node in graph.node]
    taken = {node.name for node in nodes}
    seen = {""}
    for number, node in enumerate(nodes):
        if node.name in seen:
            node.name = f"{node.name or node.op_type}_{number}"
            while node.name in taken:
                node.name += "_"
            taken.add(node.name)
        seen.add(node.name)


def _graphs(graph: GraphProto) -> Iterable[GraphProto]:
    """A graph, and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
            for inner in attribute.graphs:
                yield from _graphs(inner)


def _save(model: ModelProto, path: Path, *, is_large: bool) -> None:
    onnx.save_model(model, path, save_as_external_data=is_large, location=f"{path.name}.data", convert_attribute=False)
