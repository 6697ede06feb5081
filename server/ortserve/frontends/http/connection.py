"""The writing half of an HTTP connection: the order of its exchanges, their responses, and its end.

``protocol`` is the reading half. It creates an ``Exchange`` for each request and hands it to ``Connection.begin``.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from uvicorn.server import ServerState

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.context import ConnectionContext
from ortserve.frontends.http.limits import LINGER_BYTES, LINGER_S, too_many_connections
from ortserve.frontends.http.request_head import Header
from ortserve.frontends.http.responses import STATUS_LINES, CorkedTransport, HttpResponse, failure
from ortserve.frontends.large_body import LargeBody
from ortserve.frontends.long_reads import resume_reads
from ortserve.listening import draw_age_s

_JOINED_BYTES: Final = 64 * 1024
"""Bodies up to this size are copied behind their head: a copy is cheaper than a second buffer in the system call."""

_MAX_REJECTED_CONNECTIONS: Final = 64
"""Number of connections over the limit that get an error response; further ones are closed without an answer."""


class Exchange:
    """One request and its response, from the end of its head to the end of its response. Loop thread only.

    Attributes:
        headers: All headers of the request; names are in lower case.
        keep_alive: Whether the connection stays open after the response.
        more_body: Whether a part of the body is still to arrive.
        has_response_body: False for HEAD.
        response_started: Whether the head of the response was written.
        response_complete: Whether the whole response was written, so that the next exchange may start.
    """

    def __init__(self, connection: "Connection", headers: list[Header], *, keep_alive: bool, more_body: bool) -> None:
        self.connection: Final = connection
        self.headers: Final = headers
        self.keep_alive = keep_alive
        self.more_body = more_body
        self.has_response_body = True
        self.response_started = False
        self.response_complete = False
        self._is_written = False

    def start(self) -> None:
        """Begin to answer. All earlier exchanges are complete."""
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        """Receive the next bytes of the body."""
        raise NotImplementedError

    def on_end(self) -> None:
        """Handle the end of the body."""
        raise NotImplementedError

    def on_unfinished(self) -> LargeBody | None:
        """Handle the end of a read within the body: all received bytes were passed on.

        Returns:
            Memory for the rest of the body; None to receive the rest through ``on_body``.
        """
        return None

    def on_placed(self, nbytes: int) -> None:
        """Account for bytes of the body that were received into the memory from ``on_unfinished``."""
        raise NotImplementedError

    def on_writable(self) -> None:
        """Continue to write: the caller has read enough of the earlier output."""
        if self._is_written and not self.response_complete:
            self.connection.complete(self)

    def unwritten_bytes(self) -> int:
        """Return the bytes of the response that wait in memory until the caller has read the earlier ones."""
        return 0

    def reject_body(self, error: ServeError) -> None:
        """Answer with an error, in the order of requests, because the body is too large or too slow. Drop the body."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release all resources: no response can be sent any more."""
        raise NotImplementedError

    def write(self, response: HttpResponse) -> None:
        """Write a whole response."""
        connection = self.connection
        self.response_started = True
        if connection.ends():
            self.keep_alive = False
        status, body, headers = response
        parts: list[bytes | memoryview] = [
            STATUS_LINES[status],
            connection.context.default_lines(connection.server_state.default_headers, self.headers),
        ]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(
            (b"content-length: %d\r\n\r\n" if self.keep_alive else b"content-length: %d\r\nconnection: close\r\n\r\n")
            % len(body)
        )
        if not self.has_response_body:
            connection.transport.write_out(b"".join(parts))
        elif len(body) <= _JOINED_BYTES:
            parts.append(body)
            connection.transport.write_out(b"".join(parts))
        else:
            connection.transport.write_out(b"".join(parts), body)

    def respond(self, response: HttpResponse) -> None:
        """Write a whole response, and complete it when the transport accepts more, so that responses do not accumulate.

        ``on_writable`` completes it if the caller reads too slowly.
        """
        self.write(response)
        self._is_written = True
        if not self.connection.is_write_paused:
            self.connection.complete(self)
        else:
            self.connection.count_unsent()

    def write_rejection(self, error: ServeError, path: str = "") -> None:
        """Answer a call of ``path`` before its body is complete.

        The connection closes when the rest of the body has arrived, after ``LINGER_S`` at the latest.
        """
        self.keep_alive = False
        self.write(failure(error, path))
        if not self.more_body:
            self.connection.complete(self)
        else:
            self.connection.loop.call_later(LINGER_S, self.connection.transport.close)


class Connection:
    """Runs exchanges in the order of their requests, rejects invalid input, and closes. Loop thread only.

    It is an ``AnswerHolder`` while the caller reads too slowly.

    Attributes:
        exchange: The exchange that is being answered.
        newest: The exchange that began last. Its body may still arrive.
        is_lost: Whether the connection was lost.
        is_half_closed: Whether a FIN arrived. The caller sends no more, but may still read.
        is_old: Whether the next response closes the connection because of its age. An idle connection stays open,
            because a request may be on its way.
        is_closing: Whether the last response was written, so that no further exchange starts.
        is_lingering: Whether the sending side has ended, and received bytes are dropped until the caller closes.
        ignores_input: Whether received bytes are dropped, because an error was sent or waits for its turn.
        is_read_paused: Whether the transport does not read.
        is_write_paused: Whether the caller reads its responses too slowly.
        unsent_bytes: Bytes of responses in memory while it does, as of the last count; otherwise 0.
        unsent_since_ns: Time from which it has read nothing, as counts have shown.
    """

    def __init__(
        self,
        context: ConnectionContext,
        server_state: ServerState,
        transport: CorkedTransport,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.context: Final = context
        self.server_state: Final = server_state
        self.transport: Final = transport
        self.loop: Final = loop
        self.exchange: Exchange | None = None
        self.newest: Exchange | None = None
        self.is_lost = False
        self.is_half_closed = False
        self.is_old = False
        self.is_closing = False
        self.is_lingering = False
        self.ignores_input = False
        self.is_read_paused = False
        self.is_write_paused = False
        self.unsent_bytes = 0
        self.unsent_since_ns = 0
        self._cut_cause = "disconnected"
        self._waiting: deque[Exchange] = deque()
        self._rejection: Callable[[], None] | None = None
        """Sends the error that waits for its turn; None without one."""
        self._dropped_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._ageing: asyncio.TimerHandle | None = None
        max_age_s = context.options.http_max_connection_age_s
        if max_age_s is not None:
            self._ageing = loop.call_later(draw_age_s(max_age_s), self._on_age)

    def ends(self) -> bool:
        """Whether the next response closes the connection: it is old, or the server drains and no request waits."""
        return self.is_old or (self.context.is_draining and not self._waiting and self._rejection is None)

    def begin(self, exchange: Exchange) -> None:
        """Start the exchange of the next request, now or when all earlier exchanges are complete."""
        self.newest = exchange
        if self.exchange is not None:
            self.pause_reading()
            self._waiting.append(exchange)
        elif self.is_closing:
            exchange.abandon()
        else:
            self.exchange = exchange
            exchange.start()

    def complete(self, exchange: Exchange) -> None:
        """Mark a response as written. Close, start the next exchange, or send the error that waits for its turn."""
        exchange.response_complete = True
        if not exchange.keep_alive:
            self.is_closing = True
            self.close()
        self.server_state.total_requests += 1
        self.exchange = None
        if self.is_closing or self.transport.is_closing():
            return
        if self._waiting:
            self.exchange = self._waiting.popleft()
            # A direct call would recurse once for each request of a pipeline of rejected requests.
            self.loop.call_soon(self.exchange.start)
        elif self._rejection is not None:
            self._rejection()
        if self.is_read_paused and not self._waiting:  # otherwise a caller that sends too fast would fill the memory
            self.resume_reading()

    def reject_in_turn(self, error: ServeError, path: str, headers: list[Header], *, in_body: bool) -> None:
        """Answer the request that is being read with an error, after the responses before it, and read no more.

        ``path`` and ``headers`` are those that were received so far. ``in_body`` means that the head is complete, so
        that the request is the newest exchange.
        """
        newest = self.newest
        self.ignores_input = True
        must_wait = newest is not None and not newest.response_complete
        if newest is not None and newest.more_body:  # the rejected request, which may be behind others
            newest.abandon()
            must_wait = bool(self._waiting)
        if newest is not None and in_body and newest.response_started:
            self.linger()  # the response was sent before the body was complete
        elif not must_wait:
            self.reject(error, path, headers)
        else:
            if newest is not None and newest.more_body:
                self._waiting.pop()
            self._rejection = partial(self.reject, error, path, headers)

    def reject(self, error: ServeError, path: str, received: list[Header]) -> None:
        """Answer an incomplete request, of which these parts were received, or a connection. Then linger."""
        self.context.on_rejected(error.kind)
        if self.newest is not None:
            self.newest.abandon()
        status, body, headers = failure(error, path)
        cross_origin = self.context.cross_origin
        head = [STATUS_LINES[status], b"" if cross_origin is None else cross_origin.lines(received)]
        head += [b"%s: %s\r\n" % header for header in headers]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self.linger()

    def reject_excess(self, excess: int) -> None:
        """Reject a connection that is over the limit by ``excess``; during a flood, close it without an answer."""
        if excess > _MAX_REJECTED_CONNECTIONS:
            self.context.on_rejected(ErrorKind.OVERLOADED)
            self.transport.abort()
        else:
            self.reject(too_many_connections(self.context.options), "", [])

    def close(self) -> None:
        """Close after the last response; linger if the caller has sent more than this response answers.

        Further requests are not started.
        """
        newest = self.newest
        if newest is not None and (newest.more_body or not newest.response_complete):
            self._abandon_waiting()
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """End the sending side, and drop received bytes until the caller closes, or for ``LINGER_S``.

        A close with unread bytes would reset the connection, and the caller may lose the response.
        """
        self.is_lingering = self.ignores_input = True
        if self.is_half_closed:
            self.transport.close()
        else:
            self.transport.write_eof()
            self.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self._end_lingering)

    def _end_lingering(self) -> None:
        self.transport.close()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)  # the caller does not read

    def drop(self, nbytes: int) -> None:
        """Drop received bytes."""
        if self.is_lingering:
            self._dropped_bytes += nbytes
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.abort()

    def end_requests(self) -> None:
        """Close after the response to the newest request: the caller sends no more requests."""
        newest = self.newest
        if self._rejection is not None:
            return
        if newest is None or newest.response_complete:
            self.transport.close()  # after writing a response that is still corked
        else:
            newest.keep_alive = False  # the responses before it are sent first

    def shutdown(self) -> None:
        """Begin to drain. An idle or lingering connection closes now, any other after its newest request or error."""
        newest = self.newest
        if self.is_lingering:
            self.transport.close()
        elif newest is None or newest.response_complete:
            self.close()
        elif self._rejection is None:
            newest.keep_alive = False

    def on_lost(self) -> None:
        """Release all exchanges and timers: the connection was closed or reset."""
        self.is_lost = True
        if self.is_write_paused:
            self.context.on_cut_answer(self._cut_cause)
            self._forget_unsent()
        for timer in (self._ageing, self._linger_timer):
            if timer is not None:
                timer.cancel()
        exchange, self.exchange = self.exchange, None
        self.newest = None  # breaks a reference cycle
        if exchange is not None:
            exchange.abandon()
        self._abandon_waiting()

    def _abandon_waiting(self) -> None:
        for waiting in self._waiting:
            waiting.abandon()
        self._waiting.clear()

    def _on_age(self) -> None:
        self.is_old = True

    def is_reset(self) -> bool:
        """Whether a reset arrived. The event loop notices a reset only while it reads."""
        connected: socket.socket | None = self.transport.get_extra_info("socket")
        return connected is not None and connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def pause_reading(self) -> None:
        if not self.is_read_paused:
            self.is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_read_paused:
            self.is_read_paused = False
            resume_reads(self.transport)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.count_unsent()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._forget_unsent()
        if self.exchange is not None:
            self.exchange.on_writable()

    def count_unsent(self) -> None:
        """Count the responses in memory towards the budget. Also called regularly: transports report reads late."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.exchange is not None:
            unsent_bytes += self.exchange.unwritten_bytes()
        self.context.budget.count(self, unsent_bytes - self.unsent_bytes)

    def abort(self, cause: str) -> None:
        """Reset the connection; ``cause`` is counted if the caller then lacks a part of a response."""
        self._cut_cause = cause
        self.transport.abort()

    def end_oldest_unsent(self, _text: str, *, is_alone: bool) -> bool:
        """Reset the connection, as ``AnswerHolder`` defines: its response has begun, so no error can be sent."""
        if is_alone:
            return False
        self._forget_unsent()
        self.abort("overloaded")
        return True

    def _forget_unsent(self) -> None:
        self.context.budget.count(self, -self.unsent_bytes)
