"""The pages of ``deploy`` as tests read them: their blocks, and the commands that they tell a stranger to type."""

import re
import shlex
import shutil
import textwrap
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final

import yaml

from manifests import DEPLOY, ROOT

README: Final = (DEPLOY / "README.md").read_text()
RUNBOOK: Final = (DEPLOY / "RUNBOOK.md").read_text()
OBSERVABILITY: Final = (DEPLOY / "OBSERVABILITY.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def yaml_block(mark: str) -> Any:
    """The one block of YAML that has this text in it."""
    (found,) = (block for block in blocks("yaml") if mark in block)
    return yaml.safe_load(found)


def commands() -> list[list[str]]:
    """Every command of the console blocks, as words; variables in front of them left out."""
    typed = [shlex.split(line) for block in blocks("console") for line in block.splitlines()]
    return [list(dropwhile(lambda word: re.match(r"[A-Z]+=", word), words)) for words in typed]


def kubectl_commands() -> set[str]:
    """Of all pages, those within a sentence, too."""
    found = set()
    for page in (*ROOT.glob("*.md"), *DEPLOY.rglob("*.md")):
        text = page.read_text()
        found |= {line for block in blocks("console", text) for line in block.splitlines()}
        sentences = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        found |= {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences)}
    return {command for command in found if re.search(r"\bkubectl ", command)}


def own_overlay(folder: Path, overlay: dict[str, Any]) -> Path:
    """An overlay beside a copy of the manifests, as the page tells one to write it."""
    shutil.copytree(DEPLOY, folder / "deploy", dirs_exist_ok=True)
    (folder / "my-models").mkdir()
    (folder / "my-models" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return folder / "my-models"
