"""The log of a real server: machine-readable lines with request ids and without tensor values."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from encodings_of_requests import triton_inputs
from models import builders
from ortserve.core.dtypes import DataType
from proxies import free_ports
from raw_grpc import cancel_during_answer
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
    triton_clients,
)
from transports import ON_BOTH_TRANSPORTS

SECRET_TEXT: Final = "vErYsEcReT"
SECRET_NUMBER: Final = 918273645


def _add_models(repository: Path) -> None:
    add_model(repository, "words", builders.identity, datatype=DataType.BYTES)
    add_model(repository, "numbers", builders.identity)
    add_model(repository, "poison", builders.poison)  # fails for the secret number
    add_model(repository, "words_on_many_nodes_" * 8, builders.mlp)


def _send_secrets(server: ServerProcess) -> None:
    """Send good requests, and bad ones of every kind, on both protocols; each has a secret and its own id."""
    words = {"x": np.full((1, 4), SECRET_TEXT.encode(), np.object_)}
    numbers = {"x": np.full((1, 4), SECRET_NUMBER, np.float32)}
    bad_run = {"x": np.full((1, 4), SECRET_NUMBER, np.int64)}
    bad_shape = {"x": np.full((1, 5), SECRET_NUMBER, np.float32)}
    with triton_clients(server) as (http, grpc):
        for name, client, module in (("http", http, triton_http), ("grpc", grpc, triton_grpc)):
            client.infer("words", triton_inputs(module, words), request_id=f"{name}-words")
            client.infer("numbers", triton_inputs(module, numbers), request_id=f"{name}-numbers")
            for model, arrays in (("poison", bad_run), ("numbers", bad_shape)):
                with pytest.raises(InferenceServerException):
                    client.infer(model, triton_inputs(module, arrays), request_id=f"{name}-bad-{model}")
    good = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [SECRET_NUMBER] * 4}
    for spoiled in ({"data": [SECRET_TEXT] * 4}, {"data": [[SECRET_NUMBER], SECRET_TEXT]}, {"datatype": "FP99"}):
        body = {"id": "spoiled", "inputs": [good | spoiled]}
        assert httpx.post(rest_url(server, "numbers"), json=body, timeout=LONG_S).status_code == 400
    broken = json.dumps({"inputs": [good]}).encode()[:-3] + SECRET_TEXT.encode()
    assert httpx.post(rest_url(server, "numbers"), content=broken, timeout=LONG_S).status_code == 400
    assert httpx.post(f"http://{server.http}/v2/logging", content=broken, timeout=LONG_S).status_code == 400


@pytest.mark.parametrize("level", ["info", "debug"])
def test_json_lines_name_every_request_id_and_no_tensor_values(tmp_path: Path, level: str) -> None:
    _add_models(tmp_path)
    flags = ("--log-format", "json", "--log-level", level, "--access-log", "--max-rows", "4")
    with serving(tmp_path, *SHORT_WARMUP, *flags) as server:
        _send_secrets(server)
        verbose = {"log_verbose_level": 9, "log_info": True}
        httpx.post(f"http://{server.http}/v2/logging", json=verbose, timeout=LONG_S).raise_for_status()
        _send_secrets(server)

    assert SECRET_TEXT not in server.output
    assert str(SECRET_NUMBER) not in server.output
    lines = [json.loads(line) for line in server.lines]  # lines of every logger
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    requests = [line for line in lines if line["logger"] == "ortserve.access"]
    outcomes = {line["request_id"]: (line["protocol"], line["model"], line["outcome"]) for line in requests}
    expected = {
        f"{protocol}-{name}": (protocol, model, outcome)
        for protocol in ("http", "grpc")
        for name, model, outcome in (
            ("words", "words", "ok"),
            ("numbers", "numbers", "ok"),
            ("bad-poison", "poison", "rejected_by_model"),
            ("bad-numbers", "numbers", "invalid_input"),
        )
    }
    assert outcomes.items() >= expected.items()
    # One line covers the four requests that the model rejected within a minute.
    (rejected,) = [line for line in lines if line["message"] == "model rejected requests"]
    assert (rejected["level"], rejected["model"], rejected["requests"]) == ("info", "poison", 1)
    assert rejected["by"] == "Gather"


def test_text_lines_are_the_default_and_contain_no_tensor_values(tmp_path: Path) -> None:
    _add_models(tmp_path)
    with serving(tmp_path, *SHORT_WARMUP, "--log-level", "debug", "--access-log", "--max-rows", "4") as server:
        _send_secrets(server)
    assert SECRET_TEXT not in server.output
    assert str(SECRET_NUMBER) not in server.output
    assert "request_id=grpc-words outcome=ok" in server.output
    ready = [line for line in server.lines if "model is ready" in line]
    assert len(ready) == 4
    for line in ready:
        assert " operators=" not in line.partition(" batching=")[0]
        assert " batching=" in line
        assert len(line) < 400


def test_line_and_count_of_a_body_that_cannot_be_decoded_name_the_model_in_the_path(tmp_path: Path) -> None:
    _add_models(tmp_path)
    with serving(tmp_path, "--warmup-s", "0", "--access-log") as server:
        for path, body in (
            ("models/numbers/infer", b"{"),
            ("models/words/versions/1/infer", b'{"inputs": 1}'),
            ("models/numbers/generate", b"[]"),
            ("models/numbers/infer", b'{"id": "x", "inputs": ' + b" " * 100_000),  # decoded by another process
        ):
            assert httpx.post(f"http://{server.http}/v2/{path}", content=body, timeout=LONG_S).status_code == 400
        rejected = read_metrics(server).by_labels("ortserve_rejected_requests_total", "model", "reason")
    lines = [line for line in server.lines if "ortserve.access" in line]
    assert [line.partition(" model=")[2].split()[0] for line in lines] == ["numbers", "words", "numbers", "numbers"]
    assert rejected == {"numbers invalid_input": 3, "words invalid_input": 1}


def test_line_of_a_request_with_long_texts_is_short(tmp_path: Path) -> None:
    _add_models(tmp_path)
    ones = {"x": np.ones((1, 4), np.float32)}
    with serving(tmp_path, "--warmup-s", "0", "--access-log") as server, triton_clients(server) as (http, grpc):
        for client, module in ((http, triton_http), (grpc, triton_grpc)):
            client.infer("numbers", triton_inputs(module, ones), request_id="i" * 30_000)
            with pytest.raises(InferenceServerException, match="unknown model"):
                client.infer("m" * 2_000, triton_inputs(module, ones), request_id="i" * 30_000)
        server.wait_for_line("protocol=grpc model=mmm", f"request_id={'i' * 99}…")
    assert max(map(len, server.lines)) < 400


def test_lines_are_turned_off_and_on_by_severity_while_the_server_runs(tmp_path: Path) -> None:
    _add_models(tmp_path)
    ones = {"x": np.ones((1, 4), np.float32)}
    with serving(tmp_path, "--warmup-s", "0", "--access-log") as server, triton_clients(server) as (http, grpc):
        http.infer("numbers", triton_inputs(triton_http, ones), request_id="said-first")
        grpc.update_log_settings({"log_info": False})
        http.infer("numbers", triton_inputs(triton_http, ones), request_id="kept-quiet")
        http.update_log_settings({"log_info": True})
        http.infer("numbers", triton_inputs(triton_http, ones), request_id="said-last")
        server.wait_for_line("request_id=said-last")
    assert "request_id=said-first" in server.output
    assert "kept-quiet" not in server.output


def test_server_without_models_says_which_files_it_expects(tmp_path: Path) -> None:
    (tmp_path / "digits.ONNX").touch()
    with serving(tmp_path) as server:
        server.wait_for_line("found no models in the repositories", "<repository>/<model>/<version>/model.onnx")


def test_misspelt_variable_of_the_environment_is_a_warning_without_its_value() -> None:
    variables = {"ORTSERVE_HTTP_PROT": SECRET_TEXT, "ORTSERVE_PORT": "tcp://10.0.0.1:8000"}
    with serving("--example", *SHORT_WARMUP, env=variables) as server:
        line = server.wait_for_line("WARNING", "environment variable has no effect")
    assert line.endswith("""reason="ORTSERVE_HTTP_PROT: unknown variable; did you mean 'ORTSERVE_HTTP_PORT'?\"""")
    assert SECRET_TEXT not in server.output
    assert "ORTSERVE_PORT" not in server.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--example", "--http-port", "99999"], "--http-port: expected integer, 0 to 65535, got '99999'"),
        (["/nowhere"], "repositories: expected a folder of models or an .onnx file, got '/nowhere': No such file"),
        (["--example", "--load-model", "m"], "load_model: expected model_control_mode to be 'explicit', got 'none'"),
    ],
)
@pytest.mark.parametrize("origin", ["flag", "variable", "file"])
def test_invalid_options_are_json_lines_where_the_log_is(
    tmp_path: Path, arguments: list[str], problem: str, origin: str
) -> None:
    (tmp_path / "options.yaml").write_text("log_format: json")
    flags = {"flag": ("--log-format", "json"), "file": ("--config", tmp_path / "options.yaml")}.get(origin, ())
    env = {"ORTSERVE_LOG_FORMAT": "json"} if origin == "variable" else {}
    with starting(*arguments, *flags, env=env) as server:
        assert server.wait() == 2
    (line,) = map(json.loads, server.lines)
    assert line["reason"].startswith(problem)
    assert (line["level"], line["message"]) == ("error", "the server cannot start")


def test_invalid_options_file_is_reported_in_its_log_format(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("log_format: json\nhttp_port: -1")
    with starting("--example", "--config", tmp_path / "options.yaml") as server:
        assert server.wait() == 2
    (line,) = map(json.loads, server.lines)
    assert "options.yaml: http_port: " in line["reason"]


@ON_BOTH_TRANSPORTS
def test_calls_that_are_cancelled_while_their_answers_are_sent_are_not_logged(
    tmp_path: Path, ways: tuple[str, ...]
) -> None:
    add_model(tmp_path, "counting", builders.counting)
    request = service_pb2.ModelInferRequest(model_name="counting")
    request.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(1_000_000)
    with serving(tmp_path, *SHORT_WARMUP, *ways) as server:
        for _ in range(5):
            cancel_during_answer(server.grpc, "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString())
    assert "ERROR" not in server.output  # ``serving`` has checked that there is no traceback


def test_onnx_runtime_writes_no_lines_among_those_of_the_log(tmp_path: Path) -> None:
    """It reports a processor that does not exist in a line of its own, with colours."""
    entries = "{session.intra_op_thread_affinities: '1,100000'}"
    folder = add_model(tmp_path, "numbers", builders.mlp)
    (folder / "model.yaml").write_text(f"intra_op_threads: 2\nsession: {{entries: {entries}}}\n")
    with serving(tmp_path, *SHORT_WARMUP, "--log-format", "json") as server:
        pass
    assert "model is ready" in [json.loads(line)["message"] for line in server.lines]


def test_reader_of_the_log_that_stalls_stops_no_request(tmp_path: Path) -> None:
    """Its pipe is full after some dozen lines."""
    _add_models(tmp_path)
    ports = free_ports()
    flags = ("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics))
    command = [sys.executable, "-m", "ortserve", "serve", str(tmp_path), "--access-log", *flags, *SHORT_WARMUP]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        while "initial loading has ended" not in process.stderr.readline():
            pass
        body = {"inputs": [json_input("x", np.ones((1, 4), np.float32))]}
        with httpx.Client(base_url=f"http://127.0.0.1:{ports.http}", timeout=LONG_S) as client:
            for _ in range(200):
                assert client.post("/v2/models/numbers/infer", json=body).status_code == 200
        process.terminate()
        lines = process.stderr.read().splitlines()
        assert process.wait(LONG_S) == 0
    assert sum(" request protocol=http " in line for line in lines) == 200
    assert lines[-1].endswith(" drained")
