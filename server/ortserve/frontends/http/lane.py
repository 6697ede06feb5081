"""The HTTP lane: inference inside uvicorn's protocol, without an ASGI cycle or a task for each request.

uvicorn stays the server. Its protocol hangs pipelining, keep-alive and shutdown on an object for each request, the
cycle; an ``Exchange`` stands in for it on ``POST /v2/models/…/infer``. All other requests go uvicorn's way.
``infer_route`` is the same as plain ASGI: what is changed here is changed there, and both pass the same tests.
"""

import asyncio
import logging
from functools import lru_cache, partial
from typing import Any, Final, cast

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from ortserve.clock import Clock
from ortserve.codecs.rest import decode_rest_request, encode_rest_response
from ortserve.core.batch import Arrays
from ortserve.errors import ServeError
from ortserve.frontends.http.announcement import read_announcement
from ortserve.frontends.http.answers import LINGER_S, Answer, Header, body_too_large, failure, success
from ortserve.frontends.http.connection import Connection
from ortserve.frontends.http.infer_route import match_infer_path
from ortserve.service.gate import Hold
from ortserve.service.inference import Call, InferenceService, Pending

logger: Final = logging.getLogger(__name__)

UVICORN: Final = "0.54.0"
"""The version whose protocol class the lane is made for, attribute by attribute."""

_JOINED_BYTES: Final = 64 * 1024
"""Bodies up to this size are joined with their head: copying is cheaper than a second part of the system call."""

_CLOSE: Final = (b"connection", b"close")


def lane_fits() -> bool:
    """Whether the uvicorn that is installed is the one that the lane was made for."""
    return uvicorn.__version__ == UVICORN


class Lane:
    """What the exchanges of a server share. Loop thread only."""

    def __init__(self, service: InferenceService, *, max_body_bytes: int, clock: Clock) -> None:
        self.service: Final = service
        self.max_body_bytes: Final = max_body_bytes
        self.clock: Final = clock
        self.is_draining = False
        """Whether answers ask their callers to open new connections, elsewhere."""

    def connect(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "LaneConnection":
        """Make the protocol of a new connection; uvicorn calls this as it would the protocol's class."""
        return LaneConnection(self, config, server_state, app_state, _loop)


class LaneConnection(Connection):
    """uvicorn's protocol, with an ``Exchange`` in the place of the cycle of an infer request."""

    def __init__(
        self,
        lane: Lane,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.lane: Final = lane
        self.exchange: Exchange | None = None
        """The one whose turn it is; those behind it wait in ``pipeline``."""

    def on_message_begin(self) -> None:
        # What uvicorn's does, without the scope that only ASGI needs.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        parser = self.parser
        target = _target(self.url) if parser.get_method() == b"POST" and not parser.should_upgrade() else None
        if target is None:
            self._begin_asgi()
            return
        previous = cast("RequestResponseCycle | Exchange | None", self.cycle)
        keep_alive = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        exchange = Exchange(self, *target, self.headers, keep_alive, self.expect_100_continue)
        self.cycle = cast("RequestResponseCycle", exchange)
        if previous is None or previous.response_complete:
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange:
            exchange.on_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange:
            exchange.on_end()
        else:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange and exchange.more_body:
            exchange.abandon()
        super().send_400_response(msg)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.exchange is not None:
            self.exchange.abandon()
            self.exchange = None
        for cycle, _ in self.pipeline:
            waiting: object = cycle
            if type(waiting) is Exchange:
                waiting.abandon()
        self.pipeline.clear()

    def on_response_complete(self) -> None:
        self.exchange = None
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        exchange: object = cycle
        if type(exchange) is Exchange:
            # Not at once: a pipeline of requests that are refused would nest as deep as it is long.
            self.loop.call_soon(exchange.start)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin_asgi(self) -> None:
        url, headers, expects_continue = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects_continue
        self.scope["headers"] = headers
        super().on_headers_complete()


class _NoEvent:
    def set(self) -> None: ...


class Exchange:
    """One infer request and its answer.

    It is begun by ``start``, when all before it on the connection are answered; what comes of its body until then is
    kept. uvicorn reads and writes the attributes without docstrings here, as those of a cycle.
    """

    __slots__ = (
        "_announced",
        "_call",
        "_connection",
        "_expects_continue",
        "_hold",
        "_is_started",
        "_model",
        "_parts",
        "_pending",
        "_received_ns",
        "_refusal",
        "_size",
        "_version",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )
    message_event: Final = _NoEvent()

    def __init__(
        self,
        connection: LaneConnection,
        model: str,
        version: str,
        headers: list[Header],
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        """``headers`` are the request's, their names in lower case."""
        lane = connection.lane
        self._connection = connection
        self._model = model
        self._version = version
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []
        self._size = 0
        self._call: Call | None = None
        self._pending: Pending | None = None
        self._hold: Hold | None = None
        self._refusal: ServeError | None = None
        self._is_started = False
        self.more_body = True
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self._received_ns = lane.clock()
        try:
            self._announced = read_announcement(headers)
            if self._announced.body_size > lane.max_body_bytes:
                raise body_too_large(self._announced.body_size, lane.max_body_bytes)
            self._hold = lane.service.hold(self._announced.body_size)
        except ServeError as error:
            self._refusal = error

    def start(self) -> None:
        """Read the rest of the body, or answer: its turn has come."""
        connection = self._connection
        if connection.has_left:
            return
        connection.exchange = self
        self._is_started = True
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif not self.more_body:
            self._run()
        elif self._expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body, unless it is refused."""
        if self._refusal is not None:
            return
        lane = self._connection.lane
        size = self._size + len(data)
        try:
            if size > lane.max_body_bytes:
                raise body_too_large(size, lane.max_body_bytes)
            if size > self._announced.body_size:  # a chunked body announces none
                assert self._hold is not None
                self._hold.grow(len(data))
        except ServeError as error:
            self._refusal = error
            self._parts.clear()
            if self._is_started:
                self._refuse(error)
            return
        self._size = size
        self._parts.append(data)

    def on_end(self) -> None:
        """The body is whole."""
        self.more_body = False
        if self._refusal is not None:
            if self._is_started:
                self._complete()
        elif self._is_started:
            self._run()

    def on_writable(self) -> None:
        """The caller took enough of an answer for the next one to be sent."""
        if self._call is not None and self._pending is None and not self.response_complete:
            self._complete()

    def abandon(self) -> None:
        """The caller left: leave the queue."""
        if self._hold is not None:
            self._hold.release()
        if self._pending is not None:
            self._pending.outputs.cancel()

    def _run(self) -> None:
        try:
            self._begin()
        except Exception:  # noqa: BLE001 - an exception that leaves here is lost in the parser, and the caller waits on
            self._give_up()

    def _on_outputs(self, _: asyncio.Future[Arrays]) -> None:
        try:
            self._finish()
        except asyncio.CancelledError:
            pass  # the caller left
        except Exception:  # noqa: BLE001 - as above, in the loop
            self._give_up()

    def _give_up(self) -> None:
        """A fault of ours, which nothing above foresaw: the caller learns at least that no answer comes."""
        logger.exception("a request could not be answered")
        self.abandon()
        self._connection.transport.abort()

    def _begin(self) -> None:
        lane = self._connection.lane
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        announced = self._announced
        call = self._call = lane.service.receive("http", announced.timeout_ns)
        try:
            pending = lane.service.begin(
                call, partial(decode_rest_request, body, announced.json_size, self._model, self._version)
            )
        except ServeError as error:
            self._answer(failure(error))
            return
        self._pending = pending
        pending.outputs.add_done_callback(self._on_outputs)

    def _finish(self) -> None:
        assert self._pending is not None
        assert self._call is not None
        pending, self._pending = self._pending, None
        try:
            answer = success(self._connection.lane.service.finish(pending, encode_rest_response), self._call.timing)
        except ServeError as error:
            answer = failure(error)
        if not self._connection.has_left:
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        assert self._hold is not None
        self._hold.release()
        if self._connection.lane.is_draining:
            self.keep_alive = False
        self._write(answer)
        if not self._connection.flow.write_paused:
            self._complete()  # else when the caller took it, so that answers do not pile up

    def _refuse(self, error: ServeError) -> None:
        """Answer before the whole body came. The connection is of no more use and closes when the rest came."""
        connection = self._connection
        connection.lane.service.count_refused_body("http", error.kind, self._received_ns)
        if self._hold is not None:
            self._hold.release()
        self.keep_alive = False
        self._write(failure(error))
        if not self.more_body:
            self._complete()
        else:
            connection.loop.call_later(LINGER_S, connection.transport.close)

    def _write(self, answer: Answer) -> None:
        connection = self._connection
        status, body, headers = answer
        lines = [STATUS_LINE[status]]
        for name, value in connection.server_state.default_headers:
            lines += (name, b": ", value, b"\r\n")
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(
            (b"content-length: %d\r\n\r\n" if self.keep_alive else b"content-length: %d\r\nconnection: close\r\n\r\n")
            % len(body)
        )
        if len(body) <= _JOINED_BYTES:
            lines.append(body)
            connection.corked.write_out(b"".join(lines))
        else:
            connection.corked.write_out(b"".join(lines), body)

    def _complete(self) -> None:
        connection = self._connection
        self.response_complete = True
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()


@lru_cache(maxsize=1024)
def _target(url: bytes) -> tuple[str, str] | None:
    """Model and version of the URL of an infer request; None for any other, and for what is better left to uvicorn."""
    try:
        return match_infer_path(url.partition(b"?")[0].decode("ascii"))
    except UnicodeDecodeError:
        return None
