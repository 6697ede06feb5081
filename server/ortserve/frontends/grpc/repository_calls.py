"""The repository calls of gRPC: index, load, unload."""

from collections.abc import Callable, Mapping

from google.protobuf.message import Message

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.codecs.json_text import LoadParameter
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, awaiting
from ortserve.service.gate import Hold
from ortserve.service.repository import RepositoryService


class RepositoryCalls:
    """What lies in the repositories and what is served of it."""

    service = SERVICE_NAME

    def __init__(self, repository: RepositoryService, hold: Callable[[int], Hold]) -> None:
        """``hold`` lets the message of a load in, by its bytes; raises ServeError: overloaded."""
        self._repository = repository
        self._hold = hold

    def handlers(self) -> Handlers:
        return {
            "RepositoryIndex": awaiting(self._index),
            "RepositoryModelLoad": awaiting(self._load),
            "RepositoryModelUnload": awaiting(self._unload),
        }

    async def _index(self, data: bytes) -> Message:
        request = parse_message(pb.RepositoryIndexRequest, data)
        _require_no_repository(request.repository_name)
        entries = await self._repository.index(only_ready=request.ready)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
                )
                for entry in entries
            ]
        )

    async def _load(self, data: bytes) -> Message:
        with self._hold(len(data)):
            request = parse_message(pb.RepositoryModelLoadRequest, data)
            _require_no_repository(request.repository_name)
            await self._repository.load(request.model_name, _parameters(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, data: bytes) -> Message:
        request = parse_message(pb.RepositoryModelUnloadRequest, data)
        _require_no_repository(request.repository_name)
        await self._repository.unload(request.model_name, _parameters(request.parameters))
        return pb.RepositoryModelUnloadResponse()


def _require_no_repository(name: str) -> None:
    if name:
        raise ServeError(ErrorKind.UNSUPPORTED, "'repository_name' specification is not supported")


def _parameters(given: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, LoadParameter]:
    """Raises ServeError: invalid_input, for a parameter without a value."""
    parameters: dict[str, LoadParameter] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid_input(f"parameter '{name}': expected a value, got none")
        parameters[name] = getattr(parameter, kind)
    return parameters
