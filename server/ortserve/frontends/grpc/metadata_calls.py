"""Health and metadata: the calls that ask about the server and its models."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from google.protobuf.message import Message

from ortserve._pb import grpc_service_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message, require_version_number
from ortserve.core.signature import TensorSpec
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering


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


class MetadataCalls:
    """Answers what there is to know about the server and its models."""

    service = SERVICE_NAME

    def __init__(self, models: Models) -> None:
        self._models = models

    def handlers(self) -> Handlers:
        return {
            "ServerLive": answering(self._server_live),
            "ServerReady": answering(self._server_ready),
            "ModelReady": answering(self._model_ready),
            "ServerMetadata": answering(self._server_metadata),
            "ModelMetadata": answering(self._model_metadata),
        }

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


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype.value, shape=spec.shape)
