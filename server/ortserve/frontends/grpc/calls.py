"""Calls: the seam between what gRPC methods mean and the server that listens for them.

A module of calls is a class with a ``service`` and its ``handlers()``; ``app/composition`` makes one of each and gives
them all to ``GrpcServer``. To add calls, write such a class and add it there: nothing else has to know of it.

    class GreetingCalls:
        service = SERVICE_NAME

        def __init__(self, greetings: Greetings) -> None:
            self._greetings = greetings

        def handlers(self) -> Handlers:
            return {"Greet": answering(self._greet), "GreetSlowly": awaiting(self._greet_slowly)}

        def _greet(self, data: bytes) -> Message:
            request = parse_message(pb.GreetRequest, data)
            return pb.GreetResponse(text=self._greetings.of(request.name))

grpc hands over and takes serialized messages, so that parsing and serializing happen within a request's own time. All
handlers run on the event loop; a caller who leaves, or whose deadline passes, cancels its handler.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.status import STATUSES
from ortserve.service.access import Guard

logger = logging.getLogger(__name__)

SERVICE_NAME: Final = "inference.GRPCInferenceService"
"""The service of the Open Inference Protocol, whose calls are spread over several classes."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]"
"""Name of a method, without its service, to what answers it; see the functions below for making one."""

MetadataEntry: TypeAlias = tuple[str, str | bytes]
"""A name in lower case and its value, which is bytes for ``-bin`` names."""
Metadata: TypeAlias = tuple[MetadataEntry, ...]


class CallHead(Protocol):
    """What a quick call sees of its headers.

    Attributes:
        metadata: All of it.
        load_format: The value of ``endpoint-load-metrics-format``, empty where it is not there.
    """

    @property
    def metadata(self) -> Metadata: ...
    @property
    def load_format(self) -> str: ...


OnAnswer: TypeAlias = Callable[[bytes | memoryview, bytes, MetadataEntry | None], None]
"""Told of an answer, its ``server-timing`` and a further entry of its trailing metadata."""

OnFailure: TypeAlias = Callable[[ServeError], None]
"""Told of what went wrong."""

QuickCall: TypeAlias = Callable[
    [bytes | memoryview, int | None, CallHead, OnAnswer, OnFailure], Callable[[], object] | None
]
"""A unary call that needs no task: message, time that the caller waits (ns), headers, and what is to be called once, on
the loop. Returns what cancels it, None where it is over."""


INTERNAL_ERROR: Final = ServeError(ErrorKind.INTERNAL, "internal error")
"""What a caller sees of a fault of ours: grpc would send the text of the exception, whatever is in it."""


class Calls(Protocol):
    """Some or all calls of one service. No two classes answer the same method."""

    @property
    def service(self) -> str:
        """Full name of the service, as it stands in a method's path."""
        ...

    def handlers(self) -> Handlers: ...


def answering(answer: Callable[[bytes], Message]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A unary call of a function that answers at once, within 1 ms.

    ``answer`` takes the serialized request and raises ServeError for whatever is wrong.
    """

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        try:
            return answer(bytes(data)).SerializeToString()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an error
            status = status_of(seen(error))
        del data
        return await abort(context, status)

    return unary(call)


def awaiting(answer: Callable[[bytes], Awaitable[Message]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A unary call of a function that waits for something first; otherwise as ``answering``."""

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        try:
            return (await answer(bytes(data))).SerializeToString()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an error
            status = status_of(seen(error))
        del data
        return await abort(context, status)

    return unary(call)


def seen(error: Exception) -> ServeError:
    """What a caller sees of an exception; faults of ours are logged."""
    if isinstance(error, ServeError):
        return error
    logger.error("call failed", exc_info=error)
    return INTERNAL_ERROR


def unary(
    call: Callable[[bytes | memoryview, Context], Awaitable[bytes | memoryview]],
) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A call that sees its context: one message in, one out. It ends a failure with ``abort``, which see."""
    return grpc.unary_unary_rpc_method_handler(call, response_serializer=bytes)  # for grpcio, which takes no views


def streaming(call: Callable[[Context], Awaitable[None]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A call of any number of messages each way, by ``read`` and ``write``.

    On the wire a unary message is a stream of one, so such a handler can take any call.
    """

    async def stream(_messages: object, context: Context) -> None:
        try:
            await call(context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an error
            status = status_of(seen(error))
        else:
            return
        await abort(context, status)

    return grpc.stream_stream_rpc_method_handler(stream, response_serializer=bytes)


def check(guard: Guard, metadata: Iterable[MetadataEntry] | None) -> ServeError | None:
    """Why a guard refuses a call, by its metadata; None where it lets it pass."""
    try:
        guard.check([value for key, value in metadata or () if key == "authorization"])
    except ServeError as error:
        return error
    return None


async def read(context: Context) -> bytes | memoryview | None:
    """The next message of a stream, None when the caller has sent all."""
    data: object = await context.read()  # declared as bytes alone
    return data if isinstance(data, bytes | memoryview) else None


async def write(context: Any, data: bytes | memoryview) -> None:
    """Send a message of a stream; returns when the transport has room for more.

    Raises:
        asyncio.CancelledError: The caller has left; grpc fails to send before it cancels the call.
    """
    try:
        await context.write(data)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def read_one(context: Context) -> bytes:
    """The message of a call that takes one.

    Raises:
        ServeError: invalid_input, when the caller sent none.
    """
    data = await read(context)
    if data is None:
        raise invalid_input("the call takes one message, got none")
    return bytes(data)


_MAX_DETAILS_BYTES: Final = 2000
"""Of a status message. It travels percent-encoded, at most thrice as long, among the trailing metadata, which peers
refuse from 8 KiB on: the caller would see that refusal instead of our error."""


Status: TypeAlias = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
"""Code, details and trailing metadata of a call that fails."""


async def abort(context: Context, status: Status) -> NoReturn:
    """End a call with a status.

    Whoever calls this has let go of the error, whose frames hold the request, and of the request: grpc keeps what it
    raises here, and so the frames that wait for it, until the garbage collector finds that circle.

    Raises:
        grpc.aio.AbortError: The call has ended.
        asyncio.CancelledError: As ``write``.
    """
    try:
        await context.abort(*status)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


def status_of(error: ServeError) -> Status:
    """How a call ends that failed, with the time to come back where there is one."""
    details = error.message.encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))),)
    return STATUSES[error.kind].grpc, details, metadata
