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


def run_options(settings: SessionSettings, *, device_id: int = 0, gpus: Sequence[int] = ()) -> ort.RunOptions:
    """Options of each plain run of one instance, which alone may use them: by them its run is ended.

    Args:
        settings: Of the session.
        device_id: That it computes on.
        gpus: That instances of the model are on.
    """
    return graph_options(NEITHER, arenas_of(settings, device_id, gpus))


def shrinking_options() -> ort.RunOptions:
    """Options of a plain run after which the CPU's arena gives its free memory back."""
    return graph_options(NEITHER, ("cpu:0",))


class Termination:
    """Ends the runs of one instance by their options. ONNX Runtime looks at them before each node, in loops, too."""

    def __init__(self, options: ort.RunOptions) -> None:
        self._options = options
        self._is_set = False

    def end_run(self) -> None:
        """Have the present run fail before its next node. From any thread, while one is on its way."""
        self._is_set = True
        self._options.terminate = True

    def allow_runs(self) -> None:
        """To be called before each run, and not after ``end_run`` was called for it."""
        if self._is_set:
            self._options.terminate = False
            self._is_set = False
