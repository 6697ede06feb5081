"""``POST /v2/models/{model}[/versions/{version}]/infer`` as one bare ASGI callable.

Routing and validation by a framework cost several times what inference with a small model does, so this path is
recognised by hand and its body is read as bytes. Where uvicorn is the version that ``lane`` was made for, that answers
instead, and this is what it is measured and tested against.
"""

import asyncio
import contextlib
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from ortserve.clock import Clock
from ortserve.codecs.rest import RestEncoder, RestRequest
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.announcement import Announcement, read_announcement
from ortserve.frontends.http.answers import LINGER_S, Answer, body_too_large, failure, success
from ortserve.frontends.http.body import read_body
from ortserve.frontends.http.compressed import compressed, inflate, is_quickly_compressed, is_to_compress
from ortserve.frontends.http.connection import connection_of
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.service.gate import Hold
from ortserve.service.inference import InferenceService
from ortserve.telemetry.tracing import Trace


def match_infer_path(raw_path: str) -> tuple[str, str] | None:
    """Model and version (``""`` for none) of an infer path as it came, still percent-encoded; None for other paths."""
    if not raw_path.startswith("/v2/models/"):
        return None
    parts = raw_path.rstrip("/").split("/")
    if parts[-1] != "infer":
        return None
    if len(parts) == 5:
        model, version = parts[3], ""
    elif len(parts) == 7 and parts[4] == "versions" and parts[5].isdigit():
        model, version = parts[3], parts[5]
    else:
        return None
    return (unquote(model) if "%" in model else model), version


class InferRoute:
    """Reads the body, hands it to the service and writes the answer."""

    def __init__(
        self,
        service: InferenceService,
        *,
        max_body_bytes: int,
        compression_min_bytes: int,
        clock: Clock,
        traces: HttpTraces | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._compression_min_bytes = compression_min_bytes
        self._clock = clock
        self._traces = traces
        self._load_reports = load_reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        """Answer one request; ``model`` and ``version`` come from ``match_infer_path``."""
        received_ns = self._clock()
        trace: Trace | None = None
        if self._traces is not None:
            trace = self._traces.begin("infer", version, scope["raw_path"], scope["headers"])
        try:
            announced = read_announcement(scope["headers"])
            if announced.body_size > self._max_body_bytes:
                raise body_too_large(announced.body_size, self._max_body_bytes)
            hold = self._service.hold(announced.body_size)
        except ServeError as error:
            self._service.count_refused_body("http", error.kind, received_ns, trace)
            await refuse_body(receive, send, error)
            return
        with hold:
            try:
                body = await read_body(receive, hold, max_bytes=self._max_body_bytes)
            except ServeError as error:
                self._service.count_refused_body("http", error.kind, received_ns, trace)
                await refuse_body(receive, send, error)
                return
            if body is not None:  # else the caller left, and there is nobody to answer
                connection = connection_of(scope)
                connection.answering = asyncio.current_task()
                try:
                    answer = await self._answer(body, hold, announced, model, version, received_ns, trace)
                    await send_answer(send, answer)
                except asyncio.CancelledError:
                    if not connection.has_left:
                        raise
                finally:
                    connection.answering = None

    async def _answer(
        self,
        body: bytes | memoryview,
        hold: Hold,
        announced: Announcement,
        model: str,
        version: str,
        received_ns: int,
        trace: Trace | None,
    ) -> Answer:
        call = self._service.receive("http", announced.timeout_ns, trace, received_ns)
        if announced.encoding is not None:
            try:
                max_json_bytes = self._service.max_json_bytes if announced.json_size is None else None
                body = await inflate(
                    body, announced.encoding, hold, max_bytes=self._max_body_bytes, max_json_bytes=max_json_bytes
                )
            except ServeError as error:
                self._service.count_refused_body("http", error.kind, received_ns, trace)
                return failure(error)
            except asyncio.CancelledError:
                self._service.count_refused_body("http", ErrorKind.CANCELLED, received_ns, trace)
                raise
        try:
            encoded = await self._service.serve(
                call, RestRequest(body, announced.json_size, model, version), RestEncoder()
            )
        except ServeError as error:
            return failure(error)
        answer = success(encoded, call.timing)
        reports = self._load_reports
        if reports is not None and (report := reports.header(announced.load_format)) is not None:
            answer = answer.with_header(report)
        accepted = announced.accepted
        if accepted is None or not is_to_compress(answer, accepted, min_bytes=self._compression_min_bytes):
            return answer
        if is_quickly_compressed(answer):
            return compressed(answer, accepted)
        return await asyncio.to_thread(compressed, answer, accepted)


async def refuse_body(receive: Receive, send: Send, error: ServeError) -> None:
    """Answer before the whole body came, then close the connection, which is of no more use."""
    status, body, headers = failure(error)
    length = (b"content-length", b"%d" % len(body))
    start = {"type": "http.response.start", "status": status, "headers": [*headers, length, (b"connection", b"close")]}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a whole answer."""
    length = (b"content-length", b"%d" % len(answer.body))
    await send({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]})
    await send({"type": "http.response.body", "body": answer.body})
