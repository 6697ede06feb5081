"""The HTTP server: uvicorn with our event loop, socket and protocol. The composition root starts and stops it."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final

import uvicorn
from uvicorn.server import ServerState

from ortserve.frontends.http.asgi_exchange import AsgiEndpoint
from ortserve.frontends.http.context import ConnectionContext
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.limits import ARRIVAL_S
from ortserve.frontends.http.protocol import HttpProtocol
from ortserve.frontends.tls.transport import TlsPort
from ortserve.listening import open_listener
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_CLOSE_S: Final = ARRIVAL_S + 0.1
"""Time beyond the grace time in which idle connections close. Those without any request so far take ``ARRIVAL_S``."""


class HttpServer:
    """Listens and answers from ``start`` to ``stop``."""

    def __init__(
        self,
        infer: InferEndpoint,
        asgi: AsgiEndpoint,
        context: ConnectionContext,
        *,
        tls: TlsPort | None = None,
    ) -> None:
        """Create the server, which opens no socket before ``start``.

        Args:
            infer: Answers inference.
            asgi: Answers all other requests.
            context: Shared state of the connections, and the options.
            tls: Shared state of the TLS sessions; None for plain text.
        """
        self._infer = infer
        self._asgi = asgi
        self._context = context
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections) if self._server is not None else 0

    async def start(self) -> int:
        """Listen.

        Returns:
            The bound port.

        Raises:
            ServeError: conflict if the server cannot listen on the address; the message names the option.
            OSError: The system permits no further file.
        """
        options = self._context.options
        listener = open_listener("http_port", options.host, options.http_port, reuse_port=options.reuse_port)
        make_protocol = self._tls.wrap(self._make_protocol) if self._tls else self._make_protocol
        config = uvicorn.Config(
            self._asgi.app,
            http=make_protocol,  # type: ignore[arg-type]  # is called
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the server does not use the address of the client
        )
        self._server = _Server(config, make_protocol, self._context, self._tls)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        starting = asyncio.create_task(self._server.is_up.wait(), name="http start")
        await asyncio.wait({starting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            starting.cancel()
            self._serving.result()  # raises the error of the start
        return int(listener.getsockname()[1])

    def _make_protocol(self, *, server_state: ServerState, **_: object) -> HttpProtocol:
        """Create the protocol of a connection. uvicorn passes its state by name, and further arguments."""
        return HttpProtocol(self._context, self._infer, self._asgi, server_state)

    def begin_drain(self) -> None:
        """Continue to answer, but close each connection with its next response."""
        self._context.is_draining = True

    async def stop(self, grace_s: float) -> bool:
        """Close the listener and idle connections, and return when all current requests are answered.

        Requests that take longer than ``grace_s`` are cut off. Does nothing if the server was not started, or was
        stopped already.

        Returns:
            False if requests were cut off.
        """
        if self._server is None or self._serving is None or self._serving.done():
            return True
        self.begin_drain()
        self._server.grace_s = grace_s
        self._server.should_exit = True
        await self._serving
        return not self._server.has_cut_off


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, and with a drain that cuts off requests after ``grace_s``."""

    grace_s = 0.0

    def __init__(
        self,
        config: uvicorn.Config,
        make_protocol: Callable[..., asyncio.Protocol],
        context: ConnectionContext,
        tls: TlsPort | None,
    ) -> None:
        super().__init__(config)
        self._make_protocol = make_protocol
        self._context = context
        self._tls = tls
        self.is_up = asyncio.Event()
        self.has_cut_off = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The composition root handles signals: uvicorn would close the listeners before readiness is off.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        accepted = list(islice(_accept_waiting(sockets or ()), self.config.backlog))
        for server in self.servers:
            server.close()
        for connected in accepted:
            await self._connect(connected)
        if self._tls is not None:
            self._tls.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.grace_s + _CLOSE_S):
                await self._context.wait_until_idle(state)
        except TimeoutError:
            self._cut_off()
        await super().shutdown(sockets)

    async def _connect(self, connected: socket.socket) -> None:
        """Serve an accepted connection with the protocol that uvicorn would create."""
        make = partial(self._make_protocol, server_state=self.server_state)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connected)
        except OSError:  # the client has disconnected
            connected.close()

    def _cut_off(self) -> None:
        connections, tasks = list(self.server_state.connections), list(self.server_state.tasks)
        # Others linger after their responses, or have sent no complete head.
        unanswered = sum([isinstance(each, HttpProtocol) and each.has_unanswered for each in connections])
        self.has_cut_off = unanswered > 0
        if unanswered:
            log_event(
                logger,
                logging.WARNING,
                "drain timed out; connections with unanswered requests are closed",
                protocol="http",
                connections=unanswered,
                waited_s=round(self.grace_s, 1),
            )
        for connection in connections:
            connection.transport.abort()
        for task in tasks:
            task.cancel()


def _accept_waiting(listeners: Iterable[socket.socket]) -> Iterator[socket.socket]:
    """Accept the connections in the backlog, which closing the listener would reset."""
    for listener in listeners:
        with contextlib.suppress(OSError):  # BlockingIOError: the backlog is empty
            while True:
                connected, _ = listener.accept()
                connected.setblocking(False)
                yield connected
