"""A running server of the protocol, over REST or gRPC: what a model takes, how it batches, and one request at a time.

Uses only routes that all servers of the protocol have, and statistics and shared memory, which are extensions. The load
itself goes another way (``http_client``, ``grpc_client``). All calls block.
"""

import http.client
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import grpc
import orjson
from google.protobuf.message import DecodeError, Message

from ortserve._pb import grpc_service_pb2 as pb
from ortserve._pb import management_pb2
from ortserve._pb import shared_memory_pb2 as shm_pb
from ortserve.core.dtypes import DATATYPES
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError, invalid_input

SERVICE = "/inference.GRPCInferenceService/"
GRPC_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what each request needs to get in."""

    url: str
    host: str
    port: int
    is_tls: bool
    is_grpc: bool
    headers: Mapping[str, str]
    ca: Path | None

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """For HTTP clients; None without TLS."""
        return ssl.create_default_context(cafile=self.ca) if self.is_tls else None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For gRPC clients; None without TLS."""
        if not self.is_tls:
            return None
        return grpc.ssl_channel_credentials(self.ca.read_bytes() if self.ca else None)


def parse_address(url: str, headers: Sequence[str] = (), ca: Path | None = None) -> Address:
    """Read ``http://host:port``, ``https:``, ``grpc:`` or ``grpcs:``.

    Raises:
        ServeError: invalid_input, for another URL and for headers that are not ``NAME: VALUE``.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise invalid_input(f"{url}: {error}") from None
    if not parts.hostname or parts.path not in ("", "/"):
        raise invalid_input(f"{url}: expected {parts.scheme}://HOST:PORT")
    pairs = [header.partition(":") for header in headers]
    if bad := [header for header, (name, colon, _) in zip(headers, pairs, strict=True) if not (name and colon)]:
        raise invalid_input(f"--header: expected NAME: VALUE, got '{bad[0]}'")
    is_tls, is_grpc = parts.scheme.endswith("s"), parts.scheme.startswith("grpc")
    usual = 8001 if is_grpc else 443 if is_tls else 80
    given = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Address(url, parts.hostname, port or usual, is_tls, is_grpc, given, ca)


@dataclass(frozen=True, slots=True)
class Described:
    """What a server says of itself and of a model."""

    server: str
    signature: ModelSignature


class Control(Protocol):
    """Calls to a server. Each raises ServeError: not_ready if it cannot be reached, else as the server answers."""

    def describe(self, model: str, version: str) -> Described:
        """Read the signature of a model. not_found, if the server has no such model."""
        ...

    def batches(self, model: str, version: str) -> dict[int, int]:
        """How many batches of each size have run so far. Unsupported without the extension ``statistics``."""
        ...

    def infer(self, model: str, version: str, headers: Mapping[str, str], body: bytes) -> tuple[bytes, int | None]:
        """Send one request; the body of its answer, and the size of its JSON if binary tensors follow."""
        ...

    def register(self, region: str, key: str, nbytes: int) -> None:
        """Have the server map shared memory."""
        ...

    def unregister(self, region: str) -> None:
        """Have the server forget it."""
        ...


def connect(address: Address, timeout_s: float) -> Control:
    """The calls to a server, whose answers take at most ``timeout_s``."""
    return GrpcControl(address, timeout_s) if address.is_grpc else RestControl(address, timeout_s)


def model_path(model: str, version: str) -> str:
    """The path of a model over REST."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


class _Answer(NamedTuple):
    status: int
    body: bytes
    json_size: str = ""


class RestControl:
    """``Control`` over REST."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def describe(self, model: str, version: str) -> Described:
        """As ``Control.describe``."""
        url = self._address.url
        status, body, _ = self._call("GET", "/v2")
        about = _json(body)
        if status in (401, 403):
            raise ServeError(
                ErrorKind.UNAUTHENTICATED, f"{url}: {_error_text(status, body)} (a key is given by --header)"
            )
        if status != 200 or not isinstance(about, dict) or "name" not in about:
            raise _another_kind(url, f"GET /v2 is answered with status {status} and {len(body)} bytes")
        status, body, _ = self._call("GET", model_path(model, version))
        if status != 200:
            raise ServeError(ErrorKind.NOT_FOUND, f"{url}: {_error_text(status, body)}{self._known()}")
        metadata = _json(body)
        try:
            tensors = [
                [(one["name"], one["datatype"], one["shape"]) for one in metadata[role]]
                for role in ("inputs", "outputs")
            ]
        except (KeyError, TypeError):
            raise _another_kind(url, f"the metadata of model '{model}' has no inputs and outputs") from None
        return Described(f"{about['name']} {about.get('version', '')}".strip(), _signature(*tensors))

    def batches(self, model: str, version: str) -> dict[int, int]:
        """As ``Control.batches``."""
        stats = _json(self._expect("GET", f"{model_path(model, version)}/stats").body)
        counts: dict[int, int] = {}
        for one in stats["model_stats"]:
            for size in one["batch_stats"]:
                counts[size["batch_size"]] = counts.get(size["batch_size"], 0) + size["compute_infer"]["count"]
        return counts

    def infer(self, model: str, version: str, headers: Mapping[str, str], body: bytes) -> tuple[bytes, int | None]:
        """As ``Control.infer``."""
        answer = self._expect("POST", f"{model_path(model, version)}/infer", body, headers)
        return answer.body, int(answer.json_size) if answer.json_size.isdigit() else None

    def register(self, region: str, key: str, nbytes: int) -> None:
        """As ``Control.register``."""
        body = orjson.dumps({"key": key, "offset": 0, "byte_size": nbytes})
        self._expect("POST", f"/v2/systemsharedmemory/region/{region}/register", body)

    def unregister(self, region: str) -> None:
        """As ``Control.unregister``."""
        self._expect("POST", f"/v2/systemsharedmemory/region/{region}/unregister")

    def _known(self) -> str:
        status, body, _ = self._call("POST", "/v2/repository/index", b"{}")
        models = _json(body) if status == 200 else None
        names = [str(one.get("name")) for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        return f"; the server has {', '.join(dict.fromkeys(names))}" if names else ""

    def _expect(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> _Answer:
        answer = self._call(method, path, body, headers)
        if answer.status == 200:
            return answer
        kind = ErrorKind.REJECTED_BY_MODEL if 400 <= answer.status < 500 else ErrorKind.INTERNAL
        raise ServeError(kind, f"{self._address.url}: {_error_text(answer.status, answer.body)}")

    def _call(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> _Answer:
        address, tls = self._address, self._address.tls()
        to, wait = (address.host, address.port), self._timeout_s
        try:
            made = http.client.HTTPSConnection(*to, timeout=wait, context=tls) if tls else None
            connection = made or http.client.HTTPConnection(*to, timeout=wait)
            try:
                connection.request(method, path, body, {**address.headers, **(headers or {})})
                answer = connection.getresponse()
                return _Answer(answer.status, answer.read(), answer.getheader("inference-header-content-length", ""))
            finally:
                connection.close()
        except http.client.HTTPException as error:
            raise _another_kind(address.url, f"its answer is no HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise _unreachable(address.url, error.strerror or str(error)) from None


class GrpcControl:
    """``Control`` over gRPC."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def describe(self, model: str, version: str) -> Described:
        """As ``Control.describe``."""
        about, metadata = pb.ServerMetadataResponse(), pb.ModelMetadataResponse()
        self._call("ServerMetadata", pb.ServerMetadataRequest(), about)
        self._call("ModelMetadata", pb.ModelMetadataRequest(name=model, version=version), metadata)
        roles = (metadata.inputs, metadata.outputs)
        tensors = [[(one.name, one.datatype, list(one.shape)) for one in role] for role in roles]
        return Described(f"{about.name} {about.version}".strip(), _signature(*tensors))

    def batches(self, model: str, version: str) -> dict[int, int]:
        """As ``Control.batches``."""
        answer = management_pb2.ModelStatisticsResponse()
        self._call("ModelStatistics", management_pb2.ModelStatisticsRequest(name=model, version=version), answer)
        counts: dict[int, int] = {}
        for one in answer.model_stats:
            for size in one.batch_stats:
                counts[size.batch_size] = counts.get(size.batch_size, 0) + size.compute_infer.count
        return counts

    def infer(self, model: str, version: str, headers: Mapping[str, str], body: bytes) -> tuple[bytes, int | None]:
        """As ``Control.infer``; ``body`` names the model."""
        return self._send("ModelInfer", body), None

    def register(self, region: str, key: str, nbytes: int) -> None:
        """As ``Control.register``."""
        request = shm_pb.SystemSharedMemoryRegisterRequest(name=region, key=key, offset=0, byte_size=nbytes)
        self._send("SystemSharedMemoryRegister", request.SerializeToString())

    def unregister(self, region: str) -> None:
        """As ``Control.unregister``."""
        request = shm_pb.SystemSharedMemoryUnregisterRequest(name=region)
        self._send("SystemSharedMemoryUnregister", request.SerializeToString())

    def _call(self, method: str, request: Message, answer: Message) -> None:
        try:
            answer.ParseFromString(self._send(method, request.SerializeToString()))
        except DecodeError:
            raise _another_kind(self._address.url, f"its answer to {method} is another message") from None

    def _send(self, method: str, body: bytes) -> bytes:
        address, credentials = self._address, self._address.credentials()
        channel = (
            grpc.secure_channel(address.authority, credentials, GRPC_OPTIONS)
            if credentials
            else grpc.insecure_channel(address.authority, GRPC_OPTIONS)
        )
        with channel:
            try:
                send: Any = channel.unary_unary(f"{SERVICE}{method}")
                answer: bytes = send(body, timeout=self._timeout_s, metadata=tuple(address.headers.items()))
                return answer
            except grpc.RpcError as error:
                raise _rpc_error(address.url, error.code(), error.details() or "") from None


def _rpc_error(url: str, code: grpc.StatusCode, details: str) -> ServeError:
    codes = grpc.StatusCode
    if code in (codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED):
        return _unreachable(url, details)
    if code is codes.UNIMPLEMENTED or (code is codes.UNKNOWN and "HTTP" in details):
        return _another_kind(url, details)
    kinds = {codes.NOT_FOUND: ErrorKind.NOT_FOUND, codes.INVALID_ARGUMENT: ErrorKind.REJECTED_BY_MODEL}
    return ServeError(kinds.get(code, ErrorKind.INTERNAL), f"{url}: {code.name}: {details}")


def _unreachable(url: str, reason: str) -> ServeError:
    return ServeError(ErrorKind.NOT_READY, f"{url}: no server answers: {reason}")


def _another_kind(url: str, seen: str) -> ServeError:
    return ServeError(ErrorKind.UNSUPPORTED, f"{url}: expected a server of the Open Inference Protocol v2, {seen}")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _error_text(status: int, body: bytes) -> str:
    document = _json(body)
    text = document.get("error") if isinstance(document, dict) else None
    return f"status {status}: {text or body[:200].decode(errors='replace')}"


def _signature(inputs: list[tuple[str, str, list[Any]]], outputs: list[tuple[str, str, list[Any]]]) -> ModelSignature:
    """A signature whose rows are on axis 0, if that is free in all tensors.

    Raises:
        ServeError: unsupported, for datatypes that the protocol does not have.
    """
    for name, datatype, _ in (*inputs, *outputs):
        if datatype not in DATATYPES:
            raise ServeError(
                ErrorKind.UNSUPPORTED, f"tensor '{name}': the datatype '{datatype}' is not of the protocol"
            )
    takes, gives = (
        tuple(TensorSpec(name, DATATYPES[datatype], tuple(map(int, shape))) for name, datatype, shape in role)
        for role in (inputs, outputs)
    )
    has_rows = all(spec.shape[:1] == (-1,) for spec in (*takes, *gives))
    return ModelSignature(takes, gives, "" if has_rows else "the first dimension of a tensor is fixed")
