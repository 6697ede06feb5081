"""What a request's record says as OpenTelemetry's spans: one of the server, and one for each phase within it."""

from collections.abc import Iterator
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from ortserve import __version__
from ortserve.core.timing import PHASES
from ortserve.telemetry.tracing import EndedRequest, Operation

IDS: Final = RandomIdGenerator()
"""Of traces and spans; 0, which stands for none, is not among them."""

_SCOPE: Final = InstrumentationScope("ortserve", __version__)

_MAX_TEXT: Final = 256
"""Characters of what callers make up."""


class RequestSpans:
    """A request that was sampled and is over, and its spans.

    ``context`` is that of the request's own span, and all that a span processor asks of a span before it is exported.
    The spans are made by the library's constructor rather than by its tracer, which would have to be there when the
    request comes, and costs several times as much.
    """

    __slots__ = ("_operation", "_parent", "_path", "_request", "context")

    def __init__(
        self,
        operation: Operation,
        path: bytes,
        context: SpanContext,
        parent: SpanContext | None,
        request: EndedRequest,
    ) -> None:
        self.context = context
        self._operation = operation
        self._path = path
        self._parent = parent
        self._request = request

    @property
    def count(self) -> int:
        """How many spans there will be."""
        return 1 + sum(1 for _ in _phases(self._request))

    def make(self, resource: Resource, wall_minus_monotonic_ns: int) -> Iterator[ReadableSpan]:
        """The span of the request, then those of its phases."""
        request, context = self._request, self.context
        failed = request.kind is not None
        yield ReadableSpan(
            self._operation.name,
            context,
            self._parent,
            resource,
            self._attributes(),
            kind=SpanKind.SERVER,
            # Its description would be the text for the caller, in which there may be something of what it sent.
            status=Status(StatusCode.ERROR) if failed else Status(StatusCode.UNSET),
            start_time=request.timing.received_ns + wall_minus_monotonic_ns,
            end_time=request.ended_ns + wall_minus_monotonic_ns,
            instrumentation_scope=_SCOPE,
        )
        for name, begin_ns, end_ns in _phases(request):
            yield ReadableSpan(
                name,
                SpanContext(context.trace_id, IDS.generate_span_id(), False, context.trace_flags, context.trace_state),
                context,
                resource,
                start_time=begin_ns + wall_minus_monotonic_ns,
                end_time=end_ns + wall_minus_monotonic_ns,
                instrumentation_scope=_SCOPE,
            )

    def _attributes(self) -> dict[str, str | int]:
        request, operation = self._request, self._operation
        outcome = request.kind.value if request.kind is not None else "ok"
        attributes: dict[str, str | int] = {
            **operation.attributes,
            operation.status_attribute: operation.statuses[request.kind],
            "ortserve.outcome": outcome,
        }
        if request.kind is not None:
            attributes["error.type"] = outcome
        for key, text in (
            ("url.path", self._path.decode("latin-1")),
            ("ortserve.model.name", request.model),
            ("ortserve.model.version", request.version),
            ("ortserve.request.id", request.request_id),
        ):
            if text:
                attributes[key] = text[:_MAX_TEXT].encode(errors="replace").decode()  # no lone surrogates of JSON
        if request.rows:
            attributes["ortserve.rows"] = request.rows
        timing = request.timing
        if timing.batch_rows:
            attributes["ortserve.batch.rows"] = timing.batch_rows
            # Chosen one after the other: of one model, no two batches at the same nanosecond.
            attributes["ortserve.batch.id"] = f"{timing.taken_ns:x}"
        return attributes


def _phases(request: EndedRequest) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end of the phases that were passed, and of the queue or decoding where it ended there.

    Where in a run that failed the time went is not known.
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
