"""The documents' requests and snippets run as written and print the documented output.

``tests/repo/test_documents.py`` checks the names in them, ``tests/deploy`` the commands for containers and Kubernetes.
"""

import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import tritonclient.http as triton_http

from manifests import ROOT
from models import builders
from pages import DOCS, Command, blocks, commands, spans
from servers import SHORT_WARMUP, ServerProcess, add_model, serving

OF_SECURITY: Final = [command.text for command in commands(DOCS / "security.md")]
OF_ENSEMBLES: Final = [command.text for command in commands(DOCS / "ensembles.md")]
REQUESTS: Final = [
    command
    for command in commands(ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    if command.text.startswith("curl") and command.text not in (*OF_SECURITY, *OF_ENSEMBLES)
]


def on_ports_of(server: ServerProcess, text: str) -> str:
    """The text with the ports of the test's server in place of the default ports."""
    ports = (address.rpartition(":")[2] for address in (server.http, server.grpc, server.metrics))
    for default, port in zip(("8000", "8001", "8002"), ports, strict=True):
        text = text.replace(f":{default}", f":{port}").replace(f", {default})", f", {port})")
    return text


def bash(script: str, folder: Path, **variables: str) -> str:
    """Run a command of a page in a temporary folder; ``ortserve`` is the tested package."""
    script = f'ortserve() {{ {shlex.quote(sys.executable)} -m ortserve "$@"; }}\n{script}'
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "-ec", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("command", REQUESTS, ids=str)
def test_request_prints_the_documented_output(example_server: ServerProcess, command: Command, tmp_path: Path) -> None:
    printed = bash(on_ports_of(example_server, command.text), tmp_path)
    if command.output:
        assert printed.strip() == command.output
    elif printed.startswith("{"):
        assert "error" not in json.loads(printed)
    else:
        assert "ortserve_request_duration_seconds" in printed


def test_quickstart_quotes_the_inputs_of_a_model(example_server: ServerProcess, tmp_path: Path) -> None:
    (command,) = [one for one in REQUESTS if one.page.stem == "quickstart" and one.text.endswith("/digits")]
    (quoted,) = [span for span in spans(command.page.read_text()) if span.startswith('"inputs":')]
    assert quoted in bash(on_ports_of(example_server, command.text), tmp_path)


def test_requests_are_found() -> None:
    assert len(REQUESTS) > 5
    assert sum('"data":[2]' in command.output for command in REQUESTS) >= 1


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "quickstart.md", DOCS / "migrate.md"], ids=lambda page: page.name
)
def test_snippet_prints_the_documented_output(example_server: ServerProcess, page: Path) -> None:
    (snippet,) = blocks("python", page.read_text())
    (shown,) = blocks("text", page.read_text())
    command = [sys.executable, "-c", on_ports_of(example_server, snippet)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js")
def test_javascript_sends_the_bytes_of_an_array(example_server: ServerProcess) -> None:
    (snippet,) = blocks("js", (DOCS / "protocol.md").read_text())
    command = ["node", "--input-type=module", "--eval", on_ports_of(example_server, snippet)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "[ 3 ]\n", done.stderr


def test_models_are_loaded_and_unloaded_as_the_page_describes(tmp_path: Path) -> None:
    text = (DOCS / "models.md").read_text()
    (snippet,) = [block for block in blocks("python", text) if "client" in block]
    (started,) = [command for command in commands(DOCS / "models.md") if "explicit" in command.text]
    add_model(tmp_path / "models", "digits", builders.mlp)
    flags = [word for word in started.words[2:] if word != "REPOSITORY"]
    with serving(tmp_path / "models", *flags, *SHORT_WARMUP) as server:
        client = triton_http.InferenceServerClient(server.http)
        content = (tmp_path / "models" / "digits" / "1" / "model.onnx").read_bytes()
        exec(snippet, {"client": client, "content": content})
        assert client.is_model_ready("fresh")
        assert not client.is_model_ready("digits")
        client.close()


def test_embeddings_are_answered_as_the_page_describes(tmp_path: Path) -> None:
    (ask,) = OF_ENSEMBLES
    (snippet,) = [block for block in blocks("python", (DOCS / "ensembles.md").read_text()) if "import OpenAI" in block]
    add_model(tmp_path, "sentences", builders.word_counts, words=["two words"])
    with serving(tmp_path, *SHORT_WARMUP) as server:
        answer = json.loads(bash(on_ports_of(server, ask), tmp_path))
        variables: dict[str, Any] = {}
        exec(on_ports_of(server, snippet), variables)
        variables["client"].close()
    assert variables["vectors"] == [[1], [0]]
    assert [entry["embedding"] for entry in answer["data"]] == [[1], [0]]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ins", {"inspect"}),
        ("mo", {"models"}),
        ("inspect --fai", {"--fail-on"}),
        ("serve --no-tls", {"--no-tls-metrics"}),
        ("serve mode", set()),  # bash completes files
    ],
)
def test_completion_finds_commands_and_flags(tmp_path: Path, words: str, completed: set[str]) -> None:
    (snippet,) = blocks("bash", (DOCS / "install.md").read_text())
    line = ["ortserve", *words.split()]
    typed = f"COMP_WORDS=({shlex.join(line)}) COMP_CWORD={len(line) - 1}"
    printed = bash(f'{snippet}\n{typed}\n_ortserve || true\nprintf "%s\\n" "${{COMPREPLY[@]}}"', tmp_path)
    assert set(printed.split()) == completed


def test_trace_settings_are_accepted_as_the_page_describes(tmp_path: Path) -> None:
    (snippet,) = blocks("python", (DOCS / "observability.md").read_text())
    with serving("--example", "--trace-file", tmp_path / "traces", *SHORT_WARMUP) as server:
        client = triton_http.InferenceServerClient(server.http)
        exec(snippet, {"client": client})
        assert client.get_trace_settings()["trace_rate"] == "100"
        client.close()


def test_keys_are_required_as_the_page_describes(tmp_path: Path) -> None:
    make, start, ask = OF_SECURITY[:3]
    bash(make, tmp_path)
    flags = [tmp_path / word if word.endswith(".keys") else word for word in shlex.split(start)[2:]]
    with serving(*flags, *SHORT_WARMUP) as server:
        ask = on_ports_of(server, ask)
        assert json.loads(bash(f"{ask} -s", tmp_path))["OUTPUT0"][0] == 2
        unknown = re.sub(r'Bearer [^"]*', "Bearer another", ask)
        assert bash(f"{unknown} -s -o /dev/null -w '%{{http_code}}'", tmp_path) == "401"


def test_tls_is_set_up_as_the_page_describes(tmp_path: Path) -> None:
    make, start, ask, health = OF_SECURITY[3:]
    bash(make, tmp_path)
    flags = [tmp_path / word if word.startswith("tls.") else word for word in shlex.split(start)[2:]]
    client = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    with serving(*flags, *SHORT_WARMUP, client=client) as server:
        assert '"name":"simple"' in bash(on_ports_of(server, ask), tmp_path)
        port = server.metrics.rpartition(":")[2]
        assert bash(health, tmp_path, ORTSERVE_METRICS_PORT=port) == "ready\n"
