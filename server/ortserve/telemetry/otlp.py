"""Traces by the OpenTelemetry protocol: sampling, spans, and their export to a collector.

The only module that imports OpenTelemetry. It keeps no global state: no tracer provider is set, so other libraries of
the process do not appear in these traces.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ortserve import __version__
from ortserve.clock import Clock
from ortserve.core.thread_pool import start_thread
from ortserve.core.timing import PHASES, EndedStep
from ortserve.errors import ServeError
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.otlp_exporter import make_exporter
from ortserve.telemetry.tracing import EndedRequest, Operation

logger: Final = logging.getLogger(__name__)

IDS: Final = RandomIdGenerator()
"""Generates ids of traces and spans; never 0, which is invalid."""

_SCOPE: Final = InstrumentationScope("ortserve", __version__)

_MAX_TEXT: Final = 256
"""Maximum number of characters of a caller's text."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_PROPAGATOR: Final = TraceContextTextMapPropagator()

_IS_UNSAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]").fullmatch
"""A ``traceparent`` without the sampled flag. Matching it here is cheaper than parsing it with the library."""

_LIBRARY_LOGGER: Final = logging.getLogger("opentelemetry.exporter")
"""Logs each failed export, dozens in a second if a collector rejects them at once. Only the first one of a row is
logged."""

_QUEUED_REQUESTS: Final = 2048
"""Maximum number of requests that wait for export. Each has at most six spans, and six more for each step."""

_EXPORTED_REQUESTS: Final = 256
"""Requests per export. Creating and encoding their spans takes about ten milliseconds of the interpreter lock."""


class OtlpTrace:
    """The trace of a sampled request; see ``Trace``. Once it has ended, ``make`` creates its spans.

    ``context`` is the context of the request's own span, the only attribute that a span processor reads before export.
    The spans are created with the library's constructor. The library's tracer would have to run when the request
    begins, and costs several times as much.
    """

    __slots__ = ("_operation", "_parent", "_path", "_queue", "_request", "context")

    _request: EndedRequest

    def __init__(
        self,
        queue: Callable[["OtlpTrace"], object],
        operation: Operation,
        path: bytes,
        context: SpanContext,
        parent: SpanContext | None,
    ) -> None:
        """``queue`` receives the trace when it has ended."""
        self.context = context
        self._queue = queue
        self._operation = operation
        self._path = path
        self._parent = parent

    @property
    def trace_id(self) -> str:
        return f"{self.context.trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self.context.span_id:016x}"

    def end(self, request: EndedRequest) -> None:
        self._request = request
        self._queue(self)

    @property
    def count(self) -> int:
        """Number of spans that ``make`` creates."""
        return _count(self._request)

    def make(self, resource: Resource, wall_minus_monotonic_ns: int) -> Iterator[ReadableSpan]:
        """Yield the span of the request, the spans of its phases, and those of its steps, each with its own phases."""
        maker = _Maker(resource, wall_minus_monotonic_ns)
        request = self._request
        yield maker.span(self._operation.name, self.context, self._parent, request, self._attributes(), SpanKind.SERVER)
        yield from maker.inner(self.context, request)

    def _attributes(self) -> dict[str, str | int]:
        request, operation = self._request, self._operation
        outcome = _outcome(request)
        attributes: dict[str, str | int] = {
            **operation.attributes,
            operation.status_attribute: operation.statuses[request.kind],
            "ortserve.outcome": outcome,
        }
        if request.kind is not None:
            attributes["error.type"] = outcome
        _add_texts(attributes, {"url.path": self._path.decode("latin-1"), "ortserve.request.id": request.request_id})
        return attributes | _describe(request)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Creates the spans of one export."""

    resource: Resource
    wall_minus_monotonic_ns: int

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        ended: EndedRequest | EndedStep,
        attributes: dict[str, str | int],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        """The span of a request or a step."""
        # No description: the error text may contain data of the request.
        status = Status(StatusCode.UNSET if ended.kind is None else StatusCode.ERROR)
        begin_ns, end_ns = ended.timing.received_ns, ended.ended_ns
        return self._span(name, context, parent, begin_ns, end_ns, attributes=attributes, kind=kind, status=status)

    def inner(self, context: SpanContext, ended: EndedRequest | EndedStep) -> Iterator[ReadableSpan]:
        """Yield the spans of the phases, and those of the steps with their inner spans."""
        for name, begin_ns, end_ns in _phases(ended):
            yield self._span(name, _below(context), context, begin_ns, end_ns)
        for step in ended.timing.steps:
            own = _below(context)
            yield self.span("step", own, context, step, {"ortserve.outcome": _outcome(step), **_describe(step)})
            yield from self.inner(own, step)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begin_ns: int,
        end_ns: int,
        **more: Any,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self.resource,
            start_time=begin_ns + self.wall_minus_monotonic_ns,
            end_time=end_ns + self.wall_minus_monotonic_ns,
            instrumentation_scope=_SCOPE,
            **more,
        )


def _below(context: SpanContext) -> SpanContext:
    """The context of a new span in the same trace."""
    return SpanContext(
        context.trace_id,
        IDS.generate_span_id(),
        is_remote=False,
        trace_flags=context.trace_flags,
        trace_state=context.trace_state,
    )


def _count(ended: EndedRequest | EndedStep) -> int:
    return 1 + sum(1 for _ in _phases(ended)) + sum(map(_count, ended.timing.steps))


def _outcome(ended: EndedRequest | EndedStep) -> str:
    return "ok" if ended.kind is None else ended.kind.value


def _describe(ended: EndedRequest | EndedStep) -> dict[str, str | int]:
    """The attributes that requests and steps have in common."""
    attributes: dict[str, str | int] = {}
    _add_texts(attributes, {"ortserve.model.name": ended.model, "ortserve.model.version": ended.version})
    if ended.rows:
        attributes["ortserve.rows"] = ended.rows
    timing = ended.timing
    if timing.batch_rows:
        attributes["ortserve.batch.rows"] = timing.batch_rows
        # Unique per model, because its batches are scheduled one after another.
        attributes["ortserve.batch.id"] = f"{timing.taken_ns:x}"
    return attributes


def _add_texts(attributes: dict[str, str | int], texts: Mapping[str, str]) -> None:
    for key, text in texts.items():
        if text:
            attributes[key] = text[:_MAX_TEXT].encode(errors="replace").decode()  # removes lone surrogates


def _phases(request: EndedRequest | EndedStep) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of the finished phases, and of the phase in which the request failed before its run.

    The phases of a failed run are omitted, because their times are unknown.
    """
    timing = request.timing
    begin_ns = timing.received_ns
    ends_ns = (timing.queued_ns, timing.taken_ns, timing.staged_ns, timing.computed_ns, timing.done_ns)
    for phase, end_ns in zip(PHASES, ends_ns, strict=True):
        if not end_ns:
            if not timing.taken_ns:
                yield phase, begin_ns, request.ended_ns
            return
        yield phase, begin_ns, end_ns
        begin_ns = end_ns


class OtlpTracing:
    """Exports traces from construction until ``close``; see ``Tracing``."""

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
        """Prepare the export without connecting. If ``endpoint`` is None, the library's variables name it.

        Raises:
            Exception: The library raises various types for invalid variables.
        """
        self._root_bound: Final = TraceIdRatioBased(sample_ratio).bound
        exporter = make_exporter(endpoint, protocol)
        self._exporter = _RequestExporter(exporter, _resource(service_name, default_service_name), clock)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=_QUEUED_REQUESTS, max_export_batch_size=_EXPORTED_REQUESTS
        )
        self._handed_over = 0
        self._rejected_spans = 0

    @property
    def exported_spans(self) -> int:
        return self._exporter.exported_spans

    @property
    def dropped_spans(self) -> int:
        return self._exporter.dropped_spans + self._rejected_spans

    def begin(
        self, operation: Operation, traceparent: str | None, tracestate: Sequence[str], path: bytes = b""
    ) -> OtlpTrace | None:
        parent: SpanContext | None = None
        if traceparent is not None:
            if _IS_UNSAMPLED(traceparent):
                return None
            parent = _read_parent(traceparent, tracestate)
        if parent is None:
            trace_id, state = IDS.generate_trace_id(), None
            is_sampled = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._root_bound
        else:
            trace_id, state = parent.trace_id, parent.trace_state
            is_sampled = parent.trace_flags.sampled
        if not is_sampled:
            return None
        context = SpanContext(
            trace_id, IDS.generate_span_id(), is_remote=False, trace_flags=_SAMPLED, trace_state=state
        )
        return OtlpTrace(self._queue, operation, path, context, parent)

    def _queue(self, trace: OtlpTrace) -> None:
        """Queue a trace that has ended for export, or drop it if the queue is full."""
        if self._handed_over - self._exporter.taken_requests >= _QUEUED_REQUESTS:
            self._rejected_spans += trace.count
            return
        self._handed_over += 1
        # The processor reads only the context of a span before it passes the span to ``_RequestExporter``.
        self._processor.on_end(cast("ReadableSpan", trace))

    def close(self, timeout_s: float) -> None:
        # The processor itself would wait for half a minute before it stops the exporter.
        closing = threading.Thread(target=self._processor.shutdown, name="trace flush", daemon=True)
        try:
            start_thread(closing)
        except ServeError as error:
            log_event(logger, logging.WARNING, "the last traces are not sent", reason=error.message)
        else:
            closing.join(timeout_s)
        self._exporter.shutdown()


class _RequestExporter(SpanExporter):
    """Creates the spans of requests and passes them to the library's exporter, on the processor's thread."""

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
        traces: Sequence[OtlpTrace] = spans
        self.taken_requests += len(traces)
        if self._is_closed:
            self.dropped_spans += sum(trace.count for trace in traces)
            return SpanExportResult.FAILURE
        # One offset for all spans: the wall clock may be changed at any time, and a trace must be consistent.
        wall_minus_monotonic_ns = time.time_ns() - self._clock()
        made = [span for trace in traces for span in trace.make(self._resource, wall_minus_monotonic_ns)]
        result = self._exporter.export(made)
        is_failure = result is not SpanExportResult.SUCCESS
        if is_failure:
            self.dropped_spans += len(made)
        else:
            self.exported_spans += len(made)
        if is_failure and not self._is_failing:
            log_event(logger, logging.WARNING, "the collector does not accept traces; dropping traces until it does")
            if not (self._is_closed or _LIBRARY_LOGGER.isEnabledFor(logging.INFO)):  # only level debug enables it
                _LIBRARY_LOGGER.setLevel(logging.CRITICAL)
        elif self._is_failing and not is_failure:
            log_event(logger, logging.INFO, "the collector accepts traces again", dropped_spans=self.dropped_spans)
            _LIBRARY_LOGGER.setLevel(logging.NOTSET)
        self._is_failing = is_failure
        return result

    def shutdown(self) -> None:
        """Stop sending, and stop retries of the current export. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()
            _LIBRARY_LOGGER.setLevel(logging.NOTSET)


def _resource(service_name: str | None, default_service_name: str) -> Resource:
    """The resource of the spans. Options take precedence over variables, and variables over defaults."""
    known = Resource(
        {SERVICE_NAME: default_service_name, SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid4())}
    )
    detected = Resource.create().merge(known).merge(OTELResourceDetector().detect())
    return detected.merge(Resource({SERVICE_NAME: service_name})) if service_name else detected


def _read_parent(traceparent: str, tracestate: Sequence[str]) -> SpanContext | None:
    carrier = {"traceparent": [traceparent], "tracestate": list(tracestate)}
    parent = get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return parent if parent.is_valid else None
