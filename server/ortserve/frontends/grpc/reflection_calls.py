"""grpc.reflection: what the server can be asked, for clients that were built without its protos, such as grpcurl."""

from collections.abc import Iterable, Iterator
from typing import Final

import grpc
from google.protobuf.descriptor import FileDescriptor

# The older version differs in its package alone, so that the messages of one serve both; its descriptors are asked for.
from ortserve._pb import private_pool, reflection_v1alpha_pb2  # noqa: F401
from ortserve._pb import reflection_v1_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.frontends.grpc.calls import Context, Handlers, read, streaming, write
from ortserve.frontends.grpc.streams import Streams

REFLECTION_SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class ReflectionCalls:
    """Answers one version of the reflection service from the descriptors of our own messages."""

    def __init__(self, service: str, streams: Streams, services: Iterable[str]) -> None:
        """Take the version to answer as, where streams are counted, and all services of the server."""
        self.service = service
        self._streams = streams
        self._services = sorted(services)

    def handlers(self) -> Handlers:
        return {"ServerReflectionInfo": streaming(self._server_reflection_info)}

    async def _server_reflection_info(self, context: Context) -> None:
        with self._streams.open():
            while (data := await self._streams.until_drain(read(context))) is not None:
                request = parse_message(pb.ServerReflectionRequest, data)
                response = self._answer(request)
                response.valid_host = request.host
                response.original_request.CopyFrom(request)
                await write(context, response.SerializeToString())

    def _answer(self, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
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
            return _error(grpc.StatusCode.NOT_FOUND, f"no {asked} '{getattr(request, asked or '')}'")
        if asked == "file_containing_extension":
            extension = request.file_containing_extension
            text = f"no extension {extension.extension_number} of '{extension.containing_type}'"
            return _error(grpc.StatusCode.NOT_FOUND, text)
        return _error(grpc.StatusCode.INVALID_ARGUMENT, "the request asks for nothing that is known")


def _error(code: grpc.StatusCode, text: str) -> pb.ServerReflectionResponse:
    number: int = code.value[0]
    return pb.ServerReflectionResponse(error_response=pb.ErrorResponse(error_code=number, error_message=text))


def _file_declaring(symbol: str) -> FileDescriptor:
    """Raises KeyError."""
    pool = private_pool.Default()
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # which knows everything but methods
        return pool.FindMethodByName(symbol).containing_service.file


def _files(file: FileDescriptor) -> pb.ServerReflectionResponse:
    found = pb.FileDescriptorResponse(file_descriptor_proto=[each.serialized_pb for each in _with_imports(file, set())])
    return pb.ServerReflectionResponse(file_descriptor_response=found)


def _with_imports(file: FileDescriptor, seen: set[str]) -> Iterator[FileDescriptor]:
    """The file, then all that it imports, each once."""
    if file.name not in seen:
        seen.add(file.name)
        yield file
        for imported in file.dependencies:
            yield from _with_imports(imported, seen)
