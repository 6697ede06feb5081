"""grpc.health.v1 and grpc.reflection: services that load balancers, Kubernetes and tools such as grpcurl expect."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

# v1alpha differs from v1 in the package only, so the messages of v1 serve both. Its import registers the descriptors of
# v1alpha, which clients request.
from ortserve._pb import health_v1_pb2, private_pool, reflection_v1_pb2, reflection_v1alpha_pb2  # noqa: F401
from ortserve.codecs.grpc_infer import parse_message
from ortserve.frontends.grpc.calls import Context, Handlers, answering, read, read_one, streaming, write
from ortserve.frontends.grpc.streams import Streams
from ortserve.service.models import ModelService

REFLECTION_SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_NAMED_BY: Final[Mapping[str | None, str]] = {
    "file_by_filename": "file",
    "file_containing_symbol": "symbol",
    "all_extension_numbers_of_type": "message type",
}
"""What the fields of a reflection request name, for errors."""


class HealthCalls:
    """Handlers of the health service. Every service name gets the readiness of the whole server."""

    service = "grpc.health.v1.Health"

    def __init__(self, models: ModelService, streams: Streams, services: Iterable[str]) -> None:
        """``streams`` limits the ``Watch`` calls. ``services`` are the names that ``List`` returns."""
        self._models = models
        self._streams = streams
        self._services = ("", *services)

    def handlers(self) -> Handlers:
        return {
            "Check": answering(health_v1_pb2.HealthCheckRequest, self._check),
            "List": answering(health_v1_pb2.HealthListRequest, self._list),
            "Watch": streaming(self._watch),
        }

    def _check(self, _: health_v1_pb2.HealthCheckRequest) -> Message:
        return self._status()

    def _list(self, _: health_v1_pb2.HealthListRequest) -> Message:
        return health_v1_pb2.HealthListResponse(statuses=dict.fromkeys(self._services, self._status()))

    async def _watch(self, context: Context) -> None:
        with self._streams.open(is_inference=False) as opened:
            parse_message(health_v1_pb2.HealthCheckRequest, await opened.wait(read_one(context)))
            sent: health_v1_pb2.HealthCheckResponse | None = None
            while True:
                change = self._models.readiness_change()
                status = self._status()
                if status != sent:
                    await write(context, status.SerializeToString())
                    sent = status
                await opened.wait(change.wait())

    def _status(self) -> health_v1_pb2.HealthCheckResponse:
        response = health_v1_pb2.HealthCheckResponse
        return response(status=response.SERVING if self._models.is_ready() else response.NOT_SERVING)


class ReflectionCalls:
    """Handlers of one version of the reflection service. They answer with the descriptors in ``ortserve._pb``."""

    def __init__(self, service: str, streams: Streams, services: Iterable[str]) -> None:
        """``service`` is one of ``REFLECTION_SERVICES``; ``services`` are the names of all services of the server."""
        self.service = service
        self._streams = streams
        self._services = sorted(services)

    def handlers(self) -> Handlers:
        return {"ServerReflectionInfo": streaming(self._server_reflection_info)}

    async def _server_reflection_info(self, context: Context) -> None:
        with self._streams.open(is_inference=False) as opened:
            while (data := await opened.wait(read(context))) is not None:
                request = parse_message(reflection_v1_pb2.ServerReflectionRequest, data)
                response = self._answer(request)
                response.valid_host = request.host
                response.original_request.CopyFrom(request)
                await write(context, response.SerializeToString())

    def _answer(self, request: reflection_v1_pb2.ServerReflectionRequest) -> reflection_v1_pb2.ServerReflectionResponse:
        pb = reflection_v1_pb2
        pool = private_pool.Default()
        asked = request.WhichOneof("message_request")
        try:
            if asked == "list_services":
                services = [pb.ServiceResponse(name=name) for name in self._services]
                return pb.ServerReflectionResponse(list_services_response=pb.ListServiceResponse(service=services))
            if asked == "file_by_filename":
                return _files(pool.FindFileByName(request.file_by_filename))
            if asked == "file_containing_symbol":
                return _files(_file_declaring(request.file_containing_symbol))
            if asked == "all_extension_numbers_of_type":
                pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                none = pb.ExtensionNumberResponse(base_type_name=request.all_extension_numbers_of_type)
                return pb.ServerReflectionResponse(all_extension_numbers_response=none)
        except KeyError:
            text = f"unknown {_NAMED_BY[asked]} '{getattr(request, asked)}'"
            return _error(grpc.StatusCode.NOT_FOUND, text)
        if asked == "file_containing_extension":
            extension = request.file_containing_extension
            text = f"unknown extension {extension.extension_number} of '{extension.containing_type}'"
            return _error(grpc.StatusCode.NOT_FOUND, text)
        return _error(grpc.StatusCode.INVALID_ARGUMENT, "message_request: expected a known kind of request, got none")


def _error(code: grpc.StatusCode, text: str) -> reflection_v1_pb2.ServerReflectionResponse:
    number: int = code.value[0]
    error = reflection_v1_pb2.ErrorResponse(error_code=number, error_message=text)
    return reflection_v1_pb2.ServerReflectionResponse(error_response=error)


def _file_declaring(symbol: str) -> FileDescriptor:
    """Return the file that declares a symbol. Raises KeyError."""
    pool = private_pool.Default()
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # the function above does not find methods
        return pool.FindMethodByName(symbol).containing_service.file


def _files(file: FileDescriptor) -> reflection_v1_pb2.ServerReflectionResponse:
    serialized = [each.serialized_pb for each in _with_imports(file, set())]
    found = reflection_v1_pb2.FileDescriptorResponse(file_descriptor_proto=serialized)
    return reflection_v1_pb2.ServerReflectionResponse(file_descriptor_response=found)


def _with_imports(file: FileDescriptor, seen: set[str]) -> Iterator[FileDescriptor]:
    """Yield the file and every file that it imports, each once."""
    if file.name not in seen:
        seen.add(file.name)
        yield file
        for imported in file.dependencies:
            yield from _with_imports(imported, seen)
