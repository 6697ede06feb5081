"""Chooses the nodes to leave in floating point, so that errors stay within their bounds.

Each part of the graph is quantized alone and ranked by its error. Then as few of the most expensive parts as the bounds
allow stay in floating point. The ranking only decides which models to try: each accepted model was compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from ortserve.core.agreement import Agreement, ErrorBound
from ortserve.tools.quantize.result import NodeCost

_FINE: Final = ("max", "relative", "cosine")
"""Measures that tell small errors apart. Others count samples, and most nodes alone change none."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A model with some nodes quantized.

    Attributes:
        nodes: Names of the quantized nodes.
        agreement: Agreement with the source; None if the model cannot run.
        problem: Why the model cannot run; empty if it can.
    """

    nodes: tuple[str, ...]
    agreement: Agreement | None
    problem: str = ""

    def excess(self, bounds: Sequence[ErrorBound]) -> tuple[str, ...]:
        """A text for each bound that is exceeded."""
        if self.agreement is None:
            return (self.problem,)
        return tuple(text for bound in bounds if (text := bound.excess(self.agreement)))

    def error(self, measure: str) -> float:
        """The error in this measure; infinite if the model cannot run."""
        return math.inf if self.agreement is None else self.agreement.error(measure)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        best: The model with the most quantized nodes within the bounds; without one, the model with the least error.
        measure: The measure that ranks the parts; empty without a ranking.
        parts: All nodes in parts, the most expensive first; empty without a ranking.
        trials: The number of models that were made.
        is_complete: Whether the trials and the time were enough to rank all nodes.
    """

    best: Tried
    measure: str
    parts: tuple[NodeCost, ...]
    trials: int
    is_complete: bool


def find_nodes(
    nodes: Mapping[str, str],
    bounds: Sequence[ErrorBound],
    attempt: Callable[[tuple[str, ...]], Tried],
    is_late: Callable[[], bool],
    *,
    max_trials: int,
    always_rank: bool = False,
) -> Found:
    """Search for the nodes to quantize.

    Args:
        nodes: Operators by the names of nodes that can be quantized, in the order of the graph.
        bounds: At least one.
        attempt: Makes a model with these nodes quantized, and compares it.
        is_late: Whether the time is used up. The search then ends with the best model so far.
        max_trials: Maximum number of models until the end of the ranking.
        always_rank: Rank the nodes also if all can be quantized.
    """
    search = _Search(nodes, bounds, attempt, is_late)
    best = search.attempt(tuple(nodes))
    if not best.excess(bounds) and not always_rank:
        return Found(best, "", (), search.trials, is_complete=True)
    parts = search.rank(max_trials)
    is_complete = all(len(part.nodes) == 1 and part.error is not None for part in parts)
    if best.excess(bounds) and len(parts) > 1:
        best = search.exclude(parts, best)
    costs = tuple(replace(part, is_quantized=set(part.nodes) <= set(best.nodes)) for part in parts)
    return Found(best, search.measure, costs, search.trials, is_complete)


@dataclass(slots=True)
class _Search:
    """The arguments of ``find_nodes``, and the number of models so far."""

    nodes: Mapping[str, str]
    bounds: Sequence[ErrorBound]
    make: Callable[[tuple[str, ...]], Tried]
    is_late: Callable[[], bool]
    trials: int = 0

    @property
    def measure(self) -> str:
        return next((bound.measure for bound in self.bounds if bound.measure in _FINE), "cosine")

    def attempt(self, nodes: tuple[str, ...]) -> Tried:
        self.trials += 1
        return self.make(nodes)

    def rank(self, max_trials: int) -> list[NodeCost]:
        """Rank parts of the graph, the most expensive first. Expensive parts are divided while trials are left."""
        names = tuple(self.nodes)
        count = min(len(names), max(2, max_trials // 2))
        edges = [round(index * len(names) / count) for index in range(count + 1)]
        parts = [self._alone(names[begin:end]) for begin, end in pairwise(edges)]
        while self.trials + 2 <= max_trials and not self.is_late():
            divisible = [part for part in parts if len(part.nodes) > 1 and part.error is not None]
            if not divisible:
                break
            worst = max(divisible, key=_by_error)
            middle = len(worst.nodes) // 2
            at = parts.index(worst)
            parts[at : at + 1] = [self._alone(worst.nodes[:middle]), self._alone(worst.nodes[middle:])]
        return sorted(parts, key=_by_error, reverse=True)

    def _alone(self, nodes: tuple[str, ...]) -> NodeCost:
        operators = tuple(dict.fromkeys(self.nodes[name] for name in nodes))
        error = None if self.is_late() else self.attempt(nodes).error(self.measure)
        return NodeCost(nodes, operators, error, is_quantized=False)

    def exclude(self, parts: Sequence[NodeCost], whole: Tried) -> Tried:
        """Find the model within the bounds with the fewest of the first parts in floating point, by bisection.

        Returns the model with the least error, ``whole`` included, if even the model with one part quantized is beyond
        the bounds.
        """
        too_few, enough = 0, len(parts) - 1
        best = self._without(parts[:enough])
        if best.excess(self.bounds):
            return min(whole, best, key=lambda tried: tried.error(self.bounds[0].measure))
        while enough - too_few > 1 and not self.is_late():
            middle = (too_few + enough) // 2
            tried = self._without(parts[:middle])
            if tried.excess(self.bounds):
                too_few = middle
            else:
                best, enough = tried, middle
        return best

    def _without(self, parts: Sequence[NodeCost]) -> Tried:
        floating = {name for part in parts for name in part.nodes}
        return self.attempt(tuple(name for name in self.nodes if name not in floating))


def _by_error(part: NodeCost) -> float:
    return -1.0 if part.error is None else part.error
