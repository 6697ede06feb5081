"""From the path of a call to its handler, and a clear answer where there is none."""

from collections.abc import Iterable

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls, Context, Handler, abort, streaming


class Router(grpc.GenericRpcHandler):
    """Finds the handler of every call; there is one for each, if only to say what is wrong."""

    def __init__(self, all_calls: Iterable[Calls]) -> None:
        """Take every handler once.

        Raises:
            ValueError: Two classes answer the same method.
        """
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        for calls in all_calls:
            for method, handler in calls.handlers().items():
                path = f"/{calls.service}/{method}"
                if path in self._handlers:
                    raise ValueError(f"two handlers for {path}")
                self._handlers[path] = handler

    def find(self, path: str) -> Handler:
        return self._handlers.get(path) or _refusing(path)

    def service(self, details: grpc.HandlerCallDetails) -> Handler:
        return self.find(details.method)


def _refusing(path: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
    service, _, method = path.removeprefix("/").rpartition("/")
    if service != SERVICE_NAME:
        text = f"unknown method '{path}': the inference service is '{SERVICE_NAME}'"
    else:
        text = f"unknown method '{method}' of service '{SERVICE_NAME}'"

    async def refuse(context: Context) -> None:
        await abort(context, ServeError(ErrorKind.UNSUPPORTED, text))

    return streaming(refuse)
