"""What the analysis of empty tensors knows about a tensor, and about sums of sizes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, TypeAlias

from ortserve.model_file.graph import Constant, Tensor

Sizes: TypeAlias = tuple[int | None, ...]
"""The sizes of the axes; None for an unknown size."""


@dataclass(frozen=True, slots=True)
class SizeSum:
    """A number that a model computes from sizes: an offset plus the sizes of axes, each of which is at least 1.

    Attributes:
        offset: May be negative.
        axes: Names of the axes, sorted. An axis that is added twice occurs twice.
    """

    offset: int
    axes: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """The smallest number that it may be."""
        return self.offset + len(self.axes)

    def plus(self, other: "SizeSum") -> "SizeSum":
        return SizeSum(self.offset + other.offset, tuple(sorted((*self.axes, *other.axes))))

    def minus(self, other: "SizeSum") -> "SizeSum | None":
        """The difference; None if a size remains that is subtracted."""
        rest = Counter(self.axes)
        rest.subtract(other.axes)
        if min(rest.values(), default=0) < 0:
            return None
        return SizeSum(self.offset - other.offset, tuple(sorted(rest.elements())))


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about a tensor.

    Attributes:
        sizes: The sizes of its axes; None if their number is unknown.
        may_be_empty: Whether it may have no elements.
        least: A lower bound of the elements; None if there is none.
        has_no_zero: Whether no element is 0.
        elements: The elements of a small constant.
        total: Its value, if it is a single number that is computed from sizes; None if unknown.
        axes_of: The tensor whose sizes these are, with the first of the axes.
    """

    sizes: Sizes | None = None
    may_be_empty: bool = False
    least: Constant | None = None
    has_no_zero: bool = False
    elements: tuple[Constant, ...] | None = None
    total: SizeSum | None = None
    axes_of: tuple[str, int] | None = None

    def with_elements(self, elements: tuple[Constant, ...] | None) -> "Known":
        """The same tensor with these elements; None if they are unknown."""
        if not elements:
            return replace(self, elements=elements)
        total = SizeSum(int(elements[0])) if len(elements) == 1 and isinstance(elements[0], int) else None
        return replace(self, least=min(elements), has_no_zero=0 not in elements, elements=elements, total=total)

    def with_total(self, total: SizeSum) -> "Known":
        """The same tensor with this single number."""
        return replace(self, least=total.least, has_no_zero=total.least > 0, total=total)


ANYTHING: Final = Known(may_be_empty=True)
"""A tensor of which nothing is known."""


def of_constant(tensor: Tensor) -> Known:
    """What is known about a constant: all, if it is small."""
    return Known(tensor.dims, 0 in (tensor.dims or ())).with_elements(tensor.elements)


def least_of(known: Iterable[Known | None]) -> Constant | None:
    """The lower bound of the elements of all these tensors; None if any of them has none."""
    bounds = [None if one is None else one.least for one in known]
    return min((bound for bound in bounds if bound is not None), default=None) if None not in bounds else None


def broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    """The sizes of tensors that are broadcast together; None if a number of axes is unknown."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    axes = zip_longest(*(reversed(shape) for shape in known), fillvalue=1)
    sizes = (next((size for size in axis if size not in (None, 1)), None if None in axis else 1) for axis in axes)
    return tuple(reversed(tuple(sizes)))
