"""The reference page of verdicts about exporters' models is current and covers enough models."""

from pathlib import Path

import pytest

from rows.exported import PACKAGES, committed, packaged
from rows.verdicts import PAGE, judge, kept_lines, render


def test_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run `make reference`"


def test_corpus_is_large_and_its_models_are_small() -> None:
    models = committed()
    assert len(models) >= 40
    assert len({model.made_by.split()[0] for model in models}) >= 3
    assert sum(model.path.stat().st_size for model in models) < 3 * 2**20


@pytest.mark.skipif(not PACKAGES, reason="ORTSERVE_TEST_PACKAGES names no folder with packages that ship models")
def test_packaged_model_descriptions_are_current() -> None:
    kept = {line.name: line for line in kept_lines()}
    for model in packaged(Path(PACKAGES)):
        assert judge(model) == kept[model.name]
