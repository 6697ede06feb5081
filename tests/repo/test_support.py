"""The page of the tests lists exactly the helpers."""

import re
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
PAGE = SUPPORT.parent / "README.md"


def test_page_lists_exactly_the_helpers() -> None:
    section = PAGE.read_text().split("## Helpers in", 1)[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    there = {path.stem for path in SUPPORT.iterdir() if path.suffix == ".py" or (path.is_dir() and path.name[0] != "_")}
    assert listed == there
