"""Finds the tensors of a model that may become empty although the inputs of the model are not.

A Slice behind the end of an axis, NonZero without a hit or a pooling of a small image make such tensors. The analysis
follows sizes, and bounds of the integers that sizes are computed from, through the main graph, the branches of If and
functions of the model. A tensor counts as one that may be empty unless the analysis shows that it is not.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Final, TypeAlias

from ortserve.engine.empty_tensors.call import Call
from ortserve.engine.empty_tensors.known import ANYTHING, Known, least_of, of_constant
from ortserve.engine.empty_tensors.rules import ANY_SIZE, RULES, of_any
from ortserve.model_file.editing import inner_scope
from ortserve.model_file.graph import Declared, Function, Graph, Model, Node, Tensor

_Names: TypeAlias = MutableMapping[str, Known]
_WITH_GRAPHS: Final = frozenset({"If", "Loop", "Scan"})
_MAX_DEPTH: Final = 8
"""Maximum depth of functions and branches that are followed."""
_MAX_CALLS: Final = 1000
"""Maximum number of calls of functions that are followed; the outputs of the others may have any size."""
_DOMAINS: Final = frozenset({"", "com.microsoft", "ai.onnx.ml"})
"""The operators of other domains make outputs of any size."""


def find_sizes(model: Model) -> Mapping[str, Mapping[str, Known]]:
    """What is known about tensors if no input of a request is empty, by the scope of their graph in the model.

    Scopes are those of ``inner_scope``, and "" for the main graph. Bodies of functions are not among them. A graph
    knows the tensors of the graphs around it, too.
    """
    names = _constants(model.graph.constants)
    for declared in model.graph.inputs:
        dims = declared.dims
        sizes = None if dims is None else tuple(size if isinstance(size, int) else None for size in dims)
        names[declared.name] = Known(sizes, 0 in (sizes or ()) or not declared.is_tensor)
    graphs = _Graphs(model)
    graphs.follow(model.graph.nodes, names, model.opsets.get("", 0))
    return graphs.found | {"": names}


def _constants(constants: Mapping[str, Tensor]) -> dict[str, Known]:
    return {name: of_constant(tensor) for name, tensor in constants.items()}


class _Graphs:
    """Follows the nodes of graphs."""

    def __init__(self, model: Model) -> None:
        self._functions = model.functions
        self._calls = count()
        self.found: dict[str, Mapping[str, Known]] = {}

    def follow(self, nodes: Iterable[Node], names: _Names, opset: int, scope: str = "", depth: int = 0) -> None:
        """Add what is known about the outputs of the nodes to ``names``."""
        for node in nodes:
            function = self._functions.get((node.domain, node.op, node.overload))
            if depth > _MAX_DEPTH:
                found: Sequence[Known] = ()
            elif function is not None:
                found = self._call(function, node, names, depth + 1)
            elif node.op in _WITH_GRAPHS and not node.domain:
                results = []
                for attribute, graph in node.attributes.items():
                    if isinstance(graph, Graph):
                        inner = inner_scope(scope, node, attribute)
                        results.append(self._inside(node, graph, names, opset, inner, depth + 1))
                # The outputs of loops may be empty if they have no steps.
                found = [_either(known) for known in zip(*results, strict=False)] if node.op == "If" else ()
            elif node.domain not in _DOMAINS or node.op in ANY_SIZE:
                found = ()
            else:
                found = _outputs(Call(node, names, opset, scope))
            for place, name in enumerate(node.outputs):
                if name:
                    names[name] = found[place] if place < len(found) else ANYTHING

    def _call(self, function: Function, node: Node, names: _Names, depth: int) -> Sequence[Known]:
        call = next(self._calls)
        if call > _MAX_CALLS:
            return ()
        given = zip(function.inputs, node.inputs, strict=False)
        inner = {to: replace(names[name], axes_of=None) for to, name in given if name in names}
        self.follow(function.nodes, inner, function.opsets.get("", 0), f"{call}/", depth)
        return [replace(inner.get(name, ANYTHING), axes_of=None) for name in function.outputs]

    def _inside(self, node: Node, graph: Graph, names: _Names, opset: int, scope: str, depth: int) -> Sequence[Known]:
        """Follow a graph of a node: with states that no step makes empty, and if one does, with any states."""
        for are_full in (True, False):
            given = _given(node, graph, names, are_full=are_full)
            inner: _Names = ChainMap(_constants(graph.constants) | given, names)
            self.follow(graph.nodes, inner, opset, scope, depth)
            self.found[scope] = inner
            found = [inner.get(output.name, ANYTHING) for output in graph.outputs]
            new = found[1:] if node.op == "Loop" else found
            if not any(state.may_be_empty for state in new[: len(_states(node, graph))]):
                break
        return found


def _states(node: Node, body: Graph) -> Sequence[Declared]:
    """The inputs of a body of Loop or Scan that the steps before it may change."""
    sliced = node.attributes.get("num_scan_inputs")
    return body.inputs[2:] if node.op == "Loop" else body.inputs[: -sliced if isinstance(sliced, int) else None]


def _given(node: Node, body: Graph, names: _Names, *, are_full: bool) -> dict[str, Known]:
    """What is known about the inputs of the body of a Loop or Scan; ``are_full``: no step makes a state empty."""
    states = {declared.name for declared in _states(node, body)}
    given = {}
    for place, declared in enumerate(body.inputs):
        source = node.inputs[place] if place < len(node.inputs) else ""
        is_empty = bool(source) and names.get(source, ANYTHING).may_be_empty
        given[declared.name] = Known(may_be_empty=is_empty or (declared.name in states and not are_full))
    return given


def _outputs(call: Call) -> Sequence[Known]:
    rule = RULES.get(call.node.op, of_any) if not call.node.domain else of_any
    found = rule(call)
    if isinstance(found, Known):  # of the first output
        return [found, *[Known(may_be_empty=found.may_be_empty)] * len(call.node.outputs[1:])]
    return found


def _either(known: Sequence[Known]) -> Known:
    first = known[0]
    same = all(one.sizes == first.sizes for one in known)
    is_empty, has_no_zero = any(one.may_be_empty for one in known), all(one.has_no_zero for one in known)
    return Known(first.sizes if same else None, is_empty, least_of(known), has_no_zero)
