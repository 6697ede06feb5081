"""The load over HTTP/1.1: kept connections with one request in flight on each, parsed by httptools.

Not aiohttp: requests are bytes that were made before, so that a request costs the generator a write and a parse.
Measured (``loadtests/bench_agreement.py``): 52 µs of CPU for a request, with aiohttp 221 µs.
"""

import asyncio
import ssl
from typing import Final, cast

import httptools

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.plans import HttpPlan
from ortserve.tools.bench.pool import Pool
from ortserve.tools.bench.samples import Ticket
from ortserve.tools.bench.target import NOWHERE, Sink

_JSON_SIZE: Final = b"inference-header-content-length"


class HttpTarget:
    """A ``Target`` over HTTP/1.1."""

    def __init__(self, plan: HttpPlan) -> None:
        self.plan: Final = plan
        self.sink: Sink = NOWHERE
        self._tls = ssl.create_default_context(cafile=plan.ca) if plan.is_tls else None
        self._pool = Pool(self._connect, plan.most_connections, self._fail)

    async def open(self, count: int) -> None:
        """As ``Target.open``."""
        await self._pool.open(count)

    def send(self, ticket: Ticket) -> None:
        """As ``Target.send``."""
        self._pool.send(ticket)

    def expire(self, sent_before_ns: int) -> None:
        """As ``Target.expire``."""
        for lane in list(self._pool.lanes):
            connection = cast("_Connection", lane)
            if connection.ticket is not None and connection.ticket.sent_ns < sent_before_ns:
                connection.fail("timeout", "no answer in time")
        self._pool.expire(sent_before_ns)

    def batches(self) -> dict[int, int]:
        """As ``Target.batches``."""
        return {}

    async def close(self) -> None:
        """As ``Target.close``."""
        self._pool.close()

    def give_back(self, connection: "_Connection") -> None:
        """A connection is idle."""
        self._pool.give_back(connection)

    def lose(self, connection: "_Connection") -> None:
        """A connection is closed."""
        self._pool.lose(connection)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), self.plan.host, self.plan.port, ssl=self._tls
        )
        return connection

    def _fail(self, ticket: Ticket, kind: str, example: str) -> None:
        self.sink.failed(ticket, monotonic_ns(), kind, example)


class _Connection(asyncio.Protocol):
    """A connection, which is also what its parser calls."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._requests = target.plan.requests
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.ticket: Ticket | None = None
        self._body: list[bytes] = []
        self._nbytes = 0
        self._timing: bytes | None = None
        self._json_size: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit it

    def send(self, ticket: Ticket) -> None:
        assert self._transport is not None
        self.ticket = ticket
        self._body, self._nbytes, self._timing, self._json_size = [], 0, None, None
        self._transport.write(self._requests[ticket.number % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail("malformed_answer", str(error) or type(error).__name__)

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name)  # first, because most headers are of no interest
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
        done_ns = monotonic_ns()
        ticket, self.ticket = self.ticket, None
        if ticket is None:  # it timed out
            return
        status = self._parser.get_status_code()
        if self._parser.should_keep_alive():
            self._target.give_back(self)
        else:
            self.close()
            self._target.lose(self)
        if status == 200:
            body = (b"".join(self._body), self._json_size) if ticket.wants_body else None
            self._target.sink.answered(ticket, done_ns, self._nbytes, self._timing, body)
        else:
            example = b"".join(self._body)[:300].decode(errors="replace")
            self._target.sink.failed(ticket, done_ns, f"http_{status}", example)

    def connection_lost(self, exc: Exception | None) -> None:
        self._target.lose(self)
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            example = str(exc) if exc else "the server closed the connection instead of answering"
            self._target.sink.failed(ticket, monotonic_ns(), "connection_lost", example)

    def fail(self, kind: str, example: str) -> None:
        """Give up the request on this connection, and the connection."""
        ticket, self.ticket = self.ticket, None
        assert self._transport is not None
        self._transport.abort()
        self._target.lose(self)
        if ticket is not None:
            self._target.sink.failed(ticket, monotonic_ns(), kind, example)

    def close(self) -> None:
        self.ticket = None
        if self._transport is not None:
            self._transport.close()
