"""The reading half of an HTTP/1.1 connection: an ``asyncio.Protocol`` over httptools that uvicorn serves.

It finds requests in the received bytes, applies the limits, and creates an exchange for each request. ``connection`` is
the writing half. uvicorn listens and shuts down. It uses only ``ServerState.connections`` and ``shutdown`` of a
protocol.
"""

import asyncio
from typing import Any, Final

import httptools
from uvicorn.server import ServerState

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.asgi_exchange import AsgiEndpoint, AsgiExchange
from ortserve.frontends.http.connection import Connection, Exchange
from ortserve.frontends.http.context import ConnectionContext
from ortserve.frontends.http.infer_exchange import InferEndpoint, InferExchange
from ortserve.frontends.http.limits import (
    ARRIVAL_S,
    InvalidHeadError,
    Stage,
    UnfinishedInput,
    announced_chunk_bytes,
    check_head,
    header_bytes,
    parse_error,
    too_large_headers,
    too_many_headers,
)
from ortserve.frontends.http.request_head import (
    Header,
    InferHead,
    head_without_upgrade,
    infer_target,
    match_infer_path,
    split_head,
    split_url,
)
from ortserve.frontends.http.responses import CorkedTransport
from ortserve.frontends.http.timeouts import Timeouts
from ortserve.frontends.large_body import BodyReceiver, LargeBody
from ortserve.frontends.long_reads import SHORT_READ_BYTES, read_long
from ortserve.service.gate import body_too_large

_MAX_UNKNOWN_HEADS: Final = 16
"""A connection stops using the cache after more than this number of consecutive requests with unknown heads."""

# Read once, because each request uses them several times.
_REQUEST: Final = Stage.REQUEST
_HEADERS: Final = Stage.HEADERS
_BODY: Final = Stage.BODY

_CLOSED_PARSER: Final = httptools.HttpRequestParser(object())
"""Replaces the parser of a lost connection: the parser and its protocol would form a reference cycle."""


class HttpProtocol(asyncio.Protocol):
    """Reads the requests of one connection. Loop thread only.

    Attributes:
        connection: The writing half.
        stage: The event that the connection waits for.
        headers: Received headers of the newest request, with names in lower case.
    """

    connection: Connection

    def __init__(
        self,
        context: ConnectionContext,
        infer: InferEndpoint,
        asgi: AsgiEndpoint,
        server_state: ServerState,
    ) -> None:
        """Create the protocol of one connection. ``server_state`` comes from uvicorn."""
        self._context = context
        self._max_headers = context.options.http_max_headers
        self._max_header_bytes = context.options.http_max_header_bytes
        self._infer = infer
        self._asgi = asgi
        self._server_state = server_state
        self.stage: Stage = _REQUEST
        self._url = b""
        self.headers: list[Header] = []
        self._n_headers = 0
        """Number of headers of the request, including trailers."""
        self._expects_continue = False
        self._offers_upgrade = False
        """Whether the request offers another protocol. Its head is parsed a second time without the offer."""
        self._n_unknown_heads = 0
        self._data_bytes = 0
        """Bytes of the current read that were parsed so far."""
        self._body_bytes = 0
        self._unfinished = UnfinishedInput(self._max_header_bytes)
        self._chunk_begin = -1
        self._timeouts: Timeouts | None = None
        self._renew_parser()

    @property
    def received_bytes(self) -> int:
        """As ``timeouts.Reader.received_bytes``."""
        return self._unfinished.received_bytes

    @property
    def shown_url(self) -> str:
        """As ``timeouts.Reader.shown_url``."""
        return self._url.decode("latin-1")

    @property
    def has_unanswered(self) -> bool:
        """Whether a request with a complete head has no complete response."""
        newest = self.connection.newest
        return newest is not None and not newest.response_complete and not self.connection.is_lingering

    # Events of the transport and of uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # always one for streams
        loop = asyncio.get_running_loop()
        context = self._context
        connections: set[Any] = self._server_state.connections  # uvicorn declares a set of its own protocols
        self.transport = CorkedTransport(transport, loop)
        self.connection = Connection(context, self._server_state, self.transport, loop)
        connections.add(self)
        excess = len(connections) - context.options.http_max_connections
        if excess > 0 and not context.idle_connections.evict_one():
            self.connection.reject_excess(excess)
        else:
            self._timeouts = Timeouts(self, self.connection)

    def data_received(self, data: bytes) -> None:
        """Begin the requests in ``data``, and continue the one that is incomplete.

        A read that is one whole request with a known head needs no parser.
        """
        connection = self.connection
        if self.stage is not _REQUEST or self._n_unknown_heads > _MAX_UNKNOWN_HEADS or connection.ignores_input:
            self._read(data)
            return
        key, body = split_head(data)
        head = self._infer.heads.find(key, self._max_header_bytes) if key else None
        if head is not None:
            # The parser is between two requests. It may skip this one, because it would return to the same state.
            self._n_unknown_heads = 0
            connection.begin(InferExchange(connection, self._infer, head, body))
            return
        newest = connection.newest
        self._read(data)
        if connection.newest is not newest:
            self._note_unknown_head(key, body)

    def eof_received(self) -> bool:
        """Treat a FIN as "no more requests": answer complete requests in order, then close.

        A caller that has given up and closed its socket sends the same FIN as one that waits for its responses. The
        server cannot tell them apart without sending something, and HTTP/1.1 has nothing that all clients ignore: many
        take an interim response for the final one. So work continues until a write fails or a reset is seen.

        Returns:
            Whether the transport stays open for responses.
        """
        connection = self.connection
        connection.is_half_closed = True
        if connection.is_lingering or not self._context.options.http_answer_half_closed:
            self.transport.close()
        elif not connection.ignores_input and self.stage is not _REQUEST:
            part = "headers" if self.stage is _HEADERS else "body"
            self._reject_in_turn(invalid_input(f"incomplete request: the connection ended within its {part}"))
        else:
            connection.end_requests()
        return not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        connections: set[Any] = self._server_state.connections
        connections.discard(self)
        if self._timeouts is not None:
            self._timeouts.close()
            self._timeouts = None  # breaks a reference cycle
        self.connection.on_lost()
        self._parser = _CLOSED_PARSER
        self._context.on_ended()

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()

    def shutdown(self) -> None:
        """Begin to drain.

        A new connection, or a request with an incomplete head, gets ``ARRIVAL_S`` more. Then the connection closes with
        the response to its newest request. Callers may send requests behind that one again, to another server.
        """
        if self.connection.newest is None or self.stage is _HEADERS:
            self.connection.loop.call_later(ARRIVAL_S, self.connection.shutdown)
        else:
            self.connection.shutdown()

    # Events of the parser

    def on_message_begin(self) -> None:
        self.stage = _HEADERS
        self._url = b""
        self._expects_continue = False
        self.headers = []
        self._n_headers = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._n_headers += 1
        if self._n_headers > self._max_headers:  # check each: one read may hold 40,000 headers
            raise InvalidHeadError(too_many_headers(self._max_headers))
        if self.stage is _BODY:  # a trailer, which is ignored (RFC 9110, section 6.5.1)
            return
        name = name.lower()
        self.headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            text = f"Transfer-Encoding: expected chunked, got {value.decode('latin-1'):.100}"
            raise InvalidHeadError(ServeError(ErrorKind.UNSUPPORTED, text))

    def on_headers_complete(self) -> None:
        self._check_headers()
        if self._offers_upgrade:
            return
        self.connection.begin(self._make_exchange())
        self.stage = _BODY

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        exchange = self.connection.newest
        assert exchange is not None
        exchange.on_body(body)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade:
            self.stage = _REQUEST
            exchange = self.connection.newest
            assert exchange is not None
            exchange.on_end()

    def on_chunk_header(self) -> None:
        self._chunk_begin = self._body_bytes

    def on_chunk_complete(self) -> None:
        self._chunk_begin = -1

    # Called by ``read_long``

    def on_part(self, data: bytes) -> None:
        if self.connection.ignores_input:
            self.connection.drop(len(data))
        else:
            self._data_bytes += len(data)
            self._parse(data)

    def on_read(self, data: bytes) -> None:
        if self.stage is not _REQUEST:
            if self._chunk_begin >= 0:
                self._check_chunk(data)
            self._on_unfinished(self._data_bytes)
        self._data_bytes = 0

    def may_read(self) -> bool:
        return not self.connection.is_read_paused

    # Requests

    def _read(self, data: bytes) -> None:
        if len(data) > SHORT_READ_BYTES:
            read_long(self, self.transport, data)
        else:
            self.on_part(data)
            self.on_read(data)

    def _parse(self, data: bytes) -> None:
        pieces: list[bytes | memoryview] = [data]
        while pieces:
            piece = pieces.pop()
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                # The parser leaves the bytes behind the head to the other protocol, so a new one reads the head again.
                old = self._parser
                head = head_without_upgrade(old.get_method(), self._url, old.get_http_version(), self.headers)
                pieces += memoryview(piece)[offer.args[0] :], head
                self._renew_parser()
            except httptools.HttpParserError as fault:
                self._reject_in_turn(parse_error(fault, piece))
                return

    def _make_exchange(self) -> Exchange:
        parser, url, headers = self._parser, self._url, self.headers
        method, version = parser.get_method(), parser.get_http_version()
        keep_alive = version != "1.0" and parser.should_keep_alive()
        expects_continue = version != "1.0" and self._expects_continue  # RFC 9110, section 10.1.1
        is_post = method == b"POST"
        path, query = url, b""
        target = infer_target(url) if is_post else None
        if target is None:  # another call, or a URL with scheme and host
            path, query = split_url(url)
            target = match_infer_path(path) if is_post else None
            url = b"%b?%b" % (path, query)
        if target is not None:
            head = InferHead(url, *target, headers, keep_alive, expects_continue)
            return InferExchange(self.connection, self._infer, head)
        return AsgiExchange(
            self.connection,
            self._asgi,
            method=method.decode("ascii"),
            raw_path=path,
            query=query,
            version=version,
            headers=headers,
            keep_alive=keep_alive,
            expects_continue=expects_continue,
        )

    def _note_unknown_head(self, key: bytes, body: bytes) -> None:
        """Count a request whose head was not cached, and cache it if ``split_head`` found just this one in the read."""
        exchange = self.connection.newest
        if self.stage is not _REQUEST or not isinstance(exchange, InferExchange) or exchange.rejection is not None:
            return
        self._n_unknown_heads += 1
        # If the body has this size, the parser found the same end of the head, and no second request.
        if 0 < len(body) == exchange.head.infer_headers().body_bytes:
            self._infer.heads.keep(key, exchange.head)

    def _renew_parser(self) -> None:
        """Create a parser that expects the beginning of a request."""
        self._parser = httptools.HttpRequestParser(self)
        # Requests behind one with "Connection: close" are ignored, not malformed.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _on_placed(self, body: LargeBody, nbytes: int) -> None:
        """Account for bytes that were received into the final memory of the body.

        The parser has not seen these bytes and still waits for them, so a new one replaces it at the end of the body.
        """
        exchange = self.connection.newest
        assert exchange is not None
        self._body_bytes += nbytes
        exchange.on_placed(nbytes)
        if not body.is_whole:
            self._on_unfinished(nbytes)
            return
        self._renew_parser()
        if not self.transport.is_closing():
            self.transport.set_protocol(self)
        self.stage = _REQUEST
        exchange.on_end()

    # Limits

    def _check_headers(self) -> None:
        """Check the complete head.

        Raises:
            InvalidHeadError: The head exceeds a limit, or is not a request that this server supports.
        """
        parser, max_bytes = self._parser, self._max_header_bytes
        check_head(parser.get_http_version(), self.headers)
        self._offers_upgrade = parser.should_upgrade()
        if self._offers_upgrade and parser.get_method() == b"CONNECT":
            raise InvalidHeadError(ServeError(ErrorKind.UNSUPPORTED, "CONNECT: this server is not a proxy"))
        # Compute the size only if it may exceed the limit: a head within one read is no larger than that read.
        if self._data_bytes > max_bytes or self._unfinished.includes(self.headers):
            size = header_bytes(self._url, self.headers)
            if size > max_bytes:
                raise InvalidHeadError(too_large_headers(size, max_bytes))

    def _on_unfinished(self, read_bytes: int) -> None:
        """Limit the bytes that the parser holds, and receive the rest of a large body into its final memory."""
        connection = self.connection
        if connection.ignores_input:
            return
        error = self._unfinished.check(self.stage, self._url, self.headers, read_bytes, self._body_bytes)
        if error is not None:
            self._reject_in_turn(error)
        elif self.stage is _BODY and connection.newest is not None:
            large = connection.newest.on_unfinished()
            if large is not None:
                self.transport.set_protocol(BodyReceiver(self, large, self._on_placed))

    def _check_chunk(self, data: bytes) -> None:
        """Reject a body if its last chunk, which began in ``data``, announces too many bytes."""
        size = announced_chunk_bytes(data, self._body_bytes - self._chunk_begin)
        max_bytes = self._context.options.max_body_bytes
        self._chunk_begin = -1
        if size > max_bytes and not self.connection.ignores_input:
            self._reject_in_turn(body_too_large(size, max_bytes))

    def _reject_in_turn(self, error: ServeError) -> None:
        self.connection.reject_in_turn(error, self.shown_url, self.headers, in_body=self.stage is _BODY)
