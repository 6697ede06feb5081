"""A node of a model with the nodes that check its inputs, for ``operator_checks`` and ``empty_checks``."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from ortserve.model_file.editing import Rewired, first_output, write_constant, write_node
from ortserve.model_file.graph import INT64, Attribute, Dims, Graph, Node
from ortserve.rows import Value, constant_value

FindTensors: TypeAlias = Callable[[], Mapping[int, Mapping[str, Value]]]
"""Returns ``rows.Sizes.tensors`` of a model."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The graph of a node, and the known properties of its tensors.

    Attributes:
        graph: The graph.
        declared: The inputs of the model with their shapes.
        narrow: Constants, and the scales of DynamicQuantizeLinear, which are single numbers.
        makers: The nodes that make tensors.
        find_tensors: Returns the properties of the computed tensors, see ``rows.find_sizes``. Called only if a check
            asks for one, because the analysis takes as long as the proof of independent rows.
    """

    graph: Graph
    declared: Mapping[str, Dims | None]
    narrow: Set[str]
    makers: Mapping[str, Node]
    find_tensors: FindTensors

    def value(self, name: str) -> Value | None:
        """The known properties of a tensor that the graph reads or makes; None if none are known."""
        constant = self.graph.constants.get(name)
        if constant is not None and name not in self.declared:
            return constant_value(constant)
        return self.find_tensors().get(id(self.graph), {}).get(name)


class CheckedNode:
    """A node, with the nodes that check its inputs before it and its outputs behind it."""

    def __init__(self, node: Node, context: NodeContext) -> None:
        """Begin with the node as it is."""
        self.node = node
        self.context = context
        self._inputs = list(node.inputs)
        self._outputs = list(node.outputs)
        self._name = first_output(node)
        self._made: list[bytes] = []
        self._after: list[bytes] = []

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the node has in the model."""
        return self.node.inputs

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        return self.node.attributes

    @property
    def is_changed(self) -> bool:
        return bool(self._made or self._after) or self.edit() != Rewired(self.inputs, self.node.outputs)

    def has(self, place: int) -> bool:
        return place < len(self.inputs) and bool(self.inputs[place])

    def has_free_end(self, place: int) -> bool:
        """Whether an input of the node is an input of the model whose last axis has a free size."""
        dims = self.declared_dims(place)
        return (
            place < len(self.inputs)
            and self.inputs[place] in self.context.declared
            and not (dims and isinstance(dims[-1], int))
        )

    def declared_dims(self, place: int) -> Dims:
        """The declared shape of an input of the model; empty if it is not known."""
        return self.context.declared.get(self.inputs[place]) or () if place < len(self.inputs) else ()

    def known_sizes(self, place: int) -> tuple[int | None, ...] | None:
        """The known sizes of an input; None if not even its number of axes is known."""
        value = self._value(place)
        if value is None or value.dims is None:
            return None
        return tuple(size if isinstance(size, int) else None for size in value.dims)

    def may_be_empty(self, place: int) -> bool:
        """Whether an input may be empty although no input of the model is."""
        if not self.has(place):
            return False
        value = self._value(place)
        return value is None or not value.has_elements

    def _value(self, place: int) -> Value | None:
        return self.context.value(self.inputs[place]) if self.has(place) else None

    def add_size(self, place: int, axis: int) -> str:
        """Add nodes in front of the checked one that compute the size of an axis of an input."""
        shape = self.add("Shape", self.inputs[place])
        return self.add("Gather", shape, self.constant(INT64, axis))

    def add_sizes(self, place: int, axes: Iterable[int]) -> str:
        """Add nodes that compute a list of the sizes of several axes of an input."""
        shape = self.add("Shape", self.inputs[place])
        return self.add("Gather", shape, self.constant(INT64, *axes, is_list=True))

    def add_rank(self, place: int) -> str:
        """Add nodes that compute the number of axes of an input."""
        return self.add("Size", self.add("Shape", self.inputs[place]))

    def add(self, operator: str, *sources: str, name: str = "", **attributes: int) -> str:
        """Add a node in front of the checked one, and return the name of its output."""
        output = self._new_name()
        self._made.append(write_node(operator, "", sources, output, attributes=attributes, name=name))
        return output

    def constant(self, dtype: int, *values: float, is_list: bool = False) -> str:
        output = self._new_name()
        self._made.append(write_constant(output, dtype, *values, is_list=is_list))
        return output

    def fail_if(self, is_wrong: str, place: int, expected: str) -> None:
        """Fail before the node reads this input, if any element of ``is_wrong`` is true.

        The error of ONNX Runtime contains the name of the node that failed, and so what the operator expects.
        """
        index = self.add("ReduceSum", self.add("Cast", is_wrong, to=INT64), keepdims=0)
        self._inputs[place] = self._checked(self._inputs[place], index, expected)

    def fail_if_not_whole(self, sources: Sequence[str], expected: str) -> None:
        """Fail behind the node, if its first output has more elements than these tensors together."""
        whole, checked = f"{self._name}/whole", self.node.outputs[0]
        before, self._made = self._made, []
        parts = [self.add("Size", source) for source in sources]
        total = parts[0]
        for part in parts[1:]:
            total = self.add("Add", total, part)
        self._checked(whole, self.add("Sub", self.add("Size", whole), total), expected, checked)
        self._outputs[0] = whole
        self._made, self._after = before, self._made

    def replace_where(self, is_wrong: str, replacement: str) -> None:
        """Replace the elements of the output for which ``is_wrong`` is true."""
        self._outputs[0] = f"{self._name}/written"
        self._after = [write_node("Where", "", [is_wrong, replacement, self._outputs[0]], self.node.outputs[0])]

    def name_inputs(self, count: int) -> None:
        """Write the first ``count`` inputs of the node, those that it leaves out with empty names."""
        self._inputs += [""] * (count - len(self._inputs))

    def make_outputs(self, count: int) -> None:
        """Let the node make its first ``count`` outputs, whether or not the model reads them."""
        self._outputs += [""] * (count - len(self._outputs))
        for place, name in enumerate(self._outputs[:count]):
            self._outputs[place] = name or f"{self._name}/output_{place}"

    def edit(self) -> Rewired:
        return Rewired(tuple(self._inputs), tuple(self._outputs), b"".join(self._made), b"".join(self._after))

    def _checked(self, source: str, index: str, expected: str, output: str = "") -> str:
        """A tensor like ``source`` that cannot be read if ``index`` is not 0."""
        name = f"{self._new_name()}: {self.node.op} expects {expected}"  # names of nodes must differ
        nothing = self.add("Gather", self.constant(INT64, 0, is_list=True), index, name=name)
        # Readers of the result depend on the Gather, and the tensor keeps its shape.
        shape = self.add("Add", self.add("Shape", source), nothing)
        output = output or self._new_name()
        self._made.append(write_node("Reshape", "", [source, shape], output))
        return output

    def _new_name(self) -> str:
        return f"{self._name}/check_{len(self._made)}"
