"""Which execution provider runs which node, read back from a session: what was asked for is not what was done.

As told by what divided the graph among the providers, which happens once the graph is simplified and before nodes are
fused: so these are fewer than the file's nodes, and more than those that run. A profile tells of the latter, but takes
a run to make, and tells of no node that a provider has compiled.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import onnxruntime as ort

from ortserve.errors import invalid_input

RECORD_ENTRY: Final = "session.record_ep_graph_assignment_info"
"""The entry of the session's configuration without which a session cannot tell."""


def read_placement(session: ort.InferenceSession) -> dict[str, int]:
    """Nodes by execution provider, the provider with most of them first; the session has ``RECORD_ENTRY``."""
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[part.ep_name] += len(part.get_nodes())
    return dict(nodes.most_common())


def read_operators(session: ort.InferenceSession) -> dict[str, frozenset[str]]:
    """Which operators each execution provider runs; the session has ``RECORD_ENTRY``."""
    operators: dict[str, set[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        operators.setdefault(part.ep_name, set()).update(node.op_type for node in part.get_nodes())
    return {name: frozenset(kinds) for name, kinds in operators.items()}


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
