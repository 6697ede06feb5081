"""The interface of tracing: operations, ended requests, and the protocols of a trace and of the exporter.

A traced request carries a ``Trace`` beside its ``Timing``. When the request ends, its record is passed to the exporter,
whose thread creates spans from it. ``otlp`` implements the protocols, and ``trace_export`` starts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class Operation:
    """The called operation, in the terms of the semantic conventions of its protocol.

    Attributes:
        name: Name of the span, one of a small number of names.
        attributes: Attributes of every request of this operation.
        status_attribute: Name of the attribute for the status.
        statuses: Status by kind of error; the key None is for answered requests.
    """

    name: str
    attributes: Mapping[str, str]
    status_attribute: str
    statuses: Mapping[ErrorKind | None, int | str]


def http_operation(route: str, scheme: str, statuses: Mapping[ErrorKind | None, int]) -> Operation:
    """The operation of a POST request; see OpenTelemetry's "Semantic conventions for HTTP spans"."""
    attributes = {"http.request.method": "POST", "http.route": route, "url.scheme": scheme}
    return Operation(f"POST {route}", attributes, "http.response.status_code", statuses)


def grpc_operation(method: str, statuses: Mapping[ErrorKind | None, str]) -> Operation:
    """The operation of a gRPC call, ``service/Method``; see OpenTelemetry's "Semantic conventions for gRPC"."""
    return Operation(method, {"rpc.system.name": "grpc", "rpc.method": method}, "rpc.response.status_code", statuses)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The data of a request in its trace. It never includes tensors.

    Attributes:
        timing: The points that the request reached, which no longer change.
        ended_ns: Monotonic time of the end.
        kind: Kind of error; None for an answered request.
        model: Name of the model as the caller sent it; empty if it was not read.
        version: Version that answered; empty if no version was found.
        request_id: The caller's id.
        rows: Number of rows; 0 if unknown.
    """

    timing: Timing
    ended_ns: int
    kind: ErrorKind | None
    model: str = ""
    version: str = ""
    request_id: str = ""
    rows: int = 0


class Trace(Protocol):
    """One sampled request's part of a trace. Requests that are not sampled have no ``Trace``."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def span_id(self) -> str:
        """Id of the request's own span, 16 hexadecimal digits."""
        ...

    def end(self, request: EndedRequest) -> None:
        """Pass the record to the exporter. Called once."""
        ...


class Tracing(Protocol):
    """Starts traces. Loop thread only, except for the counts."""

    @property
    def exported_spans(self) -> int:
        """Spans that a collector accepted."""
        ...

    @property
    def dropped_spans(self) -> int:
        """Spans that were dropped: the queue was full, or the collector did not accept them."""
        ...

    def begin(
        self, operation: Operation, traceparent: str | None, tracestate: Sequence[str], path: bytes = b""
    ) -> Trace | None:
        """Join the caller's trace, or start one for a share of the requests without a trace.

        Args:
            operation: The called operation.
            traceparent: The header; None if it is missing or repeated. A malformed header counts as missing.
            tracestate: All headers of that name.
            path: Path of the URL, unchanged; empty for gRPC.

        Returns:
            None for a request that is not sampled.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Export the remaining records within ``timeout_s``. Blocks."""
        ...
