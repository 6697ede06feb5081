"""The README's first page, run as it stands: its commands and snippets print what it says they print."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from servers import ServerProcess

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def on_ports_of(server: ServerProcess, text: str) -> str:
    """The README speaks of the default ports, the test's server has others."""
    http, grpc = server.http.rpartition(":")[2], server.grpc.rpartition(":")[2]
    return text.replace("8000", http).replace("8001", grpc)


def console_commands() -> list[tuple[str, str]]:
    """The command of each console block, up to where its quotes are closed, and what the README says it prints."""
    found = []
    for block in blocks("console"):
        lines = block.removeprefix("$ ").splitlines(keepends=True)
        ends = next(count for count in range(1, len(lines) + 1) if "".join(lines[:count]).count("'") % 2 == 0)
        found.append(("".join(lines[:ends]), "".join(lines[ends:])))
    return found


def test_both_commands_are_shown() -> None:
    assert "make serve" in README
    assert "make test" in README


@pytest.mark.parametrize(("command", "printed"), console_commands(), ids=lambda text: text.split("\n")[0][:60])
def test_curl_prints_what_the_readme_says(example_server: ServerProcess, command: str, printed: str) -> None:
    told = subprocess.run(
        ["bash", "-c", on_ports_of(example_server, command)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    if printed:
        assert told.strip() == printed.strip()
    else:
        assert "error" not in json.loads(told)


def test_tritonclient_prints_what_the_readme_says(example_server: ServerProcess) -> None:
    (snippet,) = blocks("python")
    (printed,) = blocks("text")
    told = subprocess.run(
        [sys.executable, "-c", on_ports_of(example_server, snippet)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == printed


def test_the_readme_shows_a_command_that_classifies_a_digit() -> None:
    commands = [command for command, printed in console_commands() if '"data":[2]' in printed]
    assert len(commands) == 1
    assert "/v2/models/digits/infer" in commands[0]
