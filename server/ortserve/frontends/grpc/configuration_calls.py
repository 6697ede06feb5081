"""The configuration call of gRPC."""

from google.protobuf.message import Message

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message, require_version_number
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering
from ortserve.service.models import ModelService


class ConfigurationCalls:
    """How models are configured."""

    service = SERVICE_NAME

    def __init__(self, models: ModelService) -> None:
        self._models = models

    def handlers(self) -> Handlers:
        return {"ModelConfig": answering(self._model_config)}

    def _model_config(self, data: bytes) -> Message:
        request = parse_message(pb.ModelConfigRequest, data)
        require_version_number(request.version)
        return pb.ModelConfigResponse(config=self._models.model_config(request.name, request.version))
