"""ModelInfer: one request, one answer. The hot path of gRPC.

The native transport calls ``InferCalls.begin``, which needs no task; grpcio calls the handler.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.load_report import read_load_format
from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import (
    SERVICE_NAME,
    Context,
    Handlers,
    Metadata,
    abort,
    status_of,
    unary,
    visible_error,
)
from ortserve.frontends.grpc.quick_calls import OnAnswer, OnFailure, RequestHead
from ortserve.frontends.load_reports import LOAD_FORMAT_HEADER, LoadReports
from ortserve.frontends.trace_headers import begin_grpc_trace, grpc_method
from ortserve.service.call import Call
from ortserve.service.gate import BodyAdmission, Reservation
from ortserve.service.inference import InferenceService
from ortserve.telemetry.tracing import Tracing

_MODEL_INFER: Final = grpc_method(f"{SERVICE_NAME}/ModelInfer")

_ENCODER: Final = GrpcEncoder()


class InferCalls:
    """The handler of unary inference."""

    service = SERVICE_NAME

    def __init__(
        self,
        inference: InferenceService,
        admission: BodyAdmission,
        tracing: Tracing | None = None,
        load_reports: LoadReports | None = None,
    ) -> None:
        self._inference = inference
        self._admission = admission
        self._tracing = tracing
        self._load_reports = load_reports

    def handlers(self) -> Handlers:
        return {"ModelInfer": unary(self._model_infer)}

    def begin(
        self,
        data: bytes | memoryview,
        timeout_ns: int | None,
        head: RequestHead,
        on_answer: OnAnswer,
        on_failure: OnFailure,
    ) -> Callable[[], object] | None:
        """Start ModelInfer, as a ``QuickCall``."""
        trace = None if self._tracing is None else begin_grpc_trace(self._tracing, _MODEL_INFER, head.metadata)
        call = self._inference.receive("grpc", timeout_ns, trace, 0, head.metadata)
        try:
            reservation = self._admission.admit(len(data), call.timing.received_ns, trace)
        except ServeError as error:
            on_failure(error)
            return None
        answer = partial(self._answer, call, reservation, head, on_answer, on_failure)
        fail = partial(_fail, reservation, on_failure)
        try:
            self._inference.start(call, GrpcRequest(data), _ENCODER, answer, fail)
        except Exception as error:  # noqa: BLE001 - for the caller, a fault is an error like others
            fail(visible_error(error))
            return None
        return partial(_cancel, call, reservation)

    def _answer(
        self,
        call: Call,
        reservation: Reservation,
        head: RequestHead,
        on_answer: OnAnswer,
        on_failure: OnFailure,
        answer: bytes | memoryview,
    ) -> None:
        """Pass on an encoded answer, with the times of its phases and a load report."""
        reservation.release()
        try:
            report = None
            reports = self._load_reports
            if reports is not None and (chosen := head.load_format or reports.default) is not None:
                report = reports.metadata(chosen)
            on_answer(answer, call.timing.server_timing(), report)
        except Exception as error:  # noqa: BLE001 - the loop would swallow it, and the caller would never be answered
            on_failure(visible_error(error))

    async def _model_infer(self, data: bytes | memoryview, context: Context) -> bytes | memoryview:
        metadata = context.invocation_metadata() or ()
        trace = None if self._tracing is None else begin_grpc_trace(self._tracing, _MODEL_INFER, metadata)
        call = self._inference.receive("grpc", time_left_ns(context), trace, 0, metadata)
        try:
            with self._admission.admit(len(data), call.timing.received_ns, trace):
                answer = await self._inference.serve(call, GrpcRequest(data), _ENCODER)
        except Exception as error:  # noqa: BLE001 - grpc would send the text of the exception
            status = status_of(visible_error(error))
        else:
            server_timing = ("server-timing", call.timing.server_timing().decode())
            context.set_trailing_metadata((server_timing, *load_report(context, self._load_reports)))
            return answer
        data = b""  # free the message before the error is sent, see ``abort``; mypyc does not compile ``del``
        return await abort(context, status)


def _fail(reservation: Reservation, on_failure: OnFailure, error: ServeError) -> None:
    reservation.release()
    on_failure(error)


def _cancel(call: Call, reservation: Reservation) -> None:
    reservation.release()
    call.cancel()


def load_report(context: Context, reports: LoadReports | None) -> Metadata:
    """Return the load report for the caller of a handler as trailing metadata; empty if the caller gets none."""
    if reports is None:
        return ()
    metadata = context.invocation_metadata() or ()
    requested = next((read_load_format(str(value)) for name, value in metadata if name == LOAD_FORMAT_HEADER), None)
    chosen = requested or reports.default
    return () if chosen is None else (reports.metadata(chosen),)


def time_left_ns(context: Context) -> int | None:
    """Return the time until the deadline of the call; None without a deadline."""
    any_context: Any = context  # the stubs declare that it never returns None
    left_s: float | None = any_context.time_remaining()
    return None if left_s is None else int(left_s * 1e9)
