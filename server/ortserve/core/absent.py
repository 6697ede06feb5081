"""Optional inputs that a request leaves out.

In the arrays of a request and of a batch an absent input has its place, too: it is held by an array of one element a
row, of a type that no tensor has. So what slices, counts and gathers rows need not know of it; only who decides which
requests may share a batch, and who hands the arrays to the model, do.
"""

from typing import Final

import numpy as np

_NOTHING: Final = np.dtype("V1")


def absent(rows: int) -> np.ndarray:
    """What stands for an input that is not there, shape ``(rows,)``."""
    return np.empty(rows, _NOTHING)


def is_absent(array: np.ndarray) -> bool:
    """Whether the array only stands for an input that is not there."""
    return array.dtype.kind == "V"
