"""The sessions of an instance: one for all batches and, where a session keeps a single graph, one for each graph."""

import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

import onnxruntime as ort

from ortserve.engine.device.failures import keep_for_good

OpenForGraph: TypeAlias = Callable[[], ort.InferenceSession]
"""Opens a session that captures, on the instance's streams. ServeError where it cannot be."""

_THE_ONLY_ONE: Final = 0
"""The id of the graph that a session keeps without being told of ids."""


class InstanceSessions:
    """Sessions that compute on the same streams of a device, for the instance's worker alone."""

    def __init__(
        self, own: ort.InferenceSession, *, captures: bool = False, open_for_graph: OpenForGraph | None = None
    ) -> None:
        """Take over ``own``, of which the caller must keep no reference.

        Args:
            own: Runs what is not replayed.
            captures: Whether it was made to capture graphs, too, each by its id.
            open_for_graph: Opens one for each graph; None where ``own`` keeps them all, or there are none.
        """
        self._own: ort.InferenceSession | None = own
        self._own_captures = captures
        self._open_for_graph = open_for_graph
        self._of_graphs: dict[int, ort.InferenceSession] = {}
        self._all = [weakref.ref(own)]

    @property
    def own(self) -> ort.InferenceSession:
        """The one that runs what is not replayed."""
        assert self._own is not None, "the instance was closed"
        return self._own

    @property
    def can_capture(self) -> bool:
        """Whether graphs can be captured."""
        return self._own_captures or self._open_for_graph is not None

    def of_graph(self, graph: int) -> tuple[ort.InferenceSession, int]:
        """The session that keeps a graph, opened when it is first asked for, and the id that it knows the graph by.

        Raises:
            ServeError: It cannot be opened.
        """
        if self._open_for_graph is None:
            return self.own, graph
        if graph not in self._of_graphs:
            self._of_graphs[graph] = self._open_for_graph()
            self._all.append(weakref.ref(self._of_graphs[graph]))
        return self._of_graphs[graph], _THE_ONLY_ONE

    def forget_graph(self, graph: int) -> None:
        """Free the session of a graph that is not replayed, if it has one of its own."""
        self._of_graphs.pop(graph, None)

    def forget_graphs(self) -> None:
        """Free those of all graphs that have one of their own."""
        self._of_graphs.clear()

    def close(self, *, is_lost: bool) -> "list[weakref.ref[ort.InferenceSession]]":
        """Free all. Those that captured graphs are kept for good where their device is lost.

        Returns:
            What tells of each session that there ever was whether it is still there.
        """
        if is_lost:
            for session in (*self._of_graphs.values(), *([self.own] if self._own_captures else [])):
                keep_for_good(session)
        self._of_graphs.clear()
        self._own = self._open_for_graph = None
        return self._all
