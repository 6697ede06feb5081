"""``ortserve models`` against a real server: every action, its errors, and progress."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models import builders
from ortserve.cli.main import main
from ortserve.tools.models import command
from servers import SHORT_WARMUP, ServerProcess, add_model, serving
from small_server import small_server

pytestmark = pytest.mark.usefixtures("preloaded_commands")


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with explicit control and a control key; model ``m`` has versions 1 and 2, ``other`` is not loaded."""
    root = tmp_path_factory.mktemp("controlled")
    (root / "key").write_text("a-secret-of-the-test-that-is-long-enough\n")
    for version in (1, 2):
        folder = add_model(root / "models", "m", builders.identity, version=version)
    (folder / "model.yaml").write_text("labels: {stable: 1, lost: 7}\nversion_policy: {all: true}\n")
    add_model(root / "models", "other", builders.identity)
    flags = ("--control-keys-file", root / "key", "--model-control-mode", "explicit", "--load-model", "m")
    with serving(root / "models", *flags, *SHORT_WARMUP) as server:
        yield server


@pytest.fixture
def key(controlled: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(tmp_path_factory.getbasetemp().glob("controlled*/key"))


def shown(capsys: pytest.CaptureFixture[str], server: ServerProcess, *arguments: str | Path) -> dict[str, Any]:
    assert main(["models", *map(str, arguments), "--url", server.url, "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["action"]) == ("ortserve.models/1", arguments[0])
    return result


def refused(capsys: pytest.CaptureFixture[str], status: int, *arguments: str | Path) -> str:
    assert main(["models", *map(str, arguments)]) == status
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1), output
    return output.err


def test_actions_show_and_change_models(
    capsys: pytest.CaptureFixture[str], controlled: ServerProcess, key: Path
) -> None:
    versions = {(one["model"], one["version"]): one for one in shown(capsys, controlled, "list")["versions"]}
    assert versions["m", "1"]["labels"] == ["stable"]
    assert [versions["m", number]["is_default"] for number in ("1", "2")] == [True, False]
    assert versions["other", ""]["state"] == ""
    with_key = ("--key-file", key)
    loaded = shown(capsys, controlled, "load", "other", *with_key)["versions"]
    assert [(one["version"], one["state"]) for one in loaded] == [("1", "READY")]
    unloaded = shown(capsys, controlled, "unload", "other", *with_key)
    assert (unloaded["versions"][0]["reason"], unloaded["note"]) == ("unloaded", "")
    assert main(["models", "unload", "other", "--url", controlled.url, "--key-file", str(key)]) == 0
    assert "Model 'other' was not loaded: nothing was unloaded." in capsys.readouterr().out
    assert shown(capsys, controlled, "labels", "m", "canary=2", *with_key)["labels"]["canary"] == "2"
    assert shown(capsys, controlled, "promote", "m", "2", *with_key)["previous"] == "1"
    assert shown(capsys, controlled, "rollback", "m", *with_key)["labels"]["stable"] == "1"
    assert main(["models", "rollout", "m", "--url", controlled.url]) == 0
    assert "The model has no rollout." in capsys.readouterr().out
    started = ("rollout", "m", "candidate=2", "mode=canary", "sticky=user", "rules.max_error_rate=0.5")
    rollout = shown(capsys, controlled, *started, *with_key)["rollout"]
    assert (rollout["rollout"]["sticky"], rollout["rollout"]["rules"]["max_error_rate"]) == ("user", 0.5)
    assert main(["models", "rollout", "m", "--url", controlled.url]) == 0
    printed = capsys.readouterr().out
    assert "stable requests" in printed
    assert re.search(r"^rules\.max_error_rate +0\.500 *$", printed, re.MULTILINE)
    assert "None" not in printed
    stopped = shown(capsys, controlled, "rollout", "m", "stop", *with_key)["rollout"]
    assert (stopped["rollout"], stopped["ended"]["result"]) == (None, "stopped")
    shown(capsys, controlled, *started, *with_key)
    assert shown(capsys, controlled, "promote", "m", *with_key)["labels"]["stable"] == "2"
    shown(capsys, controlled, "rollback", "m", *with_key)
    labels = shown(capsys, controlled, "labels", "m", "canary=", "stable=", *with_key)["labels"]
    assert labels == {"stable": "1", "lost": "7"}
    status = shown(capsys, controlled, "status", "m")
    assert [one["requests"] for one in status["versions"]] == [0, 0]
    assert main(["models", "status", "m", "--url", controlled.url]) == 0
    text = capsys.readouterr().out
    assert "stable, (default)" in text
    assert "version 7" in text


def test_each_error_is_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], controlled: ServerProcess, key: Path
) -> None:
    url = ("--url", controlled.url)
    assert "cannot reach the server" in refused(capsys, 1, "list", "--url", "http://127.0.0.1:9")
    assert "model 'n' is not known; the server has m, other" in refused(capsys, 1, "status", "n", *url)
    assert "status 401" in refused(capsys, 1, "rollback", "m", *url)
    assert "send a key with --key-file" in refused(capsys, 1, "load", "other", *url)
    no_promotion = refused(capsys, 1, "rollback", "m", *url, "--key-file", key)
    assert "status 409: model 'm' has no promotion to roll back" in no_promotion
    assert "expected the name of a MODEL" in refused(capsys, 2, "status", *url)
    assert "expected no model" in refused(capsys, 2, "list", "m", *url)
    assert f"expected the URL of the server as --url {controlled.url}" in refused(capsys, 2, "list", controlled.url)
    assert "expected NAME=VERSION or NAME=, got 'a=b'" in refused(capsys, 2, "labels", "m", "a=b", *url)
    assert "expected the number of one version, got 'x'" in refused(capsys, 2, "promote", "m", "x", *url)
    assert "expected nothing after the model, got 'x'" in refused(capsys, 2, "unload", "m", "x", *url)
    assert "--watch: expected list, status or rollout" in refused(capsys, 2, "load", "m", "--watch", *url)
    assert "expected KEY=VALUE or stop, got 'go'" in refused(capsys, 2, "rollout", "m", "go", *url)
    twice = refused(capsys, 2, "labels", "m", "a=1", "a=2", *url)
    assert "expected each NAME once, got 'a=2' for one that is already changed" in twice
    for first, second in (("share=0.1", "share=0.2"), ("rules.max_error_rate=0.5", "rules=1")):
        assert f"expected each KEY once, got '{second}'" in refused(capsys, 2, "rollout", "m", first, second, *url)
    long = "9" * 20
    assert f"got 'a={long}'" in refused(capsys, 2, "labels", "m", f"a={long}", *url)
    assert f"expected the number of one version, got '{long}'" in refused(capsys, 2, "promote", "m", long, *url)
    both = refused(capsys, 2, "rollout", "m", "rules=1", "rules.max_error_rate=0.5", *url)
    assert "expected a value of rules or of keys within it, got both" in both
    assert "HTTP port" in refused(capsys, 2, "list", "--url", f"grpc://{controlled.grpc}")


def test_versions_of_other_servers_may_be_names(capsys: pytest.CaptureFixture[str]) -> None:
    with small_server(version="v0.1") as server:
        assert main(["models", "list", "--url", server.url, "--json"]) == 0
    (version,) = json.loads(capsys.readouterr().out)["versions"]
    assert (version["version"], version["is_default"]) == ("v0.1", None)


@pytest.mark.parametrize("entry", [7, {}, {"name": ["m"]}])
def test_index_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str], entry: object) -> None:
    with small_server(index=[entry]) as server:
        status = main(["models", "status", "m", "--url", server.url, "--json"])
    out, said = capsys.readouterr()
    assert (status, out, said.count("\n")) == (1, "", 1)
    assert said.startswith(f"ortserve models: {server.url}: expected a server of the Open Inference Protocol v2, got ")


def test_defect_of_the_command_is_not_reported_as_another_kind_of_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Report", None)
    with small_server() as server, pytest.raises(TypeError, match="NoneType"):
        main(["models", "list", "--url", server.url])


def test_interruption_ends_a_load_that_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", "from ortserve.cli.main import main; raise SystemExit(main())"]
        with subprocess.Popen([*command, "models", "load", "m", "--url", url], stderr=subprocess.PIPE) as loading:
            try:
                silent.settimeout(60)
                with silent.accept()[0]:
                    loading.send_signal(signal.SIGINT)
                    _, said = loading.communicate(timeout=60)
            finally:
                loading.kill()
    assert (loading.returncode, said) == (130, b"ortserve models: interrupted\n")


def test_watch_ends_silently_when_its_reader_does() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from ortserve.cli.main import main; raise SystemExit(main())"]
    with small_server() as server, os.fdopen(writer, "wb") as output:
        arguments = ["models", "list", "--watch", "--url", server.url]
        ended = subprocess.run([*command, *arguments], stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
