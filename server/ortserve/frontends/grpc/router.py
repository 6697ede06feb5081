"""From the path of a call to its handler, and a clear answer where there is none."""

from collections.abc import Iterable, Mapping

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import GRPC_GROUPS
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls, Context, Handler, abort, check, status_of, streaming
from ortserve.frontends.grpc.message_limits import is_small, limited
from ortserve.service.access import Group, Guard


class Router(grpc.GenericRpcHandler):
    """Finds the handler of every call; there is one for each, if only to say what is wrong."""

    def __init__(self, all_calls: Iterable[Calls], guards: Mapping[Group, Guard] | None = None) -> None:
        """Take every handler once; ``guards`` ask callers of their groups for keys.

        Raises:
            ValueError: Two classes answer the same method, or one that belongs to no group.
        """
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        self._limited: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        self.guards: dict[str, Guard] = {}
        """By path, of the calls that need a key."""
        for calls in all_calls:
            for method, handler in calls.handlers().items():
                path = f"/{calls.service}/{method}"
                if path in self._handlers:
                    raise ValueError(f"two handlers for {path}")
                self._handlers[path] = handler
                if is_small(path):
                    self._limited[path] = limited(handler)
                if path not in GRPC_GROUPS:
                    raise ValueError(f"no group for {path}")
                group = GRPC_GROUPS[path]
                if guards and group is not None and group in guards:
                    self.guards[path] = guards[group]

    def find(self, path: str) -> Handler:
        """What answers a call, whose messages the transport has held to ``message_limits``."""
        return self._handlers.get(path) or _unknown(path)

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        """As grpc asks: when the headers are there, and before any message is read."""
        guard = self.guards.get(details.method)
        if guard is not None and (error := check(guard, details.invocation_metadata)) is not None:
            return _refusing(error)
        return self._limited.get(details.method) or self.find(details.method)


def _unknown(path: str) -> Handler:
    service, _, method = path.removeprefix("/").rpartition("/")
    if service != SERVICE_NAME:
        text = f"unknown method '{path}': the inference service is '{SERVICE_NAME}'"
    else:
        text = f"unknown method '{method}' of service '{SERVICE_NAME}'"
    return _refusing(ServeError(ErrorKind.UNSUPPORTED, text))


def _refusing(error: ServeError) -> Handler:
    """Ends a call without reading anything of it."""
    status = status_of(error)

    async def refuse(context: Context) -> None:
        await abort(context, status)

    return streaming(refuse)
