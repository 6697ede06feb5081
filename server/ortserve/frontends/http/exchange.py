"""An infer request in the lane: from its headers to the codec, to the batcher, and back to the socket.

``lane`` makes one for each request, in the place of uvicorn's own object for a request.
"""

import asyncio
import logging
from typing import Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from ortserve.clock import Clock
from ortserve.codecs.compression import Encoding
from ortserve.codecs.rest import EncodedResponse, RestEncoder, RestRequest
from ortserve.errors import ErrorKind, ServeError, out_of_memory
from ortserve.frontends.http.announcement import authorizations
from ortserve.frontends.http.answers import LINGER_S, Answer, Header, body_too_large, failure, success
from ortserve.frontends.http.compressed import compressed, inflate, is_quickly_compressed, is_to_compress
from ortserve.frontends.http.corked_transport import CorkedTransport
from ortserve.frontends.http.heads import Head, Heads
from ortserve.frontends.http.incoming_body import IncomingBody
from ortserve.frontends.large_body import LargeBody
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.service.access import Guard, RefusedKeyError
from ortserve.service.call import Call
from ortserve.service.gate import Hold
from ortserve.service.inference import InferenceService
from ortserve.telemetry.tracing import Trace

logger: Final = logging.getLogger(__name__)

_ENCODER: Final = RestEncoder()

_JOINED_BYTES: Final = 64 * 1024
"""Bodies up to this size are joined with their head: copying is cheaper than a second part of the system call."""


class Lane:
    """What the exchanges of a server share. Loop thread only."""

    def __init__(
        self,
        service: InferenceService,
        *,
        max_body_bytes: int,
        compression_min_bytes: int,
        clock: Clock,
        guard: Guard | None = None,
        traces: HttpTraces | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        """``guard`` asks callers for their key; None lets everybody in."""
        self.service: Final = service
        self.guard: Final = guard
        self.max_body_bytes: Final = max_body_bytes
        self.compression_min_bytes: Final = compression_min_bytes
        self.clock: Final = clock
        self.traces: Final = traces
        self.load_reports: Final = load_reports
        self.is_draining = False
        """Whether answers ask their callers to open new connections, elsewhere."""
        self.heads: Final = Heads()
        self._default_headers: list[Header] = []
        self._default_lines = b""

    def default_lines(self, headers: list[Header]) -> bytes:
        """The headers that uvicorn gives all answers, as they travel. It makes a new list of them each second."""
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        return self._default_lines


class LaneSide(Protocol):
    """What an exchange needs of its connection."""

    exchange: "Exchange | None"
    corked: CorkedTransport
    transport: asyncio.Transport
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    server_state: ServerState
    has_left: bool
    is_old: bool

    @property
    def lane(self) -> Lane: ...
    def on_response_complete(self) -> None: ...


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
        "_hold",
        "_incoming",
        "_inflating",
        "_is_started",
        "_is_written",
        "_received_ns",
        "_refusal",
        "_trace",
        "_whole",
        "disconnected",
        "head",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
    )
    message_event: Final = _NoEvent()

    def __init__(self, connection: LaneSide, head: Head, body: bytes | None = None) -> None:
        """``body`` is that of a request that came whole, whatever ``head`` says of its size; None where it follows."""
        lane = connection.lane
        self._connection = connection
        self.head: Final = head
        self._whole = body
        self._incoming: IncomingBody | None = None
        self._call: Call | None = None
        self._hold: Hold | None = None
        self._refusal: ServeError | None = None
        self._is_started = False
        self._is_written = False
        self._inflating: asyncio.Task[None] | None = None
        self.more_body = body is None
        self.keep_alive = head.keep_alive
        self.disconnected = False
        self.response_complete = False
        self.response_started = False
        self._received_ns = lane.clock()
        self._trace: Trace | None = None
        if lane.traces is not None:
            self._trace = lane.traces.begin("infer", head.version, head.url.partition(b"?")[0], head.headers)
        try:
            if lane.guard is not None:
                lane.guard.check(authorizations(head.headers))
            self._announced = head.announced()
            body_size = self._announced.body_size if body is None else len(body)
            if body_size > lane.max_body_bytes:
                raise body_too_large(body_size, lane.max_body_bytes)
            self._hold = lane.service.hold(body_size)
            if body is None:
                self._incoming = IncomingBody(self._hold, max_bytes=lane.max_body_bytes, announced_bytes=body_size)
        except ServeError as error:
            self._refusal = error

    @property
    def is_refused(self) -> bool:
        """Whether it is answered by an error before its body was looked at."""
        return self._refusal is not None

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
        elif self.head.expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body, unless it is refused."""
        if self._refusal is None and self._incoming is not None:
            try:
                self._incoming.keep(data)
            except ServeError as error:
                self.refuse_body(error)

    def on_placed(self, nbytes: int) -> None:
        """So much of the body came to where ``on_part`` said."""
        if self._refusal is None and self._incoming is not None:
            try:
                self._incoming.count(nbytes)
            except ServeError as error:
                self.refuse_body(error)

    def on_part(self) -> LargeBody | None:
        """The rest of the body is yet to come: where it is to be received, None where it is to come as parts."""
        if self._refusal is not None or self._incoming is None:
            return None
        self._incoming.settle()
        return self._incoming.place_rest() if self._is_started else None

    def refuse_body(self, error: ServeError) -> None:
        """Answer with an error, in its turn, and keep nothing of the body."""
        if self._refusal is not None:
            return
        self._refusal = error
        if self._incoming is not None:
            self._incoming.drop()
        if self._is_started:
            self._refuse(error)

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
        if self._is_written and not self.response_complete:
            self._complete()

    def abandon(self) -> None:
        """The caller left: leave the queue."""
        if self._hold is not None:
            self._hold.release()
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        try:
            self._begin()
        except Exception:  # noqa: BLE001 - an exception that leaves here is lost in the parser, and the caller waits on
            self._give_up()

    def _on_answer(self, encoded: EncodedResponse) -> None:
        try:
            self._finish(encoded)
        except Exception:  # noqa: BLE001 - as above, in the loop
            self._give_up()

    def _on_error(self, error: ServeError) -> None:
        self._call = None
        try:
            self._answer(failure(error))
        except Exception:  # noqa: BLE001 - as above
            self._give_up()

    def _give_up(self) -> None:
        """A fault of ours, which nothing above foresaw: the caller learns at least that no answer comes."""
        logger.exception("a request could not be answered")
        self.abandon()
        self._connection.transport.abort()

    def _begin(self) -> None:
        lane = self._connection.lane
        try:
            body = self._take_body()
        except MemoryError:
            error = out_of_memory("receiving a request")
            lane.service.count_refused_body("http", error.kind, self._received_ns, self._trace)
            self._answer(failure(error))
            return
        self._call = lane.service.receive("http", self._announced.timeout_ns, self._trace, self._received_ns)
        if self._announced.encoding is None:
            self._submit(body)
        else:
            self._inflating = self._connection.loop.create_task(self._inflate(body, self._announced.encoding))

    def _take_body(self) -> bytes | memoryview:
        whole, incoming = self._whole, self._incoming
        self._whole = self._incoming = None
        if whole is not None:
            return whole
        assert incoming is not None
        return incoming.take()

    async def _inflate(self, body: bytes | memoryview, encoding: Encoding) -> None:
        connection, lane, hold = self._connection, self._connection.lane, self._hold
        assert hold is not None
        kind = ErrorKind.CANCELLED
        try:
            max_json_bytes = lane.service.max_json_bytes if self._announced.json_size is None else None
            inflated = await inflate(body, encoding, hold, max_bytes=lane.max_body_bytes, max_json_bytes=max_json_bytes)
            if not connection.has_left:
                self._submit(inflated)
                return
        except ServeError as error:
            kind = error.kind
            if not connection.has_left:
                self._answer(failure(error))
        except Exception:  # noqa: BLE001 - as above, in the task
            self._give_up()
            return
        lane.service.count_refused_body("http", kind, self._received_ns, self._trace)
        hold.release()  # it may have grown since the caller left

    def _submit(self, body: bytes | memoryview) -> None:
        assert self._call is not None
        head = self.head
        encoded = RestRequest(body, self._announced.json_size, head.model, head.version)
        self._connection.lane.service.start(self._call, encoded, _ENCODER, self._on_answer, self._on_error)

    def _finish(self, encoded: EncodedResponse) -> None:
        call, self._call = self._call, None
        assert call is not None
        answer = success(encoded, call.timing)
        reports = self._connection.lane.load_reports
        if reports is not None and (report := reports.header(self._announced.load_format)) is not None:
            answer = answer.with_header(report)
        accepted = self._announced.accepted
        if accepted is None:
            self._answer(answer)
        else:
            self._answer_compressed(answer, accepted)

    def _answer_compressed(self, answer: Answer, encoding: Encoding) -> None:
        connection = self._connection
        if not is_to_compress(answer, encoding, min_bytes=connection.lane.compression_min_bytes):
            self._answer(answer)
        elif is_quickly_compressed(answer):
            self._answer(compressed(answer, encoding))
        else:
            compressing = connection.loop.run_in_executor(None, compressed, answer, encoding)
            compressing.add_done_callback(self._on_compressed)

    def _on_compressed(self, compressing: asyncio.Future[Answer]) -> None:
        try:
            if not self._connection.has_left:
                self._answer(compressing.result())
        except Exception:  # noqa: BLE001 - as above, in the loop
            self._give_up()

    def _answer(self, answer: Answer) -> None:
        assert self._hold is not None
        self._hold.release()
        if self._connection.is_old or self._connection.lane.is_draining:
            self.keep_alive = False
        self._write(answer)
        self._is_written = True
        if not self._connection.flow.write_paused:
            self._complete()  # else when the caller took it, so that answers do not pile up

    def _refuse(self, error: ServeError) -> None:
        """Answer before the whole body came. The connection is of no more use and closes when the rest came."""
        connection = self._connection
        if not isinstance(error, RefusedKeyError):  # whose guard has counted it
            connection.lane.service.count_refused_body("http", error.kind, self._received_ns, self._trace)
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
        self.response_started = True
        status, body, headers = answer
        lines: list[bytes | memoryview] = [
            STATUS_LINE[status],
            connection.lane.default_lines(connection.server_state.default_headers),
        ]
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
