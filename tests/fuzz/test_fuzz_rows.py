"""Random graphs: every claim of the proof about every tensor, against ONNX Runtime run row by row and in batches.

Then the claims about the shape of every tensor, which ONNX Runtime may infer when it loads the model. Then random
models with a proof, most with nodes in bodies and functions, opened as the server opens them: the answers to the
requests of a batch, against ONNX Runtime's answer to each request alone.

A normal run has about 1,200 graphs; ``make fuzz CASES=100000`` generates that many of each kind. A failure prints the
graph and its seed.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import onnx
import pytest

from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from ortserve.engine.child_process import Failure, run_in_child
from rows.claims import check_model
from rows.growing import GrowingGraph, observe_outputs, with_shape_nodes, with_shapes
from rows.random_graphs import grow, grow_widely
from rows.served_trials import try_seed

_IS_FUZZ: Final = "ORTSERVE_TEST_FUZZ_CASES" in os.environ
GRAPHS: Final = CASES if _IS_FUZZ else 1000
WIDE_GRAPHS: Final = CASES if _IS_FUZZ else 160
SERVED_GRAPHS: Final = CASES if _IS_FUZZ else 80
_BLOCKS: Final = 8
_PARTS: Final = 2
"""Fewer, because each has a process."""
_MAX_TRIAL_S: Final = 60.0


@LONG_ENOUGH
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_claim_about_a_random_graph_is_false(block: int) -> None:
    _check_claims(grow, range(block, GRAPHS, _BLOCKS))


@LONG_ENOUGH
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_claim_about_a_random_graph_of_all_operators_is_false(block: int) -> None:
    _check_claims(grow_widely, range(block, WIDE_GRAPHS, _BLOCKS))


def _check_claims(make: Callable[[int], GrowingGraph], indices: Sequence[int]) -> None:
    checked = rows = 0
    for index in indices:
        seed = SEED * 10_000_000 + index
        graph = make(seed)
        model = graph.model()
        axes = {name: one.axis for name, one in graph.inputs.items()}
        seen = {name: graph.observation(name) for name in graph.values}
        check = check_model(model, axes, seen, believe_names=bool(index % 2), node_by_node=True)
        assert not check.findings, (
            f"seed {seed}: {check.findings}\n{with_shapes(onnx.printer.to_text(model), graph.values)}"
        )
        checked += check.checked
        rows += check.with_rows
    assert checked > 4 * len(indices), "too little was claimed for this to show anything"
    assert rows > 2 * len(indices), "too little was claimed of rows"


@LONG_ENOUGH
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_claim_about_a_shape_that_onnx_runtime_infers_is_false(block: int) -> None:
    """ONNX Runtime replaces Shape by the shape that it infers at the load. The kernel may make another one."""
    graphs = 0
    for index in range(block, WIDE_GRAPHS, _BLOCKS):
        seed = SEED * 10_000_000 + index
        graph = grow_widely(seed)
        model, shapes = with_shape_nodes(graph)
        observed = observe_outputs(model, graph, shapes)
        if observed is None:
            continue
        graphs += 1
        axes = {name: one.axis for name, one in graph.inputs.items()}
        seen = {name: graph.observation(name) for name in graph.values} | observed
        findings = check_model(model, axes, seen, node_by_node=True).findings
        assert not findings, f"seed {seed}: {findings}\n{with_shapes(onnx.printer.to_text(model), graph.values)}"
    assert graphs > WIDE_GRAPHS // _BLOCKS // 4, "too few graphs ran for this to show anything"


@LONG_ENOUGH
@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("part", range(_PARTS))
def test_served_batches_of_random_models_answer_as_onnx_runtime_does_alone(part: int) -> None:
    """In another process, because a model may end ONNX Runtime. Models with endless loops are left out."""
    seeds = [SEED * 10_000_000 + index for index in range(part, SERVED_GRAPHS, _PARTS)]
    batches = 0
    for seed, trial in zip(seeds, run_in_child(try_seed, seeds, _MAX_TRIAL_S), strict=True):
        if isinstance(trial, Failure):
            assert trial.is_late, f"the process {trial.reason} for seed {seed}"
            continue
        assert not trial.finding, trial.finding
        batches += trial.batches
    assert batches > len(seeds), "too few batches ran for this to show anything"
