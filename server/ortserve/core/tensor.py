"""A tensor with its wire name and datatype."""

import numpy as np

from ortserve.core.dtypes import DataType
from ortserve.core.quick_dataclass import quick_dataclass


@quick_dataclass(frozen=True, slots=True)
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
