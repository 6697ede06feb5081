"""A running server of the protocol: what a model takes, how it batches, and one request at a time, beside the load.

Uses only calls that all servers of the protocol have, and statistics and shared memory, which are extensions.
"""

import http.client
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import grpc
import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from ortserve._pb import grpc_service_pb2 as pb
from ortserve._pb import management_pb2, shared_memory_pb2
from ortserve.core.dtypes import DATATYPES
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.bench.target import Address

_GRPC_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_STATUSES: Final = {401: ErrorKind.UNAUTHENTICATED, 403: ErrorKind.UNAUTHENTICATED, 404: ErrorKind.NOT_FOUND}
_CODES: Final = {
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.REJECTED_BY_MODEL,
}


def parse_address(url: str, headers: Sequence[str] = (), ca: Path | None = None) -> Address:
    """Read ``http://host:port``, ``https:``, ``grpc:`` or ``grpcs:``.

    Raises:
        ServeError: invalid_input, for another URL, headers that are not ``NAME: VALUE``, and unreadable certificates.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise invalid_input(f"{url}: {error}") from None
    if not parts.hostname or parts.path not in ("", "/"):
        raise invalid_input(f"{url}: expected {parts.scheme}://HOST:PORT")
    given: dict[str, str] = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not name or not colon:
            raise invalid_input(f"--header: expected NAME: VALUE, got '{header}'")
        given[name.strip().lower()] = value.strip()
    is_tls, is_grpc = parts.scheme.endswith("s"), parts.scheme.startswith("grpc")
    usual = 8001 if is_grpc else 443 if is_tls else 80
    address = Address(url, parts.hostname, port or usual, is_tls, is_grpc, given, ca)
    try:
        address.tls()
    except OSError as error:
        raise invalid_input(f"--ca {ca}: expected certificates in PEM, got: {error.strerror or error}") from None
    return address


class Control:
    """Calls to a server about one model, which block. Each raises ServeError: not_ready, if the server cannot be
    reached, unsupported, if it is of another kind, otherwise as it answers.
    """

    def __init__(self, address: Address, model: str, version: str, timeout_s: float) -> None:
        self.address: Final = address
        self.path: Final = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version)}" if version else "")
        self._model = {"name": model, "version": version}
        self._timeout_s = timeout_s

    def describe(self) -> tuple[str, ModelSignature]:
        """The name and version of the server, and what the model takes. not_found, if there is no such model."""
        try:
            about = self._ask("GET", "/v2", pb, "ServerMetadata")
            server = f"{about['name']} {about.get('version', '')}".strip()
        except (ServeError, LookupError, TypeError) as error:
            if isinstance(error, ServeError) and error.kind is not ErrorKind.NOT_FOUND:
                raise
            raise self._another_kind("its metadata have no name") from None
        try:
            metadata = self._ask("GET", self.path, pb, "ModelMetadata", self._model)
        except ServeError as error:
            raise ServeError(error.kind, error.message + self._known()) from None
        try:
            return server, _signature(metadata["inputs"], metadata["outputs"])
        except (LookupError, TypeError, ValueError) as error:
            raise self._another_kind(f"the metadata of its model cannot be read: {error!r}") from None

    def batches(self) -> dict[int, int]:
        """How many batches of each size have run so far; empty for servers that do not say."""
        counts: dict[int, int] = {}
        with suppress(ServeError, LookupError, TypeError):
            stats = self._ask("GET", f"{self.path}/stats", management_pb2, "ModelStatistics", self._model)
            for size in (size for one in stats["model_stats"] for size in one["batch_stats"]):
                rows, count = int(size["batch_size"]), int(size["compute_infer"].get("count", 0))
                counts[rows] = counts.get(rows, 0) + count
        return counts

    def infer(self, headers: Mapping[str, str], body: bytes) -> tuple[bytes, int | None]:
        """Send one request; the body of its answer, and the size of its JSON if binary tensors follow."""
        if self.address.is_grpc:
            return self._send_rpc("ModelInfer", body), None
        return self._send("POST", f"{self.path}/infer", body, headers)

    def register(self, region: str, nbytes: int) -> None:
        """Have the server map shared memory."""
        fields = {"name": region, "key": f"/{region}", "offset": 0, "byte_size": nbytes}
        path = f"/v2/systemsharedmemory/region/{region}/register"
        self._ask("POST", path, shared_memory_pb2, "SystemSharedMemoryRegister", fields)

    def unregister(self, region: str) -> None:
        """Have the server forget it."""
        path = f"/v2/systemsharedmemory/region/{region}/unregister"
        self._ask("POST", path, shared_memory_pb2, "SystemSharedMemoryUnregister", {"name": region})

    def _known(self) -> str:
        try:
            index = self._ask("POST", "/v2/repository/index", management_pb2, "RepositoryIndex")
            models = index["models"] if isinstance(index, dict) else index
            return f"; the server has {', '.join(dict.fromkeys(str(one['name']) for one in models))}"
        except (ServeError, LookupError, TypeError):
            return ""

    def _ask(self, method: str, path: str, messages: Any, rpc: str, fields: Mapping[str, Any] | None = None) -> Any:
        """A call over REST or gRPC; its answer as a document, which is the same in both except for numbers."""
        fields = fields or {}
        if not self.address.is_grpc:
            body = {name: value for name, value in fields.items() if name != "name"}  # which is in the path
            answer, _ = self._send(method, path, orjson.dumps(body) if method == "POST" else b"")
            try:
                return orjson.loads(answer or b"{}")
            except orjson.JSONDecodeError:
                raise self._another_kind(f"{method} {path} is answered with {len(answer)} bytes") from None
        request, message = getattr(messages, f"{rpc}Request")(**fields), getattr(messages, f"{rpc}Response")()
        try:
            message.ParseFromString(self._send_rpc(rpc, request.SerializeToString()))
        except DecodeError:
            raise self._another_kind(f"its answer to {rpc} is another message") from None
        return MessageToDict(message, preserving_proto_field_name=True)

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, int | None]:
        address, context = self.address, self.address.tls()
        to = (address.host, address.port)
        made = http.client.HTTPSConnection(*to, timeout=self._timeout_s, context=context) if context else None
        try:
            with closing(made or http.client.HTTPConnection(*to, timeout=self._timeout_s)) as connection:
                connection.request(method, path, body, {**address.headers, **(headers or {})})
                answer = connection.getresponse()
                status, content = answer.status, answer.read()
                size = answer.getheader("inference-header-content-length", "")
        except http.client.HTTPException as error:
            raise self._another_kind(f"its answer is no HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from None
        if status == 200:
            return content, int(size) if size.isdigit() else None
        text = content[:200].decode(errors="replace")
        with suppress(orjson.JSONDecodeError, LookupError, TypeError):
            text = orjson.loads(content)["error"]
        kind = _STATUSES.get(status, ErrorKind.REJECTED_BY_MODEL if 400 <= status < 500 else ErrorKind.INTERNAL)
        raise self._rejected(kind, f"status {status}: {text}")

    def _send_rpc(self, rpc: str, body: bytes) -> bytes:
        address, codes = self.address, grpc.StatusCode
        if address.is_tls:
            credentials = grpc.ssl_channel_credentials(address.ca.read_bytes() if address.ca else None)
            channel = grpc.secure_channel(address.authority, credentials, _GRPC_OPTIONS)
        else:
            channel = grpc.insecure_channel(address.authority, _GRPC_OPTIONS)
        with channel:
            try:
                send: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")
                answer: bytes = send(body, timeout=self._timeout_s, metadata=tuple(address.headers.items()))
                return answer
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
        if code in (codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED):
            raise self._unreachable(details)
        if code is codes.UNIMPLEMENTED or (code is codes.UNKNOWN and "HTTP" in details):
            raise self._another_kind(details)
        raise self._rejected(_CODES.get(code, ErrorKind.INTERNAL), f"{code.name}: {details}")

    def _rejected(self, kind: ErrorKind, text: str) -> ServeError:
        hint = " (a key is given by --header)" if kind is ErrorKind.UNAUTHENTICATED else ""
        return ServeError(kind, f"{self.address.url}: {text}{hint}")

    def _unreachable(self, reason: str) -> ServeError:
        return ServeError(ErrorKind.NOT_READY, f"{self.address.url}: no server answers: {reason}")

    def _another_kind(self, seen: str) -> ServeError:
        expected = f"{self.address.url}: expected a server of the Open Inference Protocol v2"
        return ServeError(ErrorKind.UNSUPPORTED, f"{expected}, {seen}")


def _signature(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> ModelSignature:
    """A signature whose rows are on axis 0, if that is free in all tensors. LookupError for unknown datatypes."""
    takes, gives = (
        tuple(TensorSpec(one["name"], DATATYPES[one["datatype"]], tuple(map(int, one["shape"]))) for one in role)
        for role in (inputs, outputs)
    )
    has_rows = all(spec.shape[:1] == (-1,) for spec in (*takes, *gives))
    return ModelSignature(takes, gives, "" if has_rows else "the first dimension of a tensor is fixed")
