"""uvicorn's connection with cancellation, half-closure, an age, and limits.

uvicorn tells a request handler that its caller is gone only when the handler asks, and closes a connection at a FIN. It
bounds neither headers nor the time that a request takes to come, nor how many connections there are. It takes the rest
of a request that offers another protocol for the next request.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.connection_age import draw_age_s
from ortserve.frontends.http.answers import LINGER_BYTES, LINGER_S, body_too_large, failure
from ortserve.frontends.http.corked_transport import CorkedTransport
from ortserve.frontends.http.limits import Due, HttpLimits, Stage, Waiting, header_bytes
from ortserve.frontends.http.refusals import (
    RefusedHeadError,
    announced_chunk_bytes,
    check_head,
    malformed,
    too_large_headers,
    too_many_headers,
)

_CONNECTION: Final = "ortserve.connection"
"""Key of a request's scope under which its connection is found."""

_MAX_LINGERING: Final = 64
"""Connections beyond the allowed ones that are told so before they are closed; those beyond these are just closed."""

_FRAMING_PART: Final = 16
"""By how much a chunked body may be longer than its content; a chunk of one byte takes six."""

_OFFERS: Final = (b"upgrade", b"http2-settings")
"""Headers with which a client offers another protocol; its ``Connection`` names them, too."""

_REQUEST: Final = Stage.REQUEST
_HEADERS: Final = Stage.HEADERS
_BODY: Final = Stage.BODY


class Connection(HttpToolsProtocol):
    """uvicorn's protocol on a corked transport, which answers what is no request in its turn.

    Attributes:
        corked: The transport.
        answering: The task to cancel when the caller leaves, while there is one.
        has_left: Whether the connection is lost.
        has_ended: Whether a FIN came: the caller sends nothing more, and may still read.
        is_old: Whether its next answer is to be its last. An old connection that is idle is not closed: a request could
            be on its way.
        stage: How far the request has come that is read now: REQUEST, HEADERS or BODY.
        is_offer: Whether that request offers another protocol, for which it is read once more without its offer.
    """

    corked: CorkedTransport
    answering: "asyncio.Task[Any] | None" = None
    has_left = False
    has_ended = False
    is_old = False
    stage = _REQUEST
    is_offer = False
    _refusal: ServeError | None = None
    _is_lingering = False
    _dropped_bytes = 0
    _running: RequestResponseCycle | None = None
    _ageing: asyncio.TimerHandle | None = None
    _tick: asyncio.TimerHandle | None = None
    _chunk_bytes = 0
    _body_bytes = 0
    _unfinished: tuple[object, Stage] = (None, _REQUEST)
    _unfinished_bytes = 0
    _framed_bytes = 0
    _chunk_begin = -1

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_age_s: float | None,
        limits: HttpLimits,
        on_refusal: Callable[[ErrorKind], None],
    ) -> None:
        """``max_age_s`` is that of connections in general; None for any. ``limits`` hold for each, ``on_refusal`` is
        told of what is refused before it is a request. The rest is uvicorn's.
        """
        super().__init__(config, server_state, app_state, _loop)
        self._max_age_s = max_age_s
        self._limits = limits
        self._on_refusal = on_refusal
        self._waiting = Waiting(limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        self.corked = CorkedTransport(transport, self.loop)
        if self._max_age_s is not None:
            self._ageing = self.loop.call_later(draw_age_s(self._max_age_s), self._grow_old)
        super().connection_made(self.corked)
        beyond = len(self.connections) - self._limits.max_connections
        if beyond > 0:
            self._turn_away(beyond)
        else:
            self._tick = self.loop.call_later(self._limits.tick_s, self._on_tick)

    @property
    def is_given_up(self) -> bool:
        """Whether what comes is read no more: the caller was told why, or will be in its turn."""
        return self._is_lingering or self._refusal is not None

    def data_received(self, data: bytes) -> None:
        if self.is_given_up:
            self._drop(len(data))
            return
        self._chunk_bytes = len(data)
        self._parse(data)
        if self.stage is not _REQUEST:
            if self._chunk_begin >= 0:
                self._check_chunk(data)
            self.on_unfinished()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes
        """Take a FIN for "no more requests": answer those that came whole, in order, then close.

        A caller that gave up and closed its socket sends the same FIN as one that waits for its answers. The two cannot
        be told apart without sending something, and HTTP/1.1 has nothing to send that all clients ignore: many take an
        interim response for the answer. So work continues until a write fails or a reset is seen.

        Returns:
            Whether the transport stays open for answers.
        """
        self.has_ended = True
        cycle = self.cycle
        if self._is_lingering or not self._limits.answers_half_closed:
            self.transport.close()
        elif self._refusal is None and self.stage is not _REQUEST:
            part = "headers" if self.stage is _HEADERS else "body"
            self.refuse_in_turn(invalid_input(f"incomplete request: the connection ended within its {part}"))
        elif self._refusal is None and (cycle is None or cycle.response_complete):
            self.transport.close()  # behind an answer that is still corked
        elif self._refusal is None:
            cycle.keep_alive = False  # the newest: the answers before it go out first
        return not self.transport.is_closing()

    def on_message_begin(self) -> None:
        self.stage = _HEADERS
        super().on_message_begin()
        self.scope[_CONNECTION] = self  # type: ignore[typeddict-unknown-key]  # the ASGI text allows keys of one's own

    def on_header(self, name: bytes, value: bytes) -> None:
        # As uvicorn's, and one name more: it is called for each header of each request.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            text = f"Transfer-Encoding: expected chunked, got {value.decode('latin-1'):.100}"
            raise RefusedHeadError(ServeError(ErrorKind.UNSUPPORTED, text))

    def on_headers_complete(self) -> None:
        self.check_headers()
        if not self.is_offer:
            super().on_headers_complete()
            self.stage = _BODY

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.is_offer:
            self.stage = _REQUEST
            super().on_message_complete()

    def on_chunk_header(self) -> None:
        self._chunk_begin = self._body_bytes

    def on_chunk_complete(self) -> None:
        self._chunk_begin = -1

    def check_headers(self) -> None:
        """Refuse a head that is not a request to this server, or over the limits, now that it is whole.

        Raises:
            RefusedHeadError: It is.
        """
        parser, limits = self.parser, self._limits
        check_head(parser.get_http_version(), self.headers, limits)
        self.is_offer = parser.should_upgrade()
        if self.is_offer and parser.get_method() == b"CONNECT":
            raise RefusedHeadError(ServeError(ErrorKind.UNSUPPORTED, "CONNECT: this server is no proxy"))
        # What came in one piece is no larger than that.
        if self._chunk_bytes > limits.max_header_bytes or self._unfinished[0] is self.headers:
            size = header_bytes(self.url, self.headers)
            if size > limits.max_header_bytes:
                raise RefusedHeadError(too_large_headers(size, limits))

    def refuse_in_turn(self, error: ServeError) -> None:
        """Answer the request that is read now with an error, after the answers before it, and read no more."""
        cycle = self.cycle
        if self.stage is _BODY and cycle.response_started:
            self._linger()  # it was answered before its body was whole
        elif self.pipeline and cycle.more_body:
            self.pipeline.popleft()  # the refused one itself
            self._refusal = error
        elif cycle is None or cycle.response_complete or cycle.more_body:
            self._refuse(error)
        else:
            self._refusal = error

    def on_response_complete(self) -> None:
        # As uvicorn's, without a timer for each answer: the tick closes idle connections.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._refusal is not None:
            self._refuse(self._refusal)

    def shutdown(self) -> None:
        """Begin to drain; a connection whose refusal is sent is not waited for."""
        if self._is_lingering:
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_left = True
        if self._running is not None:  # uvicorn tells the newest alone
            _disconnect(self._running)
        for timer in (self._ageing, self._tick):
            if timer is not None:
                timer.cancel()
        if self.answering is not None:
            self.answering.cancel()

    def on_unfinished(self) -> None:
        """Bound what the parser keeps to itself: headers that do not end, and what is in a chunked body beside it."""
        if self.is_given_up:
            return
        limits = self._limits
        if self._unfinished[0] is not self.headers or self._unfinished[1] is not self.stage:
            # There may be other requests in the piece that it begins in, so that only what is seen of it counts.
            self._unfinished = (self.headers, self.stage)
            self._unfinished_bytes = 0 if self.stage is _BODY else header_bytes(self.url, self.headers)
            self._framed_bytes = self._body_bytes
        else:
            self._unfinished_bytes += self._chunk_bytes
        kept, allowed = self._unfinished_bytes, limits.max_header_bytes
        if self.stage is _BODY:
            content = self._body_bytes - self._framed_bytes
            kept -= content
            allowed += _FRAMING_PART * content
        if kept > allowed:
            self.refuse_in_turn(too_large_headers(kept, limits))
        elif len(self.headers) > limits.max_headers:
            self.refuse_in_turn(too_many_headers(len(self.headers), limits))

    def make_parser(self) -> None:
        """Begin to read anew, with whatever comes next."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def end_slow_body(self, error: ServeError) -> None:
        """Answer a request whose body takes too long, and end its handler."""
        if self.cycle.response_started:
            self._linger()
        else:
            self._refuse(error)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> None:
        pieces: list[bytes | memoryview] = [data]
        while pieces:
            piece = pieces.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                pieces += memoryview(piece)[offer.args[0] :], self._without_offer()
            except httptools.HttpParserError as fault:
                self.refuse_in_turn(malformed(fault, piece))
                return

    def _check_chunk(self, data: bytes) -> None:
        """Refuse a body for the size of its last chunk, which began in ``data``, before the chunk comes."""
        size = announced_chunk_bytes(data, self._body_bytes - self._chunk_begin)
        self._chunk_begin = -1
        if size > self._limits.max_chunk_bytes and not self.is_given_up:
            self.refuse_in_turn(body_too_large(size, self._limits.max_chunk_bytes))

    def _drop(self, count: int) -> None:
        """Read on without keeping anything, so that the close does not reset the connection and lose the answer."""
        if self._is_lingering:
            self._dropped_bytes += count
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.abort()

    def _without_offer(self) -> bytes:
        """The head that was read last without its offer of another protocol, which a server may ignore.

        The parser takes what follows such a head for bytes of the other protocol, and so needs to read it anew.
        """
        old = self.parser
        lines = [b"%s %s HTTP/%s" % (old.get_method(), self.url, old.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in value.split(b",") if part.strip().lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%s: %s" % (name, value))
        self.make_parser()
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _grow_old(self) -> None:
        self.is_old = True

    def _on_tick(self) -> None:
        """Look whether the caller keeps the connection waiting, or has reset it while nothing is read."""
        if (self.has_ended or self.flow.read_paused) and self._is_reset():
            self.transport.abort()
            return
        self._tick = self.loop.call_later(self._limits.tick_s, self._on_tick)
        unsent = self.corked.get_write_buffer_size()
        stage, cycle = self.stage, self.cycle
        is_answered = cycle is None or cycle.response_complete
        if unsent or self.flow.read_paused or not (is_answered or stage is _BODY):
            stage = Stage.ANSWER
        subject = self.headers if stage is _HEADERS else cycle
        due = self._waiting.look(time.monotonic_ns(), stage, subject, self._unfinished_bytes, unsent)
        if due is Due.ABORT:
            self.transport.abort()
        elif due is Due.CLOSE:
            self.transport.close()
        elif due is Due.REFUSE:
            limits = self._limits
            if stage is _HEADERS:
                text = f"http_header_timeout_s: the headers of the request took {limits.header_timeout_s:g} s or longer"
                self._refuse(ServeError(ErrorKind.TOO_SLOW, text))
            else:
                text = (
                    f"http_body_timeout_s: less than {limits.min_body_bytes_per_s} bytes a second came of the body "
                    f"for {limits.body_timeout_s:g} s"
                )
                self.end_slow_body(ServeError(ErrorKind.TOO_SLOW, text))

    def _turn_away(self, beyond: int) -> None:
        """Answer a connection that is one too many; while very many are, some are not told."""
        if beyond > _MAX_LINGERING:
            self._on_refusal(ErrorKind.OVERLOADED)
            self.transport.abort()
            return
        most = self._limits.max_connections
        text = f"http_max_connections: {most} connections are open and no more may be"
        self._refuse(ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1))

    def _refuse(self, error: ServeError) -> None:
        """Answer with the protocol's JSON what is no request, and what is no whole one."""
        self._on_refusal(error.kind)
        if self.cycle is not None:
            _disconnect(self.cycle)  # where it is the refused one, and its handler waits for the rest
        status, body, headers = failure(error)
        head = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in headers)]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self._linger()

    def _linger(self) -> None:
        """End the sending side, and drop what still comes until the caller ends its own, or for a while."""
        self._is_lingering = True
        if self._tick is not None:
            self._tick.cancel()
        if self.has_ended:
            self.transport.close()
        else:
            self.transport.write_eof()
            self.flow.resume_reading()
        self._tick = self.loop.call_later(LINGER_S, self._end_lingering)

    def _end_lingering(self) -> None:
        self.transport.close()
        self._tick = self.loop.call_later(LINGER_S, self.transport.abort)  # of a caller that takes nothing of it

    def _is_reset(self) -> bool:
        """Whether a reset came. The event loop sees it only while it reads."""
        connected: socket.socket | None = self.transport.get_extra_info("socket")
        return connected is not None and connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Let nothing more be written for a request, and wake its handler where that waits for the body."""
    cycle.disconnected = True
    cycle.message_event.set()


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came on."""
    connection: Connection = scope[_CONNECTION]
    return connection
