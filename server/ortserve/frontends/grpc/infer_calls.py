"""ModelInfer: one request, one answer. The hot path of gRPC."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.load_report import read_load_format
from ortserve.core.encoded import AnswerEncoder, EncodedRequest
from ortserve.core.promise import Outputs
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import (
    SERVICE_NAME,
    CallHead,
    Context,
    Handlers,
    Metadata,
    MetadataEntry,
    OnAnswer,
    OnFailure,
    abort,
    seen,
    status_of,
    unary,
)
from ortserve.frontends.load_reports import LOAD_FORMAT_HEADER, LoadReports
from ortserve.frontends.trace_headers import begin_grpc_trace, grpc_method
from ortserve.service.call import Call
from ortserve.service.gate import Hold
from ortserve.service.inference import Pending
from ortserve.telemetry.tracing import Trace, Tracing

_MODEL_INFER: Final = grpc_method(f"{SERVICE_NAME}/ModelInfer")

T = TypeVar("T")


class Inference(Protocol):
    """What this frontend needs of the inference service."""

    def hold(self, size: int) -> Hold:
        """Count the bytes of a body while it is held. Raises ServeError: overloaded."""
        ...

    def receive(self, protocol: str, timeout_ns: int | None = None, trace: Trace | None = None) -> Call:
        """Begin a call, now that its message is there."""
        ...

    def count_refused_body(self, protocol: str, kind: ErrorKind, received_ns: int, trace: Trace | None = None) -> None:
        """Count a request that was not begun."""
        ...

    async def serve(self, call: Call, encoded: EncodedRequest, encoder: AnswerEncoder[T]) -> T:
        """Answer a call, counting and timing it. Raises ServeError and nothing else."""
        ...

    def begin(self, call: Call, encoded: EncodedRequest) -> Pending:
        """Queue a call; wait for ``outputs`` and ``finish`` it. Raises ServeError."""
        ...

    def finish(self, pending: Pending, encoder: AnswerEncoder[T]) -> T | None:
        """The answer; None where a thread encodes it: call again then. Raises ServeError, CancelledError."""
        ...


_ENCODER: Final = GrpcEncoder()


class InferCalls:
    """Answers unary inference."""

    service = SERVICE_NAME

    def __init__(
        self, inference: Inference, tracing: Tracing | None = None, load_reports: LoadReports | None = None
    ) -> None:
        self._inference = inference
        self._tracing = tracing
        self._load_reports = load_reports

    def handlers(self) -> Handlers:
        return {"ModelInfer": unary(self._model_infer)}

    def begin(
        self,
        data: bytes | memoryview,
        timeout_ns: int | None,
        head: CallHead,
        on_answer: OnAnswer,
        on_failure: OnFailure,
    ) -> Callable[[], object] | None:
        """ModelInfer as a ``QuickCall``."""
        trace: Trace | None = None
        if self._tracing is not None:
            trace = begin_grpc_trace(self._tracing, _MODEL_INFER, head.metadata)
        call = self._inference.receive("grpc", timeout_ns, trace)
        try:
            hold = hold_request(self._inference, call, len(data))
        except ServeError as error:
            on_failure(error)
            return None
        try:
            pending = self._inference.begin(call, GrpcRequest(data))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an error
            hold.release()
            on_failure(seen(error))
            return None
        finish = partial(self._finish, pending, hold, head, on_answer, on_failure)
        pending.outputs.add_done_callback(finish)
        return pending.leave

    def _finish(
        self,
        pending: Pending,
        hold: Hold,
        head: CallHead,
        on_answer: OnAnswer,
        on_failure: OnFailure,
        _: Outputs,
    ) -> None:
        try:
            answer = self._inference.finish(pending, _ENCODER)
            if answer is None:
                assert pending.encoding is not None
                pending.encoding.add_done_callback(partial(self._finish, pending, hold, head, on_answer, on_failure))
                return
            hold.release()
            report = None
            if self._load_reports is not None:
                report = load_report(self._load_reports, head.load_format)
            on_answer(answer, pending.call.timing.server_timing(), report)
        except asyncio.CancelledError:
            hold.release()
            on_failure(ServeError(ErrorKind.CANCELLED, "the request was cancelled"))  # if its caller is still there
        except Exception as error:  # noqa: BLE001 - an exception that leaves here is lost, and the caller waits on
            hold.release()
            on_failure(seen(error))

    async def _model_infer(self, data: bytes | memoryview, context: Context) -> bytes | memoryview:
        trace: Trace | None = None
        if self._tracing is not None:
            trace = begin_grpc_trace(self._tracing, _MODEL_INFER, context.invocation_metadata())
        call = self._inference.receive("grpc", time_left_ns(context), trace)
        try:
            with hold_request(self._inference, call, len(data)):
                answer = await self._inference.serve(call, GrpcRequest(data), _ENCODER)
        except Exception as error:  # noqa: BLE001 - grpc would send its text
            status = status_of(seen(error))
        else:
            trailing: Metadata = (("server-timing", call.timing.server_timing().decode()),)
            if self._load_reports is not None:
                report = load_report(self._load_reports, asked_load_format(context))
                if report is not None:
                    trailing += (report,)
            context.set_trailing_metadata(trailing)
            return answer
        data = b""  # let go of the message while its refusal is sent; mypyc has no ``del`` for it
        return await abort(context, status)


def hold_request(inference: Inference, call: Call, size: int) -> Hold:
    """Count the bytes of a call's message while it is held.

    Raises:
        ServeError: overloaded; the call is counted then.
    """
    try:
        return inference.hold(size)
    except ServeError as error:
        inference.count_refused_body(call.protocol, error.kind, call.timing.received_ns, call.trace)
        raise


def asked_load_format(context: Context) -> str:
    """How the caller wants a report of the server's load; empty where it wants none."""
    metadata = context.invocation_metadata() or ()
    return next((str(value).strip() for name, value in metadata if name == LOAD_FORMAT_HEADER), "")


def load_report(reports: LoadReports, asked: str) -> MetadataEntry | None:
    """The report for a call's trailing metadata; None where its caller gets none."""
    return reports.metadata(read_load_format(asked) if asked else None)


def time_left_ns(context: Context) -> int | None:
    """How long the caller waits on, None where it did not say."""
    any_context: Any = context  # by its stub, all callers say
    left_s: float | None = any_context.time_remaining()
    return None if left_s is None else int(left_s * 1e9)
