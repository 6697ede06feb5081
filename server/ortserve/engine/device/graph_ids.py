"""The ids that ONNX Runtime keeps captured graphs by.

A replay launches what was captured under the id, with the rows and at the addresses of then; ONNX Runtime compares
neither with what it is given. So the id is made of the rows and the buffer set and of nothing else: another number of
rows has another id, whatever happened before.
"""

from typing import Final

SETS: Final = 2
"""Buffer sets of an instance: the next batch is copied to one while the batch of the other is computed."""


def graph_id(rows: int, set_index: int) -> int:
    """The id of the graph that computes ``rows`` rows (1 or more) of a buffer set; 0, ONNX Runtime's own, is none."""
    return rows * SETS + set_index
