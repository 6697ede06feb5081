"""One HTTP/2 connection of gRPC callers, between its socket and its two halves (RFC 9113; gRPC over HTTP/2).

``FrameReader`` finds the frames, ``Receiving`` makes calls of them, ``Sending`` answers; here is when it all begins and
ends.
"""

import asyncio
import logging
from typing import Final, cast

from ortserve.clock import Clock
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frame_reader import MAX_DATA_BYTES, FrameReader
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.header_blocks import MAX_LIST_BYTES
from ortserve.frontends.grpc.native.lifetime import STALL_S, Due, Lifetime
from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.losses import Losses
from ortserve.frontends.grpc.native.receiving import CONNECTION_WINDOW, DRAIN_PING, Receiving, Work
from ortserve.frontends.grpc.native.send_waits import SendWaits
from ortserve.frontends.grpc.native.sending import Sending
from ortserve.frontends.grpc.native.stream import STREAM_WINDOW, Stream
from ortserve.frontends.grpc.native.unsent_room import UnsentRoom
from ortserve.frontends.large_body import LARGE_BYTES, Receiver

logger: Final = logging.getLogger(__name__)

_WRITE_BUFFER_BYTES: Final = 1024 * 1024

_BETWEEN_BYTES: Final = 4 * 1024
"""Read at once between two frames of a large message. What is DATA among it is copied."""

_PROBE_S: Final = 0.05
"""Between the first two PINGs to a peer that has closed its side. The second one finds the reset that the first one
met; later ones come with the ticks."""

_LAST_CALLS_S: Final = 1.0
"""For which calls that were on their way when a drain began still count, where the peer does not answer a PING."""


class Connection(asyncio.Protocol):
    """Made for each socket; ``connections`` holds those that are open."""

    def __init__(
        self,
        work: Work,
        limits: Limits,
        connections: "set[Connection]",
        room: UnsentRoom,
        losses: Losses,
        clock: Clock,
        max_age_s: float | None,
    ) -> None:
        """``max_age_s`` is this connection's own, so that not all that came together leave together.

        ``room`` is for the answers of all connections, ``losses`` counts what those of the port lose.
        """
        self._work = work
        self._limits = limits
        self._connections = connections
        self._room = room
        self._losses = losses
        self._waits = SendWaits(limits.send_timeout_s)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.closed: Final = self._loop.create_future()
        self._life = Lifetime(limits, clock(), max_age_s)
        self._is_draining = False
        self._is_failed = False
        self._tick: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._drain_end: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._sending = Sending(self._loop, self._clock, self._transport, self._on_over, self._room, self._losses)
        self._receiving = Receiving(self._work, self._limits, self._loop, self._sending, self._life, self._end_drain)
        self._reader = FrameReader(self._receiving)
        if len(self._connections) >= self._limits.max_connections:
            # Without a word, as grpc does it: to clients who got SETTINGS the connection was a good one, so that they
            # open the next one at once, over and over; others back off.
            self._transport.abort()
            return
        self._connections.add(self)
        self._room.enter(self._receiving.late)
        ours = {
            frames.MAX_CONCURRENT_STREAMS: self._limits.max_streams,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_FRAME_SIZE: MAX_DATA_BYTES,
            frames.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        self._sending.control(frames.settings(ours))
        self._sending.control(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))
        self._tick = self._loop.call_later(self._limits.tick_s, self._on_tick)

    def data_received(self, data: bytes) -> None:
        self.on_bytes(data)
        if self._reader.data_left >= LARGE_BYTES and self._receiving.placing() is not None:
            self._transport.set_protocol(MessageReceiver(self))

    def eof_received(self) -> bool:
        """The peer sends nothing more. Its calls that came whole are answered, then the connection closes.

        A process that is gone sends the same FIN as a caller who still reads. PINGs tell them apart: the system of the
        one answers with a reset, the other passes them over. Over TLS the transport closes whatever is returned.
        """
        if self._is_failed or not self._receiving.streams or not self._transport.can_write_eof():
            return False
        if not self._is_half_closed:
            self._is_half_closed = self._is_draining = True
            self._life.begin_drain(self._clock(), None)
            self._receiving.goaway_id = self._receiving.last_id
            self._receiving.end_input()
            self._close_if_drained()
            self._probe()
            self._probing = self._loop.call_later(_PROBE_S, self._probe)
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        self._connections.discard(self)
        for timer in (self._tick, self._drain_end, self._probing):
            if timer is not None:
                timer.cancel()
        self._receiving.close("disconnected")
        self._room.leave(self._receiving.late)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._sending.pause()

    def resume_writing(self) -> None:
        self._sending.resume()

    # Its receiver's calls

    def room(self) -> memoryview | None:
        """Where the next bytes belong; None for those that have to be looked at first."""
        large = self._receiving.placing()
        if large is None or not self._reader.data_left:
            return None
        return large.room()[: self._reader.data_left]

    def on_placed(self, count: int) -> None:
        """The next ``count`` bytes were written to ``room``."""
        self.on_bytes(None, placed=count)

    def go_on(self) -> None:
        """Take what comes as it comes again, unless it is still part of a large message."""
        if self._receiving.placing() is None and not self._transport.is_closing():
            self._transport.set_protocol(self)

    def on_bytes(self, data: bytes | None, *, placed: int = 0) -> None:
        """The next bytes, or how many there were of those that were placed."""
        if self._is_failed:
            return
        now_ns = self._clock()
        self._life.heard_ns = now_ns
        try:
            if data is None:
                self._reader.skip(placed)
            else:
                self._reader.feed(data, now_ns)
        except Http2ConnectionError as error:
            self._fail(error)
        except Exception:
            logger.exception("a gRPC connection failed")
            self._fail(Http2ConnectionError(ErrorCode.INTERNAL_ERROR, ""))

    # The server's calls

    def begin_drain(self, grace_s: float | None = None) -> None:
        """Tell the caller to go elsewhere, finish what it has begun, then close; after ``grace_s`` in any case."""
        if self._is_draining:
            return
        self._is_draining = True
        self._life.begin_drain(self._clock(), grace_s)
        # Calls that are on their way still count; what comes after the answer to the ping does not.
        self._sending.control(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
        self._sending.control(frames.frame(frames.PING, 0, 0, DRAIN_PING))
        self._drain_end = self._loop.call_later(_LAST_CALLS_S, self._end_drain)

    def abort(self) -> None:
        self._transport.abort()

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(self._limits.tick_s, self._on_tick)
        now_ns = self._clock()
        due = self._look(now_ns)
        if due is Due.ABORT:
            self._transport.abort()
            return
        if due is Due.RETIRE:
            self.begin_drain(self._limits.max_age_grace_s)
        elif due is Due.DRAIN:
            self.begin_drain()
        elif due is Due.PING:
            self._sending.control(frames.frame(frames.PING, 0, 0, bytes(8)))
        self._receiving.late.end_stalled(now_ns)
        untaken = self._waits.late(now_ns, self._sending.taken(self._receiving.streams.values()))
        if 0 in untaken:
            self._transport.abort()
        else:
            self._receiving.late.end_untaken(untaken)

    def _look(self, now_ns: int) -> Due:
        if self._is_half_closed:  # nothing is due from the peer any more
            self._probe()
            self._receiving.late.end_unsendable()
            return Due.ABORT if self._life.is_over(now_ns) else Due.NOTHING
        return self._life.look(
            now_ns,
            has_settings=self._reader.has_settings,
            has_calls=bool(self._receiving.streams),
            unfinished_since_ns=self._reader.unfinished_since_ns,
        )

    def _probe(self) -> None:
        """Write something that a peer which is gone resets; what waits to be written does the same."""
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._sending.control(frames.frame(frames.PING, 0, 0, bytes(8)))

    def _on_over(self, stream: Stream) -> bool:
        has_others = self._receiving.on_over(stream)
        if self._is_draining:
            self._close_if_drained()
        return has_others

    def _end_drain(self) -> None:
        receiving = self._receiving
        if not self._is_draining or receiving.goaway_id != frames.MAX_STREAM_ID:
            return
        receiving.goaway_id = receiving.last_id
        self._sending.control(frames.goaway(receiving.last_id, ErrorCode.NO_ERROR))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        is_drained = self._receiving.goaway_id != frames.MAX_STREAM_ID and not self._receiving.streams
        if is_drained and not self._is_failed:
            self._close()

    def _fail(self, error: Http2ConnectionError) -> None:
        self._is_failed = True
        peer = self._transport.get_extra_info("peername")
        self._losses.connection_error(error, peer, len(self._receiving.streams))
        self._receiving.close("connection_error")
        self._sending.control(frames.goaway(self._receiving.last_id, error.code, error.text.encode()))
        self._close()

    def _close(self) -> None:
        """Close when all was sent; who does not read it is not waited for."""
        self._sending.flush()
        self._life.abort_by(self._clock(), STALL_S)
        self._transport.close()


class MessageReceiver(Receiver):
    """Receives the rest of a large message for a connection: DATA into its place, what is between into little."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        self._between = memoryview(bytearray(_BETWEEN_BYTES))
        self._is_placing = False

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._connection.room()
        self._is_placing = room is not None
        return self._between if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        connection = self._connection
        if self._is_placing:
            connection.on_placed(nbytes)
        else:
            connection.on_bytes(bytes(self._between[:nbytes]))
        connection.go_on()
