"""The ids that ONNX Runtime keeps captured graphs by.

A replay launches what was captured under the id, with the rows and at the addresses of then; ONNX Runtime compares
neither with what it is given. So the id is made of the rows and the buffer set and of nothing else: another number of
rows has another id, whatever happened before.
"""

from typing import Final

import onnxruntime as ort

SETS: Final = 2
"""Buffer sets of an instance: the next batch is copied to one while the batch of the other is computed."""

NEITHER: Final = -1
"""The id of runs that neither capture nor replay."""


def graph_options(graph: int) -> ort.RunOptions:
    """Options of runs by this id; more may be added. ``NEITHER`` is told to sessions without graphs, too.

    Of options that have no id ONNX Runtime's Python asks in each run, which takes it 25 µs to be refused.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def graph_id(rows: int, set_index: int) -> int:
    """The id of the graph that computes ``rows`` rows (1 or more) of a buffer set; 0, ONNX Runtime's own, is none."""
    return rows * SETS + set_index
