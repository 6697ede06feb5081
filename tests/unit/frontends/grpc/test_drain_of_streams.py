"""A drain lets streams finish their current write, because grpcio cannot end a call during a write."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, infer_request, new_streams
from ortserve._pb import reflection_v1_pb2
from ortserve.frontends.grpc.calls import Calls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.standard_calls import REFLECTION_SERVICES, HealthCalls, ReflectionCalls


class SlowCaller:
    """Sends one message and reads the answer on demand."""

    def __init__(self, message: bytes) -> None:
        self._messages = [message]
        self.is_writing = asyncio.Event()
        self.may_write = asyncio.Event()
        self.written: list[bytes] = []
        self.status: grpc.StatusCode | None = None

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def write(self, message: bytes) -> None:
        self.is_writing.set()
        await self.may_write.wait()
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, *_details: object) -> NoReturn:
        self.status = code
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize("name", ["Watch", "ServerReflectionInfo", "ModelStreamInfer"])
async def test_drain_finishes_the_current_write_before_the_stream_ends(name: str) -> None:
    streams = new_streams(1)
    inference: Any = FakeInferenceService()
    models: Any = FakeModelService()
    calls: dict[str, tuple[Calls, bytes]] = {
        "Watch": (HealthCalls(models, streams, ()), b""),
        "ServerReflectionInfo": (
            ReflectionCalls(REFLECTION_SERVICES[0], streams, ()),
            reflection_v1_pb2.ServerReflectionRequest(list_services="").SerializeToString(),
        ),
        "ModelStreamInfer": (
            InferStreamCalls(inference, inference.admission, streams, max_requests=2, max_bytes=2**20),
            infer_request(),
        ),
    }
    group, message = calls[name]
    caller = SlowCaller(message)
    handler: Any = group.handlers()[name]
    call = asyncio.ensure_future(handler.stream_stream(None, caller))
    await asyncio.wait_for(caller.is_writing.wait(), LONG_S)

    streams.begin_drain()
    for _ in range(20):  # iterations of the loop, more than a cancellation takes
        await asyncio.sleep(0)
    assert not call.done()
    assert caller.status is None

    caller.may_write.set()
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.wait_for(call, LONG_S)
    assert len(caller.written) == 1
    assert caller.status is grpc.StatusCode.UNAVAILABLE
