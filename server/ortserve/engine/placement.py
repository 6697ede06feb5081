"""Which execution provider runs which node, read back from a session: what was asked for is not what was done.

As told by what divided the graph among the providers, which happens once the graph is simplified and before nodes are
fused: so these are fewer than the file's nodes, and more than those that run. A profile tells of the latter, but takes
a run to make, and tells of no node that a provider has compiled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import onnxruntime as ort

from ortserve.engine.provider_options import CPU
from ortserve.errors import invalid_input

RECORD_ENTRY: Final = "session.record_ep_graph_assignment_info"
"""The entry of the session's configuration without which a session cannot tell."""

_MOST_OPERATORS: Final = 20
_MOST_LETTERS: Final = 64
_MOST_NODES: Final = 50
_MOST_LETTERS_OF_A_NODE: Final = 128
"""Exporters make names of the modules that a node stands in, one within the other."""
_ONNX_DOMAINS: Final = ("", "ai.onnx")


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Mapping[str, Mapping[str, int]]):
    """Nodes of each operator by execution provider, those with most nodes first, and which nodes they are.

    Attributes:
        operators: What it is as a mapping.
        names: Nodes of each provider, in words: the first ``_MOST_NODES`` that ONNX Runtime tells of.
    """

    operators: Mapping[str, Mapping[str, int]]
    names: Mapping[str, tuple[str, ...]]

    def __getitem__(self, provider: str) -> Mapping[str, int]:
        return self.operators[provider]

    def __iter__(self) -> Iterator[str]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)


def read_placement(session: ort.InferenceSession) -> dict[str, int]:
    """Nodes by execution provider, the provider with most of them first; the session has ``RECORD_ENTRY``."""
    return total_nodes(count_operators(session))


def read_operators(session: ort.InferenceSession) -> dict[str, frozenset[str]]:
    """Which operators each execution provider runs; the session has ``RECORD_ENTRY``."""
    return {name: frozenset(kinds) for name, kinds in count_operators(session).items()}


def count_operators(session: ort.InferenceSession) -> Placement:
    """Nodes of each operator by execution provider, those with most nodes first; the session has ``RECORD_ENTRY``."""
    nodes: dict[str, list[ort.OrtEpAssignedNode]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes.setdefault(part.ep_name, []).extend(part.get_nodes())
    by_nodes = sorted(nodes.items(), key=lambda entry: len(entry[1]), reverse=True)
    return Placement(
        {name: dict(Counter(node.op_type for node in found).most_common()) for name, found in by_nodes},
        {name: tuple(_describe_node(node) for node in found[:_MOST_NODES]) for name, found in by_nodes},
    )


def total_nodes(operators: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Nodes by execution provider, of what ``count_operators`` gave."""
    return {name: sum(kinds.values()) for name, kinds in operators.items()}


def left_to_cpu(provider: str, operators: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
    """The nodes, by operator, that the chosen provider leaves to the CPU; nothing where that is the CPU itself."""
    return operators.get(CPU, {}) if provider != CPU else {}


def check_placement(name: str, nodes: Mapping[str, int]) -> None:
    """A provider that starts and then takes no node leaves the model to others without a word; here that is an error.

    Raises:
        ServeError: invalid_input, saying who took the nodes.
    """
    if nodes and name not in nodes:
        told = ", ".join(f"{other} takes {count}" for other, count in nodes.items())
        raise invalid_input(f"execution_providers: {name} takes none of the model's nodes; {told}")


def describe_placement(nodes: Mapping[str, int]) -> str:
    """In words, for the model's metadata."""
    return ", ".join(f"{name}: {count}" for name, count in nodes.items())


def describe_operators(kinds: Mapping[str, int]) -> str:
    """In words: ``12 MatMul, 4 Relu``. However many operators there are and however they are called, it is short."""
    told = [f"{count} {name[:_MOST_LETTERS]}" for name, count in list(kinds.items())[:_MOST_OPERATORS]]
    others = len(kinds) - len(told)
    return ", ".join(told) + (f" and {others} other operators" if others else "")


def describe_elsewhere(provider: str, operators: Placement) -> str:
    """In words, which nodes others run than the chosen provider; empty where there are none.

    ``CPUExecutionProvider: NonZero '/head/NonZero', com.microsoft.FastGelu 'gelu_1' and 12 more``: at most
    ``_MOST_NODES`` of each provider.
    """
    elsewhere = {other: sum(kinds.values()) for other, kinds in operators.items() if other != provider}
    return "; ".join(
        f"{other}: {', '.join(operators.names[other])}"
        + (f" and {count - _MOST_NODES} more" if count > _MOST_NODES else "")
        for other, count in elsewhere.items()
    )


def _describe_node(node: ort.OrtEpAssignedNode) -> str:
    operator = node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}.{node.op_type}"
    try:
        name = node.name
    except UnicodeDecodeError:  # which ONNX Runtime does not check, and needs for nothing
        name = ""
    return f"{operator[:_MOST_LETTERS]} '{name[:_MOST_LETTERS_OF_A_NODE]}'" if name else operator[:_MOST_LETTERS]
