"""Blocking calls about a model on a running server, over REST or gRPC.

It uses calls that all servers of the protocol have, and the extensions for statistics and shared memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

import grpc
import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from ortserve._pb import grpc_service_pb2 as pb
from ortserve._pb import management_pb2, shared_memory_pb2
from ortserve.core.dtypes import DATATYPES
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import Address
from ortserve.tools.client import Client, another_kind, connect, failed, path_of, unreachable
from ortserve.tools.encoding import Encoded, Outputs, Parameters, decode_grpc, decode_rest, encode_grpc, encode_rest

_GRPC_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_OPENING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface of a connection, and SETTINGS without entries (RFC 9113, section 3.4)."""
_CODES: Final = {
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind.FORBIDDEN,
    grpc.StatusCode.UNIMPLEMENTED: ErrorKind.UNSUPPORTED,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.NOT_READY,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.REJECTED_BY_MODEL,
}


class Control:
    """Blocking calls to a server about one model. Each raises ServeError: not_ready, if the server cannot be reached,
    unsupported, if it does not speak the protocol, or the kind of its error.
    """

    def __init__(self, address: Address, model: str, version: str = "", timeout_s: float = 5.0) -> None:
        self.address: Final = address
        self.model: Final = model
        self.version: Final = version
        self.path: Final = path_of(model, version)
        self._model = {"name": model, "version": version}
        self._timeout_s = timeout_s
        self._is_tried = False

    def describe(self) -> tuple[str, ModelSignature]:
        """The name and version of the server, and the signature of the model. Raises not_found for an unknown model."""
        try:
            about = self._ask("GET", "/v2", pb, "ServerMetadata")
            server = f"{about['name']} {about.get('version', '')}".strip()
        except (ServeError, LookupError, TypeError) as error:
            if isinstance(error, ServeError) and error.kind is not ErrorKind.NOT_FOUND:
                raise
            is_other = isinstance(error, ServeError)
            seen = "got status 404 for /v2" if is_other else "got metadata without a name"
            raise another_kind(self.address, seen) from None
        try:
            metadata = self._ask("GET", self.path, pb, "ModelMetadata", self._model)
        except ServeError as error:
            raise ServeError(error.kind, error.message + self._known()) from None
        try:
            return server, _signature(metadata["inputs"], metadata["outputs"])
        except (LookupError, TypeError, ValueError) as error:
            raise another_kind(self.address, f"got metadata of the model that cannot be read: {error!r}") from None

    def _try_connection(self) -> None:
        """Connect to a gRPC port without the library, which gives poorer reasons if that fails, and logs errors."""
        try:
            with connect(self.address, self._timeout_s) as connected, connected.makefile("rb") as answer:
                connected.sendall(_OPENING)
                kind = answer.read(9)[3:4]
        except OSError as error:
            raise failed(self.address, error, self._timeout_s) from None
        if kind != b"\4":  # both sides begin with SETTINGS
            hint = "does it require a client certificate (--cert)" if self.address.is_tls else "or one for grpcs://"
            raise another_kind(self.address, f"got no HTTP/2; is this an HTTP port, {hint}?")
        self._is_tried = True

    def has_sequences(self) -> bool:
        """Whether requests of the model belong to sequences; False if the server does not say."""
        with suppress(ServeError, LookupError, TypeError):
            config = self._ask("GET", f"{self.path}/config", management_pb2, "ModelConfig", self._model)
            return "sequence_batching" in (config["config"] if self.address.is_grpc else config)
        return False

    def batches(self) -> dict[int, int] | None:
        """Counts of the batches that have run so far, by rows; None if the server does not say."""
        counts: dict[int, int] = {}
        with suppress(ServeError, LookupError, TypeError):
            stats = self._ask("GET", f"{self.path}/stats", management_pb2, "ModelStatistics", self._model)
            for size in (size for one in stats["model_stats"] for size in one["batch_stats"]):
                rows, count = int(size["batch_size"]), int(size["compute_infer"].get("count", 0))
                counts[rows] = counts.get(rows, 0) + count
            return counts
        return None

    def encode(
        self, tensors: Sequence[Tensor], parameters: Parameters | None = None, *, is_binary: bool = True
    ) -> Encoded:
        """A request for the model in the protocol of its port. ``is_binary`` decides the form of tensors over REST."""
        if self.address.is_grpc:
            return encode_grpc(self.model, self.version, tensors, parameters)
        return encode_rest(tensors, parameters, is_binary=is_binary)

    def infer(self, request: Encoded) -> Outputs:
        """Send one request, and return the outputs of its answer."""
        try:
            if self.address.is_grpc:
                return decode_grpc(self._send_rpc("ModelInfer", request.body))
            with closing(Client(self.address, self._timeout_s)) as client:
                answer = client.call(f"{self.path}/infer", request.body, request.headers)
            return decode_rest(answer.body, answer.json_size)
        except ServeError as error:
            hint = self._known() if error.kind is ErrorKind.NOT_FOUND else ""
            raise ServeError(error.kind, error.message + hint) from None

    def register(self, region: str, nbytes: int) -> None:
        """Register a region of shared memory."""
        fields = {"name": region, "key": f"/{region}", "offset": 0, "byte_size": nbytes}
        path = f"/v2/systemsharedmemory/region/{region}/register"
        self._ask("POST", path, shared_memory_pb2, "SystemSharedMemoryRegister", fields)

    def unregister(self, region: str) -> None:
        """Unregister a region of shared memory."""
        path = f"/v2/systemsharedmemory/region/{region}/unregister"
        self._ask("POST", path, shared_memory_pb2, "SystemSharedMemoryUnregister", {"name": region})

    def _known(self) -> str:
        """A hint for errors: the models of the server, or the ready versions of the model if the server has it."""
        try:
            index = self._ask("POST", "/v2/repository/index", management_pb2, "RepositoryIndex")
            models = index["models"] if isinstance(index, dict) else index
            names = dict.fromkeys(str(one["name"]) for one in models)
            if self.model not in names:
                return f"; the server has {', '.join(names)}"
            ready = [one["version"] for one in models if (one["name"], one.get("state")) == (self.model, "READY")]
            return f"; its ready versions: {', '.join(map(str, ready)) or 'none'}"
        except (ServeError, LookupError, TypeError):
            return ""

    def _ask(self, method: str, path: str, messages: Any, rpc: str, fields: Mapping[str, Any] | None = None) -> Any:
        """Make a call over REST or gRPC. The answers differ in the types of numbers only."""
        fields = fields or {}
        if not self.address.is_grpc:
            body = {name: value for name, value in fields.items() if name != "name"}  # the name is in the path
            with closing(Client(self.address, self._timeout_s)) as client:
                answer = client.call(path, orjson.dumps(body) if method == "POST" else None)
            document = answer.json() if answer.body else {}
            if document is None:
                raise another_kind(self.address, f"got {len(answer.body)} bytes that are not JSON from {method} {path}")
            return document
        request, message = getattr(messages, f"{rpc}Request")(**fields), getattr(messages, f"{rpc}Response")()
        try:
            message.ParseFromString(self._send_rpc(rpc, request.SerializeToString()))
        except DecodeError:
            raise another_kind(self.address, f"got another message as the answer to {rpc}") from None
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def _send_rpc(self, rpc: str, body: bytes) -> bytes:
        if not self._is_tried:
            self._try_connection()
        address, codes = self.address, grpc.StatusCode
        if address.is_tls:
            ca, cert = (file.read_bytes() if file else None for file in (address.ca, address.cert))
            credentials = grpc.ssl_channel_credentials(ca, private_key=cert, certificate_chain=cert)
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
        if code is codes.DEADLINE_EXCEEDED:
            raise unreachable(address, f"no answer within {self._timeout_s:g} s")
        # All servers of the protocol have this call, and may lack extensions.
        if (code is codes.UNIMPLEMENTED and rpc == "ServerMetadata") or (code is codes.UNKNOWN and "HTTP" in details):
            raise another_kind(address, details)
        hint = " (send a key with --key-file)" if code in (codes.UNAUTHENTICATED, codes.PERMISSION_DENIED) else ""
        raise ServeError(_CODES.get(code, ErrorKind.INTERNAL), f"{address.url}: {code.name}: {details}{hint}")


def _signature(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> ModelSignature:
    """A signature whose rows are on axis 0, if that is free in all tensors. LookupError for unknown datatypes."""
    takes, gives = (
        tuple(TensorSpec(one["name"], DATATYPES[one["datatype"]], tuple(map(int, one["shape"]))) for one in role)
        for role in (inputs, outputs)
    )
    has_rows = all(spec.shape[:1] == (-1,) for spec in (*takes, *gives))
    return ModelSignature(takes, gives, "" if has_rows else "the first dimension of a tensor is fixed")
