"""Calls that are answered before their request is complete, with grpc's sync and asyncio clients."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, MAX_BODY_BYTES, Frontend, frontend, infer_request, open_stream, read
from ortserve.frontends.grpc.calls import SERVICE_NAME
from transports import ON_BOTH_TRANSPORTS

pytestmark = ON_BOTH_TRANSPORTS

INFER = f"/{SERVICE_NAME}/ModelInfer"


@pytest.fixture
async def served(grpc_transport: str) -> AsyncIterator[tuple[Frontend, grpc.aio.Channel]]:
    async with frontend(FakeInferenceService(), FakeModelService(), grpc_transport) as front:
        yield front


async def test_unknown_method_is_rejected_while_the_client_sends(
    served: tuple[Frontend, grpc.aio.Channel],
) -> None:
    stream = open_stream(served[1], "/nothing/Here")
    assert await read(stream) is None
    assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "unknown method '/nothing/Here'" in (await stream.details() or "")


async def test_unary_call_is_answered_before_its_client_has_ended_its_side(
    served: tuple[Frontend, grpc.aio.Channel],
) -> None:
    stream = open_stream(served[1], INFER)
    await stream.write(infer_request())
    assert await read(stream) is not None
    assert await read(stream) is None
    assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 20_000_000])
async def test_upload_rejected_at_its_start_shows_its_status(
    served: tuple[Frontend, grpc.aio.Channel], size: int
) -> None:
    front, channel = served
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
    for _ in range(3):
        assert await send(bytes(size), timeout=LONG_S).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def ask() -> grpc.StatusCode:
        with grpc.insecure_channel(front.address) as sync:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = sync.unary_unary(INFER)
            _, seen = call.with_call(infer_request(), timeout=LONG_S)
            assert seen.code() is grpc.StatusCode.OK
            for _ in range(3):
                code: grpc.StatusCode = call.future(bytes(size), timeout=LONG_S).code()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            _, seen = call.with_call(infer_request(), timeout=LONG_S)
            return seen.code()

    assert await asyncio.to_thread(ask) is grpc.StatusCode.OK
