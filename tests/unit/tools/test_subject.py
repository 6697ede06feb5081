"""The model that a tool reads."""

from pathlib import Path

import pytest

from models import builders, members
from models.members import add_ensemble
from ortserve.errors import ServeError
from ortserve.tools.subject import find_model
from servers import add_model


def test_ensemble_is_refused_with_its_members(tmp_path: Path) -> None:
    add_model(tmp_path, "plus", members.affine)
    add_ensemble(tmp_path, "both", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "t"}), ("plus", {"a": "t"}, {"b": "y"})])
    with pytest.raises(ServeError, match=r"got an ensemble: use its members \(plus\), 'ortserve compare'"):
        find_model(str(tmp_path / "both"))


@pytest.mark.parametrize("version", ["²", "01"])
def test_a_version_is_a_number_as_its_folder_has_it(tmp_path: Path, version: str) -> None:
    add_model(tmp_path, "m", builders.identity)
    with pytest.raises(ServeError, match="found neither"):
        find_model(str(tmp_path / "m" / version))
