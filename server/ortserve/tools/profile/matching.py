"""Finds traced nodes in the optimized graph, and the nodes of the file that each optimized node replaces. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.model_file.graph import Dims, Graph, Node, Tensor, names_read
from ortserve.tools.profile.trace import NodeKey, Trace

_NCHWC: Final = "_nchwc"
"""A node in blocked layout is named after a value of the file, with this suffix."""
_TOKEN: Final = re.compile(r"_token_\d+$")
"""The suffix that makes names of nodes unique which ONNX Runtime adds."""
_LAYOUT_ONLY: Final = ("ReorderOutput", "ReorderInput")


@dataclass(frozen=True, slots=True)
class MatchedNode:
    """A node of the optimized graph, and the constants that it can read."""

    node: Node
    constants: Mapping[str, Tensor]


def match_nodes(trace: Trace, graph: Graph) -> dict[NodeKey, MatchedNode]:
    """Find the node of the optimized graph for each traced node.

    Nodes are matched by name. Nodes without a name are matched by their order, because ONNX Runtime saves the nodes of
    a graph in the order in which it runs them, or in that of the file if no optimization changed the graph. The order
    in which more nodes have the shapes of the trace is the right one.
    """
    outputs = {node.key: [dims for _, dims in node.outputs] for node in trace.nodes}
    found: dict[NodeKey, MatchedNode] = {}
    by_path: dict[tuple[str, ...], list[NodeKey]] = {}
    for key in dict.fromkeys(node.key for node in trace.nodes):
        by_path.setdefault(key[0], []).append(key)
    for path, keys in by_path.items():
        sharing = Counter((name, op) for _, name, op, _ in keys)
        for inner, constants in _graphs_at(graph, path):
            named = {(node.name, node.op): node for node in inner.nodes if node.name}
            unnamed = [node for node in inner.nodes if not node.name]
            nodes, left = {}, []
            for key in keys:
                _, name, op, index = key
                is_unnamed = sharing[name, op] > 1 and name == f"{op}_{index}"
                if not is_unnamed and (name, op) in named:
                    nodes[key] = named[name, op]
                elif name.startswith(f"{op}_"):
                    left.append(key)
            orders = left, sorted(left, key=lambda key: int(key[3] or 0))
            declared = {**inner.inner_dims, **{one.name: one.dims for one in inner.outputs if one.dims is not None}}
            matches = [_match_in_order(order, unnamed) for order in orders]
            fitting = [sum(_can_have(node, outputs[key], declared) for key, node in one.items()) for one in matches]
            nodes |= matches[fitting.index(max(fitting))]
            for key, node in nodes.items():
                found.setdefault(key, MatchedNode(node, constants))
    return found


def _match_in_order(keys: Iterable[NodeKey], nodes: Sequence[Node]) -> dict[NodeKey, Node]:
    """Match each key with the next node of the same operator."""
    found, begin = {}, 0
    for key in keys:
        place = next((place for place in range(begin, len(nodes)) if nodes[place].op == key[2]), None)
        if place is not None:
            found[key], begin = nodes[place], place + 1
    return found


def _can_have(node: Node, outputs: Sequence[tuple[int, ...]], declared: Mapping[str, Dims]) -> bool:
    """Whether the outputs of a node can have these shapes according to the declared ones."""
    for name, sizes in zip(node.outputs, outputs, strict=False):
        dims = declared.get(name, sizes)
        if len(dims) != len(sizes):
            return False
        if any(isinstance(dim, int) and dim != size for dim, size in zip(dims, sizes, strict=True)):
            return False
    return True


def _graphs_at(graph: Graph, path: Sequence[str]) -> list[tuple[Graph, Mapping[str, Tensor]]]:
    """The graphs inside the node at ``path``, with the constants that they can read. An If has two graphs."""
    reached: list[tuple[Graph, Mapping[str, Tensor]]] = [(graph, graph.constants)]
    for name in path:
        reached = [
            (inner, {**constants, **inner.constants, **_values(inner)})
            for outer, constants in reached
            for node in outer.nodes
            if node.name == name or (not node.name and name.startswith(f"{node.op}_"))
            for inner in node.attributes.values()
            if isinstance(inner, Graph)
        ]
    return reached


def _values(graph: Graph) -> dict[str, Tensor]:
    """The values of constant nodes, which ONNX Runtime keeps in inner graphs."""
    made = ((node.outputs[0], node.attributes.get("value")) for node in graph.nodes if node.op == "Constant")
    return {name: value for name, value in made if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class Replacement:
    """A node of the optimized main graph, and the nodes of the file that it replaces. An added node replaces none."""

    node: Node
    replaced: tuple[Node, ...]

    @property
    def is_unchanged(self) -> bool:
        """Whether the file has the same node."""
        return len(self.replaced) == 1 and self.replaced[0].op == self.node.op


def find_replacements(source: Graph, optimized: Graph) -> tuple[list[Replacement], list[Node]]:
    """Compare the main graph of a file with the optimized one.

    Most optimized nodes keep the names of the values that they compute; others keep their own name. Such a node
    replaces the nodes of the file that lead to these values, back to the values that it reads or other nodes compute.

    Returns:
        A replacement for each optimized node, and the nodes of the file that were removed: their results were computed
        when the model was opened, or are not needed. Constant nodes are in neither list.
    """
    makers = {name: node for node in source.nodes for name in node.outputs if name}
    by_name = {node.name: node.outputs[0] for node in source.nodes if node.name and node.outputs}
    ends = [_ends(node, makers, by_name) for node in optimized.nodes]
    positions = {name: index for index, node in enumerate(optimized.nodes) for name in node.outputs}
    for index, node in enumerate(optimized.nodes):
        if node.op in _LAYOUT_ONLY and ends[index] and (maker := positions.get(node.inputs[0])) is not None:
            ends[maker] += ends[index]  # the node before it computes this value, in another layout
            ends[index] = []
    made = {name for names in ends for name in names}
    replacements = []
    used: set[int] = set()
    for node, own in zip(optimized.nodes, ends, strict=True):
        replaced = _between(makers, own, ({*names_read(node)} | made) - {*own})
        used |= {id(one) for one in replaced}
        replacements.append(Replacement(node, tuple(one for one in replaced if one.op != "Constant")))
    return replacements, [node for node in source.nodes if id(node) not in used and node.op != "Constant"]


def _ends(node: Node, makers: Mapping[str, Node], by_name: Mapping[str, str]) -> list[str]:
    """The values of the file that a node of the optimized graph computes."""
    if kept := [name for name in node.outputs if name in makers]:
        return kept
    if (value := node.name.removesuffix(_NCHWC)) != node.name and value in makers:
        return [value]
    value = by_name.get(_TOKEN.sub("", node.name), "")
    return [value] if value else []


def _between(makers: Mapping[str, Node], ends: Sequence[str], stops: set[str]) -> list[Node]:
    """The nodes that compute ``ends``, and the nodes before them up to the values ``stops``, earlier ones first."""
    found: dict[int, Node] = {}
    waiting = list(ends)
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or id(node) in found:
            continue
        found[id(node)] = node
        waiting.extend(name for name in names_read(node) if name not in stops)
    return list(reversed(found.values()))
