"""The README's first page, run as it stands: its commands and snippets print what it says they print."""

import json
import re
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from ortserve.config.model import ModelOptions
from ortserve.config.options import read_options
from servers import SHORT_WARMUP, ServerProcess, serving

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


def test_samples_of_options_are_such(tmp_path: Path) -> None:
    of_model, of_server = blocks("yaml")
    assert ModelOptions.model_validate(yaml.safe_load(of_model)).max_rows == 64
    (tmp_path / "options.yaml").write_text(of_server)
    options = read_options({}, tmp_path / "options.yaml")
    assert (options.http_port, options.log_format) == (9000, "json")


def test_commands_for_tls_do_what_they_seem_to(tmp_path: Path) -> None:
    """As they stand, with other ports, and the server in the place of the line that starts it."""
    made, asked = re.findall(r"^    openssl .*?\.crt\n|^    curl --cacert.*?health\n", README, re.MULTILINE | re.DOTALL)

    def bash(script: str) -> str:
        command = ["bash", "-ec", textwrap.dedent(script)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    bash(made)
    flags = re.findall(r"(--tls-\S+) (tls\.\w+)", README)
    arguments = [word for flag, file in dict(flags).items() for word in (flag, tmp_path / file)]
    client = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    with serving("--example", *SHORT_WARMUP, *arguments, client=client) as server:
        port = server.http.rpartition(":")[2]
        asked = asked.replace(":8000", f":{port}").replace(" ortserve", f" {sys.executable} -m ortserve")
        told = bash(f"    export ORTSERVE_METRICS_PORT={server.metrics.rpartition(':')[2]}\n{asked}")
    assert '"name":"simple"' in told
    assert told.rstrip().endswith("ready")
