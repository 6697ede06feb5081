"""Fake installed distributions with the metadata that pip writes."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the metadata of a distribution on the import path, before all others."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))

    def write_metadata(name: str) -> None:
        folder = site / f"{name.replace('-', '_')}-9.9.9.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")

    return write_metadata
