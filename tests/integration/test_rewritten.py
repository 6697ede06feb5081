"""Workers of pytest-xdist share the rewriting of assertions."""

import sys
from pathlib import Path

import pytest

from rewritten import rewrite_share


def test_a_worker_rewrites_its_share_of_the_files_that_have_changed(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    files = [tmp_path / f"test_{number}.py" for number in range(4)]
    for file in files:
        file.write_text("def test():\n    assert 1 == 2\n")

    def results() -> dict[str, Path]:
        return {path.name.partition(".")[0]: path for path in (tmp_path / "__pycache__").glob("*.pyc")}

    rewrite_share(pytestconfig, files, 1, 2)
    first = {name: path.stat().st_ino for name, path in results().items()}
    assert first.keys() == {"test_1", "test_3"}
    assert all(b"@py_assert" in path.read_bytes() for path in results().values())

    files[3].write_text("def test():\n    assert 2 == 3\n")
    kept = tmp_path / "kept"
    kept.hardlink_to(results()["test_3"])  # keeps the number of its inode
    rewrite_share(pytestconfig, files, 1, 2)
    second = {name: path.stat().st_ino for name, path in results().items()}
    assert (second["test_1"] == first["test_1"], second["test_3"] == first["test_3"]) == (True, False)
