"""The gRPC socket: binding it, serving it, and taking it down without losing a call."""

import socket

import grpc

from ortserve.config.option_groups import GrpcOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.aio_server import AioServer
from ortserve.frontends.grpc.channel import COMPRESSIONS, channel_arguments
from ortserve.frontends.grpc.router import Router
from ortserve.frontends.grpc.streams import Streams


class GrpcServer:
    """Serves one address from ``start`` to ``stop``, both on the event loop that runs the calls."""

    def __init__(
        self,
        router: Router,
        streams: Streams,
        options: GrpcOptions,
        *,
        host: str,
        port: int,
        max_body_bytes: int,
        credentials: grpc.ServerCredentials | None = None,
        handshake_timeout_s: float | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            router: What is served.
            streams: Those of ``calls``, which end when the server stops.
            options: Of connections and answers.
            host: Name or address to bind; an IPv6 address without brackets.
            port: 0 lets the system choose.
            max_body_bytes: Of a request message; grpc answers a larger one with RESOURCE_EXHAUSTED before it is read.
            credentials: For TLS; None for plain text.
            handshake_timeout_s: Until a connection has said that it is HTTP/2; None for grpc's own.
        """
        self._router = router
        self._streams = streams
        self._options = options
        self._host = host
        self._port = port
        self._max_body_bytes = max_body_bytes
        self._credentials = credentials
        self._handshake_timeout_s = handshake_timeout_s
        self._server: AioServer | None = None

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            The port that was bound.

        Raises:
            ServeError: conflict, naming the option, when the address cannot be listened on.
        """
        arguments = channel_arguments(
            self._options, max_body_bytes=self._max_body_bytes, handshake_timeout_s=self._handshake_timeout_s
        )
        server = AioServer(self._router, arguments, COMPRESSIONS[self._options.grpc_response_compression])
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._port}"
        try:
            port = server.add_port(address, self._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise _bind_failure(self._host, self._port)
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no new calls (clients are told by GOAWAY) and finish the running ones; streams read nothing more.

        Returns when all have ended; those that run longer than ``grace_s`` are cancelled. Does nothing when not
        started or stopped already.
        """
        server, self._server = self._server, None
        if server is not None:
            self._streams.begin_drain()
            await server.stop(grace_s)


def _bind_failure(host: str, port: int) -> ServeError:
    """Ask the system once more: grpc writes the reason to its log and keeps it from us."""
    reason = "grpc could not bind it"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
    return ServeError(ErrorKind.CONFLICT, f"grpc_port: cannot listen on {host}:{port}: {reason}")
