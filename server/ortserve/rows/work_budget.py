"""Limits the work of the analysis of one model, over all hypotheses and rounds of loops, so that it ends soon."""

from typing import Final

from ortserve.model_file.graph import Graph, Node

MAX_VISITS: Final = 40_000
"""Maximum number of visits of nodes for one model. Other work is counted in visits."""
_STEPS_A_VISIT: Final = 2
"""Number of symbolic steps that take as long as a visit."""
_NAMES_A_VISIT: Final = 10
"""Number of operands and results of a node, or of inputs and outputs of a graph, that take as long as a visit."""
_ENTRIES_A_VISIT: Final = 200
"""Number of entries of lists, or of letters of texts, in attributes that take as long as a visit."""


class TooMuchWorkError(Exception):
    """The analysis has done the maximum of work. The text continues "the model is not analysed: "."""


class WorkBudget:
    """The visits of nodes that are left. Each method raises ``TooMuchWorkError`` if the work needs more."""

    def __init__(self, visits: int = MAX_VISITS) -> None:
        self._visits = self._left = visits

    def take_node(self, node: Node, steps: int) -> int:
        """Count a visit of a node, and symbolic steps since the last visit. Returns the steps that remain to count."""
        names = len(node.inputs) + len(node.outputs) + len(node.attributes)
        entries = sum(len(value) for value in node.attributes.values() if isinstance(value, (str, tuple)))
        visits, steps = divmod(steps, _STEPS_A_VISIT)
        self._take(1 + visits + names // _NAMES_A_VISIT + entries // _ENTRIES_A_VISIT)
        return steps

    def take_graph(self, graph: Graph) -> None:
        """Count the inputs and outputs of a graph."""
        self._take((len(graph.inputs) + len(graph.outputs)) // _NAMES_A_VISIT)

    def _take(self, visits: int) -> None:
        self._left -= visits
        if self._left < 0:
            raise TooMuchWorkError(f"it needs more than {self._visits} visits of nodes")
