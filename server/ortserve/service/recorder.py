"""Records a call when it has ended: in metrics, trace files, the access log and its own trace."""

from dataclasses import replace
from typing import Final

from ortserve.clock import Clock
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.service.call import Call
from ortserve.service.trace_settings import TraceWriter
from ortserve.telemetry.logs import AccessLog
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.tracing import EndedRequest, Trace

_EARLY_NS: Final = 20_000_000
"""A caller that enforces its deadline itself may cancel this much earlier, since its clock began before the request
arrived."""

_MAX_CHARACTERS: Final = 100
"""Maximum length of a text of the caller in a log line: a request may carry an id of 64 KiB."""


class Recorder:
    """Records every call exactly once. Loop thread only."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        trace_writer: TraceWriter | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """Without ``trace_writer``, no trace files are written; without ``access_log``, no access log."""
        self._metrics = metrics
        self._clock = clock
        self._trace_writer = trace_writer
        self._access_log = access_log

    def answered(self, call: Call) -> None:
        """Record a call whose answer is encoded, and set the time of its end."""
        served = call.served
        assert served is not None, "an answered call has run on a version"
        timing = call.timing
        ended_ns = timing.done_ns = self._clock()
        served.metrics.observe_success(call.protocol, timing, call.rows)
        if self._trace_writer is not None:
            self._trace_writer.observe(call, timing, ended_ns)
        if self._access_log is not None:
            _log(self._access_log, call, "ok", ended_ns)
        if call.trace is not None:
            _end_trace(call, call.trace, timing, ended_ns, None)

    def failed(self, call: Call, kind: ErrorKind) -> None:
        """Record a call that ended with an error or was cancelled."""
        protocol, timing, served = call.protocol, call.timing, call.served
        ended_ns = self._clock()
        duration_ns = ended_ns - timing.received_ns
        if self._trace_writer is not None or call.trace is not None:
            # Both read the copy later. The batch of a cancelled call may still run, and writes to the original.
            timing = replace(timing)
        if served is None:
            self._metrics.observe_unknown(protocol, kind, duration_ns)
        else:
            served.metrics.observe_failure(protocol, kind, duration_ns)
            if self._trace_writer is not None:
                self._trace_writer.observe(call, timing, ended_ns, is_answered=kind is not ErrorKind.CANCELLED)
        if timing.taken_ns == 0 and kind is not ErrorKind.CANCELLED:  # no run was started
            self._metrics.rejected(call.model_name, kind.value)
        if self._access_log is not None:
            _log(self._access_log, call, kind.value, ended_ns)
        if call.trace is not None:
            _end_trace(call, call.trace, timing, ended_ns, kind)

    def cancelled(self, call: Call) -> None:
        """Record a cancelled call: its caller disconnected, or the transport answered that its deadline has passed."""
        waited_ns, timeout_ns = self._clock() - call.timing.received_ns, call.timeout_ns
        is_over = timeout_ns is not None and waited_ns >= timeout_ns - min(_EARLY_NS, timeout_ns // 10)
        self.failed(call, ErrorKind.DEADLINE if is_over else ErrorKind.CANCELLED)

    def body_rejected(self, protocol: str, kind: ErrorKind, received_ns: int, trace: Trace | None) -> None:
        """Record a request whose body was rejected, for example as too large, or whose caller disconnected."""
        ended_ns = self._clock()
        self._metrics.observe_unknown(protocol, kind, ended_ns - received_ns)
        if kind is not ErrorKind.CANCELLED:
            self._metrics.rejected("", kind.value)
        if trace is not None:
            trace.end(EndedRequest(Timing(received_ns), ended_ns, kind))


class SamplingRecorder(Recorder):
    """The recorder of a server with ``record_dir``, which also records the inputs of answered requests.

    A separate class, so that calls of other servers do not check for a recording.
    """

    def answered(self, call: Call) -> None:
        super().answered(call)
        served = call.served
        if served is not None and served.recording is not None:
            served.recording.observe(call.inputs, call.rows)


def log_fields(call: Call) -> dict[str, str]:
    """Model, version and request id of a call, empty while unknown, and the ids of its trace if it is sampled.

    Long texts of the caller are truncated.
    """
    trace = call.trace
    return {
        "model": _short(call.model_name),
        "version": call.served.version if call.served else "",
        "request_id": _short(call.request.id) if call.request else "",
        **({} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}),
    }


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _log(log: AccessLog, call: Call, outcome: str, ended_ns: int) -> None:
    ms = round((ended_ns - call.timing.received_ns) / 1e6, 3)
    log.write({"protocol": call.protocol, **log_fields(call), "outcome": outcome, "ms": ms})


def _end_trace(call: Call, trace: Trace, timing: Timing, ended_ns: int, kind: ErrorKind | None) -> None:
    version = call.served.version if call.served else ""
    request_id = call.request.id if call.request else ""
    rows = call.rows if kind is None else 0
    trace.end(EndedRequest(timing, ended_ns, kind, call.model_name, version, request_id, rows))
