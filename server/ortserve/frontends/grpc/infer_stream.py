"""ModelStreamInfer: many requests on one stream, run concurrently, answered in order.

The protocol demands the order: models with one answer per request answer in the order of the requests of a stream. The
server reads the next request before it answers the previous one, so that requests of one stream can share a batch. It
does not read a stream whose quota is used up, so the flow control of HTTP/2 stops the client.
"""

import asyncio
from collections import deque
from functools import partial
from typing import Final

from ortserve.codecs.grpc_answer import StreamEncoder, encode_stream_error
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import (
    SERVICE_NAME,
    Context,
    Handlers,
    Status,
    abort,
    has_unread,
    read,
    status_of,
    streaming,
    write,
)
from ortserve.frontends.grpc.infer_calls import load_report, time_left_ns
from ortserve.frontends.grpc.streams import OpenStream, Streams
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import begin_grpc_trace, grpc_method
from ortserve.service.call import StreamPlace
from ortserve.service.gate import BodyAdmission
from ortserve.service.inference import InferenceService
from ortserve.telemetry.tracing import Tracing

_ENCODER: Final = StreamEncoder()
_TURN_REQUESTS: Final = 16
"""Requests of a stream that begin or are answered before the event loop serves other callers."""

_MODEL_STREAM_INFER: Final = grpc_method(f"{SERVICE_NAME}/ModelStreamInfer")


class StreamQuota:
    """Limits the unanswered requests of one stream, and the bytes of its requests and answers. Loop thread only."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._may_read = asyncio.Event()
        self._may_read.set()
        self.requests = 0
        self.held_bytes = 0

    async def wait(self) -> None:
        """Wait until one more request may be read. Any size is admitted, because it is unknown before."""
        await self._may_read.wait()

    def reserve(self, size: int) -> None:
        """Count a request of ``size`` bytes."""
        self.requests += 1
        self._change_bytes(size)

    def exchange(self, request_size: int, answer_size: int) -> None:
        """Replace the bytes of a request by the bytes of its answer."""
        self._change_bytes(answer_size - request_size)

    def release(self, answer_size: int) -> None:
        """Release the request and bytes of an answer that was sent."""
        self.requests -= 1
        self._change_bytes(-answer_size)

    def _change_bytes(self, change: int) -> None:
        self.held_bytes += change
        if self.requests < self._max_requests and self.held_bytes < self._max_bytes:
            self._may_read.set()
        else:
            self._may_read.clear()


class InferStreamCalls:
    """The handler of streamed inference."""

    service = SERVICE_NAME

    def __init__(
        self,
        inference: InferenceService,
        admission: BodyAdmission,
        streams: Streams,
        *,
        max_requests: int,
        max_bytes: int,
        tracing: Tracing | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        """Store the parameters.

        Args:
            inference: Answers each request.
            admission: Admits the message of each request.
            streams: The open streams.
            max_requests: Unanswered requests of one stream at which reading stops.
            max_bytes: Bytes of unanswered requests and unsent answers of one stream at which reading stops.
            tracing: Starts a trace for each request of a stream; None without tracing.
            load_reports: Load reports for the trailing metadata of streams that end without an error; None to add none.
        """
        self.inference: Final = inference
        self.admission: Final = admission
        self.streams: Final = streams
        self.tracing: Final = tracing
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._load_reports = load_reports

    def handlers(self) -> Handlers:
        return {"ModelStreamInfer": streaming(self._model_stream_infer)}

    async def _model_stream_infer(self, context: Context) -> None:
        with self.streams.open(is_inference=True, has_unread=partial(has_unread, context)) as opened:
            failure = await InferStream(self, context, opened, StreamQuota(self._max_requests, self._max_bytes)).serve()
        if failure is not None:
            await abort(context, failure)
        context.set_trailing_metadata(load_report(context, self._load_reports))


class InferStream:
    """Serves one stream. Unanswered requests are cancelled when the caller disconnects or the deadline passes."""

    def __init__(self, calls: InferStreamCalls, context: Context, opened: OpenStream, quota: StreamQuota) -> None:
        self._calls = calls
        self._context = context
        self._opened = opened
        self._quota = quota
        self._ends_at_error = _ends_at_error(context)
        self._running: deque[asyncio.Task[bytes | memoryview | Status]] = deque()
        self._changed = asyncio.Event()
        self._last: StreamPlace | None = None
        """The place of the last request that was read."""

    async def serve(self) -> Status | None:
        """Answer every request that is read, until the caller has sent its last request or the server drains.

        Returns:
            The status of the first failed request if the caller asked for the stream to end with it; otherwise None.

        Raises:
            ServeError: As from ``OpenStream.wait``.
        """
        reading = asyncio.create_task(self._opened.wait(self._read()))
        reading.add_done_callback(self._on_read)
        answered = 0
        try:
            while True:
                if self._running:
                    answer = await self._running[0]
                    if not isinstance(answer, bytes | memoryview):
                        return answer
                    await write(self._context, answer)
                    self._running.popleft()
                    self._quota.release(len(answer))
                    self._opened.on_answer()
                    del answer  # free it while waiting for the next one
                    answered += 1
                    if answered % _TURN_REQUESTS == 0:
                        await asyncio.sleep(0)
                elif reading.done():
                    break
                else:
                    self._changed.clear()
                    await self._changed.wait()
            reading.result()
            return None
        finally:
            reading.cancel()
            del reading  # breaks the reference cycle described in ``OpenStream.wait``
            for task in self._running:
                task.cancel()

    def _on_read(self, reading: asyncio.Task[None]) -> None:
        self._changed.set()
        if not reading.cancelled():
            reading.exception()  # marks it as retrieved: ``serve`` may return before it reads the result

    async def _read(self) -> None:
        """Read requests until the last one, and start a task for each."""
        begun = 0
        while True:
            await self._quota.wait()
            data = await read(self._context)
            if data is None:
                return
            self._quota.reserve(len(data))
            self._opened.on_request()
            place = self._last = StreamPlace(self._last)
            self._running.append(asyncio.create_task(self._answer(data, place)))
            self._changed.set()
            del data  # free it while waiting for the next one
            begun += 1
            if begun % _TURN_REQUESTS == 0:
                await asyncio.sleep(0)

    async def _answer(self, data: bytes | memoryview, place: StreamPlace) -> bytes | memoryview | Status:
        calls, metadata = self._calls, self._context.invocation_metadata() or ()
        trace = None if calls.tracing is None else begin_grpc_trace(calls.tracing, _MODEL_STREAM_INFER, metadata)
        call = calls.inference.receive("grpc", time_left_ns(self._context), trace, 0, metadata)
        call.place = place
        try:
            with calls.admission.admit(len(data), call.timing.received_ns, trace):
                answer = await calls.inference.serve(call, GrpcRequest(data), _ENCODER)
        except ServeError as error:
            if self._ends_at_error:
                return status_of(error)
            answer = encode_stream_error(data, error.message, error.version)
        finally:
            place.submit()  # also if the request was not submitted
        self._quota.exchange(len(data), len(answer))
        return answer


def _ends_at_error(context: Context) -> bool:
    """Whether the caller wants the first error as the status of the stream, not as a message of the stream."""
    metadata = context.invocation_metadata() or ()
    return any(key == "triton_grpc_error" and str(value).strip() == "true" for key, value in metadata)
