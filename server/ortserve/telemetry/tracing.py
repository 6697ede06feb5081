"""The interface of tracing: operations, ended requests, and the protocols of a trace and of the exporter.

A traced request carries a ``Trace`` beside its ``Timing``. Its record is handed over when the request ends; spans are
made from the record on the exporter's thread. ``otlp`` implements the protocols and ``trace_export`` starts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class Operation:
    """What a caller asked for, in the words of the semantic conventions of its protocol.

    Attributes:
        name: Of the span; one of few.
        attributes: That every such request has.
        status_attribute: Where its status goes.
        statuses: By kind of error; None for a request that was answered.
    """

    name: str
    attributes: Mapping[str, str]
    status_attribute: str
    statuses: Mapping[ErrorKind | None, int | str]


def http_operation(route: str, scheme: str, statuses: Mapping[ErrorKind | None, int]) -> Operation:
    """A POST; see OpenTelemetry's "Semantic conventions for HTTP spans"."""
    attributes = {"http.request.method": "POST", "http.route": route, "url.scheme": scheme}
    return Operation(f"POST {route}", attributes, "http.response.status_code", statuses)


def grpc_operation(method: str, statuses: Mapping[ErrorKind | None, str]) -> Operation:
    """A call of ``service/Method``; see OpenTelemetry's "Semantic conventions for gRPC"."""
    return Operation(method, {"rpc.system.name": "grpc", "rpc.method": method}, "rpc.response.status_code", statuses)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """All that is told of a request in a trace: nothing of its tensors.

    Attributes:
        timing: Whatever points it reached, and written no more.
        ended_ns: Monotonic.
        kind: None for one that was answered.
        model: As the caller spelled it; empty where it was not read.
        version: That answered; empty where none was found.
        request_id: The caller's.
        rows: 0 where they are not known.
    """

    timing: Timing
    ended_ns: int
    kind: ErrorKind | None
    model: str = ""
    version: str = ""
    request_id: str = ""
    rows: int = 0


class Trace(Protocol):
    """One request's part in a trace; there is none for a request that is not sampled."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def span_id(self) -> str:
        """Of the request's own span, 16 hexadecimal digits."""
        ...

    def end(self, request: EndedRequest) -> None:
        """Hand the record over; once."""
        ...


class Tracing(Protocol):
    """Where traces begin. Loop thread only, but for the numbers."""

    @property
    def exported_spans(self) -> int:
        """That a collector has taken."""
        ...

    @property
    def dropped_spans(self) -> int:
        """For want of room, or because no collector took them."""
        ...

    def begin(
        self, operation: Operation, traceparent: str | None, tracestate: Sequence[str], path: bytes = b""
    ) -> Trace | None:
        """Take part in the caller's trace, or begin one for some of those that bring none.

        Args:
            operation: Asked for.
            traceparent: The header, None where there was none, or more than one; one that is malformed counts as none.
            tracestate: All headers of that name.
            path: Of the URL, as it came; empty for a protocol whose spans name none.

        Returns:
            None for a request that is not sampled.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Export what was handed over, within a time; to be called on a thread that may wait."""
        ...
