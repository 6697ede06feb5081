"""RPCs that read the state of the server and its models: health, metadata and configuration."""

from google.protobuf.message import Message

from ortserve._pb import grpc_service_pb2 as pb
from ortserve._pb import management_pb2
from ortserve.codecs.grpc_infer import require_version
from ortserve.core.signature import TensorSpec
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering, awaiting
from ortserve.service.models import ModelService


class ModelCalls:
    """Handlers of the RPCs that read the state of the server and its models."""

    service = SERVICE_NAME

    def __init__(self, models: ModelService) -> None:
        self._models = models

    def handlers(self) -> Handlers:
        return {
            "ServerLive": answering(pb.ServerLiveRequest, self._server_live),
            "ServerReady": answering(pb.ServerReadyRequest, self._server_ready),
            "ModelReady": answering(pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": answering(pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": awaiting(pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": awaiting(management_pb2.ModelConfigRequest, self._model_config),
        }

    def _server_live(self, _: pb.ServerLiveRequest) -> Message:
        return pb.ServerLiveResponse(live=self._models.is_live())

    def _server_ready(self, _: pb.ServerReadyRequest) -> Message:
        return pb.ServerReadyResponse(ready=self._models.is_ready())

    def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        require_version(request.version)
        return pb.ModelReadyResponse(ready=self._models.is_model_ready(request.name, request.version))

    def _server_metadata(self, _: pb.ServerMetadataRequest) -> Message:
        metadata = self._models.server_metadata()
        return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> Message:
        require_version(request.version)
        await self._models.prepare(request.name, request.version)
        metadata = self._models.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
            properties=metadata.properties,
        )

    async def _model_config(self, request: management_pb2.ModelConfigRequest) -> Message:
        require_version(request.version)
        await self._models.prepare(request.name, request.version)
        config = await self._models.model_config(request.name, request.version)
        return management_pb2.ModelConfigResponse(config=config)


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype.value, shape=spec.shape)
