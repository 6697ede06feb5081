"""The router: the path of a call selects its handler, its key guard, and the maximum size of its messages.

Calls that carry tensors or models accept messages of up to ``max_body_bytes``. All others accept 64 KiB: a call that
needs no key, or carries only names, must not make the server store and parse as much as an inference request. The
native transport applies ``max_message_bytes`` before it stores any part of a message.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import GRPC_GROUPS
from ortserve.frontends.grpc.calls import (
    SERVICE_NAME,
    Calls,
    Context,
    Handler,
    abort,
    status_of,
    streaming,
)
from ortserve.service.access import Group, Guard

SMALL_MESSAGE_BYTES: Final = 64 * 1024
"""Limit for messages with names, versions, settings or memory handles only. Real ones have some hundred bytes."""

_LARGE: Final = frozenset(
    f"/{SERVICE_NAME}/{name}" for name in ("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad")
)


class Router:
    """Finds the handler of every call. The handler of an unknown path ends the call with an error."""

    def __init__(self, all_calls: Iterable[Calls], guards: Mapping[Group, Guard] | None = None) -> None:
        """Register every handler; ``guards`` check the keys of the calls of their groups.

        Raises:
            ValueError: Two groups of handlers implement the same method, or a method belongs to no access group.
        """
        self.handlers: dict[str, Handler] = {}
        """The known handlers by path."""
        self.guards: dict[str, Guard] = {}
        """Guards by path, for the calls that need a key."""
        for calls in all_calls:
            for method, handler in calls.handlers().items():
                path = f"/{calls.service}/{method}"
                if path in self.handlers:
                    raise ValueError(f"two handlers for {path}")
                self.handlers[path] = handler
                if path not in GRPC_GROUPS:
                    raise ValueError(f"no group for {path}")
                group = GRPC_GROUPS[path]
                if guards and group is not None and group in guards:
                    self.guards[path] = guards[group]

    def find(self, path: str) -> Handler:
        """Return the handler of a call. Its key and the size of its messages are checked elsewhere."""
        return self.handlers.get(path) or _unknown(path)


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
    return rejecting(ServeError(ErrorKind.UNSUPPORTED, text))


def rejecting(error: ServeError) -> Handler:
    """Create a handler that ends a call without reading its messages."""
    status = status_of(error)

    async def reject(context: Context) -> None:
        await abort(context, status)

    return streaming(reject)
