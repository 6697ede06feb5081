"""Random graphs: every claim of the proof about every tensor, against ONNX Runtime run row by row and in batches.

Then the claims about the shape of every tensor, which ONNX Runtime may infer when it loads the model. Then random
models with a proof, opened as the server opens them: the answers to the requests of a batch, against ONNX Runtime's
answer to each request alone.

A normal run has about 1,200 graphs; ``make fuzz CASES=100000`` generates that many of each kind. A failure prints the
graph and its seed.
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import onnx
import pytest

from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from ortserve.engine.bounded_time import why_unbounded
from rows.brute_force import differ
from rows.claims import check_model
from rows.growing import GrowingGraph, observe_outputs, with_shape_nodes, with_shapes
from rows.random_graphs import grow, grow_widely
from rows.served import NotServed, Outputs, Request, Served, make_requests, served, with_proven_outputs

_IS_FUZZ: Final = "ORTSERVE_TEST_FUZZ_CASES" in os.environ
GRAPHS: Final = CASES if _IS_FUZZ else 1000
WIDE_GRAPHS: Final = CASES if _IS_FUZZ else 160
SERVED_GRAPHS: Final = CASES if _IS_FUZZ else 80
_BLOCKS: Final = 8


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
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_served_batches_of_random_models_answer_as_onnx_runtime_does_alone(block: int, tmp_path: Path) -> None:
    batches = 0
    for index in range(block, SERVED_GRAPHS, _BLOCKS):
        seed = SEED * 10_000_000 + index
        rng = random.Random(seed)
        graph = (grow_widely if rng.random() < 0.75 else grow)(seed)
        model = with_proven_outputs(graph, rng)
        if model is None:
            continue
        try:
            with served(model, tmp_path / "model.onnx") as one:
                batches += _check_batches(one, make_requests(graph, one.signature, rng, 8), rng)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {onnx.printer.to_text(model)}")
            raise
        except NotServed:
            continue
    assert batches > SERVED_GRAPHS // _BLOCKS, "too few batches ran for this to show anything"


def _check_batches(model: Served, requests: Sequence[Request], rng: random.Random) -> int:
    """Compare the answers to requests with small numbers while requests with extreme numbers are in the same batch.

    Answers to extreme numbers are compared only with those of another batch, at the same place among other requests:
    kernels may treat NaN as the largest number or not, depending on its place in memory. Returns the number of compared
    batches.
    """
    classes: dict[object, list[tuple[Request, Outputs]]] = {}
    for request in requests:
        alone = model.run_alone(request.inputs)
        found = model.shape_class(request.inputs)
        if alone is not None and found is not None:
            classes.setdefault(found, []).append((request, alone))
    is_bounded = not why_unbounded(model.content, model.signature)
    compared = 0
    for members in classes.values():
        shapes = {tuple(output.shape for output in alone) for _, alone in members}
        assert len(shapes) == 1 or not is_bounded, f"values decide about shapes, and so about time: {shapes}"
        for count in (2, 3, len(members)):
            batch = [rng.choice(members) for _ in range(count)]
            bucket = rng.choice((0, 8))
            together = model.run_together([request.inputs for request, _ in batch], bucket)
            if together is None:  # then the requests run alone
                continue
            compared += 1
            for (request, alone), outputs in zip(batch, together, strict=True):
                for spec, one, other in zip(model.signature.outputs, outputs, alone, strict=True):
                    assert request.is_wild or not differ(one, other), (
                        f"output '{spec.name}' of {request.inputs} among {len(batch)} is {one}, alone {other}"
                    )
            place = rng.randrange(count)
            kept = batch[place][0].inputs
            others = [kept if index == place else rng.choice(members)[0].inputs for index in range(count)]
            if (again := model.run_together(others, bucket)) is not None:
                for one, other in zip(together[place], again[place], strict=True):
                    assert not differ(one, other), f"the answer to {kept} at {place} depends on the others: {others}"
    return compared
