"""Answers to bad requests: the exact status, a text that names the fault, and a server that continues to serve."""

import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import httpx
import numpy as np
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2

from models.builders import POISON
from servers import LONG_S, SHORT_WARMUP, ServerProcess, rest_url, serving

BODY_LIMIT: Final = 20_000


@dataclass(frozen=True, slots=True)
class Input:
    """An input as a client can send it, valid or not."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A request before it is encoded."""

    model: str
    inputs: Sequence[Input]
    version: str = ""
    outputs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer; ``headers`` are trailing metadata on gRPC, with keys in lower case."""

    status: int | StatusCode
    text: str
    headers: dict[str, str]


INPUT0: Final = Input("INPUT0", "INT32", [1, 16], range(16))
INPUT1: Final = Input("INPUT1", "INT32", [1, 16], range(16))
GOOD: Final = Request("simple", [INPUT0, INPUT1])
_SMALL: Final = Input("text", "BYTES", [1, 1], [b"a"])
_WEIGHT: Final = Input("weight", "FP32", [1, 1], [1.0])
_STRUCT: Final = {"INT32": "i", "FP32": "f", "INT64": "q", "INT4": "b"}
_FIELDS: Final = {
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "BYTES": "bytes_contents",
}


def send_rest_json(server: ServerProcess, request: Request) -> Refusal | None:
    entries = [
        {"name": i.name, "datatype": i.datatype, "shape": list(i.shape), "data": [_text(value) for value in i.values]}
        for i in request.inputs
    ]
    return post(server, request, json.dumps(_document(request, entries)).encode())


def send_rest_binary(server: ServerProcess, request: Request) -> Refusal | None:
    tails = [_raw(entry) for entry in request.inputs]
    entries = [
        {
            "name": i.name,
            "datatype": i.datatype,
            "shape": list(i.shape),
            "parameters": {"binary_data_size": len(tail)},
        }
        for i, tail in zip(request.inputs, tails, strict=True)
    ]
    head = json.dumps(_document(request, entries)).encode()
    return post(server, request, head + b"".join(tails), {"Inference-Header-Content-Length": str(len(head))})


def send_grpc_raw(server: ServerProcess, request: Request) -> Refusal | None:
    message = _message(request)
    message.raw_input_contents.extend(_raw(entry) for entry in request.inputs)
    return call(server, message.SerializeToString())


def send_grpc_typed(server: ServerProcess, request: Request) -> Refusal | None:
    message = _message(request)
    for tensor, entry in zip(message.inputs, request.inputs, strict=True):
        getattr(tensor.contents, _FIELDS.get(entry.datatype, "int_contents")).extend(entry.values)
    return call(server, message.SerializeToString())


def send_grpc_stream(server: ServerProcess, request: Request) -> Refusal | None:
    """Send a request on a stream that ends on an error, so that the error is the status of the stream."""
    message = _message(request)
    message.raw_input_contents.extend(_raw(entry) for entry in request.inputs)
    with grpc.insecure_channel(server.grpc) as channel:
        send: grpc.StreamStreamMultiCallable[bytes, bytes]
        send = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        metadata = (("triton_grpc_error", "true"),)
        try:
            answers = list(send(iter([message.SerializeToString()]), timeout=LONG_S, metadata=metadata))
        except grpc.RpcError as error:
            return _grpc_refusal(error)
    assert len(answers) == 1
    return None


Send = Callable[[ServerProcess, Request], Refusal | None]
REST: Final[tuple[Send, ...]] = (send_rest_json, send_rest_binary)
GRPC: Final[tuple[Send, ...]] = (send_grpc_raw, send_grpc_typed, send_grpc_stream)


def post(
    server: ServerProcess, request: Request, body: bytes | Iterator[bytes], headers: dict[str, str] | None = None
) -> Refusal | None:
    """Send a REST body; return the error, or None on success."""
    url = rest_url(server, request.model, request.version)
    return _refusal(httpx.post(url, content=body, headers=headers, timeout=LONG_S))


def call(server: ServerProcess, data: bytes, method: str = "ModelInfer") -> Refusal | None:
    """Send a gRPC message as bytes; return the error, or None on success."""
    with grpc.insecure_channel(server.grpc) as channel:
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            send(data, timeout=LONG_S)
        except grpc.RpcError as error:
            return _grpc_refusal(error)
    return None


def refusal(came: Refusal | None) -> Refusal:
    assert came is not None, "the request was answered"
    return came


@pytest.fixture(autouse=True)
def _server_goes_on(server: ServerProcess) -> Iterator[None]:
    """After each test, both protocols must answer a good request."""
    yield
    for send in (*REST, *GRPC):
        assert send(server, GOOD) is None


BAD_REQUESTS: Final[dict[str, tuple[Request, int, StatusCode, tuple[str, ...]]]] = {
    "unknown model": (replace(GOOD, model="nowhere"), 404, StatusCode.NOT_FOUND, ("unknown model", "'nowhere'")),
    "unknown version": (replace(GOOD, version="7"), 404, StatusCode.NOT_FOUND, ("'simple' version 7 is not found",)),
    "model that failed to load": (
        replace(GOOD, model="broken"),
        503,
        StatusCode.UNAVAILABLE,
        ("'broken' has no available versions", "FAILED"),
    ),
    "version that failed to load": (
        replace(GOOD, model="broken", version="1"),
        503,
        StatusCode.UNAVAILABLE,
        ("'broken' version 1 is not at ready state",),
    ),
    "wrong input name": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, name="INPUT9")]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("unexpected inference input 'INPUT9' for model 'simple'",),
    ),
    "one input too many": (
        replace(GOOD, inputs=[INPUT0, INPUT1, replace(INPUT1, name="INPUT2")]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT2'",),
    ),
    "missing input": (
        replace(GOOD, inputs=[INPUT0]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("expected 2 inputs but got 1", "['INPUT1']"),
    ),
    "no input at all": (
        replace(GOOD, inputs=[]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("expected 2 inputs but got 0", "'INPUT0', 'INPUT1'"),
    ),
    "duplicate input": (
        replace(GOOD, inputs=[INPUT0, INPUT1, INPUT0]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT0' already exists",),
    ),
    "wrong datatype": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, datatype="FP32")]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'", "'FP32'", "'INT32'"),
    ),
    "unknown datatype": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, datatype="INT4")]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'", "'INT4'"),
    ),
    "wrong size of a dimension": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, shape=[2, 8])]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'", "Expected [-1,16], got [2,8]"),
    ),
    "wrong number of dimensions": (
        replace(GOOD, inputs=[replace(INPUT0, shape=[16]), INPUT1]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT0'", "Expected [-1,16], got [16]"),
    ),
    "negative dimension": (
        replace(GOOD, inputs=[replace(INPUT0, shape=[-1, 16]), INPUT1]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT0'", "-1"),
    ),
    "too few elements": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, values=range(15))]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'",),
    ),
    "too many elements": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, values=range(17))]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'",),
    ),
    "shape far beyond its data": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, shape=[2**31, 2**31])]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1'",),
    ),
    "inputs of different rows": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, shape=[2, 16], values=range(32))]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1' batch size does not match", "expected 1, got 2"),
    ),
    "no rows in one input": (
        replace(GOOD, inputs=[INPUT0, replace(INPUT1, shape=[0, 16], values=[])]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'INPUT1' batch size does not match", "expected 1, got 0"),
    ),
    "unknown output": (
        replace(GOOD, outputs=["OUTPUT9"]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("unexpected inference output 'OUTPUT9' for model 'simple'",),
    ),
    "duplicate output": (
        replace(GOOD, outputs=["OUTPUT0", "OUTPUT0"]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'OUTPUT0' already exists",),
    ),
    "too few strings": (
        Request("text_stats", [replace(_SMALL, shape=[2, 1]), replace(_WEIGHT, shape=[2, 1], values=[1.0, 1.0])]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("'text'", "2"),
    ),
    "values that the model rejects": (
        Request("poison", [Input("x", "INT64", [1, 4], [POISON] * 4)]),
        400,
        StatusCode.INVALID_ARGUMENT,
        ("the model rejected the inputs", "Gather", str(POISON)),
    ),
}


@pytest.mark.parametrize("send", [*REST, *GRPC], ids=lambda send: send.__name__.removeprefix("send_"))
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request_gets_its_status_and_names_the_fault(server: ServerProcess, send: Send, case: str) -> None:
    request, http_status, grpc_status, words = BAD_REQUESTS[case]
    came = refusal(send(server, request))
    assert came.status == (http_status if send in REST else grpc_status)
    for word in words:
        assert word in came.text
    assert "/" not in came.text.replace("ONNX Runtime", ""), "no caller needs to know our paths"


@pytest.mark.parametrize("send", [send_rest_binary, *GRPC], ids=lambda send: send.__name__.removeprefix("send_"))
def test_string_that_is_not_utf8_is_rejected(server: ServerProcess, send: Send) -> None:
    came = refusal(send(server, Request("text_stats", [replace(_SMALL, values=[b"caf\xe9"]), _WEIGHT])))
    assert came.status in (400, StatusCode.INVALID_ARGUMENT)
    assert "'text' is not valid UTF-8" in came.text


def test_failed_model_is_rejected_without_a_time_to_retry(server: ServerProcess) -> None:
    """In the mode ``none``, nothing loads it again."""
    request = replace(GOOD, model="broken")
    rest, raw = refusal(send_rest_json(server, request)), refusal(send_grpc_raw(server, request))
    assert (rest.status, raw.status) == (503, StatusCode.UNAVAILABLE)
    assert "retry-after" not in rest.headers
    assert "grpc-retry-pushback-ms" not in raw.headers
    metadata = httpx.get(f"http://{server.http}/v2/models/broken", timeout=LONG_S)
    assert metadata.status_code == 503
    assert "retry-after" not in metadata.headers


_ENTRY: Final = '{"name":"INPUT0","datatype":"INT32","shape":[1,16],"data":%s}'
_OTHER: Final = '{"name":"INPUT1","datatype":"INT32","shape":[1,16],"data":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}'

BAD_BODIES: Final[dict[str, tuple[bytes, str]]] = {
    "empty": (b"", "failed to parse the request JSON buffer"),
    "not JSON": (b"{not json", "failed to parse the request JSON buffer"),
    "cut off": (b'{"inputs":[{"name":"INP', "failed to parse the request JSON buffer"),
    "not UTF-8": (b'{"inputs":[{"name":"\xff"}]}', "failed to parse the request JSON buffer"),
    "surrogate in bytes, beside NaN": (
        b'{"id":"\xed\xa0\x80","parameters":{"own":NaN},"inputs":[%b,%b]}'
        % ((_ENTRY % ([0] * 16)).encode(), _OTHER.encode()),
        "failed to parse the request JSON buffer",
    ),
    "nested without end": (b'{"inputs":' + b"[" * 3000, "failed to parse the request JSON buffer"),
    "nested very deep": (b'{"inputs":' + b"[" * 3000 + b"]" * 3000 + b"}", ""),
    "data nested very deep": (
        f'{{"inputs":[{_ENTRY % ("[" * 200 + "1" + "]" * 200)},{_OTHER}]}}'.encode(),
        "'INPUT0'",
    ),
    "an array": (b"[]", "'request'"),
    "without inputs": (b"{}", "'inputs'"),
    "inputs no array": (b'{"inputs":{}}', "'inputs'"),
    "input no object": (b'{"inputs":[1]}', "'inputs'"),
    "input without name": (b'{"inputs":[{}]}', "'name'"),
    "input without shape": (b'{"inputs":[{"name":"INPUT0","datatype":"INT32","data":[]}]}', "'shape'"),
    "fractional shape": (
        b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1.5],"data":[]}]}',
        "'INPUT0'",
    ),
    "id no string": (f'{{"id":7,"inputs":[{_ENTRY % "[]"}]}}'.encode(), "'id'"),
    "input without data": (b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,16]}]}', "'INPUT0'"),
    "data from two sources": (
        b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1],"data":[],"parameters":{"binary_data_size":4}}]}',
        "'INPUT0'",
    ),
    "data no array": (f'{{"inputs":[{_ENTRY % "5"},{_OTHER}]}}'.encode(), "'INPUT0'"),
    "data a null": (f'{{"inputs":[{_ENTRY % ("[" + "null," * 15 + "1]")},{_OTHER}]}}'.encode(), "got null"),
    "data a string": (f'{{"inputs":[{_ENTRY % (["1"] * 16)},{_OTHER}]}}'.replace("'", '"').encode(), "got a string"),
    "data a fraction": (f'{{"inputs":[{_ENTRY % ([0.5] * 16)},{_OTHER}]}}'.encode(), "got 0.5"),
    "data out of range": (f'{{"inputs":[{_ENTRY % ([2**31] * 16)},{_OTHER}]}}'.encode(), str(2**31)),
    "ragged data": (f'{{"inputs":[{_ENTRY % [[1, 2], [3]]},{_OTHER}]}}'.encode(), "'INPUT0'"),
    "outputs no array": (f'{{"outputs":{{}},"inputs":[{_OTHER}]}}'.encode(), "'outputs'"),
    "reserved parameter": (f'{{"parameters":{{"triton_x":1}},"inputs":[{_OTHER}]}}'.encode(), "'triton_x'"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_malformed_body_is_400_and_its_error_is_located(server: ServerProcess, case: str) -> None:
    body, word = BAD_BODIES[case]
    came = refusal(post(server, GOOD, body))
    assert came.status == 400, came.text
    assert word in came.text


def _binary_body(tail: bytes, announced: int = 64) -> tuple[bytes, int]:
    entries = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": announced}}
        for name in ("INPUT0", "INPUT1")
    ]
    head = json.dumps({"inputs": entries}).encode()
    return head + tail, len(head)


def test_truncated_binary_tensor_is_400_and_names_the_input(server: ServerProcess) -> None:
    body, json_size = _binary_body(bytes(127))
    came = refusal(post(server, GOOD, body, {"Inference-Header-Content-Length": str(json_size)}))
    assert came.status == 400
    assert "'INPUT1', expecting 1 additional bytes" in came.text


def test_binary_bytes_that_belong_to_no_input_are_400(server: ServerProcess) -> None:
    body, json_size = _binary_body(bytes(129))
    came = refusal(post(server, GOOD, body, {"Inference-Header-Content-Length": str(json_size)}))
    assert came.status == 400
    assert "1 bytes belong to no input" in came.text


@pytest.mark.parametrize(
    ("announced", "word"),
    [
        ("1000000", "got: 1000000"),
        ("10", "JSON"),
        ("200", "JSON"),
        ("-1", "-1"),
        ("ten", "ten"),
        ("", "Inference-Header"),
    ],
)
def test_wrong_length_of_the_json_part_is_400(server: ServerProcess, announced: str, word: str) -> None:
    body, _ = _binary_body(bytes(128))
    came = refusal(post(server, GOOD, body, {"Inference-Header-Content-Length": announced}))
    assert came.status == 400
    assert word in came.text


def test_absent_length_of_the_json_part_is_400_if_binary_data_follow(server: ServerProcess) -> None:
    body, _ = _binary_body(bytes(128))
    assert refusal(post(server, GOOD, body)).status == 400


@pytest.mark.parametrize("encoding", ["br", "gzip, deflate", "none"])
def test_unknown_content_encoding_is_501_and_names_the_known_ones(server: ServerProcess, encoding: str) -> None:
    came = refusal(post(server, GOOD, b"\x1f\x8b", {"Content-Encoding": encoding}))
    assert came.status == 501
    assert f"'{encoding}'" in came.text
    assert came.headers["accept-encoding"] == "gzip, deflate"


def test_garbage_instead_of_a_protobuf_message_is_invalid(server: ServerProcess) -> None:
    for garbage in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x06simp", bytes(10)):
        came = refusal(call(server, garbage))
        assert came.status is StatusCode.INVALID_ARGUMENT
        assert "inference.ModelInferRequest" in came.text


def test_label_that_the_model_does_not_have_is_not_found(server: ServerProcess) -> None:
    came = refusal(send_grpc_raw(server, replace(GOOD, version="latest")))
    assert came.status is StatusCode.NOT_FOUND
    assert "'simple' version latest is not found" in came.text
    assert refusal(send_rest_json(server, replace(GOOD, version="latest"))).status == 404


@pytest.mark.parametrize("version", ["1st", "-1", "1.0", "²"])
def test_version_that_is_neither_a_number_nor_a_label_is_rejected(server: ServerProcess, version: str) -> None:
    came = refusal(send_grpc_raw(server, replace(GOOD, version=version)))
    assert came.status is StatusCode.INVALID_ARGUMENT
    assert f"'{version}'" in came.text
    assert refusal(send_rest_json(server, replace(GOOD, version=version))).status == 404


def test_typed_and_raw_contents_together_are_rejected(server: ServerProcess) -> None:
    message = _message(GOOD)
    message.inputs[0].contents.int_contents.extend(range(16))
    message.raw_input_contents.extend([bytes(64), bytes(64)])
    came = refusal(call(server, message.SerializeToString()))
    assert came.status is StatusCode.INVALID_ARGUMENT
    assert "'INPUT0'" in came.text


def test_unknown_method_is_unimplemented(server: ServerProcess) -> None:
    came = refusal(call(server, b"", "NoSuchCall"))
    assert came.status is StatusCode.UNIMPLEMENTED
    assert "unknown method 'NoSuchCall'" in came.text


UNKNOWN = "Not Found: no call has the path '{}'"


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/nothing", 404, UNKNOWN),
        ("GET", "/v1/models/simple/metadata", 404, UNKNOWN),
        ("POST", "/v2/models/simple/guess", 404, UNKNOWN),
        ("POST", "/v2/models/simple/versions/1st/infer", 404, UNKNOWN),
        ("GET", "/v2/" + 300 * "x", 404, f"Not Found: no call has the path '/v2/{196 * 'x'}…'"),
        ("GET", "/v2/models/simple/versions/one", 404, "Request for unknown model: 'simple' version one is not found"),
        ("GET", "/v2/models/simple/versions/1st/ready", 404, UNKNOWN),
        ("GET", "/v2/models/nowhere", 404, "Request for unknown model: 'nowhere' is not found"),
        ("GET", "/v2/models/nowhere/ready", 404, "Request for unknown model: 'nowhere' is not found"),
        ("GET", "/v2/models/simple/versions/7", 404, "Request for unknown model: 'simple' version 7 is not found"),
        ("GET", "/v2/models/broken/ready", 400, "Model version not ready"),
        ("GET", "/v2/models/simple/infer", 405, "Method Not Allowed: expected POST, got GET"),
        ("PUT", "/v2/models/simple/versions/1/infer", 405, "Method Not Allowed: expected POST, got PUT"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed: expected GET, HEAD, got POST"),
        ("DELETE", "/v2/models/simple", 405, "Method Not Allowed: expected GET, HEAD, got DELETE"),
        ("POST", "/v2", 405, "Method Not Allowed: expected GET, HEAD, got POST"),
    ],
)
def test_unknown_path_and_wrong_method_get_json_errors(
    server: ServerProcess, method: str, path: str, status: int, text: str
) -> None:
    answer = httpx.request(method, f"http://{server.http}{path}", timeout=LONG_S)
    assert (answer.status_code, answer.json()) == (status, {"error": text.format(path)})
    assert answer.headers["content-type"] == "application/json"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v2/models/simple/infer", "POST"),
        ("POST", "/v2/health/live", "GET, HEAD"),
        ("DELETE", "/v2/models/simple", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("PUT", "/v2/logging", "GET, HEAD, POST"),
    ],
)
def test_answer_to_a_wrong_method_names_the_right_ones(
    server: ServerProcess, method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"http://{server.http}{path}", timeout=LONG_S)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_head_is_answered_as_get_without_its_body(server: ServerProcess) -> None:
    with httpx.Client(base_url=f"http://{server.http}", timeout=LONG_S) as client:
        for path in ("/v2/health/live", "/v2/models/simple", "/v2/models/nowhere", "/v2/logging"):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-length"] == str(len(get.content))


@pytest.fixture(scope="module")
def narrow_server(ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """A server that accepts only short bodies."""
    with serving("--example", *SHORT_WARMUP, "--max-body-bytes", str(BODY_LIMIT), *ways) as server:
        yield server
        assert send_rest_json(server, GOOD) is None
        assert send_grpc_raw(server, GOOD) is None


def test_announced_oversized_body_is_rejected_with_413(narrow_server: ServerProcess) -> None:
    came = refusal(post(narrow_server, GOOD, b" " * (BODY_LIMIT + 1)))
    assert came.status == 413
    assert f"at most {BODY_LIMIT} bytes" in came.text


def test_chunked_oversized_body_is_rejected_with_413(narrow_server: ServerProcess) -> None:
    came = refusal(post(narrow_server, GOOD, iter([b" " * 5000] * 5)))
    assert came.status == 413
    assert f"at most {BODY_LIMIT} bytes" in came.text


def test_body_of_just_the_limit_is_accepted(narrow_server: ServerProcess) -> None:
    entries = [{"name": i.name, "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for i in GOOD.inputs]
    body = json.dumps({"inputs": entries}).encode().ljust(BODY_LIMIT)
    assert post(narrow_server, GOOD, body) is None
    assert post(narrow_server, GOOD, iter([body[:7000], body[7000:]])) is None


@pytest.mark.parametrize("size", [BODY_LIMIT * 10, 8 * 1024 * 1024])
def test_caller_that_sends_all_of_a_far_too_large_body_still_reads_the_error(
    narrow_server: ServerProcess, size: int
) -> None:
    host, port = narrow_server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        head = f"POST /v2/models/simple/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + b" " * size)  # a client that does not read while it sends
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_message_over_the_limit_is_resource_exhausted(narrow_server: ServerProcess) -> None:
    rows = 1 + BODY_LIMIT // 64
    tensors = [replace(i, shape=[rows, 16], values=[0] * 16 * rows) for i in GOOD.inputs]
    assert refusal(send_grpc_raw(narrow_server, replace(GOOD, inputs=tensors))).status is StatusCode.RESOURCE_EXHAUSTED


def test_caller_that_disconnects_in_the_middle_of_its_body_harms_no_other(server: ServerProcess) -> None:
    host, port = server.http.split(":")
    for part in (
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"POST /v2/models/sim",
    ):
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            connection.sendall(part)


def test_bytes_that_are_not_http_are_400(server: ServerProcess) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("send", [*REST, *GRPC], ids=lambda send: send.__name__.removeprefix("send_"))
def test_bad_request_among_concurrent_ones_fails_alone(server: ServerProcess, send: Send) -> None:
    bad = 13

    def ask(number: int) -> Refusal | None:
        values = [POISON if number == bad else number % 16] * 4
        return send(server, Request("poison", [Input("x", "INT64", [1, 4], values)]))

    with ThreadPoolExecutor(32) as pool:
        came = list(pool.map(ask, range(32)))
    assert [number for number, answer in enumerate(came) if answer is not None] == [bad]
    assert refusal(came[bad]).status in (400, StatusCode.INVALID_ARGUMENT)


BAD_EVERY: Final = 32
"""A batch then contains at most two bad requests; the server may not find all of more than two."""


def test_other_requests_of_the_batch_of_a_bad_one_are_answered_right(server: ServerProcess) -> None:
    def ask(number: int) -> None:
        rows = np.full((1 + number % 3, 4), number % 16)
        if number % BAD_EVERY == 5:
            rows[-1, -1] = POISON
        document = {
            "inputs": [{"name": "x", "datatype": "INT64", "shape": list(rows.shape), "data": rows.ravel().tolist()}]
        }
        answer = httpx.post(rest_url(server, "poison"), json=document, timeout=LONG_S)
        if number % BAD_EVERY == 5:
            assert answer.status_code == 400
        else:
            assert answer.json()["outputs"][0]["data"] == (rows / 2).ravel().tolist()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(96)))


def _refusal(answer: httpx.Response) -> Refusal | None:
    if answer.status_code == 200:
        return None
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert list(document) == ["error"]
    return Refusal(answer.status_code, document["error"], dict(answer.headers))


def _grpc_refusal(error: grpc.RpcError) -> Refusal:
    assert isinstance(error, grpc.Call)
    trailing = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    return Refusal(error.code(), error.details() or "", trailing)


def _document(request: Request, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"inputs": list(entries), "outputs": [{"name": name} for name in request.outputs]}


def _message(request: Request) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=request.model, model_version=request.version)
    for entry in request.inputs:
        message.inputs.add(name=entry.name, datatype=entry.datatype, shape=entry.shape)
    for name in request.outputs:
        message.outputs.add(name=name)
    return message


def _raw(entry: Input) -> bytes:
    if entry.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in entry.values)
    return struct.pack(f"<{len(entry.values)}{_STRUCT[entry.datatype]}", *entry.values)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
