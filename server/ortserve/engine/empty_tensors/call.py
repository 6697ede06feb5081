"""A node with what is known about its inputs, for the rules of the analysis of empty tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ortserve.engine.empty_tensors.known import Known, SizeSum
from ortserve.model_file.graph import Attribute, Node

LARGE: Final = 2**31 - 1
"""Slices end here if they have no end."""


class Call:
    """A node with what is known about its inputs."""

    def __init__(self, node: Node, shapes: Mapping[str, Known], opset: int, scope: str) -> None:
        """Look the inputs up.

        Args:
            node: The node.
            shapes: All known tensors of the graph.
            opset: The version of ONNX's operators.
            scope: A prefix that distinguishes tensors of equal names in calls of functions.
        """
        self.node = node
        self.scope = scope
        self.shapes = shapes
        self.inputs = [shapes.get(name) if name else None for name in node.inputs]
        self.opset = opset
        self.is_any_empty = any(known is not None and known.may_be_empty for known in self.inputs)

    def known(self, place: int) -> Known:
        """An input; nothing is known about one that is not given."""
        given = self.inputs[place] if place < len(self.inputs) else None
        return Known() if given is None else given

    def has(self, place: int) -> bool:
        """Whether an input is given."""
        return place < len(self.node.inputs) and bool(self.node.inputs[place])

    def attribute(self, name: str) -> Attribute:
        return self.node.attributes.get(name)

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer."""
        value = self.attribute(name)
        return value if isinstance(value, int) else default

    def integers(self, name: str, place: int) -> tuple[int, ...] | None:
        """A list of integers from an attribute, or from a constant input; None if neither is known."""
        value = self.attribute(name)
        if isinstance(value, tuple):
            return tuple(int(one) for one in value if not isinstance(one, str))
        elements = self.known(place).elements if self.has(place) else None
        return None if elements is None else tuple(int(one) for one in elements)


def with_size(found: Known, shape: Known, at: int, call: Call) -> Known:
    """``found`` with what is known about its only number: the one at position ``at`` of the sizes in ``shape``."""
    if shape.axes_of is None:
        return found
    name, first = shape.axes_of
    sizes = call.shapes[name].sizes if name in call.shapes else None
    if at < 0 and sizes is None:
        return found
    axis = first + at if at >= 0 or sizes is None else len(sizes) + at
    size = sizes[axis] if sizes is not None and axis < len(sizes) else None
    return (
        found.with_total(SizeSum(0, (f"{call.scope}{name}[{axis}]",))) if size is None else found.with_elements((size,))
    )


def copy_of(call: Call) -> Known:
    """The output has the elements of the first input, maybe in another shape."""
    given = call.known(0)
    elements = given.elements if given.elements is not None and len(given.elements) == 1 else None
    return replace(given, elements=elements, axes_of=None, may_be_empty=call.is_any_empty)
