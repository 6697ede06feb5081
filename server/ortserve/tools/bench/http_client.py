"""The load over HTTP/1.1: persistent connections with one request in flight each, parsed by httptools.

Requests are bytes that were made before, so a request costs one write and one parse: 15 µs of CPU, where aiohttp takes
89 µs (``loadtests/bench_agreement.py``).
"""

from typing import Final

import httptools

from ortserve.clock import monotonic_ns
from ortserve.tools.bench.connections import Connection, Connections
from ortserve.tools.bench.samples import Ticket

_JSON_SIZE: Final = b"inference-header-content-length"


class HttpConnection(Connection):
    """A connection, and the callbacks of its parser. The body of an answer is a pair: its bytes, and the size of the
    JSON in them if binary tensors follow, otherwise None.
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
