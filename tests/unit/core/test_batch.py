"""Sizes of arrays. ``tests/unit/codecs/test_bounds`` has the sizes of texts, and how long they take."""

import numpy as np

from ortserve.core.batch import shallow_bytes


def test_bytes_are_those_of_all_tensors() -> None:
    assert shallow_bytes((np.zeros((2, 3), np.float32), np.zeros(5, np.int64))) == 24 + 40
    assert shallow_bytes(()) == 0
