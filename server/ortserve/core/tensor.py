"""A tensor with its wire name and datatype."""

from dataclasses import dataclass

import numpy as np

from ortserve.core.dtypes import DataType


@dataclass(frozen=True, slots=True)
class Tensor:
    """``array`` has the tensor's full shape and the element type ``datatype.numpy``.

    It may be a read-only, unaligned view on the request's body or a slice of a batch's output: never write to it.
    """

    name: str
    datatype: DataType
    array: np.ndarray


def format_shape(shape: tuple[int, ...]) -> str:
    """Spell a shape the way error messages do: ``[-1,16]``."""
    return "[" + ",".join(map(str, shape)) + "]"
