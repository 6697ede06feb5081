"""Traces by the OpenTelemetry protocol: which requests are sampled, and the way to a collector.

The only door to OpenTelemetry, with ``spans``. Nothing of it is global: no tracer provider is set, and no other library
of the process ends up in these traces.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, cast
from uuid import uuid4

from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanContext, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ortserve import __version__
from ortserve.clock import Clock
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.spans import IDS, RequestSpans
from ortserve.telemetry.tracing import EndedRequest, Operation

logger: Final = logging.getLogger(__name__)

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_PROPAGATOR: Final = TraceContextTextMapPropagator()

_IS_UNSAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]").fullmatch
"""A ``traceparent`` by which the caller wants no spans: most need not be read by the library, which costs more."""

_QUEUED_REQUESTS: Final = 2048
"""That wait to be exported; at most six spans each."""

_EXPORTED_REQUESTS: Final = 256
"""At one time: making and encoding the spans of so many takes some ten milliseconds of the interpreter."""


class OtlpTrace:
    """A request that is sampled; see ``Trace``."""

    __slots__ = ("_context", "_operation", "_parent", "_path", "_tracing")

    def __init__(
        self,
        tracing: "OtlpTracing",
        operation: Operation,
        path: bytes,
        context: SpanContext,
        parent: SpanContext | None,
    ) -> None:
        self._tracing = tracing
        self._operation = operation
        self._path = path
        self._context = context
        self._parent = parent

    @property
    def trace_id(self) -> str:
        return f"{self._context.trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self._context.span_id:016x}"

    def end(self, request: EndedRequest) -> None:
        self._tracing.hand_over(RequestSpans(self._operation, self._path, self._context, self._parent, request))


class OtlpTracing:
    """Exports from construction until ``close``; see ``Tracing``."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        protocol: str,
        sample_ratio: float,
        service_name: str | None,
        default_service_name: str,
        clock: Clock,
    ) -> None:
        """Connect to nothing yet; ``endpoint`` and what is not said here as the library's variables say.

        Raises:
            Exception: The library's, of many kinds, for variables that cannot be meant.
        """
        self._root_bound: Final = TraceIdRatioBased(sample_ratio).bound
        exporter = _exporter(endpoint, protocol)
        self._exporter = _RequestExporter(exporter, _resource(service_name, default_service_name), clock)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=_QUEUED_REQUESTS, max_export_batch_size=_EXPORTED_REQUESTS
        )
        self._handed_over = 0
        self._turned_away_spans = 0

    @property
    def exported_spans(self) -> int:
        return self._exporter.exported_spans

    @property
    def dropped_spans(self) -> int:
        return self._exporter.dropped_spans + self._turned_away_spans

    def begin(
        self, operation: Operation, traceparent: str | None, tracestate: Sequence[str], path: bytes = b""
    ) -> OtlpTrace | None:
        if traceparent is not None:
            if _IS_UNSAMPLED(traceparent):
                return None
            parent = _read_parent(traceparent, tracestate)
            if parent is not None:
                if not parent.trace_flags.sampled:
                    return None
                context = SpanContext(
                    parent.trace_id,
                    IDS.generate_span_id(),
                    is_remote=False,
                    trace_flags=_SAMPLED,
                    trace_state=parent.trace_state,
                )
                return OtlpTrace(self, operation, path, context, parent)
        trace_id = IDS.generate_trace_id()
        if trace_id & TraceIdRatioBased.TRACE_ID_LIMIT >= self._root_bound:
            return None
        return OtlpTrace(self, operation, path, SpanContext(trace_id, IDS.generate_span_id(), False, _SAMPLED), None)

    def hand_over(self, spans: RequestSpans) -> None:
        """Have the spans of a request exported, or dropped where too many wait already."""
        if self._handed_over - self._exporter.taken_requests >= _QUEUED_REQUESTS:
            self._turned_away_spans += spans.count
            return
        self._handed_over += 1
        # All that the processor asks of a span before it gives it to the exporter, which is ours, is its context.
        self._processor.on_end(cast("ReadableSpan", spans))

    def close(self, timeout_s: float) -> None:
        # The processor waits for half a minute by itself, and tells the exporter to give up only then.
        closing = threading.Thread(target=self._processor.shutdown, name="trace flush", daemon=True)
        closing.start()
        closing.join(timeout_s)
        self._exporter.shutdown()


class _RequestExporter(SpanExporter):
    """Makes spans of requests and gives them to the library's exporter, on the processor's thread."""

    def __init__(self, exporter: SpanExporter, resource: Resource, clock: Clock) -> None:
        self._exporter = exporter
        self._resource = resource
        self._clock = clock
        self._is_closed = False
        self._is_failing = False
        self.taken_requests = 0
        self.exported_spans = 0
        self.dropped_spans = 0

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        requests: Sequence[RequestSpans] = spans
        self.taken_requests += len(requests)
        if self._is_closed:
            self.dropped_spans += sum(request.count for request in requests)
            return SpanExportResult.FAILURE
        # Once for all of them: the wall clock may be set at any time, and within a trace all shall fit.
        wall_minus_monotonic_ns = time.time_ns() - self._clock()
        made = [span for request in requests for span in request.make(self._resource, wall_minus_monotonic_ns)]
        result = self._exporter.export(made)
        is_failure = result is not SpanExportResult.SUCCESS
        if is_failure:
            self.dropped_spans += len(made)
        else:
            self.exported_spans += len(made)
        if is_failure and not self._is_failing:
            log_event(logger, logging.WARNING, "the collector takes no traces: they are dropped until it does")
        elif self._is_failing and not is_failure:
            log_event(logger, logging.INFO, "the collector takes traces again", dropped_spans=self.dropped_spans)
        self._is_failing = is_failure
        return result

    def shutdown(self) -> None:
        """Send nothing any more, and end what is being sent again and again; a second time does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()


def _exporter(endpoint: str | None, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    # As for the variable of that name: the option is what comes before the path.
    return HttpExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")


def _resource(service_name: str | None, default_service_name: str) -> Resource:
    """Who exports: what the options say, else the variables, else what is known here."""
    known = Resource(
        {SERVICE_NAME: default_service_name, SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid4())}
    )
    told = Resource.create().merge(known).merge(OTELResourceDetector().detect())
    return told.merge(Resource({SERVICE_NAME: service_name})) if service_name else told


def _read_parent(traceparent: str, tracestate: Sequence[str]) -> SpanContext | None:
    carrier = {"traceparent": [traceparent], "tracestate": list(tracestate)}
    parent = get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return parent if parent.is_valid else None
