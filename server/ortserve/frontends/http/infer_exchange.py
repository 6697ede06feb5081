"""One infer request over HTTP: it calls the codec and the service, and writes the response, without a task.

``protocol`` creates an ``InferExchange`` for each ``POST /v2/models/…/infer``.
"""

import asyncio
import logging
from typing import Final

from ortserve.clock import Clock
from ortserve.codecs.compression import Encoding
from ortserve.codecs.rest import EncodedResponse, RestEncoder, RestRequest
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.connection import Connection, Exchange
from ortserve.frontends.http.request_body import IncomingBody, inflate
from ortserve.frontends.http.request_head import HeadCache, InferHead, InferHeaders, credentials
from ortserve.frontends.http.responses import (
    HttpResponse,
    compressed,
    compresses_inline,
    failure,
    should_compress,
    success,
)
from ortserve.frontends.large_body import LargeBody
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.service.access import Guard, RefusedKeyError
from ortserve.service.call import Call
from ortserve.service.gate import BodyAdmission, Reservation
from ortserve.service.inference import InferenceService
from ortserve.telemetry.tracing import Trace

logger: Final = logging.getLogger(__name__)

_ENCODER: Final = RestEncoder()

_NO_HEADERS: Final = InferHeaders()


class InferEndpoint:
    """State that all inference over HTTP shares, also ``json_calls``. Loop thread only."""

    def __init__(
        self,
        service: InferenceService,
        *,
        max_body_bytes: int,
        compression_min_bytes: int,
        clock: Clock,
        guard: Guard | None,
        traces: HttpTraces | None,
        load_reports: LoadReports | None,
    ) -> None:
        """``guard`` checks the keys of callers; None if callers need no key."""
        self.service: Final = service
        self.admission: Final = BodyAdmission(
            "http", service.gate, service.recorder.body_rejected, max_body_bytes=max_body_bytes
        )
        self.guard: Final = guard
        self.compression_min_bytes: Final = compression_min_bytes
        self.clock: Final = clock
        self.traces: Final = traces
        self.load_reports: Final = load_reports
        self.heads: Final = HeadCache()


class InferExchange(Exchange):
    """One infer request and its response. Until ``start`` it only holds the bytes of the body."""

    def __init__(
        self, connection: Connection, endpoint: InferEndpoint, head: InferHead, body: bytes | None = None
    ) -> None:
        """Admit the request: check its key, its headers and its size, and reserve memory for its body, in this order.

        ``body`` is the body of a request that arrived whole and whose ``head`` is cached, and None for any other. Its
        length counts, because a cached ``head`` may announce the length of another body.
        """
        super().__init__(connection, head.headers, keep_alive=head.keep_alive, more_body=body is None)
        self.head: Final = head
        self.rejection: ServeError | None = None
        """The error that answers the request before its body is used."""
        self._endpoint: Final = endpoint
        self._whole_body = body
        """The body if it arrived with its head, until it is used; otherwise None."""
        self._incoming: IncomingBody | None = None
        """The body that arrives in parts, until it is complete; otherwise None."""
        self._call: Call | None = None
        self._reservation: Reservation | None = None
        self._infer_headers = _NO_HEADERS
        self._is_started = False
        self._inflating: asyncio.Task[None] | None = None
        self._received_ns = endpoint.clock()
        self._trace: Trace | None = None
        if endpoint.traces is not None:
            self._trace = endpoint.traces.begin("infer", head.version, head.url.partition(b"?")[0], head.headers)
        admission = endpoint.admission
        try:
            refusal = None if endpoint.guard is None else endpoint.guard.refusal(credentials(head.headers))
            if refusal is not None:
                raise refusal
            self._infer_headers = headers = head.infer_headers()
            self._reservation = admission.reserve(headers.body_bytes if body is None else len(body))
            if body is None:
                self._incoming = IncomingBody(
                    self._reservation, max_bytes=admission.max_body_bytes, announced_bytes=headers.body_bytes
                )
        except ServeError as error:
            if not isinstance(error, RefusedKeyError):  # the guard has counted a refused key; it gets no trace
                admission.count(error.kind, self._received_ns, self._trace)
            self.rejection = error

    def start(self) -> None:
        connection = self.connection
        if connection.is_lost:
            return
        self._is_started = True
        if self.rejection is not None:
            self.write_rejection(self.rejection)
        elif not self.more_body:
            self._begin_call()
        elif self.head.expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self.rejection is None and self._incoming is not None:
            try:
                self._incoming.keep(data)
            except ServeError as error:
                self.reject_body(error)

    def on_placed(self, nbytes: int) -> None:
        if self.rejection is None and self._incoming is not None:
            try:
                self._incoming.count(nbytes)
            except ServeError as error:
                self.reject_body(error)

    def on_unfinished(self) -> LargeBody | None:
        if self.rejection is not None or self._incoming is None:
            return None
        self._incoming.settle()
        return self._incoming.place_rest() if self._is_started else None

    def on_end(self) -> None:
        self.more_body = False
        if self.rejection is not None:
            if self._is_started:
                self.connection.complete(self)
        elif self._is_started:
            self._begin_call()

    def _begin_call(self) -> None:
        """Begin the call, now that the body is complete and all earlier exchanges have ended."""
        try:
            body = self._take_incoming() if self._whole_body is None else self._whole_body
            self._whole_body = None
            if body is None:
                return
            headers = self._infer_headers
            self._call = self._endpoint.service.receive(
                "http", headers.timeout_ns, self._trace, self._received_ns, self.head.headers
            )
            if headers.encoding is None:
                self._start_call(body)
            else:
                self._inflating = self.connection.loop.create_task(self._inflate(body, headers.encoding))
        except Exception:  # noqa: BLE001 - the parser would swallow the exception, and the caller would wait forever
            self._fail()

    def _take_incoming(self) -> bytes | memoryview | None:
        """Return the body that arrived in parts; None if memory is too short, after answering with the error."""
        incoming, self._incoming = self._incoming, None
        assert incoming is not None
        try:
            return incoming.take()
        except ServeError as error:
            self._endpoint.admission.count(error.kind, self._received_ns, self._trace)
            self.respond(failure(error))
            return None

    async def _inflate(self, body: bytes | memoryview, encoding: Encoding) -> None:
        connection, endpoint, reservation = self.connection, self._endpoint, self._reservation
        assert reservation is not None
        kind = ErrorKind.CANCELLED
        try:
            max_json_bytes = endpoint.service.max_json_bytes if self._infer_headers.json_bytes is None else None
            inflated = await inflate(
                body, encoding, reservation, max_bytes=endpoint.admission.max_body_bytes, max_json_bytes=max_json_bytes
            )
            if not connection.is_lost:
                self._start_call(inflated)
                return
        except ServeError as error:
            kind = error.kind
            if not connection.is_lost:
                self.respond(failure(error))
        except Exception:  # noqa: BLE001 - the task would swallow it
            self._fail()
            return
        endpoint.admission.count(kind, self._received_ns, self._trace)
        reservation.release()  # again after ``abandon``: the reservation may have grown since

    def _start_call(self, body: bytes | memoryview) -> None:
        """Start the call with its body, which is not compressed any more. One of the two callbacks follows."""
        assert self._call is not None
        encoded = RestRequest(body, self._infer_headers.json_bytes, self.head.model, self.head.version)
        self._endpoint.service.start(self._call, encoded, _ENCODER, self._on_answer, self._on_error)

    def _on_answer(self, encoded: EncodedResponse) -> None:
        try:
            call, self._call = self._call, None
            assert call is not None
            response = success(encoded, call.timing)
            reports = self._endpoint.load_reports
            if reports is not None and (chosen := self._infer_headers.load_format or reports.default) is not None:
                response = response.with_header(reports.header(chosen))
            accepted = self._infer_headers.accepted
            if accepted is None:
                self.respond(response)
            else:
                self._respond_compressed(response, accepted)
        except Exception:  # noqa: BLE001 - the event loop would swallow it
            self._fail()

    def _respond_compressed(self, response: HttpResponse, encoding: Encoding) -> None:
        if not should_compress(response, min_bytes=self._endpoint.compression_min_bytes):
            self.respond(response)
        elif compresses_inline(response):
            self.respond(compressed(response, encoding))
        else:
            memory = self._endpoint.service.gate.memory
            compressing = self.connection.loop.run_in_executor(None, compressed, response, encoding, memory)
            compressing.add_done_callback(self._on_compressed)

    def _on_compressed(self, compressing: asyncio.Future[HttpResponse]) -> None:
        try:
            if not self.connection.is_lost:
                self.respond(compressing.result())
        except Exception:  # noqa: BLE001 - the event loop would swallow it
            self._fail()

    def _on_error(self, error: ServeError) -> None:
        self._call = None
        try:
            self.respond(failure(error))
        except Exception:  # noqa: BLE001 - as above
            self._fail()

    def reject_body(self, error: ServeError) -> None:
        if self.rejection is not None:
            return
        self.rejection = error
        self._endpoint.admission.count(error.kind, self._received_ns, self._trace)
        if self._incoming is not None:
            self._incoming.drop()
        if self._is_started:
            self.write_rejection(error)

    def write(self, response: HttpResponse) -> None:
        if self._reservation is not None:
            self._reservation.release()
        super().write(response)

    def abandon(self) -> None:
        self._incoming = None
        if self._reservation is not None:
            self._reservation.release()
        if self._call is not None:
            self._call.cancel()

    def _fail(self) -> None:
        """Log an unforeseen fault of the server, and reset the connection, so that the caller does not wait."""
        logger.exception("a request could not be answered")
        self.abandon()
        self.connection.transport.abort()
