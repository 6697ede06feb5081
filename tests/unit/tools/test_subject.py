"""The model that a tool looks at."""

from pathlib import Path

import pytest

from models import members
from models.members import add_ensemble
from ortserve.errors import ServeError
from ortserve.tools.subject import find_model
from servers import add_model


def test_ensemble_is_refused_with_its_members(tmp_path: Path) -> None:
    add_model(tmp_path, "plus", members.affine)
    add_ensemble(tmp_path, "both", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "t"}), ("plus", {"a": "t"}, {"b": "y"})])
    with pytest.raises(ServeError, match=r"got an ensemble: take its members \(plus\), 'ortserve compare'"):
        find_model(str(tmp_path / "both"))
