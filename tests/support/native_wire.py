"""A connection of the native gRPC transport without a socket, in virtual time, with the ``h2`` library as client."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.settings import SettingCodes, Settings

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.transport import FakeTransport
from ortserve.config.option_groups import GrpcOptions
from ortserve.core.inflight import CANCELLED, InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import (
    Context,
    Handler,
    read,
    streaming,
    unary,
    write,
)
from ortserve.frontends.grpc.native.connection import Connection, GrpcPort
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.flood_limits import ConnectionErrors
from ortserve.frontends.grpc.native.timeouts import CallEnds
from ortserve.frontends.grpc.quick_calls import OnAnswer, OnFailure, QuickCall, RequestHead
from ortserve.frontends.idle_connections import IdleConnections
from ortserve.frontends.unsent_answers import UnsentBudget
from ortserve.service.gate import BodyGate

ECHO: Final = "/test/Echo"
"""A quick call that answers with its message."""
FAIL: Final = "/test/Fail"
"""A quick call that fails at once."""
HOLD: Final = "/test/Hold"
"""A quick call that answers with its message after ``Wire.release``."""
SLOW: Final = "/test/Slow"
"""A handler that answers with its message after ``Wire.release``."""
STREAM: Final = "/test/Stream"
"""A handler that answers each message with the same message."""
BOOM: Final = "/test/Boom"
"""A faulty handler: it raises an exception other than ServeError."""

HEADERS: Final = ((":method", "POST"), (":scheme", "http"), (":authority", "x"), ("te", "trailers"))


def framed(message: bytes, *, flag: int = 0) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


class Wire:
    """A connection with its calls and memory limits.

    Attributes:
        running: Calls that have started and not ended.
        cancelled: Number of cancelled calls.
        timeouts_ns: The timeout of each quick call.
        cut_answers: The cause of each incomplete answer.
        rejections: The kind of error of each rejected connection.
        connection_errors: The code of each connection error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: FakeClock,
        *,
        options: GrpcOptions | None = None,
        max_message_bytes: int = 2**31 - 1,
        max_age_s: float | None = None,
        max_inflight_bytes: int = 10**9,
        compression: str = "none",
        budget: UnsentBudget | None = None,
        errors: ConnectionErrors | None = None,
    ) -> None:
        options = options or GrpcOptions()
        self.clock = clock
        self.gate = BodyGate(max_inflight_bytes)
        self.running = 0
        self.cancelled = 0
        self.timeouts_ns: list[int | None] = []
        self.cut_answers: list[str] = []
        self.rejections: list[ErrorKind] = []
        self.connection_errors: list[str] = []
        self.connections: set[Connection] = set()
        self.idle_connections = IdleConnections(clock, lambda: None)
        self._loop = loop
        self._releases: list[InflightRequest | asyncio.Future[None]] = []
        quick = {ECHO: self._answering(self._complete_soon), FAIL: _fail, HOLD: self._answering(self._keep)}
        self.work = CallDispatcher(
            self._find,
            quick,
            self.gate,
            max_quick_bytes=max_message_bytes,
            max_message_bytes=lambda _: max_message_bytes,
            compression=compression,
        )
        self.budget = budget or UnsentBudget("grpc_unsent_bytes", options.grpc_unsent_bytes or 2**30, clock)
        self._ends = CallEnds(loop)
        self.errors = errors or ConnectionErrors(clock, self.connection_errors.append)
        self.connection = self.connect(options, max_age_s)
        self.transport = FakeTransport(loop, self.connection)
        self.connection.connection_made(self.transport)

    def connect(self, options: GrpcOptions, max_age_s: float | None = None) -> Connection:
        """Open another connection to the same port, without a transport."""
        port = GrpcPort(
            self.work,
            options,
            self.budget,
            self._ends,
            self.errors,
            self.clock,
            self.cut_answers.append,
            self.rejections.append,
            self.connections,
            self.idle_connections,
        )
        return Connection(port, max_age_s)

    def feed(self, data: bytes) -> None:
        """Pass bytes to the connection as received bytes."""
        self.transport.receive(data)

    async def turn(self) -> bytes:
        """Run the loop until it is idle and has processed what it read. Returns the sent bytes."""
        idle_turns = 0
        for _ in range(1_000):  # reading stays paused if the peer leaves too many answers unread
            await asyncio.sleep(0)
            idle_turns = idle_turns + 1 if self.transport.is_reading() else 0
            if idle_turns == 8:
                break
        return self.transport.take()

    def lose(self) -> None:
        """Reset the connection, as if the peer had exited."""
        self.transport.abort()

    def release(self) -> None:
        """Answer the calls that wait for ``release``."""
        releases, self._releases = self._releases, []
        for held in releases:
            if isinstance(held, InflightRequest):
                held.complete(())
            elif not held.done():
                held.set_result(None)

    def _complete_soon(self, request: InflightRequest) -> None:
        self._loop.call_soon(request.complete, ())

    def _keep(self, request: InflightRequest) -> None:
        self._releases.append(request)

    def _answering(self, start: Callable[[InflightRequest], object]) -> QuickCall:
        """A quick call that answers with its message when the request passed to ``start`` is settled."""

        def begin(
            message: bytes | memoryview,
            timeout_ns: int | None,
            _head: RequestHead,
            on_answer: OnAnswer,
            _on_failure: OnFailure,
        ) -> Callable[[], object]:
            answer = bytes(message)
            self.timeouts_ns.append(timeout_ns)
            self.running += 1

            def finish(request: InflightRequest) -> None:
                self.running -= 1
                if request.state == CANCELLED:
                    self.cancelled += 1
                else:
                    on_answer(answer, b"all;dur=1", None)

            request = InflightRequest(Timing(0))
            request.on_settled = finish
            start(request)
            return request.cancel

        return begin

    def _find(self, path: str) -> Handler:
        handlers = {STREAM: streaming(self._stream), SLOW: unary(self._slow), BOOM: unary(self._boom)}
        handlers |= {ECHO: unary(self._echo_slowly), HOLD: unary(self._slow)}
        return handlers.get(path) or streaming(_refuse)

    async def _stream(self, context: Context) -> None:
        with _Counted(self):
            while (message := await read(context)) is not None:
                await write(context, bytes(message))

    async def _slow(self, data: bytes | memoryview, _context: Context) -> bytes:
        with _Counted(self):
            released = self._loop.create_future()
            self._releases.append(released)
            await released
            return bytes(data)

    async def _echo_slowly(self, data: bytes | memoryview, _context: Context) -> bytes:
        return bytes(data)

    async def _boom(self, _data: bytes | memoryview, _context: Context) -> bytes:
        raise RuntimeError("/secret/path")


def _fail(
    _message: bytes | memoryview,
    _timeout_ns: int | None,
    _head: RequestHead,
    _on_answer: OnAnswer,
    on_failure: OnFailure,
) -> None:
    on_failure(ServeError(ErrorKind.INVALID_INPUT, "it is 100 % wrong: ü"))


async def _refuse(context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")


class _Counted:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __enter__(self) -> None:
        self._wire.running += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._wire.running -= 1
        self._wire.cancelled += kind is asyncio.CancelledError


@dataclass
class Answer:
    """The received parts of an answer."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    is_ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        """``grpc-status``, from the trailers or from the headers of an answer without a body."""
        return int((self.trailers or self.headers)[b"grpc-status"])

    @property
    def text(self) -> bytes:
        return (self.trailers or self.headers).get(b"grpc-message", b"")

    @property
    def messages(self) -> list[bytes]:
        """The messages. Fails if one of them is incomplete."""
        messages, rest = [], self.data
        while rest:
            end = 5 + int.from_bytes(rest[1:5], "big")
            assert len(rest) >= end
            messages.append(rest[5:end])
            rest = rest[end:]
        return messages


class Client:
    """The ``h2`` library at the other end of a ``Wire``.

    Attributes:
        answers: Answers by stream id.
        goaways: Code and text of each GOAWAY.
        pongs: The payloads of answers to PINGs.
        reads: Whether the client returns window for received bytes.
    """

    def __init__(self, wire: Wire, settings: "dict[SettingCodes, int] | None" = None) -> None:
        self.wire = wire
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        self.answers: dict[int, Answer] = {}
        self.goaways: list[tuple[int, bytes]] = []
        self.pongs: list[bytes] = []
        self.reads = True
        if settings:
            defaults = {SettingCodes(code): value for code, value in self.h2.local_settings.items()}
            self.h2.local_settings = Settings(client=True, initial_values=defaults | settings)
        self.h2.initiate_connection()

    async def exchange(self) -> None:
        """Transfer bytes until both sides have nothing more to send."""
        while True:
            out = self.h2.data_to_send()
            if out:
                self.wire.feed(out)
            came = await self.wire.turn()
            if came:
                for event in self.h2.receive_data(came):
                    self._on_event(event)
            elif not out:
                return

    def open(self, path: str = ECHO, *metadata: tuple[str, str], is_end: bool = False) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        headers = [*HEADERS, (":path", path), ("content-type", "application/grpc"), *metadata]
        pseudo = [header for header in headers if header[0].startswith(":")]
        self.h2.send_headers(stream_id, pseudo + [h for h in headers if h not in pseudo], end_stream=is_end)
        self.answers[stream_id] = Answer()
        return stream_id

    def send(self, stream_id: int, data: bytes, *, is_end: bool = False, pad: int | None = None) -> None:
        """Send DATA in as few frames as possible. The window must be large enough."""
        size = self.h2.max_outbound_frame_size - 256
        parts = [data[begin : begin + size] for begin in range(0, len(data), size)] or [b""]
        for number, part in enumerate(parts):
            self.h2.send_data(stream_id, part, end_stream=is_end and number == len(parts) - 1, pad_length=pad)

    async def send_all(self, stream_id: int, data: bytes) -> None:
        """Send DATA as the window allows, and end the stream."""
        while data:
            await self.exchange()
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            assert room > 0, "the server returns no window"
            self.h2.send_data(stream_id, data[:room], end_stream=len(data) <= room)
            data = data[room:]

    async def call(self, path: str, message: bytes, *metadata: tuple[str, str]) -> Answer:
        """Call with one message. Returns the received part of the answer."""
        stream_id = self.open(path, *metadata)
        self.send(stream_id, framed(message), is_end=True)
        await self.exchange()
        return self.answers[stream_id]

    def _on_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.answers[event.stream_id].headers = dict(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            self.answers[event.stream_id].trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self.answers[event.stream_id].data += event.data
            if self.reads and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.answers[event.stream_id].is_ended = True
        elif isinstance(event, h2.events.StreamReset):
            self.answers[event.stream_id].reset = int(event.error_code or 0)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaways.append((int(event.error_code or 0), event.additional_data or b""))
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs.append(event.ping_data)


def on_wire(test: Callable[[Wire, Client], Coroutine[Any, Any, None]], **traits: Any) -> None:
    """Run a test on a connection after its handshake. At the end no call may hold memory.

    ``traits`` are arguments of ``Wire``; ``settings`` are the client's HTTP/2 settings.
    """
    settings = traits.pop("settings", None)

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        wire = Wire(loop, clock, **traits)
        client = Client(wire, settings)
        await client.exchange()
        await test(wire, client)
        await end(wire)

    run_virtual(main)


async def end(wire: Wire) -> None:
    """Reset the connection and check that it has released everything."""
    wire.transport.is_stuck = False
    wire.lose()
    await wire.turn()
    await wire.connection.closed
    await wire.work.until_done()
    assert (wire.running, wire.gate.held_bytes, len(wire.connections)) == (0, 0, 0)
    assert (wire.budget.held_bytes, len(wire.budget._holders)) == (0, 0)
