"""The calls of ``inference.GRPCInferenceService``: bytes in, bytes or a status out.

grpc hands over and takes serialized messages, so that parsing and serializing inference messages happens within the
request's own timing. What the calls mean is decided by the services; here it is only spelled.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from ortserve._pb import grpc_service_pb2 as pb
from ortserve.codecs.grpc_infer import decode_request, encode_response, parse_message, require_version_number
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.shared_memory_calls import shared_memory_calls
from ortserve.frontends.status import STATUSES
from ortserve.service.gate import Hold
from ortserve.service.inference import Call
from ortserve.service.shared_memory import SharedMemory

T = TypeVar("T")

SERVICE_NAME: Final = "inference.GRPCInferenceService"

logger = logging.getLogger(__name__)


class Inference(Protocol):
    """What this frontend needs of the inference service."""

    def hold(self, size: int) -> Hold:
        """Count the bytes of a body while it is held. Raises ServeError: overloaded."""
        ...

    def receive(self, protocol: str, timeout_ns: int | None = None) -> Call:
        """Begin a call, now that its message is there."""
        ...

    async def serve(
        self, call: Call, decode: Callable[[], InferRequest], encode: Callable[[InferRequest, InferResponse], T]
    ) -> T:
        """Answer a call, counting and timing it. Raises ServeError and nothing else."""
        ...


class ServerMetadata(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def extensions(self) -> Sequence[str]: ...


class ModelMetadata(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def versions(self) -> Sequence[str]: ...
    @property
    def platform(self) -> str: ...
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def properties(self) -> Mapping[str, str]: ...


class Models(Protocol):
    """What this frontend needs of the model service."""

    def is_live(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model can be asked now; False for an unknown one. ``version`` is ``""`` for any."""
        ...

    def server_metadata(self) -> ServerMetadata: ...
    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """Raises ServeError: not_found, not_ready."""
        ...


Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Method: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]


class Servicer:
    """Answers every call of the service. All methods run on the event loop; a cancelled call raises CancelledError."""

    def __init__(self, inference: Inference, models: Models, shared_memory: SharedMemory) -> None:
        self._inference = inference
        self._models = models
        self._shared_memory = shared_memory

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers: method names to calls, without any serializer of grpc's."""
        calls: dict[str, Method] = {
            "ServerLive": _answering(self._server_live),
            "ServerReady": _answering(self._server_ready),
            "ModelReady": _answering(self._model_ready),
            "ServerMetadata": _answering(self._server_metadata),
            "ModelMetadata": _answering(self._model_metadata),
            "ModelInfer": self._model_infer,
            **{name: _answering(answer) for name, answer in shared_memory_calls(self._shared_memory).items()},
        }
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME, {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
        )

    async def _model_infer(self, data: bytes, context: Context) -> bytes:
        left_s = context.time_remaining()
        call = self._inference.receive("grpc", None if left_s is None else int(left_s * 1e9))
        try:
            with self._inference.hold(len(data)):
                answer = await self._inference.serve(call, partial(decode_request, data), _encode)
        except ServeError as error:
            return await _abort(context, error)
        context.set_trailing_metadata((("server-timing", call.timing.server_timing().decode()),))
        return answer

    def _server_live(self, data: bytes) -> Message:
        parse_message(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=self._models.is_live())

    def _server_ready(self, data: bytes) -> Message:
        parse_message(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self._models.is_ready())

    def _model_ready(self, data: bytes) -> Message:
        request = parse_message(pb.ModelReadyRequest, data)
        require_version_number(request.version)
        return pb.ModelReadyResponse(ready=self._models.is_model_ready(request.name, request.version))

    def _server_metadata(self, data: bytes) -> Message:
        parse_message(pb.ServerMetadataRequest, data)
        metadata = self._models.server_metadata()
        return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)

    def _model_metadata(self, data: bytes) -> Message:
        request = parse_message(pb.ModelMetadataRequest, data)
        require_version_number(request.version)
        metadata = self._models.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
            properties=metadata.properties,
        )


def _encode(_request: InferRequest, response: InferResponse) -> bytes:
    return encode_response(response)


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype.value, shape=spec.shape)


def _answering(answer: Callable[[bytes], Message]) -> Method:
    """Make a call of a function that answers at once."""

    async def call(data: bytes, context: Context) -> bytes:
        try:
            return answer(data).SerializeToString()
        except ServeError as error:
            failure = error
        except Exception:  # a fault of ours: grpc would send its text, whatever is in it, to the caller
            logger.exception("call failed")
            failure = ServeError(ErrorKind.INTERNAL, "internal error")
        return await _abort(context, failure)

    return call


_MAX_DETAILS_BYTES: Final = 2000
"""Of a status message. It travels percent-encoded, at most thrice as long, among the trailing metadata, which peers
refuse from 8 KiB on: the caller would see that refusal instead of our error."""


async def _abort(context: Context, error: ServeError) -> NoReturn:
    details = error.message.encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))),)
    await context.abort(STATUSES[error.kind].grpc, details, metadata)
    raise AssertionError("abort always raises")
