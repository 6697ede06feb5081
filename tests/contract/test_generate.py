"""The generate extension over real HTTP."""

import gzip
import json
from typing import Any

import httpx
import pytest

from servers import LONG_S, ServerProcess

ROUTES = ("generate", "generate_stream", "versions/1/generate", "versions/1/generate_stream")


def post(server: ServerProcess, model: str, document: Any, route: str = "generate", **headers: str) -> httpx.Response:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    url = f"http://{server.http}/v2/models/{model}/{route}"
    return httpx.post(url, content=body, headers=headers, timeout=LONG_S)


@pytest.mark.parametrize("route", ROUTES)
def test_keys_are_inputs_and_outputs(server: ServerProcess, route: str) -> None:
    answer = post(server, "text_stats", {"id": "x", "text": "two words", "weight": 1.5, "stream": False}, route)
    assert answer.status_code == 200, answer.text
    if route.endswith("stream"):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.text.startswith("data: ")
        assert answer.text.endswith("\n\n")
        assert answer.text.count("data: ") == 1
        document = json.loads(answer.text.removeprefix("data: "))
    else:
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
    assert document == {
        "id": "x",
        "model_name": "text_stats",
        "model_version": "1",
        "word_count": 2,
        "is_number": False,
        "score": 3.0,
        "quoted": '"two words"',
    }
    assert "queue;dur=" in answer.headers["server-timing"]


def test_arrays_are_rows_and_are_returned_flat(server: ServerProcess) -> None:
    assert post(server, "echo", {"x": [1.5, 2, 3]}).json()["y"] == [1.5, 2, 3]
    assert post(server, "echo", {"x": [[1, 2], [3, 4]]}).json()["y"] == [1, 2, 3, 4]
    columns = post(server, "text_stats", {"text": ["two words", "one", ""], "weight": [1.5, 1, 2]}).json()
    assert (columns["word_count"], columns["score"]) == ([2, 1, 0], [3.0, 1.0, 0.0])
    document = {"INPUT0": list(range(16)), "INPUT1": [1] * 16}
    assert post(server, "simple", document).json()["OUTPUT0"] == list(range(1, 17))


def test_unknown_keys_are_parameters_as_for_infer(server: ServerProcess) -> None:
    assert post(server, "echo", {"x": 1, "y": 2, "parameters": {"z": "3"}}).json()["y"] == 1


def test_body_is_read_as_json_with_any_content_type(server: ServerProcess) -> None:
    for kind in ("application/x-www-form-urlencoded", "application/octet-stream", "text/plain"):
        assert post(server, "echo", {"x": 1}, **{"Content-Type": kind}).json()["y"] == 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("model", "document", "status", "text"),
    [
        ("echo", {"x": 1, "max_tokens": 5}, 501, "parameter 'max_tokens' is not supported"),
        ("echo", {"x": 1, "y": [2]}, 400, "Unable to parse 'y': expected a string, number or boolean parameter, or an"),
        ("echo", {"y": 1}, 400, "missing required input(s) ['x']"),
        ("echo", {"x": 1, "parameters": {"temperature": 0}}, 501, "'temperature'"),
        ("echo", {"x": "a"}, 400, "input 'x'"),
        ("echo", {"x": [[[1]]]}, 400, "unexpected shape for input 'x'"),
        ("echo", {}, 400, "missing required input(s) ['x']"),
        ("echo", b"", 400, "missing required input(s) ['x']"),
        ("echo", b"{", 400, "failed to parse the request JSON buffer"),
        ("digits", {}, 400, "missing required input(s)"),
        ("poison", {"x": [99, 1, 1, 1]}, 400, "[request id: <id_unknown>]"),
        ("broken", {}, 503, "broken"),
        ("absent", {}, 404, "Request for unknown model: 'absent' is not found"),
    ],
)
def test_error_before_the_answer_is_an_error_status(
    server: ServerProcess, route: str, model: str, document: Any, status: int, text: str
) -> None:
    answer = post(server, model, document, route)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert text in answer.json()["error"]


def test_version_that_does_not_exist_is_404(server: ServerProcess) -> None:
    assert post(server, "echo", {"x": 1}, "versions/7/generate").status_code == 404
    assert post(server, "echo", {"x": 1}, "versions/one/generate").status_code == 404


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_compressed_body_is_rejected(server: ServerProcess, encoding: str) -> None:
    answer = post(server, "echo", gzip.compress(b'{"x": 1}'), **{"Content-Encoding": encoding})
    assert answer.status_code == 400
    assert encoding in answer.json()["error"]


def test_wrong_method_is_405(server: ServerProcess) -> None:
    answer = httpx.get(f"http://{server.http}/v2/models/echo/generate", timeout=LONG_S)
    assert answer.status_code == 405


def test_routes_are_in_the_openapi_document(server: ServerProcess) -> None:
    paths = httpx.get(f"http://{server.http}/openapi.json", timeout=LONG_S).json()["paths"]
    for route in ("generate", "generate_stream"):
        assert f"/v2/models/{{model}}/{route}" in paths
        assert f"/v2/models/{{model}}/versions/{{version}}/{route}" in paths
