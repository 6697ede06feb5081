"""Reads the nodes that each execution provider takes, and the optimized graph of a model."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnxruntime as ort

from ortserve.engine.placement import COPIES, count_operators, describe_elsewhere, total_nodes
from ortserve.engine.provider_options import AZURE, OPENVINO
from ortserve.engine.providers import full_name
from ortserve.engine.runtime import Runtime
from ortserve.engine.scratch import scratch_folder
from ortserve.errors import ServeError
from ortserve.model_file.graph import UNREADABLE, Model, all_nodes
from ortserve.model_file.reading import read_model
from ortserve.tools.inspect.content import described, nodes_by_operator
from ortserve.tools.inspect.result import Placement
from ortserve.tools.opening import OpenModel, open_model, saving_graph
from ortserve.tools.subject import Subject


@dataclass(frozen=True, slots=True)
class ValueType:
    """The inferred element type and sizes of a value. Free sizes are 0."""

    dtype: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Optimized:
    """A graph as ONNX Runtime optimized it.

    Attributes:
        model: The graph without weights; that of the file if the optimized one cannot be saved.
        is_saved: Whether the optimized graph could be saved.
        values: The values of the main graph by name, as far as ``onnx`` infers them.
    """

    model: Model
    is_saved: bool
    values: Mapping[str, ValueType] = field(default_factory=dict)


def wishes(subject: Subject) -> list[str]:
    """Full names of the execution providers that the configuration or the command line names."""
    return [full_name(name) for name in subject.options.execution_providers]


def providers_here(subject: Subject) -> list[str]:
    """Full names of the available execution providers, and of those that are asked for."""
    runtime, wanted = Runtime(), wishes(subject)
    offered = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    known = dict.fromkeys([*wanted, OPENVINO, *offered])
    return [name for name in known if name in wanted or (name != AZURE and not runtime.offer(name).problem)]


def place(subject: Subject, provider: str) -> tuple[Placement, Optimized]:
    """Open a model on one provider, with the CPU for the other nodes, and read the placement of its nodes."""
    try:
        opened, optimized = open_optimized(subject, provider)
    except ServeError as error:
        problem = error.message.removeprefix(f"{subject.path}: ")
        failed = Placement(provider, problem, nodes={}, operators={}, elsewhere="", copies=None, fused=None)
        return failed, Optimized(UNREADABLE, is_saved=False)
    return describe_placement(opened, optimized), optimized


def open_optimized(subject: Subject, provider: str, level: str | None = None) -> tuple[OpenModel, Optimized]:
    """Open a model and read its optimized graph.

    Args:
        subject: The model on disk.
        provider: The execution provider. The CPU runs the other nodes.
        level: Level of graph optimization; None for the configured one.

    Raises:
        ServeError: As ``open_model``.
    """
    with scratch_folder() as folder:
        file = folder / "optimized.onnx"
        settings = saving_graph(read_model(subject.path), subject.options.session.entries, file)
        if level is not None:
            settings["graph_optimization"] = level
        try:
            opened = open_model(subject, provider=provider, settings=settings)
        except ServeError:  # providers that compile nodes cannot save the graph
            opened = open_model(subject, provider=provider)
            return opened, Optimized(opened.graph, is_saved=False)
        return opened, Optimized(read_model(file), is_saved=True, values=_infer_values(file))


def describe_placement(opened: OpenModel, optimized: Optimized) -> Placement:
    """The placement that a session reports."""
    provider, operators = opened.choice.name, count_operators(opened.session)
    copies = [described(node) for node in all_nodes(optimized.model) if node.op in COPIES]
    return Placement(
        provider,
        problem="",
        nodes=total_nodes(operators),
        operators={name: dict(kinds) for name, kinds in operators.items()},
        elsewhere=describe_elsewhere(provider, operators),
        copies=copies if optimized.is_saved else None,
        fused=nodes_by_operator(optimized.model) if optimized.is_saved else None,
    )


def _infer_values(file: Path) -> dict[str, ValueType]:
    model = onnx.load(file, load_external_data=False)
    with suppress(onnx.shape_inference.InferenceError):  # it knows fewer operators than ONNX Runtime
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = model.graph
    found = {one.name: ValueType(one.data_type, tuple(one.dims)) for one in graph.initializer}
    for one in (*graph.input, *graph.output, *graph.value_info):
        tensor = one.type.tensor_type
        found[one.name] = ValueType(tensor.elem_type, tuple(size.dim_value for size in tensor.shape.dim))
    return found
