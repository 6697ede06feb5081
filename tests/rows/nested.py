"""Moves nodes of random models into the bodies of If, Loop and Scan, and into functions, with misleading names.

A changed model need not compute what it computed before: its batches are compared with its own runs of single rows.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from rows.graph_parts import Part, all_names, computed, constant, copied, places_of, read_by, rename
from rows.growing import BOOL, INT64, ROWS, GrowingGraph, Unsuitable

LOCAL: Final = "local"
_LONGEST_PART: Final = 6
_TRIES: Final = 12


def nest(model: onnx.ModelProto, graph: GrowingGraph, rng: random.Random) -> None:
    """Change a model in one to six places. ``graph`` has the values of its tensors and gets those of new inputs."""
    changes = _Changes(model, graph, rng)
    steps: dict[Callable[[], None], float] = {
        changes.into_if: 4,
        changes.into_loop: 4,
        changes.into_scan: 2,
        changes.into_function: 5,
        changes.choose: 2,
        changes.pass_states: 2,
        changes.compute_weight: 4,
        changes.overridable_weight: 0.5,
        changes.hide_weight: 2,
        changes.declare: 1.5,
    }
    wanted = rng.randint(1, 6)
    for _ in range(_TRIES):
        if not wanted:
            return
        try:
            rng.choices([*steps], [*steps.values()])[0]()
        except Unsuitable:
            continue
        wanted -= 1


class _Changes:
    def __init__(self, model: onnx.ModelProto, graph: GrowingGraph, rng: random.Random) -> None:
        self._model, self._graph, self._rng = model, graph, rng
        self._opset = next(each.version for each in model.opset_import if not each.domain)

    def into_if(self) -> None:
        """Move nodes into both branches of If; one branch may then differ."""
        part = self._cut()
        before, condition = self._condition(part)
        then, other = (self._body(part, label)[0] for label in ("then", "else"))
        if self._rng.random() < 0.5:
            self._differ(other)
        part.replace([*before, helper.make_node("If", [condition], part.wanted, then_branch=then, else_branch=other)])

    def into_loop(self) -> None:
        """Move nodes into the body of Loop. Their results become states, or one round's results are selected."""
        rng, part = self._rng, self._cut()
        pairs = self._states(part) if rng.random() < 0.6 else []
        body, names = self._body(part, "round")
        before, trips = self._trips(part)
        if self._opset < 11 and not pairs:
            raise Unsuitable
        step, go, go_on = (self._name() for _ in range(3))
        body.node.append(helper.make_node("Identity", [go], [go_on]))
        if rng.random() < 0.2:
            body.node[-1].CopyFrom(helper.make_node("Less", [step, self._scalar_in(body, 2)], [go_on]))
        states = [self._name() for _ in pairs]
        rename(body.node, dict(zip((start for start, _ in pairs), states, strict=True)))
        carried = [result for _, result in pairs]
        scanned = [name for name in part.wanted if name not in carried]
        del body.output[:]
        body.output.extend(ValueInfoProto(name=name) for name in (go_on, *(names[each] for each in carried + scanned)))
        body.input.append(helper.make_tensor_value_info(step, INT64, []))
        body.input.append(helper.make_tensor_value_info(go, BOOL, []))
        body.input.extend(self._typed(state, start) for state, (start, _) in zip(states, pairs, strict=True))
        begins = ""
        if rng.random() < 0.3:
            begins = self._name()
            before.append(constant(begins, np.array(rng.random() < 0.9)))
        stacks = [self._name() for _ in scanned]
        node = helper.make_node("Loop", [trips, begins, *(start for start, _ in pairs)], [*carried, *stacks], body=body)
        part.replace([*before, node, *self._selected(stacks, scanned)])

    def into_scan(self) -> None:
        """Move nodes into the body of Scan, over a weight or over the single entry of a new axis of a tensor."""
        rng, part = self._rng, self._cut()
        body, names = self._body(part, "slice")
        tensors = [name for name in part.read if name in self._graph.values and self._rank(name) is not None]
        before: list[NodeProto] = []
        element, scanned = self._name(), self._name()
        if tensors and rng.random() < 0.5:
            name = rng.choice(tensors)
            rename(body.node, {name: element})
            body.input.append(self._typed(element, name, [None] * (self._rank(name) or 0)))
            before.append(self._unsqueeze(before, name, scanned))
        else:
            numbers = np.arange(rng.randint(1, 3), dtype=np.float32)
            body.input.append(helper.make_tensor_value_info(element, TensorProto.FLOAT, []))
            before.append(constant(scanned, numbers))
        if not body.node:
            raise Unsuitable
        del body.output[:]
        body.output.extend(ValueInfoProto(name=names[name]) for name in part.wanted)
        stacks = [self._name() for _ in part.wanted]
        node = helper.make_node("Scan", [scanned], stacks, body=body, num_scan_inputs=1)
        part.replace([*before, node, *self._selected(stacks, part.wanted)])

    def into_function(self) -> None:
        """Move nodes into a function: with inputs that no call passes, attributes of the call, and names of others."""
        rng, part = self._rng, self._cut()
        names = {name: self._name(part, in_function=True) for name in [*part.made, *part.read]}
        if len(set(names.values())) < len(names):
            raise Unsuitable
        nodes = copied(part.nodes)
        rename(nodes, names)
        function = onnx.FunctionProto(name=f"part{len(self._model.functions)}", domain=LOCAL)
        inputs = [(names[name], name) for name in part.read]
        if rng.random() < 0.4:
            inputs.insert(rng.randint(0, len(inputs)), (self._name(), ""))
        passed: dict[str, Any] = {}
        for node in nodes:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.INT and rng.random() < 0.5:
                    key = f"number{len(passed)}"
                    passed[key] = attribute.i
                    attribute.CopyFrom(AttributeProto(name=attribute.name, ref_attr_name=key, type=attribute.type))
        function.attribute.extend(passed)
        function.input.extend(inner for inner, _ in inputs)
        function.output.extend(names[name] for name in part.wanted)
        function.node.extend(nodes)
        function.opset_import.extend(self._model.opset_import)
        if LOCAL not in {each.domain for each in self._model.opset_import}:
            self._model.opset_import.append(helper.make_opsetid(LOCAL, 1))
            function.opset_import.append(helper.make_opsetid(LOCAL, 1))
        self._model.functions.append(function)
        outer = [name for _, name in inputs]
        while outer and not outer[-1]:
            outer.pop()
        part.replace([helper.make_node(function.name, outer, part.wanted, domain=LOCAL, **passed)])

    def choose(self) -> None:
        """Insert an If that returns one of two tensors of a type, and let later nodes read its result."""
        part, names = self._like()
        before, condition = self._condition(part, names)
        result, bodies = self._name(), []
        for name in self._rng.sample(names[:2], 2):
            inner = self._name()
            bodies.append(
                helper.make_graph(
                    [helper.make_node("Identity", [name], [inner])], "b", [], [ValueInfoProto(name=inner)]
                )
            )
        node = helper.make_node("If", [condition], [result], then_branch=bodies[0], else_branch=bodies[1])
        self._insert(part, [*before, node], {names[0]: result})

    def pass_states(self) -> None:
        """Insert a Loop whose states swap tensors of one type, and let later nodes read its results."""
        rng = self._rng
        part, names = self._like()
        step, go, go_on = (self._name() for _ in range(3))
        states = [self._name() for _ in names]
        body = GraphProto(name="states")
        body.node.append(helper.make_node("Identity", [go], [go_on]))
        outputs = [go_on]
        for _ in states:
            outputs.append(self._name())
            body.node.append(helper.make_node("Identity", [rng.choice(states)], [outputs[-1]]))
        body.input.append(helper.make_tensor_value_info(step, INT64, []))
        body.input.append(helper.make_tensor_value_info(go, BOOL, []))
        body.input.extend(self._typed(state, name) for state, name in zip(states, names, strict=True))
        body.output.extend(ValueInfoProto(name=name) for name in outputs)
        before, trips = self._trips(part, names)
        results = [self._name() for _ in names]
        node = helper.make_node("Loop", [trips, "", *names], results, body=body)
        self._insert(part, [*before, node], dict(zip(names, results, strict=True)))

    def compute_weight(self) -> None:
        """Compute a weight when the model runs, or make it the value of a Constant."""
        rng, graph = self._rng, self._model.graph
        weights = [each for each in graph.initializer if each.name not in {value.name for value in graph.input}]
        if not weights:
            raise Unsuitable
        weight = rng.choice(weights)
        array, name = numpy_helper.to_array(weight), weight.name
        graph.initializer.remove(weight)
        nodes = [constant(name, array)]
        if rng.random() < 0.8 and array.dtype.kind in "fi":
            nodes = computed(name, array, rng, self._name)
        rest = [*graph.node]
        del graph.node[:]
        graph.node.extend([*nodes, *rest])

    def overridable_weight(self) -> None:
        """Declare a weight as an input too, with the weight as its default."""
        graph = self._model.graph
        weights = [each for each in graph.initializer if each.name not in {value.name for value in graph.input}]
        if not weights:
            raise Unsuitable
        weight = self._rng.choice(weights)
        graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))

    def hide_weight(self) -> None:
        """Give a body a weight of its own, with the name of a tensor outside that it does not read."""
        places = [place for place in places_of(self._model) if place.body is not None and place.nodes]
        if not places:
            raise Unsuitable
        place = self._rng.choice(places)
        weights = {weight.name: weight for weight in self._model.graph.initializer}
        read = [name for name in read_by(place.nodes) if name in weights]
        if not read or place.body is None:
            raise Unsuitable
        old, new = self._rng.choice(read), self._name(Part(place, 0, [*place.nodes]))
        array = numpy_helper.to_array(weights[old])
        rename(place.nodes, {old: new})
        place.body.initializer.append(numpy_helper.from_array(array, new))

    def declare(self) -> None:
        """Declare inner tensors with names of sizes, some of which stand for several sizes."""
        rng, outputs = self._rng, {value.name for value in self._model.graph.output}
        for name in {name for node in self._model.graph.node for name in node.output} - outputs:
            if rng.random() < 0.3 and self._rank(name) is not None:
                rows = self._graph.rows_axis(name)
                sizes = [
                    rng.choice(("N", "N", None)) if axis == rows else rng.choice((None, size, size, "L", "M", "K"))
                    for axis, size in enumerate(self._graph.shape(name))
                ]
                self._model.graph.value_info.append(self._typed(name, name, sizes))

    def _cut(self) -> Part:
        rng, places = self._rng, [place for place in places_of(self._model) if place.nodes]
        place = rng.choice(places) if rng.random() < 0.6 else places[0]
        first = rng.randrange(len(place.nodes))
        part = Part(place, first, copied(place.nodes[first : first + rng.randint(1, _LONGEST_PART)]))
        if not part.wanted:
            raise Unsuitable
        return part

    def _body(self, part: Part, label: str) -> tuple[GraphProto, dict[str, str]]:
        """A body with the nodes of a part, and the new names of their results."""
        names: dict[str, str] = {}
        for name in part.made:
            new = self._name(part)
            names[name] = new if new not in names.values() else self._name()
        nodes = copied(part.nodes)
        rename(nodes, names)
        return helper.make_graph(nodes, label, [], [ValueInfoProto(name=names[name]) for name in part.wanted]), names

    def _name(self, part: Part | None = None, *, in_function: bool = False) -> str:
        """A new name; with ``part`` sometimes that of a tensor elsewhere: in another body, function, or later node.

        It is none that the part has, and none that is visible from a body: ONNX Runtime rejects these.
        """
        if part is None or self._rng.random() < 0.7:
            return self._graph.new_name("n")
        places = [*places_of(self._model)]
        later = {name for node in part.place.nodes[part.first + len(part.nodes) :] for name in node.output if name}
        outside = {*all_names(part.nodes), *all_names(part.place.nodes[: part.first])}
        if not in_function:
            graph = self._model.graph
            outside.update(value.name for value in graph.input)
            outside.update(weight.name for weight in graph.initializer)
            outside.update({name for node in graph.node for name in node.output} - later)
        others = {name for place in places[not in_function :] for name in all_names(place.nodes)} | later
        return self._rng.choice(sorted(others - outside) or [self._graph.new_name("n")])

    def _condition(self, part: Part, names: Sequence[str] = ()) -> tuple[list[NodeProto], str]:
        rng, name, other = self._rng, self._name(), self._name()
        read = [each for each in (names or part.read) if self._rank(each) is not None]
        draw = rng.random()
        if draw < 0.35 and not part.place.is_function:
            return [], self._new_input(np.array(rng.random() < 0.5))
        if draw < 0.5 or not read:
            return [constant(name, np.array(rng.random() < 0.5))], name
        size, limit = self._name(), self._name()
        read_name = rng.choice(read)
        compared = helper.make_node(
            rng.choice(("Less", "Equal", "Greater") if self._opset >= 9 else ("Equal",)), [size, limit], [name]
        )
        if draw < 0.65 and self._graph.alone(read_name).dtype == np.float32:
            nodes = [helper.make_node("ReduceMax", [read_name], [size], keepdims=0), constant(limit, np.float32(1))]
            return [*nodes, compared], name
        axis, length = self._name(), self._graph.shape(read_name)
        if not length:
            raise Unsuitable
        index = rng.randrange(len(length))
        nodes = [
            helper.make_node("Shape", [read_name], [other]),
            constant(axis, np.array(index)),
            helper.make_node("Gather", [other, axis], [size], axis=0),
            constant(limit, np.array(length[index] + rng.choice((0, 1, -1)))),
        ]
        return [*nodes, compared], name

    def _trips(self, part: Part, names: Sequence[str] = ()) -> tuple[list[NodeProto], str]:
        rng, name = self._rng, self._name()
        read = [each for each in (names or part.read) if self._rank(each)]
        if not read or rng.random() < 0.7:
            return [constant(name, np.array(rng.randint(1, 3)))], name
        shape, axis, read_name = self._name(), self._name(), rng.choice(read)
        index = rng.randrange(self._rank(read_name) or 1)
        nodes = [helper.make_node("Shape", [read_name], [shape]), constant(axis, np.array(index))]
        return [*nodes, helper.make_node("Gather", [shape, axis], [name], axis=0)], name

    def _states(self, part: Part) -> list[tuple[str, str]]:
        """A tensor that a part reads, with a result of the same type and shape."""
        pairs = [
            (start, result)
            for start in part.read for result in part.wanted
            if self._rank(start) is not None and self._rank(result) is not None
            and self._graph.alone(start).dtype == self._graph.alone(result).dtype
            and self._graph.shapes(start) == self._graph.shapes(result)
        ]  # fmt: skip
        return [self._rng.choice(pairs)] if pairs else []

    def _like(self) -> tuple[Part, list[str]]:
        """A part, and two or three tensors of one type that are visible before it."""
        part = self._cut()
        names = [name for name in part.read if self._rank(name) is not None]
        if not part.place.is_function:
            names += [value.name for value in self._model.graph.input if value.name in self._graph.values]
        if not names:
            raise Unsuitable
        first = self._rng.choice(names)
        dtype, rank = self._graph.alone(first).dtype, self._rank(first)
        alike = [
            name
            for name in dict.fromkeys(names)
            if name != first and self._rank(name) == rank and self._graph.alone(name).dtype == dtype
        ]
        if not alike:
            raise Unsuitable
        return part, [first, *self._rng.sample(alike, min(len(alike), self._rng.randint(1, 2)))]

    def _insert(self, part: Part, nodes: Sequence[NodeProto], names: dict[str, str]) -> None:
        """Insert nodes before a part, which then reads other names."""
        rename(part.nodes, {old: new for old, new in names.items() if old not in part.made})
        part.replace([*nodes, *part.nodes])

    def _differ(self, body: GraphProto) -> None:
        """Change one node of a body."""
        rng, node = self._rng, self._rng.choice(body.node)
        axes = [attribute for attribute in node.attribute if attribute.name == "axis"]
        if axes:
            axes[0].i += rng.choice((-1, 1))
        elif len(node.input) > 1 and rng.random() < 0.5:
            node.input[:] = [node.input[1], node.input[0], *node.input[2:]]
        else:
            old, new = body.output[0].name, self._name()
            body.node.append(helper.make_node(rng.choice(("Neg", "Identity", "Abs", "Relu")), [old], [new]))
            body.output[0].name = new

    def _selected(self, stacks: Sequence[str], results: Sequence[str]) -> list[NodeProto]:
        """Nodes that select the results of one round of a loop."""
        nodes = []
        for stack, result in zip(stacks, results, strict=True):
            index = self._name()
            number = np.array(self._rng.choice((0, 0, -1)))
            nodes += [constant(index, number), helper.make_node("Gather", [stack, index], [result], axis=0)]
        return nodes

    def _scalar_in(self, body: GraphProto, number: int) -> str:
        name = self._name()
        body.node.insert(len(body.node) - 1, constant(name, np.array(number)))
        return name

    def _unsqueeze(self, before: list[NodeProto], name: str, result: str) -> NodeProto:
        if self._opset < 13:
            return helper.make_node("Unsqueeze", [name], [result], axes=[0])
        axes = self._name()
        before.append(constant(axes, np.array([0])))
        return helper.make_node("Unsqueeze", [name, axes], [result])

    def _new_input(self, array: np.ndarray) -> str:
        """A new input without rows."""
        name = self._graph.add_input(BOOL, [], None, [array] * ROWS)
        self._model.graph.input.append(helper.make_tensor_value_info(name, BOOL, []))
        return name

    def _rank(self, name: str) -> int | None:
        values = self._graph.values.get(name)
        return values[0].ndim if values is not None and isinstance(values[0], np.ndarray) else None

    def _typed(self, name: str, like: str, dims: Sequence[int | str | None] | None = None) -> ValueInfoProto:
        dtype = self._graph.alone(like).dtype
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), dims)
