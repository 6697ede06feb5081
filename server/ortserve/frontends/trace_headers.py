"""Where a request's trace is said: W3C Trace Context, in headers of HTTP as in metadata of gRPC."""

from collections.abc import Iterable
from typing import AnyStr, Final

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


def http_route(path: str) -> Operation:
    """POST of a path whose variable parts are in braces."""
    return http_operation(path, _HTTP_STATUSES)


def grpc_method(method: str) -> Operation:
    """A call of ``service/Method``."""
    return grpc_operation(method, _GRPC_STATUSES)


_INFER: Final = http_route("/v2/models/{model}/infer")
_INFER_VERSION: Final = http_route("/v2/models/{model}/versions/{version}/infer")


def infer_operation(version: str) -> Operation:
    """REST inference; ``version`` is the one in the path, ``""`` for none."""
    return _INFER_VERSION if version else _INFER


def begin_http_trace(tracing: Tracing, operation: Operation, headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
    """The trace of a request by its headers, whose names are in lower case; None for one that is not sampled."""
    return _begin(tracing, operation, headers, b"traceparent", b"tracestate")


def begin_grpc_trace(
    tracing: Tracing, operation: Operation, metadata: Iterable[tuple[str, str | bytes]] | None
) -> Trace | None:
    """The same by the metadata of a call."""
    return _begin(tracing, operation, metadata or (), "traceparent", "tracestate")


def _begin(
    tracing: Tracing,
    operation: Operation,
    headers: Iterable[tuple[AnyStr, str | bytes]],
    parent_name: AnyStr,
    state_name: AnyStr,
) -> Trace | None:
    """Both names are spelled as those of ``headers`` are; of several parents none counts."""
    parents = []
    states = []
    for name, value in headers:
        if name == parent_name:
            parents.append(_text(value))
        elif name == state_name:
            states.append(_text(value))
    return tracing.begin(operation, parents[0] if len(parents) == 1 else None, states)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
