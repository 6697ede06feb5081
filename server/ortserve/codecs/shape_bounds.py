"""What no shape may be, whatever the data: the codecs ask before they make an array of it."""

from collections.abc import Sequence
from math import prod
from typing import Final

from ortserve.core.tensor import format_shape

MAX_DIMS: Final = 64
"""numpy's own bound."""

_MAX_ELEMENTS: Final = (2**63 - 1) // 8
"""Of the widest datatype, so that byte counts fit 63 bits."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Say what is wrong with the size of ``shape``, whose dimensions are not negative, for the end of a message.

    Zeros do not make a shape small: numpy cannot hold the other dimensions either.
    """
    if len(shape) > MAX_DIMS:  # first: the product of very many takes very long
        return f"at most {MAX_DIMS} dimensions, got {len(shape)}"
    if prod(filter(None, shape) if 0 in shape else shape) > _MAX_ELEMENTS:
        return f"at most {_MAX_ELEMENTS} elements, got {format_shape(tuple(shape))}"
    return None
