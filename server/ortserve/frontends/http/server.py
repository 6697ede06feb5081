"""The HTTP server: uvicorn on our loop and our socket, started and stopped by the composition root."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import http_group, is_plain
from ortserve.frontends.http.announcement import authorizations
from ortserve.frontends.http.answers import Answer, failure
from ortserve.frontends.http.connection import Connection, connection_of
from ortserve.frontends.http.exchange import Lane
from ortserve.frontends.http.infer_route import InferRoute, match_infer_path, refuse_body, send_answer
from ortserve.frontends.http.lane import LaneConnection
from ortserve.frontends.http.limits import HttpLimits
from ortserve.frontends.tls.transport import TlsEntrance
from ortserve.listening import open_listener
from ortserve.service.access import Group, Guard
from ortserve.telemetry.logs import log_event, log_fault

logger: Final = logging.getLogger(__name__)

_WRONG_METHOD = Answer(
    405, b'{"error":"Method Not Allowed"}', ((b"content-type", b"application/json"), (b"allow", b"POST"))
)


class RestApp:
    """The ASGI application: infer requests go straight to their route, all others to FastAPI."""

    def __init__(self, infer: InferRoute, control: ASGIApp, guards: Mapping[Group, Guard]) -> None:
        """``guards`` ask callers of their groups for keys."""
        self._guards = guards
        self._infer = infer
        self._control = control
        self.is_draining = False
        """Whether answers ask their callers to open new connections, elsewhere."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        try:
            await self._dispatch(scope, receive, self._closing(connection, send))
        except asyncio.CancelledError:
            if not connection.has_left:  # else the connection's loss is the reason, and no fault to be logged
                raise

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = match_infer_path(scope["raw_path"].decode("latin-1"))
        path = scope["path"]
        if target is None and path.endswith("/") and len(path) > 1:
            scope["path"] = path.rstrip("/")
        if (error := self._refusal(scope, is_infer=target is not None)) is not None:
            await _refuse(scope, receive, send, error)
        elif target is None:
            # uvicorn keeps the body of an answer to HEAD, by the scope of its own.
            is_head = scope["method"] == "HEAD"
            try:
                await self._control({**scope, "method": "GET"} if is_head else scope, receive, send)
            except Exception as fault:  # noqa: BLE001 - it was answered, and is nobody else's
                log_fault(logger, "a call failed unexpectedly", fault)
        elif scope["method"] == "POST":
            await self._infer(scope, receive, send, *target)
        else:
            await send_answer(send, _WRONG_METHOD)

    def _refusal(self, scope: Scope, *, is_infer: bool) -> ServeError | None:
        """Why the caller may not come in, decided by the path that the request is routed by."""
        if not (is_infer or is_plain(scope["path"])):
            return ServeError(ErrorKind.NOT_FOUND, "Not Found")
        group = Group.INFER if is_infer else http_group(scope["method"], scope["path"])
        guard = None if group is None else self._guards.get(group)
        if guard is None:
            return None
        try:
            guard.check(authorizations(scope["headers"]))
        except ServeError as error:
            return error
        return None

    def _closing(self, connection: Connection, send: Send) -> Send:
        """Send answers so that the last one of a connection says that it is."""

        async def send_closing(message: Message) -> None:
            # Asked now, not when the request came: a drain may have begun since.
            if message["type"] == "http.response.start" and (connection.is_old or self.is_draining):
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return send_closing


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ServeError) -> None:
    """Answer without a look at the body, of which nothing is kept."""
    if any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
        await refuse_body(receive, send, error)
    else:
        await send_answer(send, failure(error))


class HttpServer:
    """Listens from ``start`` to ``stop``."""

    def __init__(
        self,
        app: RestApp,
        lane: Lane | None,
        *,
        host: str,
        port: int,
        limits: HttpLimits,
        max_connection_age_s: float | None,
        on_refusal: Callable[[ErrorKind], None],
        tls: TlsEntrance | None = None,
    ) -> None:
        """Open nothing yet.

        ``lane`` answers infer requests in the place of ``app``; None leaves them to it. ``on_refusal`` is told of what
        is refused before it is a request. ``tls`` None for plain text.
        """
        self._app = app
        self._lane = lane
        self._host = host
        self._port = port
        self._limits = limits
        self._on_refusal = on_refusal
        self._max_connection_age_s = max_connection_age_s
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen.

        Returns:
            The port, of interest where 0 was asked for.

        Raises:
            ServeError: conflict, naming the option, when the address cannot be listened on.
        """
        listener = open_listener("http_port", self._host, self._port)
        connection = partial(LaneConnection, self._lane) if self._lane else Connection
        connect = partial(
            connection, max_age_s=self._max_connection_age_s, limits=self._limits, on_refusal=self._on_refusal
        )
        config = uvicorn.Config(
            self._app,
            http=self._tls.before(connect) if self._tls else connect,  # type: ignore[arg-type]  # called as a class is
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody here asks who the caller is
        )
        self._server = _Server(config, self._tls)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        await self._server.is_up.wait()
        return int(listener.getsockname()[1])

    def begin_drain(self) -> None:
        """Go on answering, but close each connection with its next answer."""
        self._app.is_draining = True
        if self._lane is not None:
            self._lane.is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Close the listener and idle connections, and return when all requests under way are answered.

        Those that take longer than ``grace_s`` are cut off. Does nothing when not started or stopped already.
        """
        if self._server is None or self._serving is None or self._serving.done():
            return
        self.begin_drain()
        self._server.grace_s = grace_s
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    """Leaves signals alone, says when it listens, and cuts off by itself what outlasts ``grace_s``."""

    grace_s = 0.0

    def __init__(self, config: uvicorn.Config, tls: TlsEntrance | None) -> None:
        super().__init__(config)
        self._tls = tls
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The composition root owns them: uvicorn would close the listeners before readiness is off.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is not None:
            for server in self.servers:
                server.close()
            self._tls.close()
        await super().shutdown(sockets)

    async def _wait_tasks_to_complete(self) -> None:
        # uvicorn's own bound on this logs an error and cancels tasks, of which the lane has none.
        try:
            async with asyncio.timeout(self.grace_s):
                await super()._wait_tasks_to_complete()
        except TimeoutError:
            connections, tasks = list(self.server_state.connections), list(self.server_state.tasks)
            if connections or tasks:
                told = "drain timed out: connections with unanswered requests are cut off"
                log_event(
                    logger, logging.WARNING, told, protocol="http", connections=len(connections), timeout_s=self.grace_s
                )
            for connection in connections:
                connection.transport.abort()
            for task in tasks:
                task.cancel()
