"""What ONNX Runtime is told with each run."""

from collections.abc import Sequence
from typing import Final

import onnxruntime as ort

from ortserve.config.session import SessionSettings

NEITHER: Final = -1
"""The graph's id of runs that neither capture nor replay."""


def graph_options(graph: int, shrink_arenas: Sequence[str] = ()) -> ort.RunOptions:
    """Options of runs by this graph's id; more may be added. ``NEITHER`` is told to sessions without graphs, too.

    Of options that have no id ONNX Runtime's Python asks in each run, and is refused by an exception. The free memory
    of ``shrink_arenas`` goes back after each run.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    if shrink_arenas:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(shrink_arenas))
    return options


def arenas_of(settings: SessionSettings, device_id: int = 0, gpus: Sequence[int] = ()) -> list[str]:
    """The arenas to be shrunk, without those of the GPUs (``gpus``) that other instances of the model are on."""
    others = {f"gpu:{number}" for number in gpus if number != device_id}
    return [arena for arena in settings.shrink_arenas if arena not in others]


def run_options(
    settings: SessionSettings, *, captures: bool = False, device_id: int = 0, gpus: Sequence[int] = ()
) -> ort.RunOptions | None:
    """What each plain run is told; None for nothing.

    Args:
        settings: Of the session.
        captures: Whether it may capture CUDA graphs.
        device_id: That it computes on.
        gpus: That instances of the model are on.
    """
    arenas = arenas_of(settings, device_id, gpus)
    return graph_options(NEITHER, arenas) if arenas or captures else None
