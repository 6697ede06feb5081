"""Calls with a key, without one and with a key of another group, on every frontend; no key is ever shown."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from grpc import StatusCode
from tritonclient.grpc import service_pb2

from models import builders
from servers import LONG_S, SHORT_WARMUP, Samples, ServerProcess, add_model, json_input, serving, starting
from transports import ON_BOTH_TRANSPORTS

KEYS: Final = {
    "infer": ("infer-key-aaaaaaaaaa", "infer-key-bbbbbbbbbb"),
    "metadata": ("metadata-key-cccccccc",),
    "control": ("control-key-ddddddddd",),
    "metrics": ("metrics-key-eeeeeeeee",),
}
UNKNOWN: Final = "unknown-key-zzzzzzzzz"
ROW: Final = np.zeros((1, 4), np.float32)
SERVICE: Final = "/inference.GRPCInferenceService/"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def keys_in(folder: Path) -> list[str | Path]:
    """Write files with all keys and return their flags; the keys of ``infer`` are a folder with a file per client."""
    flags: list[str | Path] = []
    for group, keys in KEYS.items():
        path = folder / group
        if group == "infer":
            path.mkdir()
            for number, key in enumerate(keys):
                (path / f"client-{number}").write_text(f"{key}\n")
        else:
            path.write_text("# one key\n" + "\n".join(keys))
        flags += [f"--{group}-keys-file", path]
    return flags


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("keys-models")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "words", builders.word_counts)
    loads = ("--load-model", "identity", "--load-model", "words")
    more = ("--model-control-mode", "explicit", *loads, "--allow-client-shm")
    logs = ("--log-level", "debug", "--access-log")
    flags = keys_in(tmp_path_factory.mktemp("keys"))
    with serving(repository, *SHORT_WARMUP, *ways, *more, *logs, *flags) as server:
        yield server


def infer_body() -> bytes:
    return httpx.Request("POST", "http://x", json={"inputs": [json_input("x", ROW)]}).content


def infer_message() -> bytes:
    request = service_pb2.ModelInferRequest(model_name="identity")
    request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
    request.raw_input_contents.append(ROW.tobytes())
    data: bytes = request.SerializeToString()
    return data


HTTP_CALLS: Final[dict[str, list[tuple[str, str, bytes]]]] = {
    "infer": [
        ("POST", "/v2/models/identity/infer", infer_body()),
        ("POST", "/v2/models/identity/versions/1/infer", infer_body()),
        ("POST", "/v2/models/identity/infer?" + "x" * 600, infer_body()),  # longer than the URLs that are cached
        ("POST", "/v2/models/identity/generate", b'{"x": [0, 0, 0, 0]}'),
        ("POST", "/v1/embeddings", b'{"model": "words", "input": "red"}'),
    ],
    "metadata": [
        ("GET", "/v2", b""),
        ("GET", "/v2/", b""),
        ("GET", "/docs", b""),
        ("GET", "/openapi.json", b""),
        ("GET", "/v2/models/identity", b""),
        ("GET", "/v2/models/%69dentity/config", b""),
        ("GET", "/v2/models/stats", b""),
        ("GET", "/v2/models/identity/batching", b""),
        ("POST", "/v2/repository/index", b""),
    ],
    "control": [
        ("POST", "/v2/repository/models/identity/load", b"{}"),
        ("POST", "/v2/%72epository/models/identity/load/", b"{}"),
        ("GET", "/v2/systemsharedmemory/status", b""),
        ("POST", "/v2/systemsharedmemory/unregister", b""),
        ("GET", "/v2/logging", b""),
        ("POST", "/v2/logging", b'{"log_info": true}'),
        ("GET", "/v2/trace/setting", b""),
        ("POST", "/v2/models/identity/trace/setting", b"{}"),
    ],
}

GRPC_CALLS: Final[dict[str, list[tuple[str, bytes]]]] = {
    "infer": [(f"{SERVICE}ModelInfer", infer_message()), (f"{SERVICE}ModelStreamInfer", infer_message())],
    "metadata": [
        (f"{SERVICE}ServerMetadata", b""),
        (f"{SERVICE}ModelStatistics", b""),
        (f"{SERVICE}RepositoryIndex", b""),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", b""),
    ],
    "control": [
        (
            f"{SERVICE}RepositoryModelLoad",
            service_pb2.RepositoryModelLoadRequest(model_name="identity").SerializeToString(),
        ),
        (f"{SERVICE}SystemSharedMemoryStatus", b""),
        (f"{SERVICE}LogSettings", b""),
        (f"{SERVICE}TraceSetting", b""),
    ],
}

each_http_call = pytest.mark.parametrize(
    ("group", "call"), [(group, call) for group, calls in HTTP_CALLS.items() for call in calls]
)
each_grpc_call = pytest.mark.parametrize(
    ("group", "call"), [(group, call) for group, calls in GRPC_CALLS.items() for call in calls]
)


def others(group: str) -> list[str]:
    return [keys[0] for other, keys in KEYS.items() if other != group]


def error_document(path: str, problem: str, code: str) -> dict[str, Any]:
    """The body of an error, which has OpenAI's form for the call of OpenAI's API."""
    if path != "/v1/embeddings":
        return {"error": problem}
    return {"error": {"message": problem, "type": "invalid_request_error", "param": None, "code": code}}


@each_http_call
def test_rest_call_needs_a_key_of_its_group(server: ServerProcess, group: str, call: tuple[str, str, bytes]) -> None:
    method, path, body = call
    with httpx.Client(base_url=f"http://{server.http}", timeout=LONG_S) as client:

        def ask(**headers: str) -> httpx.Response:
            return client.request(method, path, content=body, headers=headers)

        bare = ask()
        assert (bare.status_code, bare.headers["www-authenticate"]) == (401, f'Bearer realm="{group}"')
        problem = f"calls of the group '{group}' need a key: expected 'Authorization: Bearer KEY', got no key"
        assert bare.json() == error_document(path, problem, "unauthenticated")
        unknown = ask(**bearer(UNKNOWN))
        assert unknown.status_code == 401
        assert unknown.headers["www-authenticate"] == f'Bearer realm="{group}", error="invalid_token"'
        for key in others(group):
            forbidden = ask(**bearer(key))
            assert forbidden.status_code == 403
            challenge = f'Bearer realm="{group}", error="insufficient_scope", scope="{group}"'
            assert forbidden.headers["www-authenticate"] == challenge
        for key in KEYS[group]:
            assert ask(**bearer(key)).status_code == 200


@each_http_call
def test_path_with_a_line_feed_at_its_end_is_not_found(
    server: ServerProcess, group: str, call: tuple[str, str, bytes]
) -> None:
    """A pattern's ``$`` also matches before a line feed, so a route might answer without its guard's check."""
    method, path, body = call
    path, _, query = path.partition("?")
    for spelled in (f"{path}%0A", f"{path}%0a/", f"{path}%0A?{query}"):
        for headers in ({}, bearer(KEYS[group][0])):
            url = f"http://{server.http}{spelled}"
            came = httpx.request(method, url, content=body, headers=headers, timeout=LONG_S)
            problem = f"Not Found: no call has the path '{unquote(path)}\n'"
            assert (came.status_code, came.json()) == (404, error_document(path, problem, "not_found"))


def call_grpc(server: ServerProcess, path: str, message: bytes, key: str | None) -> tuple[StatusCode, str]:
    metadata = () if key is None else tuple(bearer(key).items())
    with grpc.insecure_channel(server.grpc) as channel:
        begin: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        call = begin(iter([message]), metadata=metadata, timeout=LONG_S)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        return call.code(), call.details()


@ON_BOTH_TRANSPORTS
@each_grpc_call
def test_grpc_call_needs_a_key_of_its_group(server: ServerProcess, group: str, call: tuple[str, bytes]) -> None:
    for key, expected in {None: StatusCode.UNAUTHENTICATED, UNKNOWN: StatusCode.UNAUTHENTICATED}.items():
        status, details = call_grpc(server, *call, key)
        assert status is expected
        assert f"calls of the group '{group}' need a key" in details
    for key in others(group):
        assert call_grpc(server, *call, key)[0] is StatusCode.PERMISSION_DENIED
    for key in KEYS[group]:
        assert call_grpc(server, *call, key)[0] is StatusCode.OK


def test_health_is_open_on_every_frontend(server: ServerProcess) -> None:
    for path in ("health/live", "health/ready", "models/identity/ready", "models/identity/versions/1/ready"):
        assert httpx.get(f"http://{server.http}/v2/{path}", timeout=LONG_S).status_code == 200
    model_ready = service_pb2.ModelReadyRequest(name="identity").SerializeToString()
    calls = [(f"{SERVICE}ServerLive", b""), (f"{SERVICE}ServerReady", b""), (f"{SERVICE}ModelReady", model_ready)]
    for path, message in [*calls, ("/grpc.health.v1.Health/Check", b""), ("/grpc.health.v1.Health/List", b"")]:
        assert call_grpc(server, path, message, None)[0] is StatusCode.OK


def test_metrics_port_needs_its_key(server: ServerProcess) -> None:
    url = f"http://{server.metrics}/metrics"
    bare = httpx.get(url, timeout=LONG_S)
    assert (bare.status_code, bare.headers["www-authenticate"]) == (401, 'Bearer realm="metrics"')
    assert httpx.get(url, headers=bearer(UNKNOWN), timeout=LONG_S).status_code == 401
    assert httpx.get(url, headers=bearer(KEYS["infer"][0]), timeout=LONG_S).status_code == 403
    assert "ortserve_build_info" in httpx.get(url, headers=bearer(KEYS["metrics"][0]), timeout=LONG_S).text


def test_triton_clients_send_keys_as_headers(server: ServerProcess) -> None:
    clients: list[tuple[Any, Any]] = [(triton_http, server.http), (triton_grpc, server.grpc)]
    for triton, address in clients:
        with triton.InferenceServerClient(address) as client:
            given = triton.InferInput("x", ROW.shape, "FP32")
            given.set_data_from_numpy(ROW)
            answer = client.infer("identity", [given], headers=bearer(KEYS["infer"][0]))
            np.testing.assert_array_equal(answer.as_numpy("y"), ROW)
            client.load_model("identity", headers=bearer(KEYS["control"][0]))
            assert client.is_server_live()
            with pytest.raises(Exception, match="need a key"):
                client.infer("identity", [given])


@pytest.mark.parametrize("path", ["/v2/models/identity/infer", "/v2/repository/models/identity/load"])
@pytest.mark.parametrize(
    "announced", ["Content-Length: 60000000", "Transfer-Encoding: chunked", "Content-Length: 9\r\nExpect: 100-continue"]
)
def test_rest_caller_is_rejected_before_its_body_arrives(server: ServerProcess, path: str, announced: str) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{announced}\r\n\r\n".encode())
        came = b""
        while b"need a key" not in came:
            data = connection.recv(65536)
            assert data, came
            came += data
        assert came.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in came


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"])
def test_grpc_caller_is_rejected_before_its_message_arrives(server: ServerProcess, method: str) -> None:
    answered = threading.Event()

    def messages() -> Iterator[bytes]:
        answered.wait(LONG_S)
        yield b""

    with grpc.insecure_channel(server.grpc) as channel:
        begin: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"{SERVICE}{method}")
        status = begin(messages(), timeout=LONG_S).code()
        answered.set()
    assert status is StatusCode.UNAUTHENTICATED


def test_two_keys_in_one_request_are_malformed(server: ServerProcess) -> None:
    values = [("authorization", f"Bearer {key}") for key in KEYS["infer"]]
    answer = httpx.post(
        f"http://{server.http}/v2/models/identity/infer", content=infer_body(), headers=values, timeout=LONG_S
    )
    assert answer.status_code == 400
    assert answer.json()["error"] == "authorization: expected one value, got 2"


def test_rejection_waits_its_turn_in_a_pipeline(server: ServerProcess) -> None:
    host, port = server.http.split(":")
    body = infer_body()
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    good = f"{head}Authorization: Bearer {KEYS['infer'][0]}\r\n\r\n".encode() + body
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(good + good + f"{head}\r\n".encode() + body)
        came = b""
        while data := connection.recv(65536):
            came += data
    assert [int(part[:3]) for part in came.split(b"HTTP/1.1 ")[1:]] == [200, 200, 401]


def test_openapi_document_names_the_operations_that_need_a_key(server: ServerProcess) -> None:
    url = f"http://{server.http}/openapi.json"
    document = httpx.get(url, headers=bearer(KEYS["metadata"][0]), timeout=LONG_S).json()
    assert set(document["components"]["securitySchemes"]) == {"infer", "metadata", "control"}
    needs = {path: [operation.get("security") for operation in at.values()] for path, at in document["paths"].items()}
    assert needs["/v2/models/{model}/infer"] == [[{"infer": []}]]
    assert needs["/v2/repository/models/{model}/load"] == [[{"control": []}]]
    assert needs["/v2/health/live"] == [None]


def test_rejections_are_counted_and_no_key_is_shown_anywhere(server: ServerProcess) -> None:
    def metrics() -> Samples:
        url = f"http://{server.metrics}/metrics"
        return Samples(httpx.get(url, headers=bearer(KEYS["metrics"][0]), timeout=LONG_S).text)

    def refusals() -> dict[str, float]:
        return metrics().by_labels("ortserve_unauthorized_requests_total", "group", "reason")

    url = f"http://{server.http}/v2/models/identity/infer"
    before = refusals()
    texts = [httpx.post(url, content=b"{}", headers=headers, timeout=LONG_S).text for headers in ({}, bearer(UNKNOWN))]
    texts.append(httpx.post(url, headers=bearer(KEYS["control"][0]), timeout=LONG_S).text)
    texts.append(call_grpc(server, f"{SERVICE}ModelInfer", b"", UNKNOWN)[1])
    after = refusals()
    body = {"id": "with-a-key", "inputs": [json_input("x", ROW)]}
    texts.append(httpx.post(url, json=body, headers=bearer(KEYS["infer"][0]), timeout=LONG_S).raise_for_status().text)
    server.wait_for_line("ortserve.access", "request_id=with-a-key")
    assert after["infer unauthenticated"] - before.get("infer unauthenticated", 0) == 3
    assert after["infer forbidden"] - before.get("infer forbidden", 0) == 1
    samples = metrics()
    outcomes = samples.by_labels("ortserve_request_duration_seconds_count", "outcome")
    assert set(outcomes) <= {"ok", "invalid_input"}
    headers = bearer(KEYS["metadata"][0])
    texts += [
        httpx.get(f"http://{server.http}{path}", headers=headers, timeout=LONG_S).text for path in ("/v2", "/docs")
    ]
    shown = "\n".join([*texts, samples.text, server.output])
    for key in (UNKNOWN, *(key for keys in KEYS.values() for key in keys)):
        assert key not in shown


def test_key_file_without_keys_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "secret-but-bad"
    file.write_text("secret-but-bad!!!!!!!")
    with starting("--example", "--control-keys-file", file) as server:
        assert server.wait() == 1
        assert "control_keys_file: line 1: expected a key of 16 to 512 letters" in server.output
        assert "secret-but-bad" not in server.output
