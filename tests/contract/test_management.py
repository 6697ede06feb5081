"""Calls for repository, statistics, configuration and settings, byte for byte as their clients read them."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from encodings_of_requests import grpc_raw, rest_json
from models import builders
from ortserve.frontends.http.request_body import SMALL_BYTES
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving, triton_clients

FORM = {"content-type": "application/x-www-form-urlencoded"}
INFERENCE = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in the mode ``explicit`` that loads ``identity``, ``poison``, ``broken`` and ``empty``; not ``idle``."""
    repository = tmp_path_factory.mktemp("managed")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "poison", builders.poison)
    add_model(repository, "broken", builders.not_onnx)
    add_model(repository, "idle", builders.identity)
    (repository / "empty").mkdir()
    names = "identity,poison,broken,empty"
    with serving(
        repository, "--model-control-mode", "explicit", "--load-model", names, "--max-rows", "8", *SHORT_WARMUP
    ) as server:
        yield server


def call(server: ServerProcess, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
    """Send GET, or POST if there is a body. The answer must be valid JSON with a good status."""
    url = f"http://{server.http}{path}"
    answer = (
        httpx.get(url, timeout=LONG_S)
        if body is None
        else httpx.post(url, content=body, headers=headers, timeout=LONG_S)
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json() if answer.content else None


def refusal(server: ServerProcess, path: str, body: bytes) -> tuple[int, str]:
    answer = httpx.post(f"http://{server.http}{path}", content=body, headers=FORM, timeout=LONG_S)
    assert list(answer.json()) == ["error"]
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize("path", ["/v2/repository/models/identity/unload", "/v2/models/identity/labels", "/v2/logging"])
@pytest.mark.parametrize("site", ["cross-site", "same-site", "?"])
def test_page_of_another_origin_changes_nothing(managed: ServerProcess, path: str, site: str) -> None:
    """A browser sends such a POST without asking the server first, as its Content-Type is one of forms."""
    headers = {"content-type": "text/plain", "origin": "http://example.org", "sec-fetch-site": site}
    answer = httpx.post(f"http://{managed.http}{path}", content=b"{}", headers=headers, timeout=LONG_S)
    assert answer.status_code == 403
    assert answer.json()["error"].endswith(f"expected 'Sec-Fetch-Site: same-origin' or 'none', got '{site}'")
    assert call(managed, "/v2/models/identity/infer", INFERENCE, headers)["outputs"]


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_own_page_and_typed_addresses_are_no_other_origin(managed: ServerProcess, site: str) -> None:
    url, headers = f"http://{managed.http}/v2/logging", {"content-type": "text/plain", "sec-fetch-site": site}
    assert httpx.post(url, content=b"{}", headers=headers, timeout=LONG_S).status_code == 200
    assert httpx.get(url, headers=headers | {"sec-fetch-site": "cross-site"}, timeout=LONG_S).status_code == 200


@pytest.mark.parametrize("headers", [FORM, {}, {"content-type": "application/octet-stream"}])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready":false}', b'{"ready":null}'])
def test_index_lists_known_models_and_those_in_the_repository(
    managed: ServerProcess, body: bytes, headers: dict[str, str]
) -> None:
    broken, *others = call(managed, "/v2/repository/index", body, headers)
    assert broken.pop("reason").startswith("ONNX Runtime cannot load the model")
    assert broken == {"name": "broken", "version": "1", "state": "UNAVAILABLE"}
    reason = "no version folder (1, 2, …) with a file model.onnx: it has nothing"
    assert others == [
        {"name": "empty", "state": "UNAVAILABLE", "reason": reason},
        {"name": "identity", "version": "1", "state": "READY"},
        {"name": "idle"},
        {"name": "poison", "version": "1", "state": "READY"},
    ]


def test_index_is_the_same_on_both_protocols(managed: ServerProcess) -> None:
    with triton_clients(managed) as (http, grpc):
        described = [
            {key: value for key in ("name", "version", "state", "reason") if (value := getattr(entry, key))}
            for entry in grpc.get_model_repository_index().models
        ]
        assert described == http.get_model_repository_index()
    ready = call(managed, "/v2/repository/index", b'{"ready":true}')
    assert [entry["name"] for entry in ready] == ["identity", "poison"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v2/repository/index", b'{"ready":1}', 400, "Invalid value for 'ready': expected a boolean"),
        ("/v2/repository/index", b"[]", 400, "expected a JSON object, got list"),
        ("/v2/repository/index", b"{", 400, "failed to parse the request JSON buffer: "),
        ("/v2/repository/mine/index", b"", 501, "'repository_name' specification is not supported"),
        ("/v2/repository/mine/models/m/load", b"", 501, "'repository_name' specification is not supported"),
        ("/v2/repository/mine/models/m/unload", b"", 501, "'repository_name' specification is not supported"),
        (
            "/v2/repository/models/none/load",
            b"",
            500,
            "failed to load 'none', failed to poll from model repository",
        ),
        ("/v2/repository/models/..%5Cm/load", b"", 400, "model name must not contain path traversal characters"),
        ("/v2/repository/models/identity/load", b'{"parameters":[]}', 400, "Unable to parse 'parameters'"),
        ("/v2/repository/models/m/load", b'{"parameters":{"x":1}}', 400, "unrecognized load parameter 'x'."),
        ("/v2/repository/models/m/load", b'{"parameters":{"file:1/x":"?"}}', 400, "the content of a file in base64"),
        ("/v2/repository/models/m/load", b'{"parameters":{"file:1/x":7}}', 400, "the content of a file in base64"),
        ("/v2/repository/models/m/unload", b'{"parameters":{"x":1}}', 400, "unrecognized unload parameter 'x'."),
        (
            "/v2/repository/models/m/unload",
            b'{"parameters":{"unload_dependents":1}}',
            400,
            "'unload_dependents': expected a boolean",
        ),
        ("/v2/logging", b'{"log_info":"yes"}', 400, "expect boolean for 'log_info', got 'yes'"),
        ("/v2/logging", b'{"log_file":"x"}', 501, "log file location can not be updated through network protocol"),
        ("/v2/trace/setting", b'{"trace_file":"x"}', 501, "trace file location can not be updated through network"),
        ("/v2/trace/setting", b'{"trace_level":["TIMESTAMPS"]}', 501, "was started without --trace-file"),
        (
            "/v2/trace/setting",
            b'{"trace_level":["TENSORS"]}',
            501,
            "never writes tensors to trace files",
        ),
        (
            "/v2/trace/setting",
            b'{"trace_rate":"1_0"}',
            400,
            "trace_rate: expected an integer, 1 to 2147483647, got '1_0'",
        ),
        ("/v2/trace/setting", '{"trace_rate":"٣"}'.encode(), 400, "trace_rate: expected an integer"),
        ("/v2/trace/setting", b'{"trace_mode":"opentelemetry"}', 501, "expected 'triton', got 'opentelemetry'"),
        ("/v2/models/none/trace/setting", b"", 404, "Request for unknown model : none"),
    ],
)
def test_impossible_call_is_rejected_in_the_words_of_the_protocol(
    managed: ServerProcess, path: str, body: bytes, status: int, text: str
) -> None:
    answered, message = refusal(managed, path, body)
    assert answered == status
    assert text in message


@pytest.mark.parametrize("path", ["/v2/repository/models/identity/load", "/v2/repository/models/none/unload"])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"parameters":{}}'])
def test_load_and_unload_answer_200_with_an_empty_body(managed: ServerProcess, path: str, body: bytes) -> None:
    assert call(managed, path, body, FORM) is None


@pytest.mark.parametrize(
    "path", ["/v2/logging", "/v2/repository/index", "/v2/cudasharedmemory/region/r/register", "/v2/trace/setting"]
)
def test_body_of_a_call_with_few_parameters_is_limited(managed: ServerProcess, path: str) -> None:
    status, text = refusal(managed, path, b'{"log_info":true,"x":"' + b"y" * SMALL_BYTES + b'"}')
    assert (status, text) == (413, "expected a body of at most 65536 bytes for this call, got more")


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/models/identity/load"])
def test_compressed_body_is_rejected_by_its_encoding(managed: ServerProcess, path: str) -> None:
    url, body = f"http://{managed.http}{path}", gzip.compress(b"{}")
    with httpx.Client(timeout=LONG_S) as client:
        answer = client.post(url, content=body, headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 501
        text = "Content-Encoding 'gzip' is not supported for this call: expected identity"
        assert answer.json() == {"error": text}
        assert client.post(url, content=b"{}", headers={"Content-Encoding": "identity"}).status_code == 200


def test_body_of_a_load_is_bounded_and_counted(tmp_path: Any) -> None:
    add_model(tmp_path, "m", builders.identity)
    load = "/v2/repository/models/m/load"
    arguments = ("--max-body-bytes", "200_000", "--max-inflight-bytes", "300_000", "--model-control-mode", "explicit")
    with serving(tmp_path, *arguments, *SHORT_WARMUP) as server:
        status, text = refusal(server, load, b'{"x":"' + b"y" * 200_000 + b'"}')
        assert (status, text.partition(":")[0]) == (413, "request body is larger than max_body_bytes")
        host, port = server.http.split(":")
        head = f"POST {load} HTTP/1.1\r\nHost: x\r\nContent-Length: 199999\r\n\r\n"
        ends = time.monotonic() + LONG_S
        came = 400, ""
        with ExitStack() as other:
            while came[0] == 400:  # the other load is rejected instead if the server counts it last
                assert time.monotonic() < ends
                other.close()
                connection = other.enter_context(socket.create_connection((host, int(port)), timeout=LONG_S))
                connection.sendall(head.encode() + b" " * 199_998)
                time.sleep(0.1)
                came = refusal(server, load, b'["' + b"y" * 150_000 + b'"]')
            assert (came[0], came[1].partition(":")[0]) == (429, "max_inflight_bytes")
            with (
                triton_grpc.InferenceServerClient(server.grpc) as client,
                pytest.raises(InferenceServerException, match="max_inflight_bytes") as caught,
            ):
                client.load_model("m", config="{}", files={"file:1/model.onnx": b"x" * 150_000})
            assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    "path",
    [
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/repository/index",
        "/v2/repository/models/identity/load",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/models/identity/generate",
        "/v2/models/identity/infer",
    ],
)
def test_caller_that_disconnects_within_its_body_harms_no_other(managed: ServerProcess, path: str) -> None:
    host, port = managed.http.split(":")
    with socket.create_connection((host, int(port)), LONG_S) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert call(managed, "/v2/health/live") == {"live": True}
    # The fixture also checks that the server ends without a traceback.
    assert call(managed, "/v2/health/live") == {"live": True}


def test_statistics_count_rows_batches_and_failures_before_the_answer_is_sent(tmp_path: Any) -> None:
    add_model(tmp_path, "identity", builders.identity)
    add_model(tmp_path, "poison", builders.poison)
    with serving(tmp_path, "--max-rows", "8", *SHORT_WARMUP) as server:
        for rows in (1, 2, 2):
            rest_json(server, "identity", {"x": np.ones((rows, 4), np.float32)})
        grpc_raw(server, "identity", {"x": np.ones((5, 4), np.float32)})
        with triton_clients(server) as (http, grpc):
            malformed = triton_http.InferInput("x", [1, 5], "FP32")
            malformed.set_data_from_numpy(np.ones((1, 5), np.float32))
            with pytest.raises(InferenceServerException):
                http.infer("identity", [malformed])
            bad = triton_http.InferInput("x", [1, 4], "INT64")
            bad.set_data_from_numpy(np.full((1, 4), builders.POISON))
            with pytest.raises(InferenceServerException):
                http.infer("poison", [bad])

            text = httpx.get(f"http://{server.http}/v2/models/stats", timeout=LONG_S).text
            assert "." not in text, "all numbers are integers"
            identity, poison = json.loads(text)["model_stats"]
            assert list(identity) == [
                "name",
                "version",
                "last_inference",
                "inference_count",
                "execution_count",
                "inference_stats",
                "response_stats",
                "batch_stats",
                "memory_usage",
            ]
            assert (identity["name"], identity["version"]) == ("identity", "1")
            assert (identity["inference_count"], identity["execution_count"]) == (10, 4)
            assert identity["last_inference"] > 1_700_000_000_000
            counts = {part: numbers["count"] for part, numbers in identity["inference_stats"].items()}
            assert counts == {
                "success": 4,
                "fail": 0,
                "queue": 4,
                "compute_input": 4,
                "compute_infer": 4,
                "compute_output": 4,
                "cache_hit": 0,
                "cache_miss": 0,
            }
            spent = {part: numbers["ns"] for part, numbers in identity["inference_stats"].items()}
            parts = ("queue", "compute_input", "compute_infer", "compute_output")
            assert 0 < sum(spent[part] for part in parts) <= spent["success"]
            sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in identity["batch_stats"]}
            assert sizes == {1: 1, 2: 2, 5: 1}
            assert (poison["inference_stats"]["fail"]["count"], poison["execution_count"]) == (1, 0)

            for statistics in (
                call(server, "/v2/models/identity/stats"),
                call(server, "/v2/models/identity/versions/1/stats"),
            ):
                assert statistics == {"model_stats": [identity]}
            (message,) = grpc.get_inference_statistics("identity").model_stats
            assert (message.inference_count, message.execution_count) == (10, 4)
            assert message.last_inference == pytest.approx(identity["last_inference"], abs=1)
            assert message.inference_stats.success.ns == spent["success"]
            assert message.inference_stats.HasField("cache_hit")
            assert [batch.batch_size for batch in message.batch_stats] == [1, 2, 5]
            assert len(grpc.get_inference_statistics().model_stats) == 2
        samples = read_metrics(server)
        assert samples.value("nv_inference_count", model="identity", version="1") == 10
        assert samples.value("nv_inference_request_failure", model="poison", version="1", reason="BACKEND") == 1


def test_statistics_of_unknown_models_are_rejected(managed: ServerProcess) -> None:
    with triton_clients(managed) as (http, grpc):
        for client, status in ((http, "400"), (grpc, "StatusCode.INVALID_ARGUMENT")):
            for arguments, text in (
                (("none",), "requested model 'none' is not available"),
                (("identity", "9"), "requested model version is not available for model 'identity'"),
            ):
                with pytest.raises(InferenceServerException, match=text) as caught:
                    client.get_inference_statistics(*arguments)
                assert caught.value.status() == status


def test_triton_names_are_left_out_if_the_option_is_off(tmp_path: Any) -> None:
    add_model(tmp_path, "m", builders.identity)
    with serving(tmp_path, "--no-triton-metrics", *SHORT_WARMUP) as server:
        text = read_metrics(server).text
    assert "nv_" not in text
    assert "ortserve_model_state" in text


@pytest.mark.parametrize("version", ["", "1"])
def test_configuration_has_numbers_as_numbers_on_rest_and_the_same_on_grpc(
    managed: ServerProcess, version: str
) -> None:
    config = call(managed, f"/v2/models/identity{f'/versions/{version}' if version else ''}/config")
    assert (config["name"], config["platform"], config["max_batch_size"]) == ("identity", "onnxruntime_onnx", 8)
    assert config["input"][0]["dims"] == [4]
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert "dynamic_batching" in config
    assert "response_cache" not in config
    with triton_clients(managed) as (http, grpc):
        assert http.get_model_config("identity", version) == config
        message = grpc.get_model_config("identity", version).config
        assert (message.name, message.max_batch_size, list(message.input[0].dims)) == ("identity", 8, [4])
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'none' is not found"):
            grpc.get_model_config("none")


def test_log_settings_change_the_lines_of_a_running_server(managed: ServerProcess) -> None:
    start = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    with triton_clients(managed) as (http, grpc):
        assert http.get_log_settings() == start
        assert http.update_log_settings({"log_error": False}) == {**start, "log_error": False}
        begun = len(managed.lines)
        with pytest.raises(InferenceServerException, match="load failed for model 'broken': version 1 is at"):
            http.load_model("broken")
        settings = grpc.update_log_settings({"log_error": True, "log_verbose_level": 1}).settings
        assert settings["log_error"].bool_param
        assert settings["log_verbose_level"].uint32_param == 1
        assert settings["log_format"].string_param == "default"
        grpc.update_log_settings({"log_verbose_level": 0})
        with pytest.raises(InferenceServerException, match="failed to load 'empty', no version is available"):
            http.load_model("empty")
        managed.wait_for_line("model cannot be served", "model=empty")  # follows all earlier lines
        assert not [line for line in managed.lines[begun:] if "model=broken" in line]
        assert call(managed, "/v2/logging", b'{"log_error":null,"other":1}', FORM) == start
        assert grpc.update_log_settings({"log_error": None}).settings["log_error"].bool_param
        with pytest.raises(InferenceServerException, match="invalid argument for --log_format, got: json"):
            grpc.update_log_settings({"log_format": "json"})


def test_trace_settings_are_kept_for_the_server_and_for_models(managed: ServerProcess) -> None:
    start = {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
    with triton_clients(managed) as (http, grpc):
        assert http.get_trace_settings() == start
        assert call(managed, "/v2/trace/setting", b"", FORM) == start
        assert http.update_trace_settings(settings={"trace_rate": "5"}) == {**start, "trace_rate": "5"}
        assert call(managed, "/v2/trace/setting", b'{"trace_count":7}', FORM)["trace_count"] == "7"
        own = grpc.update_trace_settings("identity", {"trace_rate": "9", "trace_level": ["OFF"]}).settings
        assert list(own["trace_rate"].value) == ["9"]
        assert http.get_trace_settings("identity") == {**start, "trace_rate": "9", "trace_count": "7"}
        assert http.update_trace_settings("identity", {"trace_rate": None})["trace_rate"] == "5"
        cleared = grpc.update_trace_settings(settings={"trace_rate": None, "trace_count": None}).settings
        assert {key: list(setting.value) for key, setting in cleared.items()} == {
            key: value if isinstance(value, list) else [value] for key, value in start.items()
        }
        with pytest.raises(InferenceServerException, match="was started without --trace-file") as caught:
            grpc.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
