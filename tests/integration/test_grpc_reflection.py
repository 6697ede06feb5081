"""grpc.reflection on a real socket, queried by the library's own client and, for the newer version, as bytes."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, Frontend, frontend, open_stream, read
from ortserve._pb import private_pool
from ortserve._pb import reflection_v1_pb2 as pb
from servers import ServerProcess
from transports import ON_BOTH_TRANSPORTS

SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]


@pytest.fixture
async def served(grpc_transport: str) -> AsyncIterator[tuple[Frontend, grpc.aio.Channel]]:
    async with frontend(FakeInferenceService(), FakeModelService(), grpc_transport) as front:
        yield front


@pytest.fixture
def channel(served: tuple[Frontend, grpc.aio.Channel]) -> grpc.aio.Channel:
    return served[1]


@ON_BOTH_TRANSPORTS
async def test_client_without_protos_finds_the_services_and_calls_one(
    served: tuple[Frontend, grpc.aio.Channel],
) -> None:
    def ask() -> None:
        with grpc.insecure_channel(served[0].address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert sorted(database.get_services()) == SERVICES
            pool = descriptor_pool.DescriptorPool(database)
            for name in SERVICES:
                service = pool.FindServiceByName(name)
                assert service.methods
            method = pool.FindServiceByName("inference.GRPCInferenceService").FindMethodByName("ModelMetadata")
            request = message_factory.GetMessageClass(method.input_type)(name="double")
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
            answer = message_factory.GetMessageClass(method.output_type).FromString(
                call(request.SerializeToString(), timeout=LONG_S)
            )
            assert "onnxruntime_onnx" in str(answer)

    await asyncio.to_thread(ask)


@ON_BOTH_TRANSPORTS
async def test_every_method_that_is_described_is_served(zoo_server: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(zoo_server.grpc) as channel:
        for name in SERVICES:
            for method in private_pool.Default().FindServiceByName(name).methods:
                call = open_stream(channel, f"/{name}/{method.name}")
                await call.write(b"")
                await read(call)
                call.cancel()
                await call.code()
                assert "unknown method" not in (await call.details() or ""), f"{name}/{method.name}"


REQUESTS = {
    "file by name": pb.ServerReflectionRequest(file_by_filename="inference/grpc_service.proto"),
    "message": pb.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
    "method": pb.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
    "field": pb.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest.id"),
}


async def ask_v1(channel: grpc.aio.Channel, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
    stream = open_stream(channel, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    await stream.write(request.SerializeToString())
    data = await read(stream)
    assert data is not None
    await stream.done_writing()
    assert await read(stream) is None
    assert await stream.code() is grpc.StatusCode.OK
    return pb.ServerReflectionResponse.FromString(data)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
async def test_file_is_found_by_name_and_by_declared_symbols(
    channel: grpc.aio.Channel, request_: pb.ServerReflectionRequest
) -> None:
    answer = await ask_v1(channel, request_)
    assert answer.original_request == request_
    files = answer.file_descriptor_response.file_descriptor_proto
    assert b"inference/grpc_service.proto" in files[0]
    assert len(set(files)) == len(files)


async def test_message_of_proto3_has_no_extensions(channel: grpc.aio.Channel) -> None:
    asked = pb.ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelInferRequest")
    answer = await ask_v1(channel, asked)
    assert answer.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    assert not answer.all_extension_numbers_response.extension_number


UNANSWERABLE = {
    "file": (
        pb.ServerReflectionRequest(file_by_filename="no.proto"),
        grpc.StatusCode.NOT_FOUND,
        "unknown file 'no.proto'",
    ),
    "symbol": (
        pb.ServerReflectionRequest(file_containing_symbol="no.Thing"),
        grpc.StatusCode.NOT_FOUND,
        "unknown symbol 'no.Thing'",
    ),
    "type": (
        pb.ServerReflectionRequest(all_extension_numbers_of_type="no.Type"),
        grpc.StatusCode.NOT_FOUND,
        "unknown message type 'no.Type'",
    ),
    "extension": (
        pb.ServerReflectionRequest(
            file_containing_extension=pb.ExtensionRequest(
                containing_type="inference.ModelInferRequest", extension_number=7
            )
        ),
        grpc.StatusCode.NOT_FOUND,
        "extension 7",
    ),
    "nothing": (pb.ServerReflectionRequest(host="h"), grpc.StatusCode.INVALID_ARGUMENT, "got none"),
}


@pytest.mark.parametrize(("request_", "code", "text"), UNANSWERABLE.values(), ids=UNANSWERABLE)
async def test_unknown_symbol_is_an_error_in_the_answer(
    channel: grpc.aio.Channel, request_: pb.ServerReflectionRequest, code: grpc.StatusCode, text: str
) -> None:
    answer = await ask_v1(channel, request_)
    assert answer.error_response.error_code == code.value[0]
    assert text in answer.error_response.error_message
    assert answer.valid_host == request_.host


async def test_idle_client_does_not_delay_a_drain(served: tuple[Frontend, grpc.aio.Channel]) -> None:
    front, channel = served
    stream = open_stream(channel, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    await stream.write(pb.ServerReflectionRequest(list_services="*").SerializeToString())
    assert await read(stream) is not None
    await asyncio.wait_for(front.server.stop(LONG_S), LONG_S / 2)
    assert await stream.code() is grpc.StatusCode.UNAVAILABLE
