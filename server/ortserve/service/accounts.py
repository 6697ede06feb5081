"""What is told of a call once it has ended: in metrics, trace files, the access log and its own trace."""

from dataclasses import replace
from typing import Final

from ortserve.clock import Clock
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.registry.served import ServedModel
from ortserve.service.call import Call
from ortserve.service.trace_writing import TraceWriter
from ortserve.telemetry.logs import AccessLog
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.tracing import EndedRequest, Trace

_EARLY_NS: Final = 20_000_000
"""By how much a caller who minds its deadline itself may leave sooner: its clock began before the request came."""


class Accounts:
    """Of all inference requests; each is told of once. Loop thread only."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        trace_writer: TraceWriter | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """Without ``trace_writer`` none are traced into files, without ``access_log`` none are logged."""
        self._metrics = metrics
        self._clock = clock
        self._trace_writer = trace_writer
        self._access_log = access_log

    def answered(self, call: Call, request: InferRequest, served: ServedModel, rows: int) -> None:
        """Its answer is encoded; stamps when."""
        timing = call.timing
        ended_ns = timing.done_ns = self._clock()
        served.metrics.observe_success(call.protocol, timing, rows)
        if self._trace_writer is not None:
            self._trace_writer.observe(
                call.protocol, timing, request.id, served.name, served.version, ended_ns=ended_ns
            )
        if self._access_log is not None:
            _log(self._access_log, call, request, served, "ok", ended_ns)
        if call.trace is not None:
            _end_trace(call.trace, timing, ended_ns, None, request, served, rows)

    def failed(self, call: Call, request: InferRequest | None, served: ServedModel | None, kind: ErrorKind) -> None:
        """It got an error, or its caller left. ``request`` and ``served`` as far as they were known by then."""
        protocol, timing = call.protocol, call.timing
        ended_ns = self._clock()
        duration_ns = ended_ns - timing.received_ns
        if self._trace_writer is not None or call.trace is not None:
            # Both read it later. Where the caller left, its batch goes on meanwhile, and stamps the points it reaches.
            timing = replace(timing)
        if served is None:
            self._metrics.observe_unknown(protocol, kind, duration_ns)
        else:
            served.metrics.observe_failure(protocol, kind, duration_ns)
            if self._trace_writer is not None:
                self._trace_writer.observe(
                    protocol,
                    timing,
                    request.id if request else "",
                    served.name,
                    served.version,
                    ended_ns=ended_ns,
                    is_answered=kind is not ErrorKind.CANCELLED,
                )
        if timing.taken_ns == 0 and kind is not ErrorKind.CANCELLED:  # no work was done for it
            self._metrics.rejected(request.model_name if request else "", kind.value)
        if self._access_log is not None:
            _log(self._access_log, call, request, served, kind.value, ended_ns)
        if call.trace is not None:
            _end_trace(call.trace, timing, ended_ns, kind, request, served)

    def left(self, call: Call, request: InferRequest | None, served: ServedModel | None) -> None:
        """Nobody waits for it any more: its caller left, or was told that its time is over."""
        waited_ns, timeout_ns = self._clock() - call.timing.received_ns, call.timeout_ns
        is_over = timeout_ns is not None and waited_ns >= timeout_ns - min(_EARLY_NS, timeout_ns // 10)
        self.failed(call, request, served, ErrorKind.DEADLINE if is_over else ErrorKind.CANCELLED)

    def body_refused(self, protocol: str, kind: ErrorKind, received_ns: int, trace: Trace | None) -> None:
        """Its body was refused, such as one that is too large, or its caller left while it came."""
        ended_ns = self._clock()
        self._metrics.observe_unknown(protocol, kind, ended_ns - received_ns)
        if kind is not ErrorKind.CANCELLED:
            self._metrics.rejected("", kind.value)
        if trace is not None:
            _end_trace(trace, Timing(received_ns), ended_ns, kind, None, None)


def named(call: Call, request: InferRequest | None, served: ServedModel | None) -> dict[str, str]:
    """Whose log line it is; empty where it is not known yet. The ids of the trace are there where there is one."""
    trace = call.trace
    return {
        "model": request.model_name if request else "",
        "version": served.version if served else "",
        "request_id": request.id if request else "",
        **({} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}),
    }


def _log(
    log: AccessLog,
    call: Call,
    request: InferRequest | None,
    served: ServedModel | None,
    outcome: str,
    ended_ns: int,
) -> None:
    ms = round((ended_ns - call.timing.received_ns) / 1e6, 3)
    log.write({"protocol": call.protocol, **named(call, request, served), "outcome": outcome, "ms": ms})


def _end_trace(
    trace: Trace,
    timing: Timing,
    ended_ns: int,
    kind: ErrorKind | None,
    request: InferRequest | None,
    served: ServedModel | None,
    rows: int = 0,
) -> None:
    told = (request.model_name, served.version if served else "", request.id) if request else ("", "", "")
    trace.end(EndedRequest(timing, ended_ns, kind, *told, rows))
