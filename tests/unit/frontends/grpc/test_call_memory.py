"""A rejected call releases its message at once; a reference cycle would hold it, uncounted, until a collection."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.message import Message

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import new_streams
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import Context, Handler, Handlers, answering, awaiting, awaiting_bytes, streaming
from ortserve.frontends.grpc.infer_calls import InferCalls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.standard_calls import HealthCalls, ReflectionCalls

GARBAGE = b"\xff" * 1000


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class FakeContext:
    """Holds the exception of an abort, as grpc's context does, and thereby all frames that it passed."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages
        self.is_waiting = asyncio.Event()
        self.aborted: BaseException | None = None

    async def abort(self, *status: object) -> NoReturn:
        assert status[0] is grpc.StatusCode.INVALID_ARGUMENT
        self.aborted = grpc.aio.AbortError(*status)
        raise self.aborted

    async def read(self) -> Any:
        if not self._messages:
            self.is_waiting.set()
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def write(self, _message: bytes) -> None:
        await asyncio.sleep(0)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("triton_grpc_error", "true"),)

    def time_remaining(self) -> None:
        return None


def answer(_: pb.ServerLiveRequest) -> Message:
    raise AssertionError("the request is garbage")


async def answer_later(request: pb.ServerLiveRequest) -> Message:
    return answer(request)


def parse(data: bytes | memoryview) -> Message:
    return parse_message(pb.ServerLiveRequest, data)


async def parse_later(data: bytes | memoryview) -> Message:
    await asyncio.sleep(0)
    return parse(data)


async def chained(data: bytes | memoryview) -> Message:
    try:
        return parse(data)
    except ServeError as error:
        raise ServeError(ErrorKind.INVALID_INPUT, "so it is") from error


async def read_and_parse(context: Context) -> None:
    parse(await context.read())


async def run(handler: Handler, context: FakeContext, data: bytes) -> None:
    """Answer a call of one message, in the way that its handler requires."""
    any_handler: Any = handler
    is_unary = handler.unary_unary is not None
    call = any_handler.unary_unary(data, context) if is_unary else any_handler.stream_stream(None, context)
    del data
    await call


def of(handlers: Handlers) -> Handler:
    (handler, *_) = handlers.values()
    return handler


def watch() -> Handler:
    models: Any = FakeModelService()
    return HealthCalls(models, new_streams(5), ()).handlers()["Watch"]


def infer_stream() -> Handler:
    inference: Any = FakeInferenceService()
    calls = InferStreamCalls(inference, inference.admission, new_streams(5), max_requests=5, max_bytes=10**6)
    return of(calls.handlers())


def model_infer() -> Handler:
    inference: Any = FakeInferenceService()
    return of(InferCalls(inference, inference.admission).handlers())


CALLS: Mapping[str, Callable[[], Handler]] = {
    "answering": partial(answering, pb.ServerLiveRequest, answer),
    "awaiting": partial(awaiting, pb.ServerLiveRequest, answer_later),
    "awaiting bytes": partial(awaiting_bytes, parse_later),
    "with a cause": partial(awaiting_bytes, chained),
    "streaming": partial(streaming, read_and_parse),
    "ModelInfer": model_infer,
    "ModelStreamInfer": infer_stream,
    "Watch": watch,
    "reflection": lambda: of(ReflectionCalls("grpc.reflection.v1.ServerReflection", new_streams(5), ()).handlers()),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
async def test_rejected_call_releases_its_message(make: Callable[[], Handler]) -> None:
    handler, data = make(), bytes(bytearray(GARBAGE))
    before = sys.getrefcount(data)
    messages = [data]
    context = FakeContext(messages)
    running = asyncio.ensure_future(run(handler, context, data))
    await asyncio.wait([running])
    assert running.exception() is context.aborted
    del running
    messages.clear()
    assert sys.getrefcount(data) == before


async def test_stream_message_is_released_with_its_answer() -> None:
    handler, data = infer_stream(), pb.ModelInferRequest(model_name="double").SerializeToString()
    before = sys.getrefcount(data)
    context = FakeContext([data])
    stream = asyncio.ensure_future(run(handler, context, b""))
    await context.is_waiting.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert sys.getrefcount(data) == before
    stream.cancel()
    await asyncio.wait([stream])
