"""One HTTP/2 connection of gRPC callers (RFC 9113; gRPC over HTTP/2): start, periodic checks, drain and end.

``FrameReader`` finds the frames. ``Receiving`` turns those of requests into calls, and ``ControlFrames`` handles all
others. ``Sending`` sends the answers through a ``FrameWriter``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

from ortserve.clock import Clock
from ortserve.config.option_groups import GrpcOptions
from ortserve.errors import ErrorKind
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.control_frames import DRAIN_PING, ControlFrames
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.flood_limits import ConnectionErrors
from ortserve.frontends.grpc.native.frame_reader import MAX_DATA_BYTES, FrameReader
from ortserve.frontends.grpc.native.frame_writer import FrameWriter
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import MAX_LIST_BYTES
from ortserve.frontends.grpc.native.limits import (
    CONNECTION_WINDOW,
    STALL_S,
    STREAM_WINDOW,
    Lifetime,
    LifetimeAction,
    max_calls,
    tick_s,
)
from ortserve.frontends.grpc.native.receiving import Receiving
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.timeouts import CallEnds, CallTimeouts
from ortserve.frontends.idle_connections import IdleConnections, has_unread_bytes
from ortserve.frontends.large_body import LARGE_BYTES, Receiver
from ortserve.frontends.long_reads import SHORT_READ_BYTES, read_long, resume_reads
from ortserve.frontends.unsent_answers import UnsentBudget

logger: Final = logging.getLogger(__name__)

_WRITE_BUFFER_BYTES: Final = 1024 * 1024

_BETWEEN_BYTES: Final = 4 * 1024
"""Size of a read between two DATA frames of a large message. Bytes of DATA in it are copied."""

_PROBE_S: Final = 0.05
"""Time between the first two PINGs to a peer that has closed its side. If the first one causes a reset, writing the
second one detects it. Later ones are sent at each tick."""

_LAST_CALLS_S: Final = 1.0
"""Time for which a draining connection accepts calls that may be on their way, if the peer does not answer the PING."""


@dataclass(frozen=True, slots=True)
class GrpcPort:
    """State that all connections of a port share. Loop thread only.

    Attributes:
        dispatcher: Runs the handlers.
        options: Limits of the port and each connection.
        budget: Budget for the unsent answers of all connections.
        ends: Ends calls that end together.
        errors: Counts connections that end with an error.
        clock: Monotonic nanoseconds.
        on_cut_answer: As in ``Sending``.
        on_rejected: Counts rejections of connections.
        connections: The open connections.
        idle_connections: The same ones, of which one is closed for a new one at the limit.
    """

    dispatcher: CallDispatcher
    options: GrpcOptions
    budget: UnsentBudget
    ends: CallEnds
    errors: ConnectionErrors
    clock: Clock
    on_cut_answer: Callable[[str], None]
    on_rejected: Callable[[ErrorKind], None]
    connections: "set[Connection]"
    idle_connections: IdleConnections


class Connection(asyncio.Protocol):
    """The connection of one socket. Loop thread only."""

    def __init__(self, port: GrpcPort, max_age_s: float | None) -> None:
        """``max_age_s`` is the age at which the connection drains; None for no limit. It is drawn for each connection,
        so that connections opened together do not end together.
        """
        self._port = port
        self._options = port.options
        self._tick_s = tick_s(port.options)
        self._clock = port.clock
        self._loop = asyncio.get_running_loop()
        self.closed: Final = self._loop.create_future()
        self._life = Lifetime(port.options, port.clock(), max_age_s)
        self._is_failed = False
        self._is_turn_due = False
        self._is_end_due = False
        self._is_half_closed = False
        self._tick: asyncio.TimerHandle | None = None
        self._drain_end: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        port = self._port
        self._writer = writer = FrameWriter(self._loop, self._transport, self._close_if_drained)
        self._sending = sending = Sending(
            self._loop,
            self._clock,
            writer,
            self._life,
            port.budget,
            on_cut_answer=port.on_cut_answer,
            on_stream_drained=self._close_if_drained,
        )
        self._timeouts = CallTimeouts(self._loop, sending, writer, port.options, port.ends)
        self._receiving = Receiving(port.dispatcher, port.options, sending, writer, self._timeouts, self._life)
        control = ControlFrames(self._receiving, sending, writer, port.options, self._life, self._end_drain)
        self._reader = FrameReader(self._receiving, control)
        is_full = len(port.connections) >= port.options.grpc_max_connections
        if is_full and not port.idle_connections.evict_one():
            # Without SETTINGS and GOAWAY, as in grpc: clients that have received SETTINGS reconnect at once, others
            # back off.
            port.on_rejected(ErrorKind.OVERLOADED)
            self._transport.abort()
            return
        port.connections.add(self)
        port.idle_connections.add(self)
        ours = {
            frames.MAX_CONCURRENT_STREAMS: max_calls(port.options),
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_FRAME_SIZE: MAX_DATA_BYTES,
            frames.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        writer.control(frames.settings(ours))
        writer.control(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))
        self._tick = self._loop.call_later(self._tick_s, self._on_tick)

    def data_received(self, data: bytes) -> None:
        if len(data) > SHORT_READ_BYTES:
            read_long(self, self._transport, data)
            return
        self.on_part(data)
        self.on_read(data)

    @property
    def has_calls(self) -> bool:
        """Whether calls of the connection have not ended."""
        return bool(self._sending.streams)

    def eof_received(self) -> bool:
        """Answer the complete requests, then close: the peer sends nothing more.

        A process that has exited sends the same FIN as a caller that still reads. A PING distinguishes them: the system
        of an exited process answers with a reset.
        """
        if self._is_failed:
            return False
        if self._reader.has_more:
            self._is_end_due = True  # after the rest of the read
            return True
        if not self.has_calls:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._life.begin_drain(self._clock(), None)
            self._receiving.accepts_calls = False
            self._port.ends.add(self._receiving.end_input())
            self._probe()
            self._probing = self._loop.call_later(_PROBE_S, self._probe)
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        self._port.connections.discard(self)
        self._port.idle_connections.discard(self)
        for timer in (self._tick, self._drain_end, self._probing):
            if timer is not None:
                timer.cancel()
        self._port.ends.add(self._drop_calls("disconnected"))
        self._port.ends.add(self._forget())

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()
        self._sending.on_window()

    # Called by ``read_long``, and ``on_part`` also by the receiver of large messages

    def on_part(self, data: bytes | None, *, placed: int = 0) -> None:
        """Process the next bytes. ``data`` is None for ``placed`` bytes that were written to ``next_buffer``."""
        if self._is_failed:
            return
        now_ns = self._clock()
        self._life.heard_ns = now_ns
        try:
            if data is None:
                self._reader.skip(placed)
            else:
                self._reader.feed(data, now_ns)
                if self._reader.has_more:
                    self._read_on_soon()
        except Http2ConnectionError as error:
            self._fail(error)
        except Exception:
            logger.exception("a gRPC connection failed")
            self._fail(Http2ConnectionError(ErrorCode.INTERNAL_ERROR, ""))

    def on_read(self, data: bytes) -> None:
        if self._reader.data_left >= LARGE_BYTES and self._receiving.placing() is not None:
            self._transport.set_protocol(MessageReceiver(self))

    def may_read(self) -> bool:
        return not self._is_turn_due and self._writer.may_read()

    def _read_on_soon(self) -> None:
        """Read the rest of the received frames in the next turn of the loop, and no further bytes until then."""
        if not self._is_turn_due and not self._transport.is_closing():
            self._is_turn_due = True
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_turn_due = False
        if self._transport.is_closing():
            return
        self.on_part(b"")
        if self._is_end_due and not self._reader.has_more:
            if not self.eof_received():
                self._transport.close()
        elif self.may_read() and not self._transport.is_closing():
            resume_reads(self._transport)

    # Called by the receiver of large messages

    def next_buffer(self) -> memoryview | None:
        """Return the memory for the next bytes; None if the next bytes are not part of a large message."""
        large = self._receiving.placing()
        if large is None or not self._reader.data_left:
            return None
        return large.room()[: self._reader.data_left]

    def resume_parsing(self) -> None:
        """Receive the next bytes in ``data_received`` again, unless the large message is still incomplete."""
        if self._receiving.placing() is None and not self._transport.is_closing():
            self._transport.set_protocol(self)

    # Called by the server

    def begin_drain(self, grace_s: float | None = None) -> None:
        """Send GOAWAY, finish the running calls, then close; after ``grace_s`` at the latest (None for no bound)."""
        if self._life.is_draining:
            return
        self._life.begin_drain(self._clock(), grace_s)
        # Calls that are on their way are accepted until the answer to the PING arrives.
        self._writer.control(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
        self._writer.control(frames.frame(frames.PING, 0, 0, DRAIN_PING))
        self._drain_end = self._loop.call_later(_LAST_CALLS_S, self._end_drain)

    def abort(self) -> None:
        self._transport.abort()

    # Called by ``IdleConnections``

    @property
    def has_begun(self) -> bool:
        """As ``Evictable.has_begun``."""
        return self._receiving.begun_calls > 0

    def idle_ns(self, now_ns: int) -> int | None:
        """As ``Evictable.idle_ns``."""
        if self.has_calls or self._is_turn_due or self._writer.buffered_bytes:
            is_slow = self._timeouts.slow_ns > self._life.useful_ns  # no call has begun since the check
            return 0 if is_slow and not self._is_turn_due else None
        if self._transport.is_closing():
            return now_ns
        return max(1, now_ns - self._life.useful_ns) if self._reader.unfinished_since_ns is None else 0

    def has_unread(self) -> bool:
        """As ``Evictable.has_unread``."""
        return self._writer.may_read() and has_unread_bytes(self._transport.get_extra_info("socket"))

    def evict(self) -> None:
        """Close after a GOAWAY that names the last call, so that clients repeat calls that are on their way."""
        self._port.ends.add(self._drop_calls("overloaded"))
        self._life.begin_drain(self._clock(), None)
        self._end_drain()
        self._close()  # also before pending resets
        if self._writer.buffered_bytes:  # closing must not wait for a peer that does not read
            self._transport.abort()

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(self._tick_s, self._on_tick)
        now_ns = self._clock()
        action = self._next_action(now_ns)
        if action is LifetimeAction.ABORT:
            self._transport.abort()
            return
        if action is LifetimeAction.RETIRE:
            self.begin_drain(self._options.grpc_max_connection_age_grace_s)
        elif action is LifetimeAction.DRAIN:
            self.begin_drain()
        elif action is LifetimeAction.PING:
            self._writer.control(frames.frame(frames.PING, 0, 0, bytes(8)))
        if self._timeouts.end_late(now_ns):
            self._transport.abort()

    def _next_action(self, now_ns: int) -> LifetimeAction:
        if self._is_half_closed:  # the peer sends nothing more, so the limits on its input do not apply
            self._probe()
            self._timeouts.end_unsendable()
            return LifetimeAction.ABORT if self._life.is_over(now_ns) else LifetimeAction.NOTHING
        return self._life.next_action(
            now_ns,
            has_settings=self._reader.has_settings,
            has_calls=self.has_calls,
            unfinished_since_ns=self._reader.unfinished_since_ns,
        )

    def _probe(self) -> None:
        """Write a PING unless bytes are buffered, which have the same effect: an exited peer answers with a reset."""
        if not self._transport.is_closing() and not self._writer.buffered_bytes:
            self._writer.control(frames.frame(frames.PING, 0, 0, bytes(8)))

    def _end_drain(self) -> None:
        receiving = self._receiving
        if not self._life.is_draining or not receiving.accepts_calls:
            return
        receiving.accepts_calls = False
        self._writer.control(frames.goaway(receiving.last_id, ErrorCode.NO_ERROR))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        """Close if no call is left, after the end of the requests that were answered before their end.

        Most peers reset such requests. If the socket were closed before those frames are read, the system would reset
        the connection, and the peer could lose answers.
        """
        is_drained = not (self._receiving.accepts_calls or self._sending.streams or self._writer.has_resets)
        if is_drained and not self._is_failed:
            self._close()

    def _fail(self, error: Http2ConnectionError) -> None:
        self._is_failed = True
        peer = self._transport.get_extra_info("peername")
        self._port.errors.report(error, peer, len(self._sending.streams))
        self._port.ends.add(self._drop_calls("connection_error"))
        self._writer.control(frames.goaway(self._receiving.last_id, error.code, error.text.encode()))
        self._close()

    def _drop_calls(self, cause: str) -> Iterator[None]:
        """End a call without an answer with each step, because the connection ends."""
        for stream in list(self._sending.streams.values()):
            if not stream.is_over:  # it may have ended between two steps
                self._sending.drop(stream, cause)
                yield

    def _forget(self) -> Iterator[None]:
        """Report that the connection is closed, after the end of its calls."""
        self._timeouts.close()
        if not self.closed.done():
            self.closed.set_result(None)
        yield

    def _close(self) -> None:
        """Close when all written bytes are sent, after ``STALL_S`` at the latest."""
        self._writer.flush()
        self._life.abort_by(self._clock(), STALL_S)
        self._transport.close()


class MessageReceiver(Receiver):
    """Receives the rest of a large message: DATA into its final memory, bytes between frames into a small buffer."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        self._between = memoryview(bytearray(_BETWEEN_BYTES))
        self._is_placing = False

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._connection.next_buffer()
        self._is_placing = buffer is not None
        return self._between if buffer is None else buffer

    def buffer_updated(self, nbytes: int) -> None:
        connection = self._connection
        if self._is_placing:
            connection.on_part(None, placed=nbytes)
        else:
            connection.on_part(bytes(self._between[:nbytes]))
        connection.resume_parsing()
