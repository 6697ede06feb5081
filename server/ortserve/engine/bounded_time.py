"""Whether the number of rows alone bounds the time of a model's runs, so that they may happen on the event loop.

A dataflow analysis of the model file. It follows which tensors have values that the model and the shapes of its inputs
fix: initializers, constants, ``Shape``, and what is computed of these. Where shapes follow from other values, or a node
runs a graph of its own, the time of a run depends on what a request brings. Pure but for reading the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature
from ortserve.engine.operator_time import BOUNDED, CONTROL_FLOW, DATA_DEPENDENT, RANDOM, SHAPING_INPUTS
from ortserve.model_file import LENGTH_DELIMITED, fields, messages, read_model, text, varint

MOST_NODES: Final = 1000
"""Nodes and initializers that are looked at, in functions for each call. Reading one takes some 10 µs, and as many
nodes take ONNX Runtime longer than a run on the loop may last."""

# Field numbers of onnx.proto (github.com/onnx/onnx).
_MODEL_GRAPH: Final = 7
_MODEL_FUNCTIONS: Final = 25
_GRAPH_NODE: Final = 1
_GRAPH_INITIALIZER: Final = 5
_TENSOR_TYPE: Final = 2
_TENSOR_NAME: Final = 8
_NODE_INPUT: Final = 1
_NODE_OUTPUT: Final = 2
_NODE_NAME: Final = 3
_NODE_OPERATOR: Final = 4
_NODE_ATTRIBUTE: Final = 5
_NODE_DOMAIN: Final = 7
_NODE_OVERLOAD: Final = 8
_ATTRIBUTE_NAME: Final = 1
_ATTRIBUTE_INT: Final = 3
_ATTRIBUTE_TENSOR: Final = 5
_FUNCTION_NAME: Final = 1
_FUNCTION_INPUT: Final = 4
_FUNCTION_OUTPUT: Final = 5
_FUNCTION_NODE: Final = 7
_FUNCTION_DOMAIN: Final = 10
_FUNCTION_OVERLOAD: Final = 13

_STRING: Final = 8
"""ONNX's number of the element type (TensorProto.DataType)."""
_STRING_CONSTANTS: Final = frozenset({"value_string", "value_strings"})

_TOO_LARGE: Final = f"the graph has more than {MOST_NODES} nodes and initializers"


def why_unbounded(path: Path, signature: ModelSignature) -> str:
    """Why the number of rows does not bound the time of a run; empty where it does. Blocks on the file.

    Args:
        path: The ``.onnx`` file.
        signature: What is served of the model.
    """
    return _why_shapes_vary(signature) or _why_values_matter(path, {spec.name for spec in signature.inputs})


def _why_shapes_vary(signature: ModelSignature) -> str:
    for role, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.datatype is DataType.BYTES:
                return f"{role} '{spec.name}' holds strings"
    for spec in signature.inputs:
        if signature.is_batched and spec.is_optional and spec.batch_axis is None:
            return f"a request may bring input '{spec.name}', and then runs alone with any number of rows"
        if spec.has_any_shape or -1 in spec.row_shape:
            return f"the number of rows does not fix the shape of input '{spec.name}'"
    return ""


def _why_values_matter(path: Path, fed: set[str]) -> str:
    """As ``why_unbounded``, of a graph whose inputs ``fed`` have fixed shapes."""
    found = read_model(path, lambda model: iter([_Walk(model).why_unbounded(fed)]))
    return found[0] if found else "the model file cannot be read as ONNX"


@dataclass(frozen=True, slots=True)
class _Node:
    """A node, and where its attributes are in the file."""

    name: str
    operator: str
    domain: str
    overload: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Sequence[tuple[int, int]]

    def __str__(self) -> str:
        operator = f"{self.domain}.{self.operator}" if self.domain else self.operator
        return f"node '{self.name}' ({operator})" if self.name else f"a node ({operator})"


@dataclass(slots=True)
class _Function:
    """A function of the model, and where its nodes are in the file."""

    name: str = ""
    domain: str = ""
    overload: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)


class _Walk:
    """One walk over a model's nodes, in their order, in which each comes after those it reads from."""

    def __init__(self, model: memoryview) -> None:
        self._model = model
        self._left = MOST_NODES
        self._functions: Mapping[tuple[str, str, str], _Function] = {}

    def why_unbounded(self, fed: set[str]) -> str:
        """Raises ValueError or IndexError: The model is no protobuf message."""
        model = self._model
        functions = (self._read_function(*span) for span in messages(model, 0, len(model), _MODEL_FUNCTIONS))
        self._functions = {(function.domain, function.name, function.overload): function for function in functions}
        nodes: list[tuple[int, int]] = []
        fixed: set[str] = set()
        for graph in messages(model, 0, len(model), _MODEL_GRAPH):
            for number, wire_type, span in fields(model, *graph):
                if wire_type != LENGTH_DELIMITED or number not in (_GRAPH_NODE, _GRAPH_INITIALIZER):
                    continue
                self._left -= number == _GRAPH_INITIALIZER
                if self._left < 0 or len(nodes) > MOST_NODES:
                    return _TOO_LARGE
                if number == _GRAPH_NODE:
                    nodes.append(span)
                    continue
                name, element_type = self._read_tensor(*span)
                if element_type == _STRING:
                    return f"initializer '{name}' holds strings"
                if name not in fed:  # else requests may bring another value
                    fixed.add(name)
        return self._why_nodes(nodes, fixed)

    def _why_nodes(self, spans: Sequence[tuple[int, int]], fixed: set[str]) -> str:
        """Why the time of these nodes is not bounded. ``fixed`` are tensors with fixed values, and grows by theirs."""
        for span in spans:
            self._left -= 1
            if self._left < 0:
                return _TOO_LARGE
            node = self._read_node(*span)
            function = self._functions.get((node.domain, node.operator, node.overload))
            why = self._why_node(node, fixed) if function is None else self._why_function(node, function, fixed)
            if why:
                return why
        return ""

    def _why_node(self, node: _Node, fixed: set[str]) -> str:
        is_fixed = all(not name or name in fixed for name in node.inputs)
        if not node.domain:
            if node.operator in CONTROL_FLOW:
                return f"{node} is control flow"
            if node.operator in DATA_DEPENDENT:
                if not is_fixed:
                    return f"{node} takes a time that depends on values"
            elif node.operator not in BOUNDED[""]:
                return f"{node} is not known to take a time that its shapes bound"
            for index in SHAPING_INPUTS.get(node.operator, ()):
                name = node.inputs[index] if index < len(node.inputs) else ""
                if name and name not in fixed:
                    return f"{node} gets a shape from values, by its input '{name}'"
            if self._makes_strings(node):
                return f"{node} makes strings"
            is_fixed = (is_fixed or node.operator in ("Shape", "Size")) and node.operator not in RANDOM
        elif node.operator not in BOUNDED.get(node.domain, ()):
            return f"{node} is not known to take a time that its shapes bound"
        if is_fixed:
            fixed.update(node.outputs)
        return ""

    def _why_function(self, node: _Node, function: _Function, fixed: set[str]) -> str:
        """As of its body, with the node's inputs for the function's."""
        given = zip(function.inputs, node.inputs, strict=False)  # the last ones may be left out
        inside = {inner for inner, outer in given if not outer or outer in fixed}
        inside.update(function.inputs[len(node.inputs) :])
        why = self._why_nodes(function.nodes, inside)
        if not why:
            pairs = zip(function.outputs, node.outputs, strict=False)
            fixed.update(outer for inner, outer in pairs if inner in inside)
        return why

    def _makes_strings(self, node: _Node) -> bool:
        model = self._model
        if node.operator not in ("Cast", "Constant"):
            return False
        for span in node.attributes:
            name = text(model, *span, _ATTRIBUTE_NAME)
            if name in _STRING_CONSTANTS:
                return True
            if name == "to" and any(
                number == _ATTRIBUTE_INT and varint(model, value[0])[0] == _STRING
                for number, _, value in fields(model, *span)
            ):
                return True
            if name == "value" and any(
                self._read_tensor(*tensor)[1] == _STRING for tensor in messages(model, *span, _ATTRIBUTE_TENSOR)
            ):
                return True
        return False

    def _read_tensor(self, start: int, end: int) -> tuple[str, int]:
        """Name and element type. Of strings, which are fields of their own, only as far as the type."""
        model, name, element_type = self._model, "", 0
        for number, wire_type, span in fields(model, start, end):
            if number == _TENSOR_TYPE:
                element_type = varint(model, span[0])[0]
                if element_type == _STRING:
                    break
            elif number == _TENSOR_NAME and wire_type == LENGTH_DELIMITED:
                name = self._decode(span)
        return name, element_type

    def _read_node(self, start: int, end: int) -> _Node:
        found: dict[int, list[tuple[int, int]]] = {}
        for number, wire_type, span in fields(self._model, start, end):
            if wire_type == LENGTH_DELIMITED:
                found.setdefault(number, []).append(span)
        name, operator, domain, overload = (
            self._decode(found[number][-1]) if number in found else ""
            for number in (_NODE_NAME, _NODE_OPERATOR, _NODE_DOMAIN, _NODE_OVERLOAD)
        )
        inputs, outputs = (list(map(self._decode, found.get(number, ()))) for number in (_NODE_INPUT, _NODE_OUTPUT))
        return _Node(name, operator, _domain(domain), overload, inputs, outputs, found.get(_NODE_ATTRIBUTE, ()))

    def _read_function(self, start: int, end: int) -> _Function:
        function = _Function()
        for number, _, span in fields(self._model, start, end):
            if number == _FUNCTION_NAME:
                function.name = self._decode(span)
            elif number == _FUNCTION_DOMAIN:
                function.domain = _domain(self._decode(span))
            elif number == _FUNCTION_OVERLOAD:
                function.overload = self._decode(span)
            elif number == _FUNCTION_INPUT:
                function.inputs.append(self._decode(span))
            elif number == _FUNCTION_OUTPUT:
                function.outputs.append(self._decode(span))
            elif number == _FUNCTION_NODE:
                function.nodes.append(span)
        return function

    def _decode(self, span: tuple[int, int]) -> str:
        return bytes(self._model[slice(*span)]).decode(errors="replace")


def _domain(name: str) -> str:
    """Of an operator; ONNX's own has two names."""
    return "" if name == "ai.onnx" else name
