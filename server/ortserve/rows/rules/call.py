"""The interface of rules: an analysed node with operands, attributes and results; and the rules of broadcasting."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Protocol, TypeAlias

from ortserve.model_file.graph import Attribute, Graph, Node
from ortserve.rows.number import DEPENDENT, Number
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import NO_FACTS, Facts, Kind, Value, element_count, free, rows

MAX_RANK: Final = 64
"""Maximum number of axes of a result."""
OTHER_AXIS: Final = "has a result with another axis whose length depends on the number of rows"
"""The error of a rule whose result would have N in the length of an axis that does not carry its rows."""


class RowsMeetError(Exception):
    """The operator may combine rows. The text continues a sentence whose subject is the operator.

    ``facts`` are known about the result all the same.
    """

    def __init__(self, text: str, facts: Facts = NO_FACTS) -> None:
        super().__init__(text)
        self.facts = facts


class RandomError(RowsMeetError):
    """The results of the operator may differ from run to run, also for operands without rows."""


class NotKnownError(Exception):
    """The rule cannot decide. The text continues a sentence whose subject is the operator."""


class Scope(Protocol):
    """The analysis of subgraphs, for rules of operators with graphs."""

    def run_graph(self, graph: Graph, arguments: Sequence[Value], *, hide_rows: bool = False) -> list[Value]:
        """The claims about a subgraph's outputs. With ``hide_rows``, captured tensors must be free."""


@dataclass(slots=True)
class Call:
    """One node under analysis.

    Attributes:
        operands: A claim for each operand, which is never mixed or unknown; None for an omitted operand.
        opset: The version of the operator set of the node's domain.
        attributes: The node's attributes; in a function, with references replaced.
    """

    node: Node
    operands: tuple[Value | None, ...]
    opset: int
    symbols: Symbols
    scope: Scope
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.node.op

    def has(self, index: int) -> bool:
        return index < len(self.operands) and self.operands[index] is not None

    def operand(self, index: int) -> Value:
        value = self.operands[index] if index < len(self.operands) else None
        if value is None:
            raise NotKnownError(f"has no operand {index}")
        return value

    def optional(self, index: int) -> Value | None:
        return self.operands[index] if index < len(self.operands) else None

    def present(self) -> list[Value]:
        return [value for value in self.operands if value is not None]

    def wants(self, output: int) -> bool:
        """Whether an output is used."""
        return output < len(self.node.outputs) and bool(self.node.outputs[output])

    def integer(self, name: str, default: int) -> int:
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise NotKnownError(f"has an attribute '{name}' that cannot be read")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.attributes.get(name, default)
        if not isinstance(value, str):
            raise NotKnownError(f"has an attribute '{name}' that cannot be read")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """An attribute that is a list of integers; None if it is not given."""
        value = self.attributes.get(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(each, int) for each in value):
            raise NotKnownError(f"has an attribute '{name}' that cannot be read")
        return tuple(each for each in value if isinstance(each, int))

    def dims(self, value: Value) -> tuple[Number, ...]:
        """The shape of an operand."""
        if value.dims is None:
            raise NotKnownError("has an operand whose shape is not known")
        return value.dims

    def numbers(self, index: int, what: str) -> tuple[Number, ...]:
        """The elements of an operand that determines a shape."""
        value = self.operand(index)
        if value.is_rows:
            raise RowsMeetError(f"takes its {what} from the rows")
        if value.elements is None:
            if value.kind is Kind.SIZE:
                raise RowsMeetError(f"takes its {what} from the number of rows")
            raise NotKnownError(f"takes its {what} from a value that is not known")
        if DEPENDENT in value.elements:
            raise RowsMeetError(f"takes its {what} from the number of rows")
        return value.elements

    def number(self, index: int, what: str) -> Number:
        """The single element of an operand that determines a shape."""
        elements = self.numbers(index, what)
        if len(elements) != 1:
            raise NotKnownError(f"takes its {what} from {len(elements)} numbers")
        return elements[0]

    def constants(self, index: int, what: str) -> tuple[int, ...]:
        """The elements of an operand that must be known integers."""
        elements = self.numbers(index, what)
        known = tuple(element for element in elements if isinstance(element, int))
        if len(known) != len(elements):
            raise NotKnownError(f"takes its {what} from a value that is not known")
        return known

    def axis(self, name: str, default: int, rank: int) -> int:
        return normal_axis(self.integer(name, default), rank)

    def axes(self, index: int, rank: int) -> tuple[int, ...] | None:
        """Axes from the attribute ``axes`` or an operand; None if neither is given."""
        given = self.integers("axes")
        if given is None and self.has(index):
            given = self.constants(index, "axes")
        return None if given is None else tuple(normal_axis(axis, rank) for axis in given)

    def is_free(self, index: int) -> bool:
        """Whether an operand is omitted or free."""
        value = self.optional(index)
        return value is None or value.kind is Kind.FREE

    def result(
        self,
        dims: Sequence[Number],
        like: Value | None = None,
        axis: int = 0,
        dtype: int = 0,
        elements: tuple[Number, ...] | None = None,
        facts: Facts = NO_FACTS,
    ) -> Value:
        """An output: with the row layout of ``like`` if it has rows; otherwise free, with the bounds of ``facts``."""
        if len(dims) > MAX_RANK:
            raise NotKnownError(f"returns a tensor of {len(dims)} dimensions, more than are analysed")
        if like is None or not like.is_rows:
            return free(tuple(dims), dtype, elements, facts)
        return rows(self.symbols, tuple(dims), axis, outer=like.outer, inner=like.inner, dtype=dtype, facts=facts)

    def same_shape(self, value: Value, dtype: int | None = None, facts: Facts = NO_FACTS) -> Value:
        """An output with the shape and the rows of an operand."""
        return self.result(self.dims(value), value, value.axis, value.dtype if dtype is None else dtype, facts=facts)


Output: TypeAlias = Value | Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator treats rows.

    Attributes:
        apply: Returns the claims about the outputs. It is also called if all operands are free, to derive shapes.
        arguments: Indices of operands of which the rule uses only the elements; they may be of kind size.
        parameters: Indices of operands that must be free.
        keeps_stride: Whether the rule supports values that contain the row's number.
        keeps_padding: Whether the rule supports rows that are padded to the longest row.
        has_graphs: Whether the operator runs graphs, which may read any tensor. Then the rule does all checks itself.
    """

    apply: Callable[[Call], Output]
    _: KW_ONLY
    arguments: Collection[int] = ()
    parameters: Collection[int] = ()
    keeps_stride: bool = False
    keeps_padding: bool = False
    has_graphs: bool = False


Rules: TypeAlias = Mapping[tuple[str, str], Rule]


def normal_axis(axis: int, rank: int) -> int:
    """Convert an axis, which may be negative, to a nonnegative number."""
    if not -rank <= axis < max(rank, 1):
        raise NotKnownError(f"has axis {axis} for {rank} dimensions")
    return axis + rank if axis < 0 else axis


def off_axis(value: Value, axes: Iterable[int], what: str) -> None:
    """Raise ``RowsMeetError`` if the rows of a value lie on one of the axes."""
    if value.is_rows and value.axis in axes:
        raise RowsMeetError(f"{what} along the axis of the rows")


def check_sizes(call: Call) -> None:
    """Raise if a row may have more entries than its claim says, so that a position along the rows is in another row.

    ONNX Runtime 1.31.1 replaces a computed size in a target shape by -1. Then the Reshape accepts requests of other
    sizes than the one for which its target shape holds all elements. A trial would see only requests of one size.
    """
    if call.symbols.has_uncertain_size:
        raise RowsMeetError(
            "reads positions along the axis of the rows, after a Reshape that may give a row several entries"
        )


def check_no_stride(values: Iterable[Value]) -> None:
    """Raise ``RowsMeetError`` if a value contains the number of its row."""
    if any(value.facts.stride != 0 for value in values):
        raise RowsMeetError("uses the index of each row in the batch")


def broadcast_shape(call: Call, shapes: Sequence[tuple[Number, ...]]) -> tuple[Number, ...]:
    """The shape to which operands with these shapes broadcast."""
    rank = max(map(len, shapes), default=0)
    lengths: list[Number] = [1] * rank
    for shape in shapes:
        for position, length in enumerate(shape, rank - len(shape)):
            lengths[position] = call.symbols.broadcast(lengths[position], length)
    return tuple(lengths)


def without_rows(value: Value, dims: tuple[Number, ...]) -> tuple[Number, ...]:
    """The dimensions of a value with 1 in place of the rows, to broadcast the other dimensions."""
    return (*dims[: value.axis], 1, *dims[value.axis + 1 :]) if value.is_rows else dims


def aligned_axis(call: Call, values: Sequence[Value]) -> tuple[int, Value] | None:
    """The axis of the broadcast result that carries the rows, and an operand with these rows; None without rows.

    Raises:
        RowsMeetError: A row would be paired with another row, or with an entry of a tensor without rows that depends
            on the row's number.
        NotKnownError: The shape of an operand is not known.
    """
    carriers = [value for value in values if value.is_rows]
    if not carriers:
        return None
    rank = max(len(call.dims(value)) for value in values)
    first = carriers[0]
    axis = rank - len(call.dims(first)) + first.axis
    for value in values:
        dims = call.dims(value)
        position = axis - (rank - len(dims))
        if value.is_rows:
            if position != value.axis or not value.carries_like(first):
                raise RowsMeetError("pairs rows that lie along different axes or in different orders")
        elif position >= 0 and dims[position] != 1:
            raise RowsMeetError("pairs each row by its index with an entry of a tensor without rows")
    return axis, first


def _check_numbers(call: Call, values: Sequence[Value]) -> None:
    """Raise if a single number adds axes to the result.

    ONNX Runtime 1.32.0 leaves such axes out if it fuses the operators of a normalization, a product of integers or
    ``Mul(x, Div(1, z))``.
    """
    ranks = [len(call.dims(value)) for value in values if element_count(call.dims(value)) != 1]
    if ranks and any(len(call.dims(value)) > max(1, *ranks) for value in values):
        raise NotKnownError("has a single number with more axes than its other operands")


def broadcast(call: Call, values: Sequence[Value], dtype: int = 0, facts: Facts = NO_FACTS) -> Value:
    """The result of an operator that combines the elements of its operands after broadcasting."""
    if not values:
        raise NotKnownError("has no operands")
    _check_numbers(call, values)
    found = aligned_axis(call, values)
    if len(values) == 1 or (len(values) == 2 and values[0].dims == values[1].dims):
        dims = call.dims(values[0])
    else:
        dims = broadcast_shape(call, [without_rows(value, call.dims(value)) for value in values])
    if found is None:
        return call.result(dims, dtype=dtype, facts=facts)
    axis, like = found
    return call.result(dims, like, axis, dtype, facts=facts)
