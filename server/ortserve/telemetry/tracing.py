"""Traces of requests: what the rooms above need of them, and the choice of whether there are any.

A request that is traced carries a ``Trace`` beside its ``Timing``. When it is over, its record is handed over, and the
spans are made of it where they are exported, on a thread of their own. OpenTelemetry is an extra: nothing here imports
it, ``otlp`` does, and is imported only where traces are wanted.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ortserve.clock import Clock
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, invalid_input
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS: Final = ("http/protobuf", "grpc")

_INSTALL: Final = "pip install 'ortserve[otel]'"


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


def start_tracing(
    environment: Mapping[str, str],
    *,
    endpoint: str | None,
    protocol: str | None,
    sample_ratio: float | None,
    service_name: str | None,
    default_service_name: str,
    clock: Clock,
) -> Tracing | None:
    """Begin to export traces, where that is asked for.

    Args:
        environment: The process' own: what is None below is as its ``OTEL_`` variables say, of which OpenTelemetry's
            library reads some by itself.
        endpoint: The option ``otlp_endpoint``.
        protocol: The option ``otlp_protocol``.
        sample_ratio: The option ``otlp_sample_ratio``.
        service_name: The option ``otlp_service_name``.
        default_service_name: Where the variables name none either.
        clock: That requests are stamped with.

    Returns:
        None where nobody asked for traces, or only the environment did and the library is not installed.

    Raises:
        ServeError: invalid_input, for an option without the library, and for variables that cannot be meant.
    """
    variable = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), "")
    if (endpoint is None and not variable) or _is_turned_off(environment):
        return None
    try:
        from ortserve.telemetry.otlp import OtlpTracing
    except ImportError as error:
        if endpoint is not None:
            raise invalid_input(
                f"otlp_endpoint: expected OpenTelemetry to be installed, got {error}; try: {_INSTALL}"
            ) from error
        log_event(logger, logging.WARNING, "no traces are exported", reason=f"{variable} is set; try: {_INSTALL}")
        return None
    protocol = protocol or _protocol(environment)
    sample_ratio = _ratio(environment) if sample_ratio is None else sample_ratio
    try:
        tracing = OtlpTracing(
            endpoint=endpoint,
            protocol=protocol,
            sample_ratio=sample_ratio,
            service_name=service_name,
            default_service_name=default_service_name,
            clock=clock,
        )
    except Exception as error:  # the library raises all kinds of them for variables of its own
        raise invalid_input(f"traces cannot be exported: {error}") from error
    where = re.sub("//[^/@]*@", "//", endpoint or environment[variable])  # it may hold a password
    told = {"endpoint": where, "protocol": protocol, "sample_ratio": sample_ratio}
    log_event(logger, logging.INFO, "exporting traces", **told)
    return tracing


def _is_turned_off(environment: Mapping[str, str]) -> bool:
    return (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none"
    )


def _protocol(environment: Mapping[str, str]) -> str:
    for name in _PROTOCOL_VARIABLES:
        value = environment.get(name)
        if value:
            if value not in _PROTOCOLS:
                raise invalid_input(f"{name}: expected {' or '.join(_PROTOCOLS)}, got {value!r}")
            return value
    return _PROTOCOLS[0]


def _ratio(environment: Mapping[str, str]) -> float:
    """As the variables of OpenTelemetry's samplers say, of which those that follow the caller are understood."""
    sampler = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if sampler == "parentbased_always_on":
        return 1.0
    if sampler == "parentbased_always_off":
        return 0.0
    if sampler != "parentbased_traceidratio":
        raise invalid_input(
            "OTEL_TRACES_SAMPLER: expected parentbased_always_on, parentbased_always_off or parentbased_traceidratio, "
            f"got {sampler!r}"
        )
    text = environment.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise invalid_input(f"OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1, got {text!r}")
    return ratio
