"""Which nodes to leave in floating point, so that errors stay within their bounds. Decides; others make and compare.

Each part of the graph is quantized alone and ranked by its error. Then as few of the most expensive parts as the bounds
allow stay in floating point. A model is accepted only after it was compared: the ranking only decides what to try.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from ortserve.tools.agreement import Agreement, ErrorBound

_FINE: Final = ("max", "relative", "cosine")
"""Measures that tell small errors apart. Others count samples, and most nodes alone change none."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A model with some nodes quantized.

    Attributes:
        nodes: Their names.
        path: The model file.
        agreement: With the source; None if the model cannot run.
        problem: Why it cannot; empty if it can.
    """

    nodes: tuple[str, ...]
    path: Path
    agreement: Agreement | None
    problem: str = ""

    def excess(self, bounds: Sequence[ErrorBound]) -> tuple[str, ...]:
        """How the bounds are exceeded, in words."""
        if self.agreement is None:
            return (self.problem,)
        return tuple(text for bound in bounds if (text := bound.excess(self.agreement)))

    def error(self, measure: str) -> float:
        """Infinite if the model cannot run."""
        return math.inf if self.agreement is None else self.agreement.error(measure)


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring nodes, and the error of the model with only these quantized; None if it was not measured."""

    nodes: tuple[str, ...]
    error: float | None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        best: The model with the most quantized nodes within the bounds, or else the one with the least error.
        measure: That the parts are ranked by; empty without a ranking.
        parts: All nodes, the most expensive first; empty if all can be quantized.
        trials: Models that were made.
        is_complete: Whether the trials and the time were enough to rank all nodes.
    """

    best: Tried
    measure: str
    parts: tuple[Part, ...]
    trials: int
    is_complete: bool


def find_nodes(
    nodes: Mapping[str, str],
    bounds: Sequence[ErrorBound],
    attempt: Callable[[tuple[str, ...]], Tried],
    is_late: Callable[[], bool],
    *,
    most_trials: int,
    always_rank: bool = False,
) -> Found:
    """Search for the nodes to quantize.

    Args:
        nodes: That can be quantized, in the order of the graph.
        bounds: At least one.
        attempt: Makes and compares a model. The search decides nothing by nodes that were not compared.
        is_late: Whether the time is used up. The search then ends with the best model so far.
        most_trials: The number of models for the ranking.
        always_rank: Rank the nodes also if all can be quantized.
    """
    search = _Search(bounds, attempt, is_late, most_trials)
    whole = search.attempt(tuple(nodes))
    if not whole.excess(bounds) and not always_rank:
        return Found(whole, "", (), search.trials, is_complete=True)
    parts, is_complete = search.rank(tuple(nodes))
    best = search.exclude(tuple(nodes), parts, whole)
    return Found(best, search.measure, tuple(parts), search.trials, is_complete)


class _Search:
    def __init__(
        self,
        bounds: Sequence[ErrorBound],
        attempt: Callable[[tuple[str, ...]], Tried],
        is_late: Callable[[], bool],
        most_trials: int,
    ) -> None:
        self._bounds: Final = bounds
        self._attempt: Final = attempt
        self._is_late: Final = is_late
        self._most_trials: Final = most_trials
        self.measure: Final = next((bound.measure for bound in bounds if bound.measure in _FINE), "cosine")
        self.trials = 0

    def attempt(self, nodes: tuple[str, ...]) -> Tried:
        self.trials += 1
        return self._attempt(nodes)

    def rank(self, nodes: tuple[str, ...]) -> tuple[list[Part], bool]:
        """Parts of the graph, the most expensive first; expensive parts are divided while trials are left."""
        count = min(len(nodes), max(2, self._most_trials // 2))
        edges = [round(index * len(nodes) / count) for index in range(count + 1)]
        groups = [nodes[begin:end] for begin, end in pairwise(edges)]
        parts = [self._alone(group) for group in groups]
        while self.trials + 2 <= self._most_trials and not self._is_late():
            divisible = [part for part in parts if len(part.nodes) > 1 and part.error is not None]
            if not divisible:
                break
            worst = max(divisible, key=lambda part: part.error or 0.0)
            middle = len(worst.nodes) // 2
            at = parts.index(worst)
            parts[at : at + 1] = [self._alone(worst.nodes[:middle]), self._alone(worst.nodes[middle:])]
        is_complete = all(len(part.nodes) == 1 and part.error is not None for part in parts)
        return sorted(parts, key=lambda part: -1.0 if part.error is None else part.error, reverse=True), is_complete

    def _alone(self, nodes: tuple[str, ...]) -> Part:
        return Part(nodes, None if self._is_late() else self.attempt(nodes).error(self.measure))

    def exclude(self, nodes: tuple[str, ...], parts: Sequence[Part], whole: Tried) -> Tried:
        """The model with the fewest of the first parts in floating point that is within the bounds."""
        if not whole.excess(self._bounds) or len(parts) < 2:
            return whole
        too_few, enough = 0, len(parts) - 1
        best = self._without(nodes, parts[:enough])
        if best.excess(self._bounds):
            return min(whole, best, key=lambda tried: tried.error(self._bounds[0].measure))
        while enough - too_few > 1 and not self._is_late():
            middle = (too_few + enough) // 2
            tried = self._without(nodes, parts[:middle])
            if tried.excess(self._bounds):
                too_few = middle
            else:
                best, enough = tried, middle
        return best

    def _without(self, nodes: tuple[str, ...], parts: Sequence[Part]) -> Tried:
        floating = {name for part in parts for name in part.nodes}
        return self.attempt(tuple(name for name in nodes if name not in floating))
