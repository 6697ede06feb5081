"""What uvicorn's connections lack: answers in one system call, word of callers who leave, and an age.

uvicorn writes head and body of an answer one after the other, and uvloop hands each to the kernel at once; on a small
answer the second call costs as much as decoding the request. And a request handler that waits for something else than
its caller learns only when it asks that the caller is gone.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import orjson
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ortserve.frontends.connection_age import draw_age_s

_CONNECTION: Final = "ortserve.connection"
"""Key of a request's scope under which its connection is found."""


class CorkedTransport(asyncio.Transport):
    """Collects what is written in one turn of the loop and hands it on together, uncopied. Loop thread only."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def write_out(self, *data: bytes) -> None:
        """Hand on at once, behind what was collected: for who writes once a turn anyway."""
        if self._pending:
            self._pending += data
            self._flush()
        elif len(data) == 1:
            self._transport.write(data[0])
        else:
            self._transport.writelines(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pending.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol on a corked transport, which answers what is no request in its turn.

    Attributes:
        corked: The transport.
        answering: The task to cancel when the caller leaves, while there is one.
        has_left: Whether the caller left.
        is_old: Whether its next answer is to be its last. An old connection that is idle is not closed: a request could
            be on its way.
    """

    corked: CorkedTransport
    answering: "asyncio.Task[Any] | None" = None
    has_left = False
    is_old = False
    _malformed: str | None = None
    _ageing: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_age_s: float | None,
    ) -> None:
        """``max_age_s`` is that of connections in general; None for any. The rest is uvicorn's."""
        super().__init__(config, server_state, app_state, _loop)
        self._max_age_s = max_age_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        self.corked = CorkedTransport(transport, self.loop)
        if self._max_age_s is not None:
            self._ageing = self.loop.call_later(draw_age_s(self._max_age_s), self._grow_old)
        super().connection_made(self.corked)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_CONNECTION] = self  # type: ignore[typeddict-unknown-key]  # the ASGI text allows keys of one's own

    def data_received(self, data: bytes) -> None:
        if self._malformed is None:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # the malformed one itself
        elif self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._refuse(msg)
            return
        self._malformed = msg  # there are requests before it that are still to be answered

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self._malformed is not None and is_last and not self.transport.is_closing():
            self._refuse(self._malformed)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_left = True
        if self._ageing is not None:
            self._ageing.cancel()
        if self.answering is not None:
            self.answering.cancel()

    def _grow_old(self) -> None:
        self.is_old = True

    def _refuse(self, message: str) -> None:
        """As uvicorn does, but in the protocol's JSON."""
        body = orjson.dumps({"error": message})
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came on."""
    connection: Connection = scope[_CONNECTION]
    return connection
