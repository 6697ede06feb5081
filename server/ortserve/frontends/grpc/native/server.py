"""The gRPC port served by the native transport (``grpc_transport=native``)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.grpc.native.connection import Connection, GrpcPort
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.flood_limits import ConnectionErrors
from ortserve.frontends.grpc.native.timeouts import CallEnds
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.idle_connections import IdleConnections
from ortserve.frontends.tls.transport import TlsPort
from ortserve.frontends.unsent_answers import UnsentBudget
from ortserve.listening import draw_age_s, open_listener
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_BACKLOG: Final = 4096
"""Number of connections that may wait to be accepted. The system has a bound of its own."""


class NativeGrpcServer:
    """Serves one address from ``start`` to ``stop``, both on the event loop that runs the calls."""

    def __init__(
        self,
        dispatcher: CallDispatcher,
        streams: Streams,
        options: ServerOptions,
        *,
        clock: Clock,
        max_unsent_bytes: int,
        on_cut_answer: Callable[[str], None],
        on_connection_error: Callable[[str], None],
        on_rejected: Callable[[ErrorKind], None],
        on_evicted: Callable[[], object],
        tls: TlsPort | None = None,
    ) -> None:
        """Store the parameters; ``start`` opens the port.

        Args:
            dispatcher: Runs the handlers.
            streams: The open streams of the handlers; ``stop`` drains them.
            options: The address, and limits of the port and each connection.
            clock: Monotonic nanoseconds.
            max_unsent_bytes: Limit of the unsent answers of all connections.
            on_cut_answer: As in ``Sending``.
            on_connection_error: As ``on_error`` in ``ConnectionErrors``.
            on_rejected: Counts rejections of connections.
            on_evicted: Counts idle connections that were closed for new ones.
            tls: Shared state of the TLS sessions; None for plain text.
        """
        errors = ConnectionErrors(clock, on_connection_error)
        budget = UnsentBudget("grpc_unsent_bytes", max_unsent_bytes, clock)
        ends = CallEnds(asyncio.get_running_loop())
        idle = IdleConnections(clock, on_evicted)
        self._shared = GrpcPort(
            dispatcher, options, budget, ends, errors, clock, on_cut_answer, on_rejected, set(), idle
        )
        self._streams = streams
        self._options = options
        self._tls = tls
        self._server: asyncio.Server | None = None

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._shared.connections)

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            The bound port.

        Raises:
            ServeError: conflict if the address cannot be bound; the message names the option.
        """
        factory = self._tls.wrap(self._connect) if self._tls else self._connect
        options = self._options
        listener = open_listener("grpc_port", options.host, options.grpc_port, reuse_port=options.reuse_port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(factory, sock=listener, backlog=_BACKLOG)
        return int(listener.getsockname()[1])

    def _connect(self) -> Connection:
        age_s = self._options.grpc_max_connection_age_s
        return Connection(self._shared, None if age_s is None else draw_age_s(age_s))

    async def stop(self, grace_s: float) -> bool:
        """Reject new calls (GOAWAY), finish running calls, and stop reading requests of streams.

        Returns when every call has ended. Calls that run longer than ``grace_s`` are cancelled. Does nothing before
        ``start`` or after the first ``stop``.

        Returns:
            False if calls were cancelled.
        """
        server, self._server = self._server, None
        if server is None:
            return True
        server.close()
        if self._tls is not None:
            self._tls.close()
        self._streams.begin_drain()
        await asyncio.sleep(0)  # connections accepted in this turn of the loop are registered in the next one
        connections = list(self._shared.connections)
        for connection in connections:
            connection.begin_drain()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=grace_s)
        remaining = list(self._shared.connections)
        if unanswered := sum([connection.has_calls for connection in remaining]):
            log_event(
                logger,
                logging.WARNING,
                "drain timed out; connections with unanswered requests are closed",
                protocol="grpc",
                connections=unanswered,
                waited_s=round(grace_s, 1),
            )
        for connection in remaining:
            connection.abort()
        if connections:
            await asyncio.wait([connection.closed for connection in connections])
        await self._shared.dispatcher.until_done()
        return not unanswered
