"""SECURITY.md claims nothing that is not there: every option and test that it names exists."""

import re
from pathlib import Path
from typing import Final

import pytest

from ortserve.config.options import ServerOptions, flag_name
from ortserve.telemetry.declarations import DECLARATIONS

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "SECURITY.md").read_text()
NAMED: Final = set(re.findall(r"`([^`]+)`", PAGE))
TESTS: Final = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("test", sorted(name for name in NAMED if name.startswith("test_")))
def test_named_test_is_there(test: str) -> None:
    assert test in TESTS


@pytest.mark.parametrize("path", sorted(name for name in NAMED if name.startswith(("tests/", "deploy/"))))
def test_named_path_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_named_options_and_metrics_are_there() -> None:
    flags = {name.split()[0] for name in NAMED if name.startswith("--")}
    assert flags - {"--host"} <= {flag_name(name) for name in ServerOptions.model_fields}
    assert {name for name in NAMED if name.startswith("ortserve_")} <= {declared.name for declared in DECLARATIONS}
    assert len(flags) > 20


def test_every_group_of_claims_names_a_test_or_an_option() -> None:
    defended = PAGE[PAGE.index("## What is defended") : PAGE.index("## Left to the operator")]
    claims = re.split(r"\n\n(?:- )?|\n- ", defended.strip())[1:]
    assert len(claims) > 12
    for claim in claims:
        is_heading = re.fullmatch(r"\*\*[^*]+\*\*", claim)
        assert is_heading or "test" in claim or "--" in claim, claim


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / path).exists()
        assert not anchor or f"## {anchor.replace('-', ' ')}" in PAGE.lower()
