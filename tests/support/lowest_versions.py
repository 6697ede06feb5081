"""Prints the constraints of ``make test-lowest``: the pinned versions of requirements without a lowest version.

They are tools of the tests. Of all other requirements, uv chooses the lowest version that ``pyproject.toml`` allows.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def pins_without_lowest_version() -> list[str]:
    """The lines of ``constraints.txt`` for requirements that no extra bounds from below."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    bounded = {_name(requirement) for requirement in requirements if ">=" in requirement}
    free = {_name(requirement) for requirement in requirements} - bounded
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line and _name(line) in free]


def _name(requirement: str) -> str:
    """The name in front of a version, in the spelling of a registry's index."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


if __name__ == "__main__":
    print(*pins_without_lowest_version(), sep="\n")
