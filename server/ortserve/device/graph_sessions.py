"""The sessions of an instance, and the ids of the CUDA graphs that they capture.

ONNX Runtime stores captured graphs by id. A replay launches the graph as it was captured, with the rows and addresses
of the capture. ONNX Runtime does not compare them with the binding of the run. So an id is computed from the rows and
the buffer set alone: different rows or sets always have different ids.
"""

import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

import onnxruntime as ort

from ortserve.device.protocol import never_free

SETS: Final = 2
"""Buffer sets of an instance: one receives the next batch while the batch in the other is computed."""

OpenForGraph: TypeAlias = Callable[[], ort.InferenceSession]
"""Opens a session that captures, on the instance's streams. Raises ServeError if the session cannot be opened."""

_ONLY_GRAPH: Final = 0
"""The id of the graph in a session that holds one graph and ignores ids."""


def graph_id(rows: int, set_index: int) -> int:
    """The id of the graph that computes ``rows`` rows (at least 1) of a buffer set. Never 0, ONNX Runtime's default."""
    return rows * SETS + set_index


class InstanceSessions:
    """The sessions of one instance, which share its streams. Only the instance's worker uses them.

    One session runs all batches. If sessions of the execution provider hold a single graph, each graph has a further
    session of its own.
    """

    def __init__(self, own: ort.InferenceSession, *, captures: bool, open_for_graph: OpenForGraph | None) -> None:
        """Take over ``own``; the caller must not keep a reference to it.

        Args:
            own: The session that runs batches without replay, opened with the options of the instance's streams.
            captures: Whether ``own`` was opened to capture graphs, too, each by its id.
            open_for_graph: Opens a session for each graph, on the worker, which holds the capture lock. None if ``own``
                holds all graphs, or there are none.
        """
        self._own: ort.InferenceSession | None = own
        self._own_captures = captures
        self._open_for_graph = open_for_graph
        self._has_one_per_graph = open_for_graph is not None
        self._by_graph: dict[int, ort.InferenceSession] = {}
        self._all = [weakref.ref(own)]

    @property
    def own(self) -> ort.InferenceSession:
        """The session that runs batches without replay."""
        assert self._own is not None, "the instance was closed"
        return self._own

    @property
    def can_capture(self) -> bool:
        """Whether graphs can be captured."""
        return self._own_captures or self._has_one_per_graph

    def for_graph(self, graph: int) -> tuple[ort.InferenceSession, int]:
        """The session that holds a graph, opened at first use, and the graph's id in that session.

        Raises:
            ServeError: The session cannot be opened.
        """
        if not self._has_one_per_graph:
            return self.own, graph
        if graph not in self._by_graph:
            assert self._open_for_graph is not None, "the sessions are complete"
            self._by_graph[graph] = self._open_for_graph()
            self._all.append(weakref.ref(self._by_graph[graph]))
        return self._by_graph[graph], _ONLY_GRAPH

    def complete(self) -> None:
        """Open no more sessions. Drops ``open_for_graph``, whose references keep the state of the load alive."""
        self._open_for_graph = None

    def forget_graph(self, graph: int) -> None:
        """Free a graph's own session, if it has one, because the graph is not replayed."""
        self._by_graph.pop(graph, None)

    def forget_graphs(self) -> None:
        """Free the sessions of all graphs that have sessions of their own."""
        self._by_graph.clear()

    def close(self, *, is_lost: bool) -> "list[weakref.ref[ort.InferenceSession]]":
        """Free all sessions. If the device is lost, sessions with captured graphs are leaked (``never_free``).

        Returns:
            A weak reference to each session that existed.
        """
        if is_lost:
            for session in (*self._by_graph.values(), *([self.own] if self._own_captures else [])):
                never_free(session)
        self._by_graph.clear()
        self._own = self._open_for_graph = None
        return self._all
