"""How large the messages of each call may be: ``max_body_bytes`` where tensors or models come, little where names do.

A call that is open to everybody, or asks for a name, shall not have the server keep and parse what an inference may
bring. The native transport asks here before it keeps anything of a message. grpcio knows one limit for the whole
server, so that its calls are ``limited``: there a message was read, but is not parsed.
"""

from typing import Any, Final

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import SERVICE_NAME, Context, Handler, abort, status_of, unary

SMALL_MESSAGE_BYTES: Final = 64 * 1024
"""Names, versions, settings, handles of memory: what is asked in earnest has some hundred bytes."""

_LARGE: Final = frozenset(
    f"/{SERVICE_NAME}/{name}" for name in ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad")
)


def is_small(path: str) -> bool:
    """Whether a call takes small messages alone; so do those that there are not."""
    return path not in _LARGE


def max_message_bytes(path: str, max_body_bytes: int) -> int:
    """Of one message of a call, also without its compression."""
    return min(max_body_bytes, SMALL_MESSAGE_BYTES) if is_small(path) else max_body_bytes


def too_large(max_bytes: int, got: int | None, kind: str = "message") -> ServeError:
    """The refusal of a message; ``got`` None where nobody knows how long it would have become."""
    limit = "such a call takes" if max_bytes == SMALL_MESSAGE_BYTES else "max_body_bytes"
    text = f"{kind} larger than {limit}: expected at most {max_bytes} bytes, got {'more' if got is None else got}"
    return ServeError(ErrorKind.TOO_LARGE, text)


def limited(handler: Handler) -> Handler:
    """The same call, refusing what is not small before it is parsed."""
    any_handler: Any = handler
    if handler.unary_unary is None:

        async def stream(messages: object, context: Context) -> None:
            await any_handler.stream_stream(messages, _LimitedContext(context))

        return grpc.stream_stream_rpc_method_handler(stream)

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        size = len(data)
        answering = any_handler.unary_unary(data, context) if size <= SMALL_MESSAGE_BYTES else None
        del data  # for the sake of ``abort``
        if answering is None:
            await abort(context, status_of(too_large(SMALL_MESSAGE_BYTES, size)))
        answer: bytes = await answering
        return answer

    return unary(call)


class _LimitedContext:
    """A stream's context, whose messages are small."""

    def __init__(self, context: Context) -> None:
        self._context: Any = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Raises ServeError: too_large."""
        data = await self._context.read()
        if isinstance(data, bytes) and len(data) > SMALL_MESSAGE_BYTES:
            raise too_large(SMALL_MESSAGE_BYTES, len(data))
        return data
