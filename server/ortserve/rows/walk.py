"""The analysis of a graph under one hypothesis, node by node: from claims about inputs to claims about outputs."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from ortserve.model_file.graph import Attribute, Dims, Function, Graph, Model, Node, Reference, Tensor, names_read
from ortserve.rows.number import Number, contains_rows
from ortserve.rows.rules import RULES, masked_writes
from ortserve.rows.rules.call import OTHER_AXIS, Call, NotKnownError, Output, RandomError, RowsMeetError, Rule
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import NO_FACTS, Cause, Facts, Kind, Value, free
from ortserve.rows.work_budget import TooMuchWorkError, WorkBudget

DOMAINS: Final = frozenset({"", "ai.onnx.ml"})
"""Domains in which all operators compute free results from free operands, even operators without a rule."""
RANDOM: Final = frozenset(
    {"Bernoulli", "BiasDropout", "BitmaskDropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
    | {"RandomUniformLike", "Sampling"}
)
_FLAGS: Final = frozenset(
    """
    allowzero antialias broadcast causal ceil_mode channels_last count_include_pad do_rotary exclude_outside exclusive
    fmod input_forget interleaved inverse is_causal is_inner_broadcast is_packed_batching is_test keepdims layout
    linear_before_reset noop_with_empty_axes onesided past_present_share_buffer reverse rotary_interleaved saturate
    select_last_index sliding_window_cache training_mode transA transB transBatchA transBatchB unidirectional upper
    """.split()  # noqa: SIM905
)
"""Attributes of which only the values 0 and 1 have a meaning."""
_NEW_AXES: Final = frozenset({"Conv", "Einsum", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul", "RNN", "Transpose"})
"""Operators behind which ONNX Runtime moves no transposition of their operands, and Transpose, whose rule notes it."""
_BUILT_IN: Final = DOMAINS | {"ai.onnx.contrib"}
"""Domains, besides ``com.microsoft`` and its subdomains, whose operators have kernels, which run in place of a function
of the model with the same name."""
_NEWEST: Final = 1 << 16
"""The version of ONNX's own operators for a model that imports none: ONNX Runtime takes the newest that it knows."""
_DEEPEST: Final = 16
"""Maximum depth of graphs and functions inside each other."""


class Walk:
    """The analysis under one hypothesis. Each tensor of the graph gets a claim."""

    def __init__(self, model: Model, symbols: Symbols, budget: WorkBudget) -> None:
        self._model = model
        self.symbols = symbols
        self.budget = budget
        self._order = 0

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The claims about all tensors of the main graph, by name."""
        scope = _Scope(self, {"": _NEWEST, **self._model.opsets}, {}, {}, 0)
        graph = self._model.graph
        read = {name for node in graph.nodes for name in names_read(node)}
        outputs = {output.name: output.dims or () for output in graph.outputs}
        names = _constants(graph, read | outputs.keys())
        names.update(inputs)
        declared = _inner_dims(graph) | {name: dims for name, dims in outputs.items() if name in read}
        scope.walk(graph.nodes, names, declared)
        self.finished(graph, names)
        return names

    def next_order(self, node: Node) -> int:
        """The next number in the order of visits, for a visit of a node."""
        self._order += 1
        self.symbols.steps = self.budget.take_node(node, self.symbols.steps)
        return self._order

    def function(self, node: Node) -> Function | None:
        return self._model.functions.get((node.domain, node.op, node.overload))

    def concluded(self, node: Node, operands: Sequence[Value | None], results: list[Value]) -> list[Value]:
        """The claims about the outputs of a node after its rule; ``sizes`` adds to them."""
        return results

    def finished(self, graph: Graph, names: Mapping[str, Value]) -> None:
        """Called with the claims about all tensors of a graph after its nodes."""

    def wrong_size(self, name: str, declared: Dims, value: Value) -> str:
        """A tensor and its declared fixed size that does not follow from the graph; empty if there is none.

        Also records the names of its sizes. ONNX Runtime believes declared sizes and names, and computes shapes from
        them when it loads a model. They are often those of an export with one row, whose inputs were given a free axis
        later.
        """
        if value.dims is None or value.cause is not None or not any(size is not None for size in declared):
            return ""
        if len(declared) != len(value.dims):
            return f"'{name}', which is declared with {len(declared)} axes, but has {len(value.dims)}"
        for axis, (size, length) in enumerate(zip(declared, value.dims, strict=True)):
            if isinstance(size, str):
                self.symbols.declare(size, length)
            elif size is not None and size != length:
                return f"'{name}', whose declared size {size} on axis {axis} does not follow from the graph"
        return ""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A visit of a node: the node, its place in the order of visits, and its index in its graph."""

    node: Node
    order: int
    index: int

    def failed(self, kind: Kind, reason: str, facts: Facts = NO_FACTS) -> list[Value]:
        """The claims about the node's outputs if it is the first with a mixed or unknown result."""
        node = self.node
        cause = Cause(self.order, node.name or f"{node.op} #{self.index}", f"{node.op} {reason}")
        return [Value(kind, cause=cause, facts=facts)] * len(node.outputs)


class _Scope:
    """The names visible in one graph, with its operator sets and the attributes of its function."""

    def __init__(
        self,
        walk: Walk,
        opsets: Mapping[str, int],
        attributes: Mapping[str, Attribute],
        names: dict[str, Value],
        depth: int,
    ) -> None:
        self._walk = walk
        self._opsets = opsets
        self._attributes = attributes
        self._names = names
        self._depth = depth

    def walk(
        self,
        nodes: Sequence[Node],
        names: dict[str, Value],
        declared: Mapping[str, Dims],
    ) -> None:
        """Analyse nodes, given the claims in ``names``. Adds the claims about their outputs to ``names``.

        A result with a fixed size in ``declared`` that does not follow from the graph is unknown.
        """
        self._names = names
        for index, node in enumerate(nodes):
            visit = _Visit(node, self._walk.next_order(node), index)
            operands = [names.get(name) if name else None for name in node.inputs]
            missing = [name for name, value in zip(node.inputs, operands, strict=True) if name and value is None]
            if missing:
                results = visit.failed(Kind.UNKNOWN, f"reads '{missing[0]}', which no node computes")
            else:
                results = self._results(visit, operands)
                for name, value in zip(node.outputs, results, strict=False):
                    if name in declared and (wrong := self._walk.wrong_size(name, declared[name], value)):
                        results = visit.failed(Kind.UNKNOWN, f"gives {wrong}")
                        break
            results = self._walk.concluded(node, operands, results)
            names.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)

    def run_graph(self, graph: Graph, arguments: Sequence[Value], *, hide_rows: bool = False) -> list[Value]:
        if self._depth >= _DEEPEST:
            raise NotKnownError(f"nests graphs more than {_DEEPEST} deep")
        if len(arguments) != len(graph.inputs):
            raise NotKnownError(f"passes {len(arguments)} values to a graph with {len(graph.inputs)} inputs")
        self._walk.budget.take_graph(graph)
        read = {name for node in graph.nodes for name in names_read(node)}
        read.update(output.name for output in graph.outputs)
        names = {name: _without_facts(self._names[name]) for name in read & self._names.keys()}
        if hide_rows:
            names = {name: _hidden(value) for name, value in names.items()}
        names.update(_constants(graph, read))
        for given, value in zip(graph.inputs, arguments, strict=True):
            if wrong := self._walk.wrong_size(given.name, given.dims or (), value):
                raise NotKnownError(f"passes {wrong}")
            names[given.name] = value
        inner = _Scope(self._walk, self._opsets, self._attributes, names, self._depth + 1)
        inner.walk(
            graph.nodes, names, _inner_dims(graph) | {output.name: output.dims or () for output in graph.outputs}
        )
        self._walk.finished(graph, names)
        return [_without_facts(_given(names, output.name)) for output in graph.outputs]

    def _results(self, visit: _Visit, operands: list[Value | None]) -> list[Value]:
        node = visit.node
        causes = [value for value in operands if value is not None and value.cause is not None]
        if causes:
            first = min(causes, key=lambda value: value.cause.order if value.cause is not None else 0)
            mixed = Value(first.kind, cause=first.cause)
            return self._results_of_mixed(node, operands, mixed) or [mixed] * len(node.outputs)
        if node.op in RANDOM:
            return visit.failed(Kind.MIXED, "draws random numbers")
        rule = RULES.get((node.domain, node.op))
        function = self._walk.function(node)
        try:
            if function is not None:
                if node.domain in _BUILT_IN or node.domain.startswith(("com.microsoft", "com.ms.")):
                    raise NotKnownError("is redefined by a function of the model")
                return self._call(function, node, operands)
            if rule is None:
                if node.domain in DOMAINS and not _has_graphs(node) and _all_free(operands):
                    return [free(None)] * len(node.outputs)
                raise NotKnownError("has no rule" + (f" in domain '{node.domain}'" if node.domain else ""))
            self._check_flags(node)
            return self._applied(rule, node, operands)
        except RowsMeetError as meeting:
            return visit.failed(Kind.MIXED, str(meeting), meeting.facts)
        except NotKnownError as not_known:
            return visit.failed(Kind.UNKNOWN, str(not_known))
        except TooMuchWorkError:
            raise
        except Exception as error:  # noqa: BLE001 - an error in a rule must not fail the load of the model
            reason = f"does not have the form that its rule expects: {type(error).__name__}"
            return visit.failed(Kind.UNKNOWN, reason)

    def _results_of_mixed(self, node: Node, operands: list[Value | None], mixed: Value) -> list[Value]:
        """The claims about the results of a node with mixed operands; empty if nothing is known about them."""
        if (node.domain, node.op) not in masked_writes.OPERATORS or self._walk.function(node) is not None:
            return []
        try:
            _check_operands(RULES[node.domain, node.op], operands)
            found = masked_writes.result_of_mixed(self._call_of(node, operands), mixed)
        except (RowsMeetError, NotKnownError):
            return []
        return [] if found is None else _with_transpositions(node, operands, [found])

    def _check_flags(self, node: Node) -> None:
        """Raise unless each flag of a node is 0 or 1. Kernels take others for either; Cast then writes no output."""
        for name, value in self._substituted(node.attributes).items():
            if name in _FLAGS and value not in (0, 1):
                raise NotKnownError(f"has the attribute '{name}' with the value {value}, but 0 or 1 is expected")

    def _applied(self, rule: Rule, node: Node, operands: list[Value | None]) -> list[Value]:
        """Apply a rule, after the checks for all operators."""
        if rule.has_graphs:
            return self._checked(rule.apply(self._call_of(node, operands)), node, has_size=False)
        has_rows = has_size = False
        is_free = True
        for i, value in enumerate(operands):
            if value is not None and value.kind is not Kind.FREE:
                is_free = False
                has_rows = has_rows or value.is_rows
                has_size = has_size or (value.kind is Kind.SIZE and i not in rule.arguments)
        if has_rows:
            if has_size:
                raise RowsMeetError("computes with the number of rows in the batch")
            _check_operands(rule, operands)
        try:
            results = self._checked(rule.apply(self._call_of(node, operands)), node, has_size=has_size)
            return _with_transpositions(node, operands, results) if has_rows else results
        except RandomError:
            raise
        except (RowsMeetError, NotKnownError):
            if is_free:
                return [free(None)] * len(node.outputs)
            raise

    def _call_of(self, node: Node, operands: list[Value | None]) -> Call:
        version = self._opsets.get(node.domain, 1)
        return Call(node, tuple(operands), version, self._walk.symbols, self, self._substituted(node.attributes))

    def _checked(self, given: Output, node: Node, *, has_size: bool) -> list[Value]:
        outputs = [given] if isinstance(given, Value) else list(given)
        outputs += [None] * (len(node.outputs) - len(outputs))
        checked: list[Value] = []
        for i, value in enumerate(outputs[: len(node.outputs)]):
            if not node.outputs[i]:
                checked.append(free(None))
            elif value is None:
                raise NotKnownError(f"has no rule for its output {i}")
            else:
                checked.append(self._settled(value, has_size=has_size))
        return checked

    def _settled(self, value: Value, *, has_size: bool) -> Value:
        if value.cause is not None:
            return value
        for axis, length in enumerate(value.dims or ()):
            if contains_rows(length) and not (value.is_rows and axis == value.axis):
                raise RowsMeetError(OTHER_AXIS)
        if value.is_rows:
            if has_size:
                raise RowsMeetError("computes with the number of rows in the batch")
            return value
        if has_size and value.kind is Kind.FREE and value.elements is None:
            return replace(value, kind=Kind.SIZE, facts=NO_FACTS)
        return value

    def _call(self, function: Function, node: Node, operands: list[Value | None]) -> list[Value]:
        """The claims about the outputs of a call of one of the model's functions."""
        if self._depth >= _DEEPEST:
            raise NotKnownError(f"nests functions more than {_DEEPEST} deep")
        for domain, version in function.opsets.items():
            if self._opsets.get(domain, version) != version:  # ONNX Runtime runs the body with the model's version
                raise NotKnownError(f"is a function for version {version} of domain '{domain}', the model for another")
        attributes = {**function.defaults, **self._substituted(node.attributes)}
        names = {name: each for name, each in zip(function.inputs, operands, strict=False) if each is not None}
        absent = {name for name in function.inputs if name not in names}
        nodes = (
            [
                replace(each, inputs=tuple("" if name in absent else name for name in each.inputs))
                for each in function.nodes
            ]
            if absent
            else function.nodes
        )
        inner = _Scope(self._walk, self._opsets, attributes, names, self._depth + 1)
        inner.walk(nodes, names, {})  # ONNX Runtime does not read the sizes that a function declares
        return [_given(names, name) for name in function.outputs[: len(node.outputs)]]

    def _substituted(self, attributes: Mapping[str, Attribute]) -> Mapping[str, Attribute]:
        """Replace references by the attributes of the function. References without a value are left out."""
        if not any(isinstance(value, Reference) for value in attributes.values()):
            return attributes
        found: dict[str, Attribute] = {}
        for name, value in attributes.items():
            if not isinstance(value, Reference):
                found[name] = value
            elif value.name in self._attributes:
                found[name] = self._attributes[value.name]
        return found


def _check_operands(rule: Rule, operands: Sequence[Value | None]) -> None:
    """Raise an error unless the rule supports the facts of the operands, and the rule's parameters are free."""
    for i, value in enumerate(operands):
        if value is None or value.kind is Kind.FREE:
            continue
        if value.facts.stride != 0 and not rule.keeps_stride:
            raise RowsMeetError("uses the index of each row in the batch")
        if value.facts.padding is not None and not rule.keeps_padding:
            raise RowsMeetError("reads rows whose padding depends on the longest row of the batch")
        if i in rule.parameters:
            raise RowsMeetError(f"takes its parameter {i} from the rows")


def _with_transpositions(node: Node, operands: Sequence[Value | None], results: list[Value]) -> list[Value]:
    """Note transpositions of the operands at the results, because ONNX Runtime may move them behind the node."""
    turned = [value for value in operands if value is not None and value.facts.transposed]
    if not turned or node.op in _NEW_AXES:
        return results
    return [
        _with_axes(value, frozenset().union(*(_overtaken(node, each, value) for each in turned))) for value in results
    ]


def _with_axes(value: Value, axes: frozenset[int]) -> Value:
    return replace(value, facts=replace(value.facts, transposed=axes)) if value.is_rows else value


def _overtaken(node: Node, operand: Value, result: Value) -> frozenset[int]:
    """The axes of a result that may have lain before the rows of an operand."""
    before, after = operand.dims or (), result.dims or ()
    if node.op in ("Flatten", "Reshape") and _long(before) != _long(after):
        return frozenset()  # otherwise ONNX Runtime may drop the node, or treat it like Squeeze or Unsqueeze
    return operand.facts.transposed if len(before) == len(after) else frozenset(range(-len(after), 0))


def _long(dims: Sequence[Number]) -> list[Number]:
    """The sizes other than 1."""
    return [length for length in dims if length != 1]


def _has_graphs(node: Node) -> bool:
    """Whether a node runs graphs of its own, which may read any tensor."""
    return any(isinstance(value, Graph) for value in node.attributes.values())


def _all_free(operands: Sequence[Value | None]) -> bool:
    return all(value is None or value.kind is Kind.FREE for value in operands)


def _inner_dims(graph: Graph) -> dict[str, Dims]:
    """The declared shapes of the results of a graph's nodes."""
    made = {name for node in graph.nodes for name in node.outputs}
    return {name: graph.inner_dims[name] for name in made & graph.inner_dims.keys()}


def _constants(graph: Graph, read: Set[str]) -> dict[str, Value]:
    """The claims about the constants of a graph, as far as they are read. A file may hold many others."""
    return {name: constant_value(graph.constants[name]) for name in read & graph.constants.keys()}


def constant_value(tensor: Tensor) -> Value:
    has_elements = tensor.dims is not None and 0 not in tensor.dims
    return Value(Kind.FREE, tensor.dims, dtype=tensor.dtype, elements=tensor.elements, has_elements=has_elements)


def _given(names: Mapping[str, Value], name: str) -> Value:
    value = names.get(name)
    if value is None:
        raise NotKnownError(f"has a graph that does not compute its output '{name}'")
    return value


def _without_facts(value: Value) -> Value:
    """A claim that holds for all runs of a graph: a mixed tensor has no facts there."""
    return value if value.cause is None else Value(value.kind, cause=value.cause)


def _hidden(value: Value) -> Value:
    if value.kind is Kind.FREE or value.cause is not None:
        return value
    return Value(Kind.MIXED, cause=Cause(0, "", "the graph of a Scan over rows reads a tensor of the whole batch"))
