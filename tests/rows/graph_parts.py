"""Parts of models: consecutive nodes, the tensors that they read and compute, and new names for these."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, ValueInfoProto, helper, numpy_helper


@dataclass(frozen=True)
class Place:
    """A list of nodes: the main graph, a body, or a function. ``is_function``: tensors outside are not visible."""

    nodes: Any
    outputs: Sequence[str]
    is_function: bool = False
    body: GraphProto | None = None


@dataclass(frozen=True)
class Part:
    """Consecutive nodes of a place. The nodes behind them, and the outputs of the place, read ``wanted``."""

    place: Place
    first: int
    nodes: Sequence[NodeProto]

    @property
    def made(self) -> list[str]:
        return [name for node in self.nodes for name in node.output if name]

    @property
    def read(self) -> list[str]:
        return [*read_by(self.nodes)]

    @property
    def wanted(self) -> list[str]:
        later = {*read_by(self.place.nodes[self.first + len(self.nodes) :]), *self.place.outputs}
        return [name for name in self.made if name in later]

    def replace(self, nodes: Sequence[NodeProto]) -> None:
        all_nodes = [*self.place.nodes]
        all_nodes[self.first : self.first + len(self.nodes)] = nodes
        del self.place.nodes[:]
        self.place.nodes.extend(all_nodes)


def places_of(model: onnx.ModelProto) -> Iterator[Place]:
    """The main graph first, then the bodies in it, then functions with theirs."""
    graph = model.graph
    yield Place(graph.node, [value.name for value in graph.output])
    yield from _inner_places(graph.node, is_function=False)
    for function in model.functions:
        yield Place(function.node, function.output, is_function=True)
        yield from _inner_places(function.node, is_function=True)


def read_by(nodes: Sequence[NodeProto]) -> dict[str, None]:
    """The tensors that nodes read and none of them computes, with those that their bodies read from outside."""
    found: dict[str, None] = {}
    made: set[str] = set()
    for node in nodes:
        read = dict.fromkeys(name for name in node.input if name)
        for body in _bodies(node):
            own = _own(body)
            inner = [*read_by(body.node), *(value.name for value in body.output)]
            read.update(dict.fromkeys(name for name in inner if name not in own))
        found.update(dict.fromkeys(name for name in read if name not in made))
        made.update(node.output)
    return found


def rename(nodes: Sequence[NodeProto], names: dict[str, str]) -> None:
    """Rename tensors, except where a body has a tensor of its own with such a name."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in _bodies(node):
            own = _own(body)
            inner = {old: new for old, new in names.items() if old not in own}
            rename(body.node, inner)
            for value in body.output:
                value.name = inner.get(value.name, value.name)


def _own(body: GraphProto) -> set[str]:
    made = {name for node in body.node for name in node.output}
    return made | {value.name for value in body.input} | {weight.name for weight in body.initializer}


def all_names(nodes: Sequence[NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from (name for name in (*node.input, *node.output) if name)
        for body in _bodies(node):
            yield from _own(body)
            yield from all_names(body.node)


def _inner_places(nodes: Sequence[NodeProto], *, is_function: bool) -> Iterator[Place]:
    for node in nodes:
        for body in _bodies(node):
            yield Place(body.node, [value.name for value in body.output], is_function, body)
            yield from _inner_places(body.node, is_function=is_function)


def _bodies(node: NodeProto) -> list[GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]


def copied(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    copies = []
    for node in nodes:
        copies.append(NodeProto())
        copies[-1].CopyFrom(node)
    return copies


def constant(name: str, array: np.ndarray | np.generic) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array), f"{name}_value"))


def computed(name: str, array: np.ndarray, rng: random.Random, new_name: Callable[[], str]) -> list[NodeProto]:
    """Nodes that compute a constant tensor of numbers from other constants, in one of seven ways."""
    first, other = new_name(), new_name()
    zero, one, two = (constant(other, np.full((), number, array.dtype)) for number in range(3))
    same = constant(first, array)
    draw = rng.randrange(7)
    if draw == 0 and array.ndim == 1 and array.dtype == np.int64 and all(0 < size < 9 for size in array):
        return [
            same,
            helper.make_node("ConstantOfShape", [first], [other]),
            helper.make_node("Shape", [other], [name]),
        ]
    if draw == 1 and array.ndim:
        return [same, helper.make_node("Concat", [first], [name], axis=rng.choice((0, -1)))]
    if draw == 2:
        return [
            same,
            helper.make_node("Shape", [first], [other]),
            helper.make_node("Reshape", [first, other], [name]),
        ]
    if draw == 3:
        return [constant(first, array + 1), one, helper.make_node("Sub", [first, other], [name])]
    if draw == 4:
        condition, inner, added = new_name(), new_name(), new_name()
        then = helper.make_graph(
            [helper.make_node("Identity", [first], [inner])], "t", [], [ValueInfoProto(name=inner)]
        )
        nodes = [helper.make_node("Add", [first, first], [added])]
        other_body = helper.make_graph(nodes, "e", [], [ValueInfoProto(name=added)])
        chosen = helper.make_node("If", [condition], [name], then_branch=then, else_branch=other_body)
        return [same, constant(condition, np.array(True)), chosen]
    if draw == 5:
        return [constant(first, array * 2), two, helper.make_node("Div", [first, other], [name])]
    return [same, zero, helper.make_node("Add", [first, other], [name])]
