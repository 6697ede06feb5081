"""What the analysis of empty tensors knows about a tensor, and about sums of sizes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from ortserve.model_file.graph import Constant, Tensor

Sizes: TypeAlias = tuple[int | None, ...]
"""The sizes of the axes; None for an unknown size."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about a tensor.

    Attributes:
        sizes: The sizes of its axes; None if their number is unknown.
        may_be_empty: Whether it may have no elements.
        least: A lower bound of the elements; None if there is none.
        has_no_zero: Whether no element is 0.
        elements: The elements of a small constant.
        total: A single number as an offset and the sizes of axes that are added to it, in order; None if unknown.
        axes_of: The tensor whose sizes these are, with the first of the axes.
    """

    sizes: Sizes | None = None
    may_be_empty: bool = False
    least: Constant | None = None
    has_no_zero: bool = False
    elements: tuple[Constant, ...] | None = None
    total: tuple[int, tuple[str, ...]] | None = None
    axes_of: tuple[str, int] | None = None


ANYTHING: Final = Known(may_be_empty=True)
"""A tensor of which nothing is known."""


def of_constant(tensor: Tensor) -> Known:
    elements = tensor.elements
    return Known(tensor.dims, 0 in (tensor.dims or ()), **listed(elements))


def listed(elements: tuple[Constant, ...] | None) -> dict[str, Any]:
    if not elements:
        return {"elements": elements}
    total = (int(elements[0]), ()) if len(elements) == 1 and isinstance(elements[0], int) else None
    return {"least": min(elements), "has_no_zero": 0 not in elements, "elements": elements, "total": total}


def sum_of(offset: int, axes: Iterable[str]) -> dict[str, Any]:
    """A sum of sizes, each of which is at least 1."""
    total = (offset, tuple(sorted(axes)))
    return {"least": offset + len(total[1]), "has_no_zero": offset + len(total[1]) > 0, "total": total}


def minus(first: Known, second: Known) -> tuple[int, tuple[str, ...]] | None:
    """The difference of two sums of sizes, if no size remains that is subtracted."""
    if first.total is None or second.total is None:
        return None
    rest = Counter(first.total[1])
    rest.subtract(second.total[1])
    return (
        (first.total[0] - second.total[0], tuple(sorted(rest.elements())))
        if min(rest.values(), default=0) >= 0
        else None
    )


def least_of(known: Iterable[Known | None]) -> Constant | None:
    bounds = [None if one is None else one.least for one in known]
    return min((bound for bound in bounds if bound is not None), default=None) if None not in bounds else None


def broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    axes = zip_longest(*(reversed(shape) for shape in known), fillvalue=1)
    sizes = (next((size for size in axis if size not in (None, 1)), None if None in axis else 1) for axis in axes)
    return tuple(reversed(tuple(sizes)))
