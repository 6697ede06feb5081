"""The timeouts of a connection, by the stage that it is in. ``protocol`` starts them, and one timer checks them."""

import asyncio
import time
from enum import Enum, auto
from typing import Protocol

from ortserve.frontends.http.connection import Connection
from ortserve.frontends.http.limits import HttpLimits, Stage, too_slow_body, too_slow_headers
from ortserve.frontends.http.request_head import Header


class TimeoutAction(Enum):
    """The next action on a connection."""

    NOTHING = auto()
    CLOSE = auto()
    REJECT = auto()
    """Answer with the error of a slow request, then close."""
    ABORT = auto()
    """Reset the connection: the caller reads nothing of the response."""


class StageTimer:
    """Measures how long one connection waits for its caller in a stage. Pure; checked once a tick."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._stage: Stage | None = None
        self._subject: object = None
        self._since_ns = 0
        self._since_bytes = 0

    def check(
        self, now_ns: int, stage: Stage, subject: object, received_bytes: int, unsent_bytes: int
    ) -> TimeoutAction:
        """Decide the next action.

        Args:
            now_ns: Monotonic time.
            stage: The event that the connection waits for.
            subject: The current request, by identity; another one restarts the timer.
            received_bytes: Received bytes of the stage, as ``UnfinishedInput`` counts them.
            unsent_bytes: Bytes of responses that the caller has not read.
        """
        limits = self._limits
        if stage is Stage.RESPONSE:
            # Without unsent bytes the server is still working. With fewer than before, the caller is reading.
            continues = 0 < self._since_bytes <= unsent_bytes
            n_bytes = unsent_bytes
        else:
            continues = True
            n_bytes = received_bytes
        if not continues or stage is not self._stage or subject is not self._subject:
            self._restart(now_ns, stage, subject, n_bytes)
            return TimeoutAction.NOTHING
        waited_s = (now_ns - self._since_ns) / 1e9
        if stage is Stage.HEADERS:
            return TimeoutAction.REJECT if waited_s >= limits.header_timeout_s else TimeoutAction.NOTHING
        if stage is Stage.BODY:
            if waited_s < limits.body_timeout_s:
                return TimeoutAction.NOTHING
            if received_bytes - self._since_bytes < waited_s * limits.min_body_bytes_per_s:
                return TimeoutAction.REJECT
            self._restart(now_ns, stage, subject, received_bytes)
            return TimeoutAction.NOTHING
        if stage is Stage.RESPONSE:
            return TimeoutAction.ABORT if waited_s >= limits.send_timeout_s else TimeoutAction.NOTHING
        return TimeoutAction.CLOSE if waited_s >= limits.idle_timeout_s else TimeoutAction.NOTHING

    def _restart(self, now_ns: int, stage: Stage, subject: object, n_bytes: int) -> None:
        self._stage, self._subject, self._since_ns, self._since_bytes = stage, subject, now_ns, n_bytes


class Reader(Protocol):
    """The reading half of a connection, as its timeouts see it.

    Attributes:
        stage: The event that it waits for.
        headers: Received headers of the newest request; the list object identifies the request.
    """

    stage: Stage
    headers: list[Header]

    @property
    def received_bytes(self) -> int:
        """Received bytes of the stage, as ``UnfinishedInput`` counts them."""
        ...

    @property
    def shown_url(self) -> str:
        """The received part of the URL of the newest request."""
        ...


class Timeouts:
    """Ends a connection whose caller is too slow, or has gone while the connection is not read. Loop thread only."""

    def __init__(
        self, reader: Reader, connection: Connection, limits: HttpLimits, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start the timer."""
        self._reader = reader
        self._connection = connection
        self._limits = limits
        self._loop = loop
        self._stages = StageTimer(limits)
        self._handle = loop.call_later(limits.tick_s, self._check)

    def close(self) -> None:
        """Stop the timer."""
        self._handle.cancel()

    def _check(self) -> None:
        connection, reader = self._connection, self._reader
        transport = connection.transport
        if connection.is_lingering:
            return
        if (connection.has_ended or connection.is_read_paused) and connection.is_reset():
            transport.abort()
            return
        self._handle = self._loop.call_later(self._limits.tick_s, self._check)
        unsent = transport.get_write_buffer_size()
        if connection.is_write_paused:
            connection.count_unsent()
        stage, exchange = reader.stage, connection.newest
        is_answered = exchange is None or exchange.response_complete
        if unsent or connection.is_read_paused or connection.ignores_input or not (is_answered or stage is Stage.BODY):
            stage = Stage.RESPONSE
        subject = reader.headers if stage is Stage.HEADERS else exchange
        action = self._stages.check(time.monotonic_ns(), stage, subject, reader.received_bytes, unsent)
        if action is TimeoutAction.ABORT:
            connection.abort("too_slow")
        elif action is TimeoutAction.CLOSE:
            transport.close()
        elif action is TimeoutAction.REJECT and stage is Stage.HEADERS:
            connection.reject(too_slow_headers(self._limits), reader.shown_url, reader.headers)
        elif action is TimeoutAction.REJECT and exchange is not None:
            exchange.reject_body(too_slow_body(self._limits))
