"""What the analysis claims of one tensor of a graph."""

import enum
from dataclasses import dataclass
from typing import Final

from ortserve.rows.graph import INTEGERS
from ortserve.rows.symbols import N, Number, Symbols, contains_rows


class Kind(enum.Enum):
    """How a tensor depends on the rows of the batch and on their number N."""

    ROWS = "rows"
    """Axis ``axis`` has ``outer * N * inner`` entries; those of row r depend on row r only."""
    FREE = "free"
    """Value and shape are the same for every N and all rows."""
    SIZE = "size"
    """The value depends on N, but not on the rows; the shape on neither."""
    MIXED = "mixed"
    """The value may depend on several rows."""
    UNKNOWN = "unknown"
    """No rule applied."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The node that first made a tensor mixed or unknown, and a sentence that says how."""

    order: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What else is known of the values of a tensor: bounds of a free one, all of these of one with rows.

    Attributes:
        stride: The value in the batch is the value alone plus the row's number times this. Where it is ``DEPENDENT``,
            nothing is known of the value in the batch, except of ``columns``.
        nonnegative: The value alone is never negative.
        below: The value alone, an integer, is below this; None where that is not known.
        columns: The operands of a Concat of columns along the last axis.
        padding: The text that makes the rows as long as the longest one; None where they are not padded.
    """

    stride: Number = 0
    nonnegative: bool = False
    below: Number | None = None
    columns: "tuple[Value, ...]" = ()
    padding: str | None = None


NO_FACTS: Final = Facts()


@dataclass(frozen=True, slots=True)
class Value:
    """A claim about a tensor.

    Attributes:
        dims: The shape in the batch; None where it is not known, which only happens to free and size tensors.
        axis: The axis that carries the rows. This and the next two are meant for rows only.
        outer: How often the rows are repeated along the axis.
        inner: How many neighbouring entries along the axis belong to one row.
        dtype: The element type; 0 where it is not known.
        elements: The elements of a small tensor without rows, in the order of memory.
        cause: Why a tensor is mixed or unknown.
    """

    kind: Kind
    dims: tuple[Number, ...] | None = None
    axis: int = 0
    outer: Number = 1
    inner: Number = 1
    dtype: int = 0
    elements: tuple[Number, ...] | None = None
    facts: Facts = NO_FACTS
    cause: Cause | None = None

    @property
    def is_rows(self) -> bool:
        return self.kind is Kind.ROWS

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    def carries_like(self, other: "Value") -> bool:
        """Whether both have rows with the same layout along their axes."""
        return self.outer == other.outer and self.inner == other.inner

    @property
    def is_plain(self) -> bool:
        """Whether each row is one entry of its axis."""
        return self.outer == 1 and self.inner == 1


def free(
    dims: tuple[Number, ...] | None,
    dtype: int = 0,
    elements: tuple[Number, ...] | None = None,
    facts: Facts = NO_FACTS,
) -> Value:
    """A tensor without rows, of kind size where its elements depend on N. Of facts, it may have bounds."""
    if elements is not None and any(map(contains_rows, elements)):
        return Value(Kind.SIZE, dims, dtype=dtype, elements=elements)
    if facts.nonnegative or facts.below is not None:
        facts = Facts(nonnegative=facts.nonnegative, below=facts.below)
    else:
        facts = NO_FACTS
    return Value(Kind.FREE, dims, dtype=dtype, elements=elements, facts=facts)


def rows(
    symbols: Symbols,
    dims: tuple[Number, ...],
    axis: int,
    outer: Number,
    inner: Number,
    dtype: int = 0,
    facts: Facts = NO_FACTS,
) -> Value:
    """A tensor with rows along an axis; the size given for the axis is replaced."""
    along = symbols.product((outer, N, inner))
    shape = (*dims[:axis], along, *dims[axis + 1 :])
    return Value(Kind.ROWS, shape, axis, outer, inner, dtype, facts=facts)
