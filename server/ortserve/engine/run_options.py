"""What ONNX Runtime is told with each run."""

from typing import Final

import onnxruntime as ort

from ortserve.config.session import SessionSettings

NEITHER: Final = -1
"""The graph's id of runs that neither capture nor replay."""


def graph_options(graph: int) -> ort.RunOptions:
    """Options of runs by this graph's id; more may be added. ``NEITHER`` is told to sessions without graphs, too.

    Of options that have no id ONNX Runtime's Python asks in each run, and is refused by an exception.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def run_options(settings: SessionSettings, *, captures: bool = False) -> ort.RunOptions | None:
    """What each plain run is told; None for nothing. ``captures`` says that the session may capture CUDA graphs."""
    if not settings.shrink_arenas and not captures:
        return None
    told = graph_options(NEITHER)
    if settings.shrink_arenas:
        told.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(settings.shrink_arenas))
    return told
