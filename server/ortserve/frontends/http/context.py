"""State that all connections of the HTTP port share: options, the headers of all responses, and the drain."""

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.server import ServerState

from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.http.cross_origin import CrossOrigin
from ortserve.frontends.http.request_head import Header
from ortserve.frontends.idle_connections import IdleConnections
from ortserve.frontends.unsent_answers import UnsentBudget


class ConnectionContext:
    """State that all connections of a server share. Loop thread only.

    Attributes:
        options: Limits of connections and requests.
        on_rejected: Counts rejections of connections and of incomplete requests.
        budget: Budget for the unsent answers of all connections.
        on_cut_answer: Counts a response that ends before the transport has accepted all of it; its argument is the
            cause.
        cross_origin: The origins whose pages may read responses; None if there are none.
        idle_connections: The accepted connections, of which one is closed for a new one at the limit.
        is_draining: Whether each response closes its connection, so that callers connect to another server.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        on_rejected: Callable[[ErrorKind], None],
        budget: UnsentBudget,
        on_cut_answer: Callable[[str], None],
        on_evicted: Callable[[], object],
    ) -> None:
        self.options: Final = options
        self.on_rejected: Final = on_rejected
        self.budget: Final = budget
        self.on_cut_answer: Final = on_cut_answer
        self.cross_origin: Final = CrossOrigin(options.cors_origins) if options.cors_origins else None
        self.idle_connections: Final = IdleConnections(monotonic_ns, on_evicted)
        self.is_draining = False
        self._default_headers: list[Header] = []
        self._default_lines = b""
        self._change = asyncio.Event()

    def default_lines(self, headers: list[Header], received: list[Header]) -> bytes:
        """Encode the headers that each response has.

        Args:
            headers: The default headers of uvicorn, which replaces the list each second.
            received: The headers of the request.
        """
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join([b"%s: %s\r\n" % header for header in headers])
        if self.cross_origin is None:
            return self._default_lines
        return self._default_lines + self.cross_origin.lines(received)

    def on_ended(self, _: object = None) -> None:
        """Wake ``wait_until_idle``: a connection or a task has ended."""
        self._change.set()

    async def wait_until_idle(self, state: ServerState) -> None:
        """Wait until all connections are closed and all tasks are done."""
        while state.connections or state.tasks:
            self._change.clear()
            await self._change.wait()
