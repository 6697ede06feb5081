from collections.abc import Mapping

import pytest

from ortserve.core.agreement import Agreement, ErrorBound, OutputError
from ortserve.tools.quantize.search import Found, Tried, find_nodes

NODES = dict.fromkeys("abcdefgh", "MatMul")
BOUND = ErrorBound("cosine", 0.1)


class Models:
    """Models whose error is the sum of their nodes' errors. Models with a node in ``broken`` cannot run."""

    def __init__(self, costs: Mapping[str, float], broken: str = "") -> None:
        self.costs = costs
        self.broken = broken
        self.made: list[tuple[str, ...]] = []

    def attempt(self, nodes: tuple[str, ...]) -> Tried:
        self.made.append(nodes)
        if set(nodes) & set(self.broken):
            return Tried(nodes, None, "no kernel")
        error = sum(self.costs.get(name, 0.0) for name in nodes)
        return Tried(nodes, Agreement(1, (OutputError("y", error, error, error, 0.0),)))

    def find(self, *, trials: int = 100, late_after: int = 1000, always_rank: bool = False) -> Found:
        return find_nodes(
            NODES,
            [BOUND],
            self.attempt,
            lambda: len(self.made) >= late_after,
            max_trials=trials,
            always_rank=always_rank,
        )


def test_a_model_within_the_bound_needs_no_ranking() -> None:
    found = Models({"a": 0.05}).find()
    assert (found.best.nodes, found.parts, found.trials) == (tuple(NODES), (), 1)


def test_the_ranking_can_be_asked_for() -> None:
    found = Models({"c": 0.05, "f": 0.02}).find(always_rank=True)
    assert found.best.nodes == tuple(NODES)
    assert [part.nodes for part in found.parts][:2] == [("c",), ("f",)]


def test_the_fewest_nodes_that_suffice_stay_in_floating_point() -> None:
    models = Models({"b": 0.09, "e": 0.3, "g": 0.05})
    found = models.find()
    assert found.best.nodes == tuple("acdfgh")  # b and g together still exceed the bound
    assert [(part.nodes, part.error) for part in found.parts][:3] == [(("e",), 0.3), (("b",), 0.09), (("g",), 0.05)]
    assert found.is_complete
    assert found.trials == len(models.made)


def test_nodes_that_cannot_run_are_excluded_first() -> None:
    found = Models({"b": 0.01}, broken="d").find()
    assert found.best.nodes == tuple("abcefgh")


def test_with_few_trials_neighbours_are_ranked_together_and_the_worst_are_divided() -> None:
    found = Models({"c": 0.3}).find(trials=9)
    assert "c" not in found.best.nodes
    assert not found.best.excess([BOUND])
    assert not found.is_complete
    assert found.parts[0].nodes == ("c",)


def test_a_bound_that_no_model_keeps_gives_the_best_one() -> None:
    found = Models(dict.fromkeys(NODES, 0.2)).find()
    assert len(found.best.nodes) == 1
    assert found.best.excess([BOUND]) == ("cosine error 0.2 exceeds 0.1",)


def test_a_single_node_is_not_excluded() -> None:
    models = Models({"a": 0.2})
    found = find_nodes({"a": "MatMul"}, [BOUND], models.attempt, lambda: False, max_trials=10)
    assert (found.best.nodes, len(found.parts)) == (("a",), 1)


@pytest.mark.parametrize("late_after", [1, 4, 10])
def test_the_time_limit_leaves_a_model_that_was_compared(late_after: int) -> None:
    models = Models({"b": 0.05, "h": 0.3})
    found = models.find(late_after=late_after)
    assert found.best.nodes in models.made
    assert found.is_complete is (late_after == 10)
    assert len(models.made) <= late_after + 1
