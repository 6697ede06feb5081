"""A tensor with its wire name and datatype."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ortserve.core.dtypes import DataType


@dataclass(slots=True, init=False)
class Tensor:
    """``array`` has the tensor's full shape and the element type ``datatype.numpy``.

    It may be a read-only, unaligned view on the request's body or a slice of a batch's output: never write to it.
    """

    name: Final[str]
    datatype: Final[DataType]
    array: Final[np.ndarray]

    def __init__(self, name: str, datatype: DataType, array: np.ndarray) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array


def format_shape(shape: tuple[int, ...]) -> str:
    """Spell a shape the way error messages do: ``[-1,16]``."""
    return "[" + ",".join(map(str, shape)) + "]"
