"""grpc.health.v1 on a real socket, queried by the protocol's own client."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, Frontend, frontend, open_stream, read, wait_until
from ortserve._pb import health_v1_pb2 as pb
from transports import ON_BOTH_TRANSPORTS

pytestmark = ON_BOTH_TRANSPORTS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "inference.GRPCInferenceService", "anything")


@pytest.fixture
def models() -> FakeModelService:
    return FakeModelService()


@pytest.fixture
async def served(models: FakeModelService, grpc_transport: str) -> AsyncIterator[tuple[Frontend, grpc.aio.Channel]]:
    async with frontend(FakeInferenceService(), models, grpc_transport) as front:
        yield front


@pytest.fixture
def channel(served: tuple[Frontend, grpc.aio.Channel]) -> grpc.aio.Channel:
    return served[1]


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("name", NAMES)
async def test_check_follows_readiness_for_every_service_name(
    stub: health_pb2_grpc.HealthStub, models: FakeModelService, name: str
) -> None:
    request = health_pb2.HealthCheckRequest(service=name)
    assert (await stub.Check(request, timeout=LONG_S)).status == SERVING
    models.turn(ready=False)
    assert (await stub.Check(request, timeout=LONG_S)).status == NOT_SERVING


async def test_list_contains_every_service(channel: grpc.aio.Channel, models: FakeModelService) -> None:
    models.turn(ready=False)
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]  # the library's client does not have List yet
    call = channel.unary_unary("/grpc.health.v1.Health/List")
    answer = pb.HealthListResponse.FromString(await call(b"", timeout=LONG_S))
    assert {name: health.status for name, health in answer.statuses.items()} == dict.fromkeys(
        (
            "",
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ),
        NOT_SERVING,
    )


async def test_watch_sends_the_current_status_and_each_change_once(
    stub: health_pb2_grpc.HealthStub, models: FakeModelService
) -> None:
    models.ready = False
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=LONG_S)
    statuses = [(await watch.read()).status]
    for ready in (True, True, False, True):  # the second is not a change
        models.turn(ready=ready)
        if ready is not (statuses[-1] == SERVING):
            statuses.append((await watch.read()).status)
    assert statuses == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]
    watch.cancel()


async def test_cancelled_watch_is_removed(
    stub: health_pb2_grpc.HealthStub, served: tuple[Frontend, grpc.aio.Channel]
) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=LONG_S)
    await watch.read()
    assert served[0].streams.open_count == 1
    watch.cancel()
    await wait_until(lambda: served[0].streams.open_count == 0)


async def test_watch_does_not_delay_a_drain(
    stub: health_pb2_grpc.HealthStub, served: tuple[Frontend, grpc.aio.Channel]
) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=LONG_S)
    await watch.read()
    await asyncio.wait_for(served[0].server.stop(LONG_S), LONG_S / 2)
    assert await watch.code() is grpc.StatusCode.UNAVAILABLE


async def test_malformed_message_is_an_invalid_argument(channel: grpc.aio.Channel) -> None:
    for data in (b"\xff", None):
        stream = open_stream(channel, "/grpc.health.v1.Health/Watch")
        if data is not None:
            await stream.write(data)
        await stream.done_writing()
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
