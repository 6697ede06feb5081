"""The router: the path of a call selects its handler, its key guard, and the maximum size of its messages.

Calls that carry tensors or models accept messages of up to ``max_body_bytes``. All others accept 64 KiB: a call that
needs no key, or carries only names, must not make the server store and parse as much as an inference request. The
native transport applies ``max_message_bytes`` before it stores any part of a message. grpcio has one limit for the
whole server, so ``_limited`` wraps its small calls and rejects a message after it has arrived and before it is parsed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import GRPC_GROUPS
from ortserve.frontends.grpc.calls import (
    SERVICE_NAME,
    Calls,
    Context,
    Handler,
    abort,
    check_key,
    status_of,
    streaming,
    unary,
)
from ortserve.service.access import Group, Guard

SMALL_MESSAGE_BYTES: Final = 64 * 1024
"""Limit for messages with names, versions, settings or memory handles only. Real ones have some hundred bytes."""

_LARGE: Final = frozenset(
    f"/{SERVICE_NAME}/{name}" for name in ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad")
)


class Router(grpc.GenericRpcHandler):
    """Finds the handler of every call. The handler of an unknown path ends the call with an error."""

    def __init__(self, all_calls: Iterable[Calls], guards: Mapping[Group, Guard] | None = None) -> None:
        """Register every handler; ``guards`` check the keys of the calls of their groups.

        Raises:
            ValueError: Two groups of handlers implement the same method, or a method belongs to no access group.
        """
        self._handlers: dict[str, Handler] = {}
        self._limited: dict[str, Handler] = {}
        self.guards: dict[str, Guard] = {}
        """Guards by path, for the calls that need a key."""
        for calls in all_calls:
            for method, handler in calls.handlers().items():
                path = f"/{calls.service}/{method}"
                if path in self._handlers:
                    raise ValueError(f"two handlers for {path}")
                self._handlers[path] = handler
                if is_small(path):
                    self._limited[path] = _limited(handler)
                if path not in GRPC_GROUPS:
                    raise ValueError(f"no group for {path}")
                group = GRPC_GROUPS[path]
                if guards and group is not None and group in guards:
                    self.guards[path] = guards[group]

    def find(self, path: str) -> Handler:
        """Return the handler of a call on a transport that enforces ``max_message_bytes``."""
        return self._handlers.get(path) or _unknown(path)

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler of a call on grpcio, which calls this after the headers and before the first message."""
        guard = self.guards.get(details.method)
        if guard is not None and (error := check_key(guard, details.invocation_metadata)) is not None:
            return _rejecting(error)
        return self._limited.get(details.method) or self.find(details.method)


def is_small(path: str) -> bool:
    """Whether a call accepts small messages only. True for unknown paths."""
    return path not in _LARGE


def max_message_bytes(path: str, max_body_bytes: int) -> int:
    """Return the maximum size of one message of a call, before and after decompression."""
    return min(max_body_bytes, SMALL_MESSAGE_BYTES) if is_small(path) else max_body_bytes


def too_large(max_bytes: int, got: int | None, kind: str = "message") -> ServeError:
    """Return the error for a message over its limit. ``got`` is None if the full size is unknown."""
    limit = "such a call takes" if max_bytes == SMALL_MESSAGE_BYTES else "max_body_bytes"
    text = f"{kind} larger than {limit}: expected at most {max_bytes} bytes, got {'more' if got is None else got}"
    return ServeError(ErrorKind.TOO_LARGE, text)


def _unknown(path: str) -> Handler:
    service, _, method = path.removeprefix("/").rpartition("/")
    if service != SERVICE_NAME:
        text = f"unknown method '{path}': the inference service is '{SERVICE_NAME}'"
    else:
        text = f"unknown method '{method}' of service '{SERVICE_NAME}'"
    return _rejecting(ServeError(ErrorKind.UNSUPPORTED, text))


def _rejecting(error: ServeError) -> Handler:
    """Create a handler that ends a call without reading its messages."""
    status = status_of(error)

    async def reject(context: Context) -> None:
        await abort(context, status)

    return streaming(reject)


def _limited(handler: Handler) -> Handler:
    """Wrap a handler so that messages over ``SMALL_MESSAGE_BYTES`` are rejected before they are parsed."""
    any_handler: Any = handler
    if handler.unary_unary is None:

        async def stream(messages: object, context: Context) -> None:
            await any_handler.stream_stream(messages, _LimitedContext(context))

        return grpc.stream_stream_rpc_method_handler(stream)

    async def call(data: bytes | memoryview, context: Context) -> bytes:
        size = len(data)
        answering = any_handler.unary_unary(data, context) if size <= SMALL_MESSAGE_BYTES else None
        del data  # see ``abort``
        if answering is None:
            await abort(context, status_of(too_large(SMALL_MESSAGE_BYTES, size)))
        answer: bytes = await answering
        return answer

    return unary(call)


class _LimitedContext:
    """The context of a stream whose messages must be small."""

    def __init__(self, context: Context) -> None:
        self._context: Any = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Return the next message. Raises ServeError: too_large."""
        data = await self._context.read()
        if isinstance(data, bytes) and len(data) > SMALL_MESSAGE_BYTES:
            raise too_large(SMALL_MESSAGE_BYTES, len(data))
        return data
