"""Starts with various repositories: the models that load, those that do not, and the messages for the operator."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from encodings_of_requests import grpc_raw, rest_json
from held_files import held_file
from http_wire import wait_until
from models import builders, interfaces
from ortserve.registry.load.load_limits import MAX_LOADS
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    rest_url,
    serving,
    starting,
    triton_clients,
    wait_for_sample,
)

ROW = {"x": np.array([[1, 2, 3, 4]], np.float32)}


def is_ready(server: ServerProcess) -> bool:
    """Readiness, on which both protocols must agree."""
    with triton_clients(server) as (http, grpc):
        by_http: bool = http.is_server_ready()
        assert grpc.is_server_ready() == by_http
    return by_http


@pytest.fixture(scope="module")
def mixed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One valid model among broken ones."""
    repository = tmp_path_factory.mktemp("mixed")
    add_model(repository, "good", builders.identity)
    add_model(repository, "a_no_model", builders.not_onnx)
    add_model(repository, "a_float8", interfaces.float8_output)
    (add_model(repository, "bad_options", builders.identity) / "model.yaml").write_text("max_rows: many\nmax_row: 5\n")
    (add_model(repository, "no_yaml", builders.identity) / "model.yaml").write_text("max_rows: [")
    (add_model(repository, "for_triton", builders.identity) / "config.pbtxt").write_text('backend: "python"\n')
    shutil.rmtree(add_model(repository, "no_version", builders.identity) / "1")
    (add_model(repository, "no_file", builders.identity) / "1" / "model.onnx").unlink()
    builders.identity(repository / "bare.onnx")
    (repository / "README.md").write_text("not a model\n")
    (repository / ".cache").mkdir()
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def test_broken_models_do_not_block_other_models(mixed_server: ServerProcess) -> None:
    assert is_ready(mixed_server)
    for model in ("good", "bare"):
        np.testing.assert_array_equal(rest_json(mixed_server, model, ROW)["y"], ROW["x"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("a_no_model", ("ONNX Runtime cannot load the model",)),
        ("a_float8", ("output 'y' has type tensor(float8e4m3fn)",)),
        ("bad_options", ("max_rows: expected integer, 1 to 65536, in rows, got 'many'", "max_row: unknown key")),
        ("no_yaml", ("is not YAML",)),
        ("for_triton", ("config.pbtxt: backend: expected 'onnxruntime', got 'python'",)),
        ("no_version", ("no version folder",)),
        ("no_file", ("version folder 1 has no file model.onnx",)),
    ],
)
def test_broken_model_is_not_ready_and_its_reason_is_shown(
    mixed_server: ServerProcess, model: str, words: tuple[str, ...]
) -> None:
    line = mixed_server.wait_for_line("model cannot be served", f"model={model} ")
    with triton_clients(mixed_server) as (http, grpc):
        assert not http.is_model_ready(model)
        assert not grpc.is_model_ready(model)
    answer = httpx.get(f"http://{mixed_server.http}/v2/models/{model}", timeout=LONG_S)
    assert answer.status_code == 503
    for word in words:
        assert word in line
        assert word in answer.json()["error"]


def test_files_that_are_not_models_are_ignored(mixed_server: ServerProcess) -> None:
    for name in ("README", "README.md", ".cache"):
        assert httpx.get(f"http://{mixed_server.http}/v2/models/{name}", timeout=LONG_S).status_code == 404


def test_model_not_yet_loading_is_unready_and_not_unknown(tmp_path: Path) -> None:
    """The files of all concurrent loads are held."""
    names = [f"a_slow_{number}" for number in range(MAX_LOADS)]
    add_model(tmp_path, "identity", builders.identity)
    with ExitStack() as stack:
        held_files = [stack.enter_context(held_file(builders.identity(tmp_path / f"{name}.onnx"))) for name in names]
        server = stack.enter_context(starting(tmp_path))
        labels = {"model": names[0], "version": "1", "state": "loading"}
        wait_for_sample(server, "ortserve_model_state", lambda value: value == 1, **labels)
        document = {"inputs": [json_input("x", ROW["x"])]}
        answer = httpx.post(rest_url(server, "identity"), json=document, timeout=LONG_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "'identity' has no available versions: LOADING (waiting for its turn)" in answer.json()["error"]
        with pytest.raises(InferenceServerException) as caught:
            grpc_raw(server, "identity", ROW)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        ready = httpx.get(f"http://{server.http}/v2/models/identity/ready", timeout=LONG_S)
        assert (ready.status_code, ready.json()) == (400, {"error": "Model version not ready"})

        for file in held_files:
            file.release()
        server.wait_until_loaded()
        np.testing.assert_array_equal(rest_json(server, "identity", ROW)["y"], ROW["x"])
        assert httpx.post(rest_url(server, "nowhere"), json=document, timeout=LONG_S).status_code == 404
        server.stop()


def doubling(path: Path) -> Path:
    """A model with the tensors of the smallest ``identity``, but another result: y = 2x."""
    return builders.unnamed_dims(path)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy: {latest: 2}", ["2", "10"]),
        ("version_policy: {all: true}", ["1", "2", "10"]),
        ("version_policy: {specific: [1, 2]}", ["1", "2"]),
    ],
)
def test_version_policy_selects_versions_and_the_highest_answers(
    tmp_path: Path, policy: str, served: list[str]
) -> None:
    for number in (1, 2, 10):
        folder = add_model(tmp_path, "m", doubling if number == 2 else builders.identity, version=number)
    (folder / "model.yaml").write_text(policy)
    with serving(tmp_path, *SHORT_WARMUP) as server, triton_clients(server) as (http, grpc):
        assert http.get_model_metadata("m")["versions"] == served
        assert list(grpc.get_model_metadata("m").versions) == served
        for version in ("1", "2", "10"):
            assert http.is_model_ready("m", version) is (version in served)
            assert grpc.is_model_ready("m", version) is (version in served)
            if version in served:
                document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
                url = f"http://{server.http}/v2/models/m/versions/{version}/infer"
                answer = httpx.post(url, json=document, timeout=LONG_S).json()
                assert answer["model_version"] == version
                assert answer["outputs"][0]["data"] == ([2, 4, 6, 8] if version == "2" else [1, 2, 3, 4])
        expected = 2 * ROW["x"] if served[-1] == "2" else ROW["x"]
        np.testing.assert_array_equal(rest_json(server, "m", ROW)["y"], expected)


def test_model_options_override_server_options(tmp_path: Path) -> None:
    (add_model(tmp_path, "small", builders.identity) / "model.yaml").write_text("max_rows: 2\n")
    add_model(tmp_path, "wide", builders.identity)
    with serving(tmp_path, *SHORT_WARMUP, "--max-rows", "8") as server:
        rows = {"x": np.ones((3, 4), np.float32)}
        assert rest_json(server, "wide", rows)["y"].shape == (3, 4)
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "data": [1] * 12}]}
        answer = httpx.post(f"http://{server.http}/v2/models/small/infer", json=document, timeout=LONG_S)
        assert answer.status_code == 400
        assert "batch-size must be <= 2 for 'small', got 3" in answer.json()["error"]


def test_name_in_two_repositories_is_served_from_neither(tmp_path: Path) -> None:
    for repository, own in (("one", "first"), ("two", "second")):
        (tmp_path / repository).mkdir()
        add_model(tmp_path / repository, own, builders.identity)
        add_model(tmp_path / repository, "both", builders.identity)
    with serving(tmp_path / "one", tmp_path / "two", *SHORT_WARMUP) as server:
        with triton_clients(server) as (http, _):
            assert [http.is_model_ready(name) for name in ("first", "second", "both")] == [True, True, False]
        assert "two models of this name" in server.wait_for_line("model cannot be served", "model=both ")


@pytest.mark.parametrize("flags", [[], ["--strict-readiness"]], ids=["required", "strict readiness"])
def test_server_is_never_ready_without_a_model_it_must_serve(tmp_path: Path, flags: list[str]) -> None:
    add_model(tmp_path, "good", builders.identity)
    broken = add_model(tmp_path, "broken", builders.not_onnx)
    if not flags:
        (broken / "model.yaml").write_text("required: true\n")
    with starting(tmp_path, *SHORT_WARMUP, *flags) as server:
        server.wait_until_loaded()
        assert not is_ready(server)
        assert httpx.get(f"http://{server.http}/v2/health/live", timeout=LONG_S).status_code == 200
        np.testing.assert_array_equal(rest_json(server, "good", ROW)["y"], ROW["x"])
        server.stop()


def test_repository_can_be_a_single_model_file(tmp_path: Path) -> None:
    """The file is polled like those in a folder. Other files beside it are not served."""
    for name in ("only", "other"):
        builders.identity(tmp_path / f"{name}.onnx")
    polling = ("--model-control-mode", "poll", "--repository-poll-s", "0.2")
    with serving(tmp_path / "only.onnx", *SHORT_WARMUP, *polling) as server:
        index = httpx.post(f"{server.url}/v2/repository/index").json()
        assert [model["name"] for model in index] == ["only"]
        answer = httpx.post(rest_url(server, "only"), json={"inputs": [json_input("x", ROW["x"])]})
        assert answer.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]

        def shape() -> object:
            return httpx.get(f"{server.url}/v2/models/only").json()["inputs"][0]["shape"]

        assert shape() == [-1, 4]
        builders.identity(tmp_path / "new", shape=("batch", 5)).replace(tmp_path / "only.onnx")
        wait_until(lambda: shape() == [-1, 5])


def test_server_without_any_model_is_ready(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert is_ready(server)


def test_repository_that_cannot_be_read_ends_the_server_with_status_1(tmp_path: Path) -> None:
    # Bypasses the command line, which rejects paths that are not folders, to simulate a folder removed after that
    # check.
    script = (
        "import sys; from pathlib import Path; from ortserve.config.options import ServerOptions; "
        "from ortserve.app.run import run; "
        "sys.exit(run(ServerOptions(repositories=(Path(sys.argv[1]),), http_port=0, grpc_port=0, metrics_port=0)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "gone"], capture_output=True, text=True, timeout=LONG_S
    )
    assert ended.returncode == 1
    assert "the server cannot start" in ended.stderr
    assert "gone: expected a folder of models or an .onnx file, got: No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_system_error_after_the_start_is_logged_as_a_fault_with_its_traceback() -> None:
    script = (
        "from ortserve.app import run, server; from ortserve.config.options import ServerOptions\n"
        "async def load(self): raise OSError(5, 'Input/output error')\n"
        "server.Server.load = load\n"
        "run.run(ServerOptions(example=True, http_port=0, grpc_port=0, metrics_port=0))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S)
    assert ended.returncode == 1
    assert "the server has failed" in ended.stderr
    assert "Traceback" in ended.stderr
    assert "cannot start" not in ended.stderr


@pytest.mark.parametrize("option", ["http", "grpc", "metrics"])
def test_port_in_use_ends_the_server_with_status_1_and_names_the_option(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"http": "0", "grpc": "0", "metrics": "0"} | {option: port}
        flags = [word for name, value in ports.items() for word in (f"--{name}-port", value)]
        with starting("--example", *flags) as server:
            assert server.wait() == 1
            line = server.wait_for_line("the server cannot start")
            assert f"{option}_port: cannot listen on 127.0.0.1:{port}: Address already in use" in line
            assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--example", "--http-port", "70000"], "--http-port: expected integer, 0 to 65535, got '70000'"),
        (["--example", "--no-such-flag"], "--no-such-flag"),
        ([], "expected at least one folder, .onnx file, URL or --example"),
        (
            ["/no/such/folder"],
            "expected a folder of models or an .onnx file, got '/no/such/folder': No such file or directory",
        ),
    ],
)
def test_invalid_arguments_end_the_command_with_status_2(words: list[str], problem: str) -> None:
    with starting(*words) as server:
        assert server.wait() == 2
        assert problem in server.output
        assert "Traceback" not in server.output


WITHOUT_RIGHTS_OF_ROOT = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@pytest.mark.parametrize("mode", [0o400, 0o200])
def test_repository_without_permission_ends_the_command_with_status_2(mode: int, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "models").mkdir(parents=True)
    closed.chmod(mode)
    for folder in (closed, closed / "models"):
        with starting(folder, through=WITHOUT_RIGHTS_OF_ROOT) as server:
            assert server.wait() == 2
            expected = f"repositories: expected a folder of models or an .onnx file, got '{folder}': Permission denied"
            assert server.lines == [f"ortserve serve: {expected}"]
    closed.chmod(0o700)


def test_files_without_permission_are_named(tmp_path: Path) -> None:
    (add_model(tmp_path, "model", builders.identity) / "1" / "model.onnx").chmod(0)
    weights = add_model(tmp_path, "weights", builders.external_weights, location="weights.bin") / "1" / "weights.bin"
    weights.write_bytes(bytes(16))
    weights.chmod(0)
    with serving(tmp_path, through=WITHOUT_RIGHTS_OF_ROOT) as server:
        for problem in ("an ONNX model, it", "weights, as of tensor 'w', in weights.bin: it"):
            server.wait_for_line(f"cannot load the model: expected {problem} cannot be read: Permission denied")


def test_interrupt_from_the_keyboard_ends_the_server_as_sigterm_does() -> None:
    with starting("--example", *SHORT_WARMUP) as server:
        server.wait_until_loaded()
        server.send(signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.output
