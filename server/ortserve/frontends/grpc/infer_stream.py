"""ModelStreamInfer: many requests on one stream, run together, answered in their order.

The order is the protocol's (answers of models with one answer a request come in the order of the requests of their
stream), whatever the batcher makes of them. The next request is read without waiting for an answer, so that requests of
one stream ride in one batch, until the stream is full: then the transport holds the client back.
"""

import asyncio
from collections import deque
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
    read,
    status_of,
    streaming,
    write,
)
from ortserve.frontends.grpc.infer_calls import Inference, asked_load_format, hold_request, load_report, time_left_ns
from ortserve.frontends.grpc.stream_room import StreamRoom
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import begin_grpc_trace, grpc_method
from ortserve.telemetry.tracing import Trace, Tracing

_ENCODER: Final = StreamEncoder()
_MODEL_STREAM_INFER: Final = grpc_method(f"{SERVICE_NAME}/ModelStreamInfer")


class InferStreamCalls:
    """Answers streamed inference."""

    service = SERVICE_NAME

    def __init__(
        self,
        inference: Inference,
        streams: Streams,
        *,
        max_requests: int,
        max_bytes: int,
        tracing: Tracing | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        """Take where requests go and what one stream may hold.

        Args:
            inference: Answers each request.
            streams: Where open streams are counted.
            max_requests: Of one stream that are unanswered at one time.
            max_bytes: Of one stream's unanswered requests and unsent answers, from which on nothing more is read.
            tracing: Where traces begin, one for each request of a stream; None for nowhere.
            load_reports: What a stream that ends well tells of the server's load; None for nothing.
        """
        self._inference = inference
        self._streams = streams
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._tracing = tracing
        self._load_reports = load_reports

    def handlers(self) -> Handlers:
        return {"ModelStreamInfer": streaming(self._model_stream_infer)}

    async def _model_stream_infer(self, context: Context) -> None:
        with self._streams.open():
            room = StreamRoom(self._max_requests, self._max_bytes)
            refusal = await InferStream(self._inference, self._streams, context, room, self._tracing).serve()
        if refusal is not None:
            await abort(context, refusal)
        if self._load_reports is not None:
            report = load_report(self._load_reports, asked_load_format(context))
            if report is not None:
                context.set_trailing_metadata((report,))


class InferStream:
    """One stream. What it leaves unanswered when its caller leaves, or its deadline passes, is cancelled."""

    def __init__(
        self, inference: Inference, streams: Streams, context: Context, room: StreamRoom, tracing: Tracing | None
    ) -> None:
        self._inference = inference
        self._tracing = tracing
        self._streams = streams
        self._context = context
        self._room = room
        self._ends_at_error = _asks_for_status(context)
        self._under_way: deque[asyncio.Task[bytes | memoryview | Status]] = deque()
        self._has_news = asyncio.Event()

    async def serve(self) -> Status | None:
        """Answer until the caller has sent all and has all answers, or the server drains and what was read is answered.

        Returns:
            The status of the first request that failed, where the caller wants the stream to end by it; else None.

        Raises:
            ServeError: not_ready, when a drain cut the stream before the caller had sent all.
        """
        reading = asyncio.create_task(self._streams.until_drain(self._read()))
        reading.add_done_callback(self._on_read)
        try:
            while True:
                if self._under_way:
                    answer = await self._under_way[0]
                    if not isinstance(answer, bytes | memoryview):
                        return answer
                    await write(self._context, answer)
                    self._under_way.popleft()
                    self._room.leave(len(answer))
                    del answer  # the next one may be long in coming
                elif reading.done():
                    break
                else:
                    self._has_news.clear()
                    await self._has_news.wait()
            reading.result()
            return None
        finally:
            reading.cancel()
            del reading  # as in ``until_drain``
            for task in self._under_way:
                task.cancel()

    def _on_read(self, reading: asyncio.Task[None]) -> None:
        self._has_news.set()
        if not reading.cancelled():
            reading.exception()  # now it was asked for, which ``serve`` may end without

    async def _read(self) -> None:
        """Begin to answer each request that comes, until the caller has sent all."""
        while True:
            await self._room.wait()
            data = await read(self._context)
            if data is None:
                return
            self._room.enter(len(data))
            self._under_way.append(asyncio.create_task(self._answer(data)))
            self._has_news.set()
            del data  # the next one may be long in coming

    async def _answer(self, data: bytes | memoryview) -> bytes | memoryview | Status:
        trace: Trace | None = None
        if self._tracing is not None:
            trace = begin_grpc_trace(self._tracing, _MODEL_STREAM_INFER, self._context.invocation_metadata())
        call = self._inference.receive("grpc", time_left_ns(self._context), trace)
        try:
            with hold_request(self._inference, call, len(data)):
                answer = await self._inference.serve(call, GrpcRequest(data), _ENCODER)
        except ServeError as error:
            if self._ends_at_error:
                return status_of(error)
            answer = encode_stream_error(data, error.message, error.version)
        self._room.exchange(len(data), len(answer))
        return answer


def _asks_for_status(context: Context) -> bool:
    """Whether the caller wants the first error as the status of the stream, rather than among the answers."""
    metadata = context.invocation_metadata() or ()
    return any(key == "triton_grpc_error" and str(value).strip() == "true" for key, value in metadata)
