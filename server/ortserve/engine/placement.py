"""Which execution provider runs which node, read from a session, because it may differ from the configuration.

ONNX Runtime records the partitioning of the graph, after the graph is simplified and before nodes are fused. So there
are fewer nodes than in the file, and more than run. A profile would show the nodes that run, but needs a run and lacks
nodes that a provider compiled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import onnxruntime as ort

from ortserve.engine.provider_options import CPU
from ortserve.errors import invalid_input

RECORD_ENTRY: Final = "session.record_ep_graph_assignment_info"
"""The session option that makes a session record its placement."""

_MAX_OPERATORS: Final = 20
_MAX_LETTERS: Final = 64
_MAX_NODES: Final = 50
_MAX_LETTERS_OF_A_NODE: Final = 128
"""Long enough for names that exporters build from nested modules."""
_REPEATING: Final = frozenset(("Loop", "Scan"))
COPIES: Final = frozenset(("MemcpyFromHost", "MemcpyToHost"))
"""The operators that ONNX Runtime inserts to copy tensors between the host and a device."""
_ONNX_DOMAINS: Final = ("", "ai.onnx")


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Mapping[str, Mapping[str, int]]):
    """Counts of nodes by execution provider and operator, and names of nodes. Providers with most nodes come first.

    Attributes:
        operators: Counts of nodes by operator, for each provider.
        names: The first ``_MAX_NODES`` nodes of each provider, for messages.
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
    """Counts of nodes by execution provider, the largest first. The session was opened with ``RECORD_ENTRY``."""
    return total_nodes(count_operators(session))


def read_operators(session: ort.InferenceSession) -> dict[str, frozenset[str]]:
    """The operators of each execution provider. The session was opened with ``RECORD_ENTRY``."""
    return {name: frozenset(kinds) for name, kinds in count_operators(session).items()}


def count_operators(session: ort.InferenceSession) -> Placement:
    """Read the placement of a session that was opened with ``RECORD_ENTRY``."""
    nodes: dict[str, list[ort.OrtEpAssignedNode]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes.setdefault(part.ep_name, []).extend(part.get_nodes())
    by_nodes = sorted(nodes.items(), key=lambda entry: len(entry[1]), reverse=True)
    return Placement(
        {name: dict(Counter(node.op_type for node in found).most_common()) for name, found in by_nodes},
        {name: tuple(_describe_node(node) for node in found[:_MAX_NODES]) for name, found in by_nodes},
    )


def total_nodes(operators: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Counts of nodes by execution provider, from the counts of ``count_operators``."""
    return {name: sum(kinds.values()) for name, kinds in operators.items()}


def profiler_events(operators: Mapping[str, Mapping[str, int]]) -> int | None:
    """The maximum number of events in a profile for each run; None if nodes repeat an unknown number of times."""
    if any(not _REPEATING.isdisjoint(kinds) for kinds in operators.values()):
        return None
    return 3 + sum(total_nodes(operators).values())


def left_to_cpu(provider: str, operators: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
    """Counts of the operators that the chosen provider leaves to the CPU; empty if the CPU itself is chosen."""
    return operators.get(CPU, {}) if provider != CPU else {}


def check_placement(name: str, nodes: Mapping[str, int]) -> None:
    """Check that the chosen provider runs at least one node. ONNX Runtime reports no error if it does not.

    Raises:
        ServeError: invalid_input: other providers run all nodes; the message names them.
    """
    if nodes and name not in nodes:
        others = ", ".join(f"{other} runs {count}" for other, count in nodes.items())
        raise invalid_input(f"execution_providers: {name} runs none of the model's nodes; {others}")


def describe_placement(nodes: Mapping[str, int]) -> str:
    """The counts of nodes, for the model's metadata."""
    return ", ".join(f"{name}: {count}" for name, count in nodes.items())


def describe_operators(kinds: Mapping[str, int]) -> str:
    """Counts of operators for messages, such as ``12 MatMul, 4 Relu``. The length is bounded."""
    shown = [f"{count} {name[:_MAX_LETTERS]}" for name, count in list(kinds.items())[:_MAX_OPERATORS]]
    others = len(kinds) - len(shown)
    return ", ".join(shown) + (f" and {others} other operators" if others else "")


def describe_elsewhere(provider: str, operators: Placement) -> str:
    """The nodes that other providers than the chosen one run, for messages; empty if there are none.

    For example ``CPUExecutionProvider: NonZero '/head/NonZero', com.microsoft.FastGelu 'gelu_1' and 12 more``. At most
    ``_MAX_NODES`` nodes of each provider are named.
    """
    elsewhere = {other: sum(kinds.values()) for other, kinds in operators.items() if other != provider}
    return "; ".join(
        f"{other}: {', '.join(operators.names[other])}"
        + (f" and {count - _MAX_NODES} more" if count > _MAX_NODES else "")
        for other, count in elsewhere.items()
    )


def _describe_node(node: ort.OrtEpAssignedNode) -> str:
    operator = node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}.{node.op_type}"
    try:
        name = node.name
    except UnicodeDecodeError:  # ONNX Runtime does not check the names of nodes
        name = ""
    return f"{operator[:_MAX_LETTERS]} '{name[:_MAX_LETTERS_OF_A_NODE]}'" if name else operator[:_MAX_LETTERS]
