"""The documents as tests read them: their pages, code blocks, and the commands for readers."""

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final

import yaml

from manifests import DEPLOY, ROOT
from ortserve.cli.main import main

DOCS: Final = ROOT / "docs"
GENERATED: Final = DOCS / "reference"
PAGES: Final = (
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    ROOT / "deploy" / "README.md",
    ROOT / "loadtests" / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents),
)
"""All hand-written pages for users."""

_CONSOLE: Final = r"^ *```console\n(.*?)^ *```\n(?:\n```json\n(.*?)^```)?"
"""A block of commands, and the answer in a block below it."""

KUBERNETES: Final = (DOCS / "operations" / "kubernetes.md").read_text()
RUNBOOK: Final = (DOCS / "operations" / "runbook.md").read_text()


def anchor_of(title: str) -> str:
    """The anchor of a heading on the site and on code hosts."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def sections(page: Path) -> dict[str, str]:
    """The text of each section of the second level, by its anchor."""
    _, *parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(map(anchor_of, parts[::2]), parts[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block: its text as a shell reads it, and the output that the page shows."""

    page: Path
    text: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        """The words of the command, without the variables that it sets."""
        return list(dropwhile(lambda word: re.match(r"[A-Z]+(_[A-Z]+)*=", word), shlex.split(self.text)))

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:60]}"


def blocks(language: str, text: str) -> list[str]:
    """The fenced blocks of a language, without their indentation in lists."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def yaml_block(mark: str) -> Any:
    """The only block of YAML on the page about Kubernetes that contains this text."""
    (found,) = (block for block in blocks("yaml", KUBERNETES) if mark in block)
    return yaml.safe_load(found)


def commands(*pages: Path) -> list[Command]:
    """All commands in the console blocks of pages, by default of all pages."""
    return [
        command
        for page in pages or PAGES
        for block, answer in re.findall(_CONSOLE, page.read_text(), re.MULTILINE | re.DOTALL)
        for command in _of(page, textwrap.dedent(block), answer)
    ]


def _of(page: Path, block: str, answer: str) -> Iterator[Command]:
    """The commands of a block. A block with prompts also shows their output, from the line after each command.

    In other blocks, each line is a command. A line also continues after a backslash, and within single quotes.
    """
    block = re.sub(r"\\\n *", "", block)
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        text, _, output = part.partition("\n")
        yield Command(page, text, output.strip())
    if not block.startswith("$ "):
        for text in re.findall(r"(?:[^'\n]|'[^']*')+", block):
            yield Command(page, text.strip(), answer.strip())


def spans(text: str) -> list[str]:
    """The code spans in sentences and tables, each on one line."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))


@cache
def flags_of_tool(name: str) -> set[str]:
    """The flags in the help of a tool. This process prints it, because imports take seconds in each new process."""
    with redirect_stdout(StringIO()) as shown:
        assert main([name, "--help"]) == 0, f"there is no command {name}"
    return flags_in(shown.getvalue())


def kubectl_commands() -> set[str]:
    """The ``kubectl`` commands of all pages, including those within sentences."""
    typed = {command.text for command in commands()} | {span for page in PAGES for span in spans(page.read_text())}
    return {command for command in typed if re.search(r"\bkubectl ", command)}


def own_overlay(folder: Path, overlay: dict[str, Any]) -> Path:
    """Write an overlay beside a copy of the manifests, as the page about Kubernetes describes."""
    shutil.copytree(DEPLOY, folder / "deploy", dirs_exist_ok=True)
    (folder / "my-models").mkdir()
    (folder / "my-models" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return folder / "my-models"
