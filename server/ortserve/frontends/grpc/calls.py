"""The interface between the handlers of RPCs and the servers that call them.

A group of handlers is a class with the attribute ``service`` and the method ``handlers()``. ``app/protocol_servers``
creates one object of each group and passes all of them to the ``Router``. ``frontends/access`` assigns each method to
an access group.

    class GreetingCalls:
        service = SERVICE_NAME

        def __init__(self, greetings: Greetings) -> None:
            self._greetings = greetings

        def handlers(self) -> Handlers:
            return {"Greet": answering(pb.GreetRequest, self._greet), "Echo": unary(self._echo)}

        def _greet(self, request: pb.GreetRequest) -> Message:
            return pb.GreetResponse(text=self._greetings.of(request.name))

Handlers of inference receive and return serialized messages, so that the time of a request includes parsing and
serializing. All handlers run on the event loop. The server cancels a handler when its caller disconnects or its
deadline passes.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from ortserve.codecs.grpc_infer import parse_message
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.status import STATUSES
from ortserve.service.access import Guard

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)

SERVICE_NAME: Final = "inference.GRPCInferenceService"
"""The service of the Open Inference Protocol. Several groups implement it together."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]"
"""Handlers by method name without the service. The functions of this module create them."""

MetadataEntry: TypeAlias = tuple[str, str | bytes]
"""A name in lower case and its value, which is bytes if the name ends with ``-bin``."""
Metadata: TypeAlias = tuple[MetadataEntry, ...]

INTERNAL_ERROR: Final = ServeError(ErrorKind.INTERNAL, "internal error")
"""The error for faults of the server. grpc would send the text of the exception, which may contain private data."""


class Calls(Protocol):
    """Some or all handlers of one service. Two groups never implement the same method."""

    @property
    def service(self) -> str:
        """Full name of the service, as in the path of a method."""
        ...

    def handlers(self) -> Handlers: ...


def answering(request_type: type[Request], answer: Callable[[Request], Message]) -> Handler:
    """Create a unary handler from a function that answers a request within 1 ms, or raises ServeError."""

    async def answer_at_once(data: bytes | memoryview) -> Message:
        return answer(parse_message(request_type, data))

    return awaiting_bytes(answer_at_once)


def awaiting(request_type: type[Request], answer: Callable[[Request], Awaitable[Message | bytes]]) -> Handler:
    """Create a unary handler from a coroutine function; otherwise as ``answering``."""

    async def parse_and_answer(data: bytes | memoryview) -> Message | bytes:
        return await answer(parse_message(request_type, data))

    return awaiting_bytes(parse_and_answer)


def awaiting_bytes(answer: Callable[[bytes | memoryview], Awaitable[Message | bytes]]) -> Handler:
    """Create a unary handler from a coroutine function that parses the request itself; otherwise as ``awaiting``.

    It may return a serialized message.
    """

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        try:
            answered = await answer(data)
            return answered if isinstance(answered, bytes) else answered.SerializeToString()
        except Exception as error:  # noqa: BLE001 - every failure becomes a status
            status = status_of(visible_error(error))
        del data
        return await abort(context, status)

    return unary(call)


def visible_error(error: Exception) -> ServeError:
    """Return the error that the caller sees for an exception. Logs exceptions that are faults of the server."""
    if isinstance(error, ServeError):
        return error
    logger.error("call failed", exc_info=error)
    return INTERNAL_ERROR


def unary(call: Callable[[bytes | memoryview, Context], Awaitable[bytes | memoryview]]) -> Handler:
    """Create a unary handler from a coroutine function with a context. ``call`` ends failed calls with ``abort``."""
    return grpc.unary_unary_rpc_method_handler(call, response_serializer=bytes)  # grpcio accepts no memoryviews


def streaming(call: Callable[[Context], Awaitable[None]]) -> Handler:
    """Create a handler for any number of messages in both directions. ``call`` uses ``read`` and ``write``.

    On the wire a unary message is a stream of one message, so this handler can answer any method.
    """

    async def stream(_messages: object, context: Context) -> None:
        try:
            await call(context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - every failure becomes a status
            status = status_of(visible_error(error))
        else:
            return
        await abort(context, status)

    return grpc.stream_stream_rpc_method_handler(stream, response_serializer=bytes)


def check_key(guard: Guard, metadata: Iterable[MetadataEntry] | None) -> ServeError | None:
    """Return the error of a call whose metadata contains no valid key; None if the guard accepts the call."""
    return guard.refusal([value for key, value in metadata or () if key == "authorization"])


async def read(context: Context) -> bytes | memoryview | None:
    """Return the next message of a stream; None after the last one."""
    data: object = await context.read()  # grpc's stubs declare bytes only
    return data if isinstance(data, bytes | memoryview) else None


def has_unread(context: Any) -> bool:
    """Whether a message that ``read`` has not returned has arrived or is arriving; False on grpcio."""
    tell: Callable[[], bool] | None = getattr(context, "has_unread", None)
    return tell is not None and tell()


async def write(context: Any, data: bytes | memoryview) -> None:
    """Send a message of a stream. Returns when the transport accepts more.

    Raises:
        asyncio.CancelledError: The caller disconnected; grpc fails the write before it cancels the call.
    """
    try:
        await context.write(data)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def read_one(context: Context) -> bytes:
    """Return the message of a call that expects one message.

    Raises:
        ServeError: invalid_input if the caller sent no message.
    """
    data = await read(context)
    if data is None:
        raise invalid_input("expected one message, got none")
    return bytes(data)


_MAX_DETAILS_BYTES: Final = 2000
"""Maximum size of a status message. Percent-encoding makes it at most three times as long. Peers reject trailing
metadata of more than 8 KiB, and the caller would see this rejection instead of the error."""


Status: TypeAlias = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
"""Code, details and trailing metadata of a failed call."""


async def abort(context: Context, status: Status) -> NoReturn:
    """End a call with a status.

    Drop all references to the request and to the error before this call: the frames of the error refer to the request.
    grpc holds the exception raised here, and with it the waiting frames, in a reference cycle that only the garbage
    collector frees.

    Raises:
        grpc.aio.AbortError: The call has ended.
        asyncio.CancelledError: As from ``write``.
    """
    try:
        await context.abort(*status)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


def status_of(error: ServeError) -> Status:
    """Return the status of a failed call, with the time after which to retry if the error contains one."""
    details = error.message.encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))),)
    return STATUSES[error.kind].grpc, details, metadata
