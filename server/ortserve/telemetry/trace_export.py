"""Starts the export of traces if an option or an environment variable enables it.

OpenTelemetry is an optional dependency, so ``otlp``, which imports it, is imported only on demand.
"""

import logging
import re
from collections.abc import Mapping
from typing import Final

from ortserve.clock import Clock
from ortserve.errors import invalid_input
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.tracing import Tracing

logger: Final = logging.getLogger(__name__)

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS: Final = ("http/protobuf", "grpc")

_INSTALL: Final = "pip install 'ortserve[otel]'"


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
    """Start the export of traces if it is enabled.

    Args:
        environment: The environment of the process. Its ``OTEL_`` variables replace arguments that are None;
            OpenTelemetry's library reads some of them itself.
        endpoint: The option ``otlp_endpoint``.
        protocol: The option ``otlp_protocol``.
        sample_ratio: The option ``otlp_sample_ratio``.
        service_name: The option ``otlp_service_name``.
        default_service_name: The name if neither option nor variables name the service.
        clock: The clock of the requests' timing.

    Returns:
        None if traces are not enabled, or if only a variable enables them and the library is not installed.

    Raises:
        ServeError: invalid_input: the option is set but the library is not installed, or a variable is invalid.
    """
    variable = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), "")
    if (endpoint is None and not variable) or _is_disabled(environment):
        return None
    try:
        from ortserve.telemetry.otlp import OtlpTracing
    except ImportError as error:
        if endpoint is not None:
            raise invalid_input(
                f"otlp_endpoint: expected OpenTelemetry to be installed, got {error}; try: {_INSTALL}"
            ) from error
        log_event(logger, logging.WARNING, "traces are not exported", reason=f"{variable} is set; try: {_INSTALL}")
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
    except Exception as error:  # the library raises various types for its own variables
        raise invalid_input(f"traces cannot be exported: {error}") from error
    # Without a query, which may hold a token, and without a password, which may contain "@".
    address = re.split("[?#]", endpoint or environment[variable], maxsplit=1)[0]
    where = re.sub("//[^/]*@", "//", address)
    fields = {"endpoint": where, "protocol": protocol, "sample_ratio": sample_ratio}
    log_event(logger, logging.INFO, "exporting traces", **fields)
    return tracing


def _is_disabled(environment: Mapping[str, str]) -> bool:
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
    """The ratio from OpenTelemetry's sampler variables. Only parent-based samplers are supported."""
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
