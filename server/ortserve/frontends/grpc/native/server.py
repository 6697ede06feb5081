"""The native gRPC transport: HTTP/2 on the server's own event loop, in the place of grpc's."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ortserve.clock import Clock
from ortserve.frontends.grpc.calls import Handler, QuickCall
from ortserve.frontends.grpc.message_limits import max_message_bytes
from ortserve.frontends.grpc.native.calls_work import CallsWork
from ortserve.frontends.grpc.native.connection import Connection
from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.losses import Losses
from ortserve.frontends.grpc.native.unsent_room import UnsentRoom
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.tls.transport import TlsPort
from ortserve.listening import draw_age_s, open_listener
from ortserve.service.access import Guard
from ortserve.service.gate import Hold

_BACKLOG: Final = 4096
"""Connections that may come faster than they are taken; the system bounds it."""


class NativeGrpcServer:
    """Serves one address from ``start`` to ``stop``, both on the event loop that runs the calls."""

    def __init__(
        self,
        find: Callable[[str], Handler],
        quick: Mapping[str, QuickCall],
        streams: Streams,
        hold: Callable[[int], Hold],
        limits: Limits,
        *,
        host: str,
        port: int,
        clock: Clock,
        on_cut_answer: Callable[[str], None],
        on_connection_error: Callable[[str], None],
        encoding: bytes = b"",
        guards: Mapping[str, Guard] | None = None,
        tls: TlsPort | None = None,
    ) -> None:
        """Open nothing yet; calls, ``encoding`` and ``guards`` as in ``CallsWork``, ``port`` 0 for any free one.

        ``on_cut_answer`` and ``on_connection_error`` count, as in ``Losses``. ``tls`` None for plain text.
        """
        self._guards = guards
        self._find = find
        self._quick = quick
        self._streams = streams
        self._hold = hold
        self._limits = limits
        self._host = host
        self._port = port
        self._clock = clock
        self._losses = Losses(clock, on_cut_answer, on_connection_error)
        self._connections: set[Connection] = set()
        self._encoding = encoding
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._work: CallsWork | None = None

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            The port that was bound.

        Raises:
            ServeError: conflict, naming the option, when the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        work = self._work = CallsWork(
            self._find,
            self._quick,
            self._hold,
            max_message_bytes=partial(max_message_bytes, max_body_bytes=self._limits.max_message_bytes),
            encoding=self._encoding,
            guards=self._guards,
        )

        room = UnsentRoom(self._limits.max_unsent_bytes)

        def connect() -> Connection:
            age_s = self._limits.max_age_s
            own_s = None if age_s is None else draw_age_s(age_s)
            return Connection(work, self._limits, self._connections, room, self._losses, self._clock, own_s)

        factory = self._tls.wrap(connect) if self._tls else connect
        listener = open_listener("grpc_port", self._host, self._port)
        self._server = await loop.create_server(factory, sock=listener, backlog=_BACKLOG)
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Take no new calls (clients are told by GOAWAY) and finish the running ones; streams read nothing more.

        Returns when all have ended; those that run longer than ``grace_s`` are cut off. Does nothing when not started
        or stopped already.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        if self._tls is not None:
            self._tls.close()
        self._streams.begin_drain()
        await asyncio.sleep(0)  # for connections that were taken in this turn of the loop
        connections = list(self._connections)
        for connection in connections:
            connection.begin_drain()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=grace_s)
        for connection in list(self._connections):
            connection.abort()
        if connections:
            await asyncio.wait([connection.closed for connection in connections])
        assert self._work is not None
        await self._work.until_done()
