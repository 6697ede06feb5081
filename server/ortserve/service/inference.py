"""The way of one inference request, the same for every protocol."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.tensor import Tensor
from ortserve.core.terms import Terms
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.registry.served import ServedModel
from ortserve.service.gate import BodyGate, Hold
from ortserve.service.validation import check_request
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import Metrics

logger: Final = logging.getLogger(__name__)
access_logger: Final = logging.getLogger("ortserve.access")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose body is complete.

    Attributes:
        protocol: ``http`` or ``grpc``, for metrics.
        timing: Begun; its points are stamped on the way, and all there when the call was answered.
        timeout_ns: How long the caller waits for the answer, None where it did not say.
    """

    protocol: str
    timing: Timing
    timeout_ns: int | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A request on its way through its model. ``inputs`` are in the signature's order."""

    call: Call
    request: InferRequest
    served: ServedModel
    inputs: Arrays
    outputs: asyncio.Future[Arrays]


class InferenceService:
    """Decodes, checks, runs and encodes requests, and counts each exactly once. Loop thread only."""

    def __init__(self, registry: Registry, metrics: Metrics, clock: Clock, *, max_inflight_bytes: int) -> None:
        self._registry = registry
        self._gate = BodyGate(max_inflight_bytes)
        self._metrics = metrics
        self._clock = clock

    def hold(self, size: int) -> Hold:
        """Let a body of ``size`` bytes in, for as long as a ``with`` block lasts.

        Raises:
            ServeError: overloaded, when the server holds too many bytes already.
        """
        return self._gate.hold(size)

    def receive(self, protocol: str, timeout_ns: int | None = None) -> Call:
        """Begin a call, now that its body is complete."""
        return Call(protocol, Timing(self._clock()), timeout_ns)

    def begin(self, call: Call, decode: Callable[[], InferRequest]) -> Pending:
        """Decode and check a call's request and put it into its model's queue.

        Args:
            call: From ``receive``.
            decode: Makes the request from its bytes; called once, at once.

        Returns:
            What to wait for and to ``finish``. Cancelling ``outputs`` leaves the queue; ``finish`` it all the same.

        Raises:
            ServeError: Whatever went wrong, with its kind and a text for the caller; the call is counted.
        """
        request: InferRequest | None = None
        served: ServedModel | None = None
        try:
            request = decode()
            served = self._registry.find(request.model_name, request.model_version)
            inputs, rows = check_request(request, served.signature, served.name)
            return Pending(
                call, request, served, inputs, served.submit(inputs, rows, call.timing, _terms(call, request, served))
            )
        except Exception as error:
            raise self._failed(call, request, served, error) from error

    def finish(self, pending: Pending, encode: Callable[[InferRequest, InferResponse], Answer]) -> Answer:
        """Encode what a model gave, and count the call. To be called once, when ``pending.outputs`` is done.

        Args:
            pending: From ``begin``.
            encode: Makes the answer's bytes; called once, unless something failed.

        Raises:
            ServeError: Whatever went wrong, with its kind and a text for the caller.
            asyncio.CancelledError: The caller left.
        """
        call, request, served = pending.call, pending.request, pending.served
        try:
            outputs = served.cut_back(pending.outputs.result(), pending.inputs)
            answer = encode(request, _response(request, served, outputs))
        except asyncio.CancelledError:
            self._count_failure(call, request, served, ErrorKind.CANCELLED)
            raise
        except Exception as error:
            raise self._failed(call, request, served, error) from error
        timing = call.timing
        timing.done_ns = self._clock()
        served.metrics.observe_success(call.protocol, timing)
        if not access_logger.disabled:
            self._log_access(call.protocol, request, served, "ok", timing.done_ns - timing.received_ns)
        return answer

    async def serve(
        self,
        call: Call,
        decode: Callable[[], InferRequest],
        encode: Callable[[InferRequest, InferResponse], Answer],
    ) -> Answer:
        """``begin``, wait and ``finish``, for frontends that have a task for each request."""
        pending = self.begin(call, decode)
        try:
            await pending.outputs
        except asyncio.CancelledError:
            self._count_failure(call, pending.request, pending.served, ErrorKind.CANCELLED)
            raise
        except ServeError:
            pass  # ``finish`` meets it again, and counts it
        return self.finish(pending, encode)

    def count_refused_body(self, protocol: str, kind: ErrorKind, received_ns: int) -> None:
        """Count a request that a frontend refused before its body was complete, such as one that is too large."""
        self._metrics.observe_unknown(protocol, kind, self._clock() - received_ns)
        self._metrics.rejected("", kind.value)

    def _failed(
        self, call: Call, request: InferRequest | None, served: ServedModel | None, error: Exception
    ) -> ServeError:
        """Count a call that failed, and say it to its caller."""
        if not isinstance(error, ServeError):
            logger.error("a request failed unexpectedly", exc_info=error)
            error = ServeError(ErrorKind.INTERNAL, "internal error")
        self._count_failure(call, request, served, error.kind)
        return _for_caller(error, request, served)

    def _count_failure(
        self, call: Call, request: InferRequest | None, served: ServedModel | None, kind: ErrorKind
    ) -> None:
        protocol, timing = call.protocol, call.timing
        duration_ns = self._clock() - timing.received_ns
        if served is None:
            self._metrics.observe_unknown(protocol, kind, duration_ns)
        else:
            served.metrics.observe_failure(protocol, kind, duration_ns)
        if timing.taken_ns == 0 and kind is not ErrorKind.CANCELLED:  # no work was done for it
            self._metrics.rejected(request.model_name if request else "", kind.value)
        if not access_logger.disabled:
            self._log_access(protocol, request, served, kind.value, duration_ns)

    def _log_access(
        self, protocol: str, request: InferRequest | None, served: ServedModel | None, outcome: str, duration_ns: int
    ) -> None:
        log_event(
            access_logger,
            logging.INFO,
            "request",
            protocol=protocol,
            model=request.model_name if request else "",
            version=served.version if served else "",
            request_id=request.id if request else "",
            outcome=outcome,
            ms=round(duration_ns / 1e6, 3),
        )


def _terms(call: Call, request: InferRequest, served: ServedModel) -> Terms:
    """Raises ServeError: invalid_input, for a ``priority`` or ``timeout`` that is no unsigned integer."""
    priority = queue_timeout_us = 0
    if request.parameters:
        priority = _unsigned(request, "priority")
        queue_timeout_us = _unsigned(request, "timeout")
    return served.terms(
        call.timing.received_ns,
        timeout_ns=call.timeout_ns,
        priority=priority,
        queue_timeout_ns=queue_timeout_us * 1000 or None,
    )


def _unsigned(request: InferRequest, name: str) -> int:
    value = request.parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise invalid_input(f"parameter '{name}': expected an unsigned integer, got {value!r}")
    return value


def _response(request: InferRequest, served: ServedModel, outputs: Arrays) -> InferResponse:
    signature = served.signature
    if request.outputs:
        chosen = [signature.output_index[output.name] for output in request.outputs]
        tensors = [Tensor(signature.outputs[i].name, signature.outputs[i].datatype, outputs[i]) for i in chosen]
    else:
        tensors = [
            Tensor(spec.name, spec.datatype, array) for spec, array in zip(signature.outputs, outputs, strict=True)
        ]
    return InferResponse(served.name, served.version, request.id, tensors)


def _for_caller(error: ServeError, request: InferRequest | None, served: ServedModel | None) -> ServeError:
    """A copy of its own for each caller; once its model is known, the text begins with the request's id."""
    message = error.message
    if request is not None and served is not None:
        message = f"[request id: {request.id or '<id_unknown>'}] {message}"
    return ServeError(error.kind, message, retry_after_s=error.retry_after_s)
