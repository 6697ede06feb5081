"""Connections to a server, with at most one request on each; requests wait if all are in use."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.samples import Ticket
from ortserve.tools.bench.target import ServerPlan, Target


class Connection(asyncio.Protocol):
    """A connection; what it speaks is said by the classes below it."""

    def __init__(self, owner: "Connections") -> None:
        self.owner: Final = owner
        self.transport: asyncio.Transport
        self.ticket: Ticket | None = None
        self.came_ns = 0
        """When the last bytes came. They are parsed afterwards, which is no part of the latency."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit it

    @abstractmethod
    def send(self, ticket: Ticket) -> None:
        """Send a request, while no other is under way."""

    def answered(self, nbytes: int, timing: bytes | None, body: object, *, is_usable: bool = True) -> None:
        """The request was answered, and the connection can be used again or not."""
        ticket = self._release(is_usable=is_usable)
        if ticket is not None:
            self.owner.sink.answered(ticket, self.came_ns, nbytes, timing, body)

    def failed(self, kind: str, example: str, *, is_usable: bool = False) -> None:
        """The request, if there is one, has failed."""
        done_ns = monotonic_ns()
        ticket = self._release(is_usable=is_usable)
        if ticket is not None:
            self.owner.sink.failed(ticket, done_ns, kind, example)

    def connection_lost(self, exc: Exception | None) -> None:
        self.failed("connection_lost", str(exc or "the server closed the connection instead of answering"))

    def _release(self, *, is_usable: bool) -> Ticket | None:
        ticket, self.ticket = self.ticket, None
        if not is_usable:
            self.transport.abort()
            self.owner.lose(self)
        elif ticket is not None:
            self.owner.give_back(self)
        return ticket


class Connections(Target):
    """A ``Target`` over connections of one kind; opens more as long as requests wait for one."""

    def __init__(self, plan: ServerPlan, make: Callable[["Connections"], Connection]) -> None:
        self.plan: Final = plan
        self._make = make
        self._tls = plan.address.tls()
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        self._waiting: deque[Ticket] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """As ``Target.open``."""
        for _ in range(min(count, self.plan.most_connections) - len(self._all)):
            self._idle.append(await self._connect())

    def send(self, ticket: Ticket) -> None:
        """As ``Target.send``."""
        if self._idle:
            self._idle.pop().send(ticket)
            return
        self._waiting.append(ticket)
        opening = len(self._opening)
        if len(self._all) + opening < self.plan.most_connections and opening < len(self._waiting):
            task = asyncio.ensure_future(self._add())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def give_back(self, connection: Connection) -> None:
        """A connection is idle again."""
        if self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lose(self, connection: Connection) -> None:
        """A connection is closed; requests that wait get another one."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting:
            self.send(self._waiting.popleft())

    def expire(self, sent_before_ns: int) -> None:
        """As ``Target.expire``."""
        for connection in list(self._all):
            if connection.ticket is not None and connection.ticket.sent_ns < sent_before_ns:
                connection.failed("timeout", "no answer in time")
        while self._waiting and self._waiting[0].sent_ns < sent_before_ns:
            self._fail_waiting("timeout", "no connection was free in time")

    async def close(self) -> None:
        """As ``Target.close``."""
        for task in self._opening:
            task.cancel()
        for connection in list(self._all):
            connection.transport.close()

    async def _connect(self) -> Connection:
        address, loop = self.plan.address, asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: self._make(self), address.host, address.port, ssl=self._tls
        )
        self._all.add(connection)
        return connection

    async def _add(self) -> None:
        try:
            self.give_back(await self._connect())
        except OSError as error:
            if self._waiting:
                kind = "connection_refused" if isinstance(error, ConnectionRefusedError) else "connection_failed"
                self._fail_waiting(kind, error.strerror or str(error))

    def _fail_waiting(self, kind: str, example: str) -> None:
        self.sink.failed(self._waiting.popleft(), monotonic_ns(), kind, example)
