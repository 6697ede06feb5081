"""Random graphs: every claim of the proof about every tensor, against ONNX Runtime run row by row and in batches.

1,000 graphs among all tests; ``make fuzz CASES=100000`` makes as many graphs as cases. A failure prints the graph and
its seed.
"""

import os
from typing import Final

import onnx
import pytest

from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from rows.claims import check_model
from rows.growing import with_shapes
from rows.random_graphs import grow

GRAPHS: Final = CASES if "ORTSERVE_TEST_FUZZ_CASES" in os.environ else 1000
_BLOCKS: Final = 8


@LONG_ENOUGH
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_claim_about_a_random_graph_is_false(block: int) -> None:
    checked = rows = 0
    for index in range(block, GRAPHS, _BLOCKS):
        seed = SEED * 10_000_000 + index
        graph = grow(seed)
        model = graph.model()
        axes = {name: one.axis for name, one in graph.inputs.items()}
        seen = {name: graph.observation(name) for name in graph.values}
        check = check_model(model, axes, seen, believe_names=bool(index % 2), node_by_node=True)
        assert not check.findings, (
            f"seed {seed}: {check.findings}\n{with_shapes(onnx.printer.to_text(model), graph.values)}"
        )
        checked += check.checked
        rows += check.with_rows
    count = len(range(block, GRAPHS, _BLOCKS))
    assert checked > 5 * count, "too little was claimed for this to show anything"
    assert rows > 2 * count, "too little was claimed of rows"
