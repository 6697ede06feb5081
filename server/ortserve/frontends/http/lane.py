"""The HTTP lane: inference inside uvicorn's protocol, without an ASGI cycle or a task for each request.

uvicorn stays the server. Its protocol hangs pipelining, keep-alive and shutdown on an object for each request, the
cycle; an ``Exchange`` stands in for it on ``POST /v2/models/…/infer``. All other requests go uvicorn's way.
``infer_route`` is the same as plain ASGI: what is changed here is changed there, and both pass the same tests.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, cast

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.connection import Connection
from ortserve.frontends.http.exchange import Exchange, Lane
from ortserve.frontends.http.heads import Head, find_head
from ortserve.frontends.http.infer_route import match_infer_path
from ortserve.frontends.http.limits import HttpLimits, Stage
from ortserve.frontends.large_body import LargeBody, Receiver

UVICORN: Final = "0.54.0"
"""The version whose protocol class the lane is made for, attribute by attribute."""

_MAX_STRANGE: Final = 16
"""Requests in a row whose heads were not known: from then on a connection's are not looked up, for all may differ."""

_KEPT_URL_BYTES: Final = 512
"""Longer URLs go uvicorn's way: anybody may make them up, and what was read of the others is kept."""


# Looked up once, rather than thrice in each request.
_REQUEST: Final = Stage.REQUEST
_HEADERS: Final = Stage.HEADERS
_BODY: Final = Stage.BODY


def lane_fits() -> bool:
    """Whether the uvicorn that is installed is the one that the lane was made for."""
    return uvicorn.__version__ == UVICORN


class LaneConnection(Connection):
    """uvicorn's protocol, with an ``Exchange`` in the place of the cycle of an infer request."""

    def __init__(
        self,
        lane: Lane,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None,
        *,
        max_age_s: float | None,
        limits: HttpLimits,
        on_refusal: Callable[[ErrorKind], None],
    ) -> None:
        super().__init__(
            config, server_state, app_state, _loop, max_age_s=max_age_s, limits=limits, on_refusal=on_refusal
        )
        self.lane: Final = lane
        self.exchange: Exchange | None = None
        """The one whose turn it is; those behind it wait in ``pipeline``."""
        self._n_strange = 0

    def data_received(self, data: bytes) -> None:
        if self._n_strange > _MAX_STRANGE or self.stage is not _REQUEST or self.is_given_up:
            super().data_received(data)
            return
        found = find_head(data)
        head = self.lane.heads.find(found[0], self._limits.max_header_bytes) if found else None
        if found is None or head is None:
            previous = self.cycle
            super().data_received(data)
            if self.cycle is not previous:
                self._remember(found)
        else:
            # The parser is between two requests, and would be there again after this one.
            self._n_strange = 0
            self._begin(head, found[1])

    def on_message_begin(self) -> None:
        # What uvicorn's does, without the scope that only ASGI needs.
        self.stage = _HEADERS
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        self.check_headers()
        if self.is_offer:
            return
        parser = self.parser
        target = _target(self.url) if parser.get_method() == b"POST" else None
        if target is None:
            self._begin_asgi()
            return
        keep_alive = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        self._begin(Head(self.url, *target, self.headers, keep_alive, self.expect_100_continue))
        self.stage = _BODY

    def on_body(self, body: bytes) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange:
            self._body_bytes += len(body)
            exchange.on_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange and not self.is_offer:
            self.stage = _REQUEST
            exchange.on_end()
        else:
            super().on_message_complete()

    def on_unfinished(self) -> None:
        super().on_unfinished()
        exchange: object = self.cycle
        if type(exchange) is Exchange and self.stage is _BODY:
            large = exchange.on_part()
            if large is not None:
                self.transport.set_protocol(BodyReceiver(self, large))

    def on_placed(self, count: int, *, is_whole: bool) -> None:
        """``count`` bytes of the exchange's body came to their place, past the parser, which still waits for them."""
        exchange: object = self.cycle
        assert type(exchange) is Exchange
        self._chunk_bytes = count
        self._body_bytes += count
        exchange.on_placed(count)
        if not is_whole:
            self.on_unfinished()
            return
        self.make_parser()
        if not self.transport.is_closing():
            self.transport.set_protocol(self)
        self.stage = _REQUEST
        exchange.on_end()

    def refuse_in_turn(self, error: ServeError) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange and exchange.more_body:
            exchange.abandon()
        super().refuse_in_turn(error)

    def end_slow_body(self, error: ServeError) -> None:
        exchange: object = self.cycle
        if type(exchange) is Exchange:
            exchange.refuse_body(error)
        else:
            super().end_slow_body(error)

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

    def _remember(self, found: tuple[bytes, bytes] | None) -> None:
        """Keep what the parser made of the head of a request, if all that came was that one, whole."""
        exchange: object = self.cycle
        if self.stage is not _REQUEST or type(exchange) is not Exchange or exchange.is_refused:
            return
        self._n_strange += 1
        # With a body of just this size the head ended there for the parser, too, and there was no other request.
        if found is not None and 0 < len(found[1]) == exchange.head.announced().body_size:
            self.lane.heads.keep(found[0], exchange.head)

    def _begin(self, head: Head, body: bytes | None = None) -> None:
        previous = cast("RequestResponseCycle | Exchange | None", self.cycle)
        exchange = Exchange(self, head, body)
        self.cycle = cast("RequestResponseCycle", exchange)
        if previous is None or previous.response_complete:
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

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
        super().on_headers_complete()  # which checks them once more; control requests are few


class BodyReceiver(Receiver):
    """Receives the rest of a large body for a connection."""

    def __init__(self, connection: LaneConnection, body: LargeBody) -> None:
        super().__init__(connection)
        self._connection = connection
        self._body = body

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._body.add(nbytes)
        self._connection.on_placed(nbytes, is_whole=self._body.is_whole)


def _target(url: bytes) -> tuple[str, str] | None:
    """Model and version of the URL of an infer request; None for any other, and for what is better left to uvicorn."""
    return _known_target(url.partition(b"?")[0]) if len(url) <= _KEPT_URL_BYTES else None


@lru_cache(maxsize=1024)
def _known_target(path: bytes) -> tuple[str, str] | None:
    try:
        return match_infer_path(path.decode("ascii"))
    except UnicodeDecodeError:
        return None
