"""Calls as clients write them and the server's answers, frozen in ``contract/golden_calls.json``.

``golden_bytes`` freezes the codecs' encoding of tensors. This module freezes the rest of the protocol over real
sockets: the bytes that a client sends and receives, independent of names inside the package. ``golden_bytes`` writes
both pages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

import wire
from models import builders
from ortserve._pb.grpc_service_pb2 import ModelMetadataResponse  # tritonclient's has no properties
from ortserve.core.dtypes import DataType
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving

PAGE: Final = Path(__file__).parents[1] / "contract" / "golden_calls.json"

_HEADERS: Final = ("content-type", "inference-header-content-length", "retry-after", "allow")
"""The headers of an answer that belong to the protocol and do not vary."""

_TRAILERS: Final = ("grpc-retry-pushback-ms",)

Spelled: TypeAlias = dict[str, Any]
"""A value for JSON."""


@dataclass(frozen=True, slots=True)
class RestCall:
    """A REST call. ``strip`` names keys that are removed from the answer, because they differ each time."""

    path: str
    body: bytes | None = None
    headers: Mapping[str, str] | None = None
    strip: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """A gRPC call.

    ``strip`` names fields that are cleared in the answer, a ``response``, because they differ each time.
    """

    method: str
    messages: Sequence[bytes]
    strip: Sequence[str] = ()
    response: Callable[[], Any] | None = None


@contextmanager
def contract_server(repository: Path, *ways: str) -> Iterator[ServerProcess]:
    """Serve the example models, one whose runs can fail (``poison``) and one that cannot load (``broken``).

    ``echo`` and ``echo_text`` return rows of any number of FP32 or BYTES elements unchanged.
    """
    add_model(repository, "poison", builders.poison)
    add_model(repository, "broken", builders.not_onnx)
    add_model(repository, "echo", builders.identity, shape=("batch", "n"))
    add_model(repository, "echo_text", builders.identity, datatype=DataType.BYTES, shape=("batch", 1))
    with serving(repository, "--example", *SHORT_WARMUP, *ways) as server:
        yield server


def calls() -> dict[str, RestCall | GrpcCall]:
    """All calls, by name."""
    return _rest_calls() | _grpc_calls()


def answer(server: ServerProcess, call: RestCall | GrpcCall) -> Spelled:
    """Send a call to a ``contract_server``. Returns the answer for JSON."""
    return _rest_answer(server, call) if isinstance(call, RestCall) else _grpc_answer(server, call)


def spell_call(call: RestCall | GrpcCall) -> Spelled:
    """The request of a call for JSON."""
    if isinstance(call, GrpcCall):
        return {"method": call.method, "messages": [message.hex() for message in call.messages]}
    body = {} if call.body is None else {"body": _spell(call.body)}
    return {"path": call.path, "headers": dict(call.headers or {})} | body


def render(server: ServerProcess) -> str:
    """The content of ``golden_calls.json``, from the answers of a ``contract_server``."""
    page = {name: {"call": spell_call(call), "answer": answer(server, call)} for name, call in calls().items()}
    return json.dumps(page, indent=1, ensure_ascii=True) + "\n"


_SCORES: Final = np.array([[0.5, 200, -1], [7, 7, 8]], np.float32)


def _rest_calls() -> dict[str, RestCall | GrpcCall]:
    raw = {"Inference-Header-Content-Length": "0"}
    scores = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": _SCORES.tolist()}

    def classified(**form: bool) -> bytes:
        asked = {"name": "y", "parameters": {"classification": 2, **form}}
        return json.dumps({"id": "7", "inputs": [scores], "outputs": [asked]}).encode()

    text = json.dumps({"id": "7", "text": "two words", "weight": 0.1}).encode()
    missing = json.dumps({"inputs": [scores]}).encode()
    return {
        "REST raw binary": RestCall("/v2/models/echo/infer", np.array([0.1, -0.0, 3e38], np.float32).tobytes(), raw),
        "REST raw text": RestCall("/v2/models/echo_text/infer", "añb 😀".encode(), raw),
        "REST raw binary of a wrong size": RestCall("/v2/models/echo/infer", bytes(5), raw),
        "REST classification in JSON": RestCall("/v2/models/echo/infer", classified()),
        "REST classification in binary": RestCall("/v2/models/echo/infer", classified(binary_data=True)),
        "REST generate": RestCall("/v2/models/text_stats/generate", text),
        "REST generate_stream": RestCall("/v2/models/text_stats/generate_stream", text),
        "REST generate of rows": RestCall("/v2/models/echo/versions/1/generate", b'{"x": [[1, 2.5], [3, 4]]}'),
        "REST error of a request": RestCall("/v2/models/simple/infer", missing),
        "REST error of a document": RestCall("/v2/models/simple/infer", b'{"inputs": 1}'),
        "REST error of an unknown model": RestCall("/v2/models/nobody/infer", missing),
        "REST error of a path": RestCall("/v2/models/simple/versions/1x"),
        "REST model metadata": RestCall("/v2/models/simple", strip=("properties",)),
        "REST model metadata of a version": RestCall("/v2/models/echo_text/versions/1", strip=("properties",)),
        "REST model readiness": RestCall("/v2/models/simple/ready"),
        "REST repository index": RestCall("/v2/repository/index", b'{"ready": true}'),
    }


def _grpc_calls() -> dict[str, RestCall | GrpcCall]:
    def infer(model: str, array: np.ndarray = _SCORES, *, classes: int = 0, final: bool = False) -> bytes:
        message = pb.ModelInferRequest(model_name=model, id="7")
        message.inputs.add(name="x", datatype="FP32", shape=array.shape)
        message.raw_input_contents.append(wire.raw_bytes(DataType.FP32, array))
        if classes:
            message.outputs.add(name="y").parameters["classification"].int64_param = classes
        if final:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        data: bytes = message.SerializeToString()
        return data

    def metadata(name: str, version: str = "") -> GrpcCall:
        data = pb.ModelMetadataRequest(name=name, version=version).SerializeToString()
        return GrpcCall("ModelMetadata", [data], ("properties",), ModelMetadataResponse)

    index = pb.RepositoryIndexRequest(ready=True).SerializeToString()
    ready = pb.ModelReadyRequest(name="simple").SerializeToString()
    return {
        "gRPC classification": GrpcCall("ModelInfer", [infer("echo", classes=2)]),
        "gRPC error of a request": GrpcCall("ModelInfer", [infer("simple")]),
        "gRPC error of a message": GrpcCall("ModelInfer", [b"\xff\xff"]),
        "gRPC error of an unknown model": GrpcCall("ModelInfer", [infer("nobody")]),
        "gRPC stream": GrpcCall("ModelStreamInfer", [infer("echo")]),
        "gRPC stream that asks for an empty final response": GrpcCall("ModelStreamInfer", [infer("echo", final=True)]),
        "gRPC stream with an error in it": GrpcCall("ModelStreamInfer", [infer("nobody"), infer("echo")]),
        "gRPC model metadata": metadata("simple"),
        "gRPC model metadata of a version": metadata("echo_text", "1"),
        "gRPC model readiness": GrpcCall("ModelReady", [ready]),
        "gRPC repository index": GrpcCall("RepositoryIndex", [index]),
    }


def _rest_answer(server: ServerProcess, call: RestCall) -> Spelled:
    method = "GET" if call.body is None else "POST"
    url = f"http://{server.http}{call.path}"
    got = httpx.request(method, url, content=call.body, headers=call.headers, timeout=LONG_S)
    body = got.content
    if call.strip:
        document = got.json()
        for key in call.strip:
            del document[key]
        body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    headers = {name: got.headers[name] for name in _HEADERS if name in got.headers}
    return {"status": got.status_code, "headers": headers, "body": _spell(body)}


def _grpc_answer(server: ServerProcess, call: GrpcCall) -> Spelled:
    messages: list[bytes] = []
    with grpc.insecure_channel(server.grpc) as channel:
        # On the wire a unary call is a stream of one message in each direction.
        method = f"/inference.GRPCInferenceService/{call.method}"
        stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        got = stream(iter(call.messages), timeout=LONG_S)
        try:
            messages.extend(got)
        except grpc.RpcError:
            assert got.code() is not grpc.StatusCode.OK
        trailers = {key: value for key, value in got.trailing_metadata() if key in _TRAILERS}
        status = {"code": got.code().name, "details": got.details(), "trailers": trailers}
    return status | {"messages": [_stripped(message, call).hex() for message in messages]}


def _stripped(data: bytes, call: GrpcCall) -> bytes:
    if call.response is None:
        return data
    message = call.response()
    message.ParseFromString(data)
    for field in call.strip:
        message.ClearField(field)
    stripped: bytes = message.SerializeToString(deterministic=True)
    return stripped


def _spell(body: bytes) -> Spelled:
    """Returns readable bytes as text, and other bytes as hexadecimal digits."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"hex": body.hex()}
    return {"text": text} if text.isprintable() or text.startswith("data: ") else {"hex": body.hex()}
