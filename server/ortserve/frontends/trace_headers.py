"""The trace context of requests (W3C Trace Context), in HTTP headers and gRPC metadata."""

from collections.abc import Iterable
from typing import AnyStr, Final, Literal

from ortserve.errors import ErrorKind
from ortserve.frontends.status import STATUSES
from ortserve.telemetry.tracing import Operation, Trace, Tracing, grpc_operation, http_operation

_HTTP_STATUSES: Final[dict[ErrorKind | None, int]] = {
    None: 200,
    **{kind: status.http for kind, status in STATUSES.items()},
}
_GRPC_STATUSES: Final[dict[ErrorKind | None, str]] = {
    None: "OK",
    **{kind: status.grpc.name for kind, status in STATUSES.items()},
}
_HTTP_CALLS: Final = ("infer", "generate", "generate_stream")


def grpc_method(method: str) -> Operation:
    """Return the operation of the gRPC method ``service/Method``."""
    return grpc_operation(method, _GRPC_STATUSES)


class HttpTraces:
    """Begins the traces of HTTP requests. Loop thread only."""

    def __init__(self, tracing: Tracing, scheme: Literal["http", "https"]) -> None:
        """``scheme`` describes the connections to this server. Clients of a proxy may use another one."""
        self._tracing = tracing
        self._operations = {
            (call, has_version): http_operation(
                f"/v2/models/{{model}}{'/versions/{version}' if has_version else ''}/{call}", scheme, _HTTP_STATUSES
            )
            for call in _HTTP_CALLS
            for has_version in (False, True)
        }
        self._operations["embeddings", False] = http_operation("/v1/embeddings", scheme, _HTTP_STATUSES)

    def begin(self, call: str, version: str, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
        """Begin the trace of a request.

        Args:
            call: ``infer``, ``generate``, ``generate_stream`` or ``embeddings``.
            version: Version in the path; ``""`` without one.
            path: Path as the client sent it, without its query.
            headers: Headers of the request; names are in lower case.

        Returns:
            The trace; None for a request that is not sampled.
        """
        operation = self._operations[call, bool(version)]
        return _begin(self._tracing, operation, headers, b"traceparent", b"tracestate", path)


def begin_grpc_trace(
    tracing: Tracing, operation: Operation, metadata: Iterable[tuple[str, str | bytes]]
) -> Trace | None:
    """Begin the trace of a gRPC call; None for a call that is not sampled."""
    return _begin(tracing, operation, metadata, "traceparent", "tracestate")


def _begin(
    tracing: Tracing,
    operation: Operation,
    headers: Iterable[tuple[AnyStr, str | bytes]],
    parent_name: AnyStr,
    state_name: AnyStr,
    path: bytes = b"",
) -> Trace | None:
    """Begin a trace from ``headers``, whose names have the type of both given names. Several parents are ignored."""
    parents = []
    states = []
    for name, value in headers:
        if name == parent_name:
            parents.append(_text(value))
        elif name == state_name:
            states.append(_text(value))
    return tracing.begin(operation, parents[0] if len(parents) == 1 else None, states, path)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
