"""No verdict about a model of a real exporter is wrong, nor any claim about its tensors."""

from pathlib import Path

import pytest

from ortserve.model_file.reading import parse_model
from ortserve.rows import Outcome, prove_axes
from rows import brute_force
from rows.brute_force import Claim, disagreement
from rows.cases import rows_meet
from rows.claims import check_model
from rows.exported import PACKAGES, Exported, committed, packaged

MODELS = [*committed(), *(packaged(Path(PACKAGES)) if PACKAGES else [])]
pytestmark = pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])


@pytest.mark.timeout(600)
def test_brute_force_agrees(model: Exported) -> None:
    verdict = model.verdict
    served = model.observe(inside=False)
    assert rows_meet(served) is not model.independent
    if verdict.outcome is Outcome.PROVEN and verdict.input_axes == model.row_axes:
        for name, seen in served.items():
            axis = verdict.output_axes[name]
            kind = brute_force.Kind.FREE if axis is None else brute_force.Kind.ROWS
            assert disagreement(Claim(kind, axis or 0), seen) == "", name
    else:
        assert verdict.outcome is not Outcome.PROVEN or not model.independent
    if not model.independent:
        parsed = parse_model(memoryview(model.path.read_bytes()))
        assert prove_axes(parsed, model.row_axes).outcome is not Outcome.PROVEN


@pytest.mark.timeout(600)
def test_every_claim_inside_is_true(model: Exported) -> None:
    names = bool(model.verdict.equal_sizes)
    assert not check_model(model.model, model.row_axes, model.observe(inside=True), believe_names=names).findings
