"""``ortserve doctor`` in a process, on this machine, repositories and real servers."""

import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any, Final

import httpx
import jsonschema
import pytest

from apart import UnavailableError
from certificates import Secret
from gpu_package import environment_on_host_memory
from models import builders, members
from ortserve.cli.main import main
from ortserve.example import repository_path
from ortserve.tools.command import json_schema
from ortserve.tools.doctor.arguments import build_parser
from ortserve.tools.doctor.catalog import CATALOG
from ortserve.tools.doctor.result import DoctorResult
from pages import DOCS, commands
from servers import LONG_S, SHORT_WARMUP, ServerProcess, _clean_environment, add_model, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")

PAGE: Final = DOCS / "tools" / "doctor.md"
SCHEMA: Final = json_schema(DoctorResult)


def doctor(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command: in this process, so that its children are forked; in another for variables of libraries."""
    words = ["doctor", *map(str, arguments)]
    if any(not name.startswith("ORTSERVE_") for name in env or ()):
        command = [sys.executable, "-m", "ortserve", *words]
        environment = _clean_environment() | dict(env or {})
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * LONG_S, check=False)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - _clean_environment().keys():
            patch.delenv(name)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def result_of(*arguments: str | Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the command. Its result must conform to the schema, and the exit status must follow from the findings."""
    done = doctor(*arguments, "--json", env=env)
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(result, SCHEMA)
    assert result["schema"] == "ortserve.doctor/1"
    assert done.returncode == any(found["level"] == "problem" for found in result["findings"])
    return result


def found(result: dict[str, Any], where: str) -> dict[str, str]:
    """The findings about one thing: their texts by kind."""
    return {each["kind"]: each["seen"] for each in result["findings"] if where in each["where"]}


def test_this_machine_and_the_options_of_its_environment_are_described() -> None:
    result = result_of("--seconds", "0.1", env={"OMP_NUM_THREADS": "2", "ORTSERVE_HTTP_PORT": "99999"})

    assert result["subject"] == "this machine"
    assert result["processors"]["budget"] >= 1
    cpu = next(trial for trial in result["runtime"]["providers"] if trial["name"] == "CPUExecutionProvider")
    assert (cpu["is_usable"], cpu["problem"]) == (True, "")
    assert "variables_without_effect" in found(result, "OMP_NUM_THREADS")
    (invalid,) = (each["seen"] for each in result["findings"] if each["kind"] == "invalid_option")
    assert invalid.startswith("ORTSERVE_HTTP_PORT: ")
    levels = [each["level"] for each in result["findings"]]
    assert levels == sorted(levels, key=["problem", "warning", "advice"].index)


def test_problems_of_a_repository_are_found(tmp_path: Path) -> None:
    for name in ("well", "contradicts", "many", "wishes", "falls", "broken", "elsewhere", "misspelled"):
        add_model(tmp_path, name, builders.mlp)
    (tmp_path / "contradicts" / "model.yaml").write_text("session: {inter_op_threads: 4}\ngpus: [0]\n")
    (tmp_path / "many" / "model.yaml").write_text("instances: 20\nintra_op_threads: 10\n")
    (tmp_path / "wishes" / "model.yaml").write_text("execution_providers: [cuda]\n")
    (tmp_path / "falls" / "model.yaml").write_text("execution_providers: [cuda, cpu]\n")
    (tmp_path / "misspelled" / "model.yaml").write_text("instnces: 2\n")
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"\x08\x01 is not ONNX")
    builders.external_weights(tmp_path / "elsewhere" / "1" / "model.onnx", "weights.bin")
    (tmp_path / "elsewhere" / "1" / "weights.bin").unlink(missing_ok=True)
    (tmp_path / "empty").mkdir()
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    result = result_of(tmp_path, "--seconds", "0", env={"ORTSERVE_WARMUP_S": "0.05"})

    assert found(result, "well/1") == {}
    assert "only the execution_mode parallel uses them" in str(result["findings"])
    assert found(result, "contradicts/1").keys() == {"option_without_effect"}
    assert "20 instances of 10 threads" in found(result, "many/1")["too_many_threads"]
    assert "CUDAExecutionProvider" in found(result, "wishes/1")["model_fails"]
    assert "CUDAExecutionProvider" in found(result, "falls/1")["provider_passed_over"]
    assert found(result, "broken/1").keys() == {"model_fails"}
    assert "weights.bin" in found(result, "elsewhere/1")["model_fails"]
    assert "instnces" in found(result, "misspelled")["model_fails"]
    assert "no version folder" in found(result, "empty")["model_fails"]
    loaded = {model["name"] for model in result["models"] if model["load_s"]}
    assert loaded == {"well", "contradicts", "many", "falls"}
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before, "nothing is changed"


def test_server_and_the_path_of_its_requests_are_checked(example_server: ServerProcess, tmp_path: Path) -> None:
    metrics = f"http://{example_server.metrics}/metrics"
    model = Path(str(repository_path())) / "digits"
    page = tmp_path / "page.html"

    result = result_of(example_server.url, "--model", model, "--requests", "60", "--metrics", metrics, "-o", page)

    server, request = result["server"], result["request"]
    assert (server["name"], server["live"], server["ready"], server["reach"]) == ("ortserve", True, True, "loopback")
    assert server["models"]["digits/1"] == "READY"
    assert server["metrics"]["open_files"] > 0
    assert [each["kind"] for each in result["findings"] if each["level"] == "problem"] == []
    assert request["requests"] == 60
    assert [stage["name"] for stage in request["stages"]] == [
        *("network and HTTP", "decode", "queue", "stage", "compute", "encode")
    ]
    assert all(0 <= stage["median_us"] <= request["median_us"] for stage in request["stages"])
    assert 0 < request["bare_us"] < request["median_us"], "serving costs more than a bare run"
    assert "Bare session.run takes" in page.read_text()
    assert not re.search(r"<(script|link|iframe|img)\b|url\((?!#)|@import", page.read_text())


def test_model_is_followed_by_its_name_alone(example_server: ServerProcess) -> None:
    request = result_of(example_server.url, "--model", "text_stats", "--requests", "5")["request"]

    assert (request["model"], request["requests"], request["bare_us"]) == ("text_stats", 5, None)


def test_ensemble_is_compared_with_runs_of_its_members(tmp_path: Path) -> None:
    add_model(tmp_path, "double", members.affine, scale=2)
    members.add_ensemble(tmp_path, "sum", ["a"], ["b"], [("double", {"a": "a"}, {"b": "b"})])
    with serving(tmp_path, *SHORT_WARMUP) as server:
        request = result_of(server.url, "--model", tmp_path / "sum", "--requests", "20")["request"]

    assert (request["model"], request["requests"]) == ("sum", 20)
    assert 0 < request["bare_us"] < request["median_us"]


def test_slow_model_is_followed_with_few_requests(tmp_path: Path) -> None:
    """A quick model gets at least 20 requests before those that are followed."""
    add_model(tmp_path, "m", builders.slow, steps=100_000)
    with serving(tmp_path, *SHORT_WARMUP) as server:
        request = result_of(server.url, "--model", "m", "--requests", "1")["request"]
        (stats,) = httpx.get(f"{server.url}/v2/models/m/stats").json()["model_stats"]

    assert request["requests"] == 1
    assert stats["inference_count"] < 12


def test_model_that_rejects_synthetic_inputs_gets_advice(tmp_path: Path) -> None:
    add_model(tmp_path, "picky", builders.refuses_synthetic)
    with serving(tmp_path, *SHORT_WARMUP) as server:
        picky = doctor(server.url, "--model", "picky")

    assert picky.returncode == 2
    assert "rejects synthetic inputs; ortserve bench measures it with real samples, by --inputs: " in picky.stderr


def test_certificate_and_keys_are_used(tmp_path: Path) -> None:
    secret, keys = Secret(tmp_path / "secret"), tmp_path / "keys"
    keys.write_text("# of the tests\n0123456789abcdef0\n")
    flags: tuple[str | Path, ...] = (*secret.flags, "--metadata-keys-file", keys, "--control-keys-file", keys)
    context = ssl.create_default_context(cafile=str(secret.ca))
    add_model(tmp_path / "models", "m", builders.mlp)
    with serving(tmp_path / "models", *flags, *SHORT_WARMUP, client=context) as server:
        without_key = result_of(server.url)
        refused = doctor(server.url, "--key-file", keys)
        plain = doctor(server.url.replace("https", "http"))
        with_key = result_of(server.url, "--key-file", keys, env={"SSL_CERT_FILE": str(secret.ca)})

    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the server's certificate is not trusted" in refused.stderr, "the key is for the server only"
    assert plain.stderr.endswith("this port uses TLS: expected https:// in the address, got a plain HTTP request\n")
    assert [each["kind"] for each in without_key["findings"]] == ["untrusted_certificate"]
    assert (without_key["server"]["models"], without_key["server"]["control_is_open"]) == (None, False)
    assert with_key["findings"] == []
    assert (with_key["server"]["models"], with_key["server"]["control_is_open"]) == ({"m/1": "READY"}, False)
    assert 29 < with_key["server"]["certificate_expires_s"] / 86_400 <= 30


def test_models_that_nobody_loaded_are_shown_and_no_finding(tmp_path: Path) -> None:
    for name in ("loaded", "never", "unloaded"):
        add_model(tmp_path / "models", name, builders.mlp)
    flags = ("--model-control-mode", "explicit", "--load-model", "loaded", "--load-model", "unloaded", *SHORT_WARMUP)
    with serving(tmp_path / "models", *flags) as server:
        httpx.post(f"{server.url}/v2/repository/models/unloaded/unload").raise_for_status()
        found = result_of(server.url)

    assert found["server"]["models"] == {
        "loaded/1": "READY",
        "never": "not loaded",
        "unloaded/1": "UNAVAILABLE: unloaded",
    }
    assert found["findings"] == []


@pytest.mark.parametrize("is_asked", [True, False])
def test_metrics_that_need_a_key_get_it(tmp_path: Path, is_asked: bool) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef0\n")
    add_model(tmp_path / "models", "m", builders.mlp)
    with serving(tmp_path / "models", "--metrics-keys-file", keys, *SHORT_WARMUP) as server:
        key = ("--key-file", keys) if is_asked else ()
        found = result_of(server.url, "--metrics", f"http://{server.metrics}", *key)["server"]["metrics"]

    assert (found is not None) == is_asked


class OtherServer(BaseHTTPRequestHandler):
    """Answers every request with a page."""

    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/v2" else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write no log."""


@contextmanager
def another_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_server_of_another_kind_is_reported() -> None:
    with another_server() as url:
        done = doctor(url)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"ortserve doctor: {url}: expected a server of the Open Inference Protocol v2, got status 404 for /v2\n"
    )


def test_missing_model_of_a_server_is_reported(example_server: ServerProcess) -> None:
    done = doctor(example_server.url, "--model", "unknown")

    assert (done.returncode, done.stdout) == (1, "")
    assert "'unknown' is not found" in done.stderr
    assert "the server has" in done.stderr
    assert done.stderr.count("\n") == 1


def test_interruption_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "ortserve", "doctor", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            silent.settimeout(LONG_S)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                out, problem = process.communicate(timeout=LONG_S)

    assert (process.returncode, out, problem) == (130, "", "ortserve doctor: interrupted\n")


@pytest.mark.timeout(600)  # the package may need to be installed
def test_gpu_package_is_tried_on_host_memory() -> None:
    try:
        environment = environment_on_host_memory(pace="late", devices="2")
    except UnavailableError as error:
        pytest.skip(f"ONNX Runtime's package for GPUs cannot be had here: {error}")

    result = result_of("--seconds", "0", env=environment)

    trials = {trial["name"]: trial for trial in result["runtime"]["providers"]}
    assert trials["CUDAExecutionProvider"]["is_usable"]
    assert trials["CUDAExecutionProvider"]["libraries"]["libcudart.so.13"] == "13.0"
    assert trials["TensorrtExecutionProvider"]["problem"].startswith("libnvinfer.so.10: cannot open shared object")
    assert [gpu["name"] for gpu in result["runtime"]["gpus"]] == ["host memory"] * 2
    assert "missing_library" in found(result, "libcudnn.so.9")


def test_commands_of_the_page_work(example_server: ServerProcess) -> None:
    shown = commands(PAGE)
    assert len(shown) >= 3
    for command in shown:
        words = [
            {"models": str(repository_path()), "models/digits": f"{repository_path()}/digits"}.get(word, word)
            for word in shlex.split(command.text)[2:]
        ]
        words = [word.replace("http://127.0.0.1:8000", example_server.url) for word in words]
        more = ["--metrics", f"http://{example_server.metrics}"] if example_server.url in words else []
        done = doctor(*words, *more)
        assert done.stderr == "", command.text
        titles = [line for line in command.output.splitlines() if re.fullmatch(r"[A-Z][\w ,]+", line)]
        assert titles
        for title in titles:
            assert any(line.rstrip() == title for line in done.stdout.splitlines()), title


def test_page_lists_every_flag_and_kind() -> None:
    text = PAGE.read_text()
    for action in build_parser()._actions:
        for flag in action.option_strings:
            assert flag in ("-h", "--help") or f"`{flag}" in text, flag
    for kind, (level, _, _) in CATALOG.kinds.items():
        assert re.search(rf"^\| `{kind}` \| {level} \|", text, re.MULTILINE), kind
