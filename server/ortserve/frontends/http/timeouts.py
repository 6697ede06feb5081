"""The timeouts of a connection, by the stage that it is in. ``protocol`` starts them, and one timer checks them."""

import time
from enum import Enum, auto
from typing import Protocol

from ortserve.config.options import ServerOptions
from ortserve.frontends.http.connection import Connection
from ortserve.frontends.http.limits import Stage, tick_s, too_many_connections, too_slow_body, too_slow_headers
from ortserve.frontends.http.request_head import Header
from ortserve.frontends.idle_connections import has_unread_bytes
from ortserve.frontends.read_rate import SLOW_SHARE, ReadRate
from ortserve.frontends.unsent_answers import unacknowledged_bytes


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

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
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
        options = self._options
        if stage is Stage.RESPONSE:
            # Without unsent bytes the server is still working. With fewer than at the last check, the caller reads.
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
            return TimeoutAction.REJECT if waited_s >= options.http_header_timeout_s else TimeoutAction.NOTHING
        if stage is Stage.BODY:
            if waited_s < options.http_body_timeout_s:
                return TimeoutAction.NOTHING
            if received_bytes - self._since_bytes < waited_s * options.http_min_body_bytes_per_s:
                return TimeoutAction.REJECT
            self._restart(now_ns, stage, subject, received_bytes)
            return TimeoutAction.NOTHING
        if stage is Stage.RESPONSE:
            self._since_bytes = unsent_bytes  # more than before if the server has written more
            return TimeoutAction.ABORT if waited_s >= options.http_send_timeout_s else TimeoutAction.NOTHING
        return TimeoutAction.CLOSE if waited_s >= options.idle_timeout_s else TimeoutAction.NOTHING

    def waited_ns(self, now_ns: int, stage: Stage, subject: object) -> int:
        """Return the time since a check first saw this stage and request; 0 if the last check saw others."""
        return now_ns - self._since_ns if stage is self._stage and subject is self._subject else 0

    def is_slow_body(self, now_ns: int, subject: object, received_bytes: int) -> bool:
        """Whether the body has arrived below the minimum rate for a part of its timeout."""
        waited_s = self.waited_ns(now_ns, Stage.BODY, subject) / 1e9
        came = received_bytes - self._since_bytes
        is_late = waited_s >= SLOW_SHARE * self._options.http_body_timeout_s
        return is_late and came < waited_s * self._options.http_min_body_bytes_per_s

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
    """Ends a connection whose caller is too slow, or has gone while the connection is not read. Loop thread only.

    It is ``Evictable``: it also ends an idle connection for a new one.
    """

    def __init__(self, reader: Reader, connection: Connection) -> None:
        """Start the timer."""
        options = connection.context.options
        self._reader = reader
        self._connection = connection
        self._options = options
        self._tick_s = tick_s(options)
        self._stages = StageTimer(options)
        self._reading = ReadRate(options.http_min_body_bytes_per_s, options.http_send_timeout_s)
        self._handle = connection.loop.call_later(self._tick_s, self._check)
        connection.context.idle_connections.add(self)

    def close(self) -> None:
        """Stop the timer: the connection was lost."""
        self._handle.cancel()
        self._connection.context.idle_connections.discard(self)

    @property
    def has_begun(self) -> bool:
        """As ``Evictable.has_begun``."""
        return self._connection.newest is not None

    def idle_ns(self, now_ns: int) -> int | None:
        """As ``Evictable.idle_ns``: up to a tick less, so that requests need not note their time."""
        connection, reader = self._connection, self._reader
        transport, exchange = connection.transport, connection.newest
        if transport.get_write_buffer_size():
            return 0 if self._reading.is_slow(now_ns) else None
        if transport.is_closing():
            return now_ns
        if connection.is_lingering:
            return 0
        if connection.ignores_input or connection.is_read_paused:
            return None
        if exchange is not None and not exchange.response_complete:
            is_receiving = reader.stage is Stage.BODY and exchange is connection.exchange
            may_reject = is_receiving and not exchange.response_started
            is_slow = may_reject and self._stages.is_slow_body(now_ns, exchange, reader.received_bytes)
            return 0 if is_slow else None
        if reader.stage is not Stage.REQUEST:
            return 0
        return max(1, self._stages.waited_ns(now_ns, Stage.REQUEST, exchange))

    def has_unread(self) -> bool:
        """As ``Evictable.has_unread``: requests behind an unread answer do not protect a caller that reads slowly."""
        transport = self._connection.transport
        return not transport.get_write_buffer_size() and has_unread_bytes(transport.get_extra_info("socket"))

    def evict(self) -> None:
        """Close, as between two requests of a connection that has timed out. Reject a request that is incomplete."""
        connection, reader = self._connection, self._reader
        transport, exchange = connection.transport, connection.newest
        is_done = transport.is_closing() or connection.is_lingering
        if not is_done and reader.stage is not Stage.REQUEST:
            error = too_many_connections(self._options)
            if reader.stage is Stage.BODY and exchange is not None:
                exchange.reject_body(error)
            else:
                connection.reject(error, reader.shown_url, reader.headers)
        transport.close()
        if transport.get_write_buffer_size():  # closing must not wait for a caller that does not read
            connection.abort("overloaded")

    def _check(self) -> None:
        connection, reader = self._connection, self._reader
        transport = connection.transport
        if connection.is_lingering:
            return
        if (connection.is_half_closed or connection.is_read_paused) and connection.is_reset():
            transport.abort()
            return
        self._handle = connection.loop.call_later(self._tick_s, self._check)
        unsent = transport.get_write_buffer_size()
        if unsent:
            unsent += unacknowledged_bytes(transport.get_extra_info("socket"))
        if connection.is_write_paused:
            connection.count_unsent()
        now_ns = time.monotonic_ns()
        self._reading.note(now_ns, connection.exchange, -unsent, has_unsent=unsent > 0)
        stage, exchange = reader.stage, connection.newest
        is_answered = exchange is None or exchange.response_complete
        if unsent or connection.is_read_paused or connection.ignores_input or not (is_answered or stage is Stage.BODY):
            stage = Stage.RESPONSE
        subject = reader.headers if stage is Stage.HEADERS else exchange
        action = self._stages.check(now_ns, stage, subject, reader.received_bytes, unsent)
        if action is TimeoutAction.ABORT:
            connection.abort("too_slow")
        elif action is TimeoutAction.CLOSE:
            transport.close()
        elif action is TimeoutAction.REJECT and stage is Stage.HEADERS:
            connection.reject(too_slow_headers(self._options), reader.shown_url, reader.headers)
        elif action is TimeoutAction.REJECT and exchange is not None:
            exchange.reject_body(too_slow_body(self._options))
