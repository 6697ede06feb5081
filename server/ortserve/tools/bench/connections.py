"""A pool of connections to a server. Each carries one request at a time; other requests wait for a free connection.

Over HTTP/1.1 requests are bytes that were made before, so a request costs one write and one parse by httptools: 16 µs
of CPU, where aiohttp takes 110 µs (``loadtests/bench_agreement.py``).
"""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.outcomes import Ticket
from ortserve.tools.bench.target import ServerPlan, Target

_JSON_SIZE: Final = b"inference-header-content-length"


class Connection(asyncio.Protocol):
    """A connection. Subclasses implement the protocol."""

    def __init__(self, owner: "Connections") -> None:
        self.owner: Final = owner
        self.transport: asyncio.Transport
        self.ticket: Ticket | None = None
        self.came_ns = 0
        """When the last bytes arrived. Latency ends here, before the bytes are parsed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit it

    @abstractmethod
    def send(self, ticket: Ticket) -> None:
        """Send a request. The connection is idle."""

    def answered(self, nbytes: int, timing: bytes | None, body: object, *, is_usable: bool = True) -> None:
        """Report the answer. A connection that is not usable any more is closed."""
        ticket = self._release(is_usable=is_usable)
        if ticket is not None:
            self.owner.sink.answered(ticket, self.came_ns, nbytes, timing, body)

    def failed(self, kind: str, example: str, *, is_usable: bool = False) -> None:
        """Report the failure of the current request, if there is one."""
        done_ns = monotonic_ns()
        ticket = self._release(is_usable=is_usable)
        if ticket is not None:
            self.owner.sink.failed(ticket, done_ns, kind, example)

    def connection_lost(self, exc: Exception | None) -> None:
        self.failed("connection_lost", str(exc or "the server closed the connection without an answer"))

    def _release(self, *, is_usable: bool) -> Ticket | None:
        ticket, self.ticket = self.ticket, None
        if not is_usable:
            self.transport.abort()
            self.owner.lose(self)
        elif ticket is not None:
            self.owner.give_back(self)
        return ticket


class Connections(Target):
    """A target over connections of one kind. It opens more connections while requests wait, up to the limit."""

    def __init__(self, plan: ServerPlan, make: Callable[["Connections"], Connection]) -> None:
        self.plan: Final = plan
        self._make = make
        self._tls = plan.address.tls()
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        self._waiting: deque[Ticket] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        for _ in range(min(count, self.plan.max_connections) - len(self._all)):
            self._idle.append(await self._connect())

    def send(self, ticket: Ticket) -> None:
        if self._idle:
            self._idle.pop().send(ticket)
            return
        self._waiting.append(ticket)
        self._open_more()

    def give_back(self, connection: Connection) -> None:
        """Send the next waiting request on a free connection, or keep the connection idle."""
        if self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lose(self, connection: Connection) -> None:
        """Forget a closed connection, and open another one for waiting requests."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._open_more()

    def _open_more(self) -> None:
        """Open a connection if fewer are being opened than requests wait, up to the limit."""
        opening = len(self._opening)
        if len(self._all) + opening < self.plan.max_connections and opening < len(self._waiting):
            self._opening.add(asyncio.ensure_future(self._add()))

    def expire(self, sent_before_ns: int) -> None:
        for connection in list(self._all):
            if connection.ticket is not None and connection.ticket.sent_ns < sent_before_ns:
                connection.failed("timeout", "no answer in time")
        while self._waiting and self._waiting[0].sent_ns < sent_before_ns:
            self._fail_waiting("timeout", "no connection was free in time")

    async def close(self) -> None:
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
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = await self._connect()
        except OSError as error:
            self._opening.discard(task)  # before the failure is reported, after which callers send again
            if self._waiting:
                kind = "connection_refused" if isinstance(error, ConnectionRefusedError) else "connection_failed"
                self._fail_waiting(kind, error.strerror or str(error))
            self._open_more()
            return
        self._opening.discard(task)
        self.give_back(connection)

    def _fail_waiting(self, kind: str, example: str) -> None:
        self.sink.failed(self._waiting.popleft(), monotonic_ns(), kind, example)


class HttpConnection(Connection):
    """A connection over HTTP/1.1, and the callbacks of its parser.

    The body of an answer is a pair: its bytes, and the size of the JSON in them if binary tensors follow, else None.
    """

    def __init__(self, owner: Connections) -> None:
        super().__init__(owner)
        self._requests = owner.plan.requests
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._nbytes = 0
        self._timing: bytes | None = None
        self._json_size: int | None = None

    def send(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._body, self._nbytes, self._timing, self._json_size = [], 0, None, None
        self.transport.write(self._requests[ticket.request])

    def data_received(self, data: bytes) -> None:
        self.came_ns = monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failed("malformed_answer", str(error) or type(error).__name__)

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)  # compared first, as it rules out most headers cheaply
        if size == 13 and name.lower() == b"server-timing":
            self._timing = value
        elif size == len(_JSON_SIZE) and name.lower() == _JSON_SIZE and value.isdigit():
            self._json_size = int(value)

    def on_body(self, body: bytes) -> None:
        self._nbytes += len(body)
        ticket = self.ticket
        if ticket is not None and (ticket.wants_body or self._parser.get_status_code() != 200):
            self._body.append(body)

    def on_message_complete(self) -> None:
        status, is_usable = self._parser.get_status_code(), self._parser.should_keep_alive()
        content = b"".join(self._body)
        if self.ticket is None:  # the request has timed out
            return
        if status != 200:
            self.failed(f"http_{status}", content[:300].decode(errors="replace"), is_usable=is_usable)
            return
        body = (content, self._json_size) if self.ticket.wants_body else None
        self.answered(self._nbytes, self._timing, body, is_usable=is_usable)
