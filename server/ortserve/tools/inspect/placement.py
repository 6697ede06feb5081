"""Which execution provider runs which nodes: asked of a session on each provider that is here."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from ortserve.engine.placement import count_operators, describe_elsewhere, total_nodes
from ortserve.engine.provider_options import OPENVINO
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runtime import Runtime
from ortserve.errors import ServeError
from ortserve.model_file.graph import UNREADABLE, Model
from ortserve.model_file.reading import read_model
from ortserve.tools.inspect.content import all_nodes, described
from ortserve.tools.inspect.replay import COPIES
from ortserve.tools.inspect.result import Placement
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.subject import Subject

_AZURE: Final = "AzureExecutionProvider"
"""Part of every ONNX Runtime. It takes only operators that call a service of its vendor."""
_WEIGHTS: Final = "session.optimized_model_external_initializers_file_name"


@dataclass(frozen=True, slots=True)
class Optimized:
    """A model as ONNX Runtime runs it on one provider.

    Attributes:
        placement: What the session reports.
        graph: The optimized graph; ``UNREADABLE`` if it cannot be saved.
    """

    placement: Placement
    graph: Model = UNREADABLE


def providers_here(wanted: Sequence[str]) -> list[str]:
    """Full names of the execution providers that sessions can name here, and of those that the user asks for."""
    runtime = Runtime()
    offered = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    known = dict.fromkeys([*wanted, OPENVINO, *offered])
    return [name for name in known if name in wanted or (name != _AZURE and not runtime.offer(name).problem)]


def place(subject: Subject, provider: str) -> Optimized:
    """Open a model on one provider, with the CPU behind it, and read which nodes it takes."""
    try:
        opened, graph = open_optimized(subject, provider)
    except ServeError as error:
        return Optimized(Placement(provider, error.message.removeprefix(f"{subject.path}: "), {}, {}, "", None, None))
    return Optimized(describe_placement(opened, graph), graph)


def open_optimized(subject: Subject, provider: str, level: str | None = None) -> tuple[OpenModel, Model]:
    """Open a model and read its optimized graph, without weights; ``UNREADABLE`` if it cannot be saved.

    Args:
        subject: The model on disk.
        provider: The execution provider, with the CPU behind it.
        level: Of graph optimization; None for the configured one.

    Raises:
        ServeError: As ``open_model``.
    """
    with tempfile.TemporaryDirectory(prefix="ortserve-inspect-") as folder:
        file = Path(folder) / "optimized.onnx"
        entries = dict(subject.options.session.entries)
        if not read_model(subject.path).external_files:  # the graph refers to these
            # ONNX Runtime writes weights of more than 1 KiB into this file, which leads to nothing.
            (Path(folder) / "weights").symlink_to("/dev/null")
            entries[_WEIGHTS] = "weights"
        try:
            settings: dict[str, Any] = {"optimized_model_file": str(file), "entries": entries}
            if level is not None:
                settings["graph_optimization"] = level
            opened = open_model(subject, provider=provider, settings=settings)
        except ServeError:  # providers that compile nodes cannot save the graph
            return open_model(subject, provider=provider), UNREADABLE
        return opened, read_model(file)


def describe_placement(opened: OpenModel, graph: Model) -> Placement:
    """What a session reports."""
    choice: ProviderChoice = opened.choice
    operators = count_operators(opened.session)
    nodes = list(all_nodes(graph))
    return Placement(
        choice.name,
        "",
        total_nodes(operators),
        {name: dict(kinds) for name, kinds in operators.items()},
        describe_elsewhere(choice.name, operators),
        [described(node) for node in nodes if node.op in COPIES] if graph.is_readable else None,
        dict(Counter(operator_name(node.domain, node.op) for node in nodes).most_common())
        if graph.is_readable
        else None,
    )


def operator_name(domain: str, operator: str) -> str:
    """An operator with its domain, unless that is ONNX's."""
    return f"{domain}.{operator}" if domain else operator
