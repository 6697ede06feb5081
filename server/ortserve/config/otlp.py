"""What can be set for traces: where they go and how many there are.

What is unset is as OpenTelemetry's own variables say (``OTEL_…``), which its exporter, batching and resource read.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OtlpOptions(BaseModel):
    """Traces of requests, exported by the OpenTelemetry protocol. Needs the extra ``otel``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        json_schema_extra={"expects": "URL such as http://collector:4318"},
    )
    """URL of an OpenTelemetry collector that traces of requests are sent to: ``http://collector:4318``, or
    ``http://collector:4317`` for gRPC; ``https://`` for TLS. Unset: as ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or
    ``OTEL_EXPORTER_OTLP_ENDPOINT`` says, and no traces without them. Needs the extra ``otel``: without it the option
    stops the start, the variables are passed over with a warning."""
    otlp_protocol: Literal["http/protobuf", "grpc"] | None = None
    """How traces are sent; over HTTP to ``/v1/traces`` of the endpoint. Unset: as
    ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` or ``OTEL_EXPORTER_OTLP_PROTOCOL`` says, else ``http/protobuf``."""
    otlp_sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Of the requests that come without a trace of their caller's, the part that gets one here. A caller that sends
    ``traceparent`` decides itself. Unset: as ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG`` say, else all."""
    otlp_service_name: str | None = Field(default=None, min_length=1, json_schema_extra={"expects": "text, not empty"})
    """Name of the service in traces. Unset: as ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` says, else
    ``server_name``."""
    otlp_flush_timeout_s: float = Field(default=5.0, ge=0, le=3600)
    """How long the end of the server may wait for the last traces to be sent."""
