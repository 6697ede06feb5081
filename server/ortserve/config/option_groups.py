"""Groups of the server's options: keys, TLS, HTTP, gRPC, trace files and OpenTelemetry.

Each class declares one group; ``options`` joins them. The TLS options are named like those of Kubernetes' and etcd's
servers. The gRPC connection options are gRPC's channel arguments (github.com/grpc/grpc, doc/keepalive.md) with their
defaults. Unset OpenTelemetry options follow the variables ``OTEL_...``, which its libraries read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AccessOptions(BaseModel):
    """Keys for groups of calls. A group without a file is open to everybody who reaches the port."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    infer_keys_file: Path | None = None
    """File of keys, one a line, of which callers of inference need one; or a folder of such files, such as a mounted
    Kubernetes Secret. Empty lines and lines that begin with ``#`` do not count. Callers send ``Authorization: Bearer
    KEY``, over gRPC as the metadata ``authorization``. Health stays open. Unset: open to everybody."""
    metadata_keys_file: Path | None = None
    """The same for what tells of the server and its models: metadata, configurations, statistics, what batchers
    learned, the repository index, the documentation and gRPC reflection. Unset: open to everybody."""
    control_keys_file: Path | None = None
    """The same for calls that change the server, or read what they change: loading and unloading, shared memory, trace
    and log settings. Unset: open to everybody."""
    metrics_keys_file: Path | None = None
    """The same for the metrics port. Unset: open to everybody."""
    keys_poll_s: float = Field(default=5.0, ge=0.01, le=3600)
    """How often the files of keys are read again. New keys count when the next reading, a second later at most, finds
    the same. Put a changed file in place by renaming all the same: one whose writing takes longer would be taken half
    written. Where it is gone, empty or malformed, the keys that were read before stay valid."""


class TlsOptions(BaseModel):
    """How connections are encrypted, and which clients may open one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    tls_cert_file: Path | None = None
    """The server's certificate in PEM, followed by those that lead to its authority: the HTTP and the gRPC port speak
    TLS with it, and nothing else. The files of TLS are looked at every second; new ones are used for the next
    connections when two looks found the same, and ones that cannot be used, or not yet or no more while the old ones
    can, are logged and change nothing. Unset: no TLS."""
    tls_key_file: Path | None = None
    """The private key of ``tls_cert_file`` in PEM, without a passphrase."""
    tls_client_ca_file: Path | None = None
    """Certificates in PEM of the authorities that sign those of clients: a client of the HTTP or gRPC port must bring
    one of theirs then (mutual TLS). Unset: anybody may connect."""
    tls_min_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest version of TLS that is spoken. ``1.3`` needs ``grpc_transport`` to be ``native``, since grpcio
    cannot be told."""
    tls_handshake_timeout_s: float = Field(default=10.0, ge=0.1, le=600)
    """How long a client may take for its TLS handshake before its connection is closed."""
    tls_metrics: bool = False
    """Speak TLS on the metrics port, too. It never asks for a client's certificate, because it is where Kubernetes'
    probes, which have none, ask for health. Off, so that turning TLS on breaks no scrape."""


def tls_problems(options: TlsOptions, *, grpc_transport: str) -> Iterator[str]:
    """Say which options of TLS do not go together, a line for each."""
    if options.tls_cert_file is not None and options.tls_key_file is None:
        yield f"tls_key_file: expected the private key of tls_cert_file '{options.tls_cert_file}', got none"
    if options.tls_cert_file is None:
        for name in ("tls_key_file", "tls_client_ca_file", "tls_metrics"):
            if getattr(options, name):
                yield f"{name}: expected tls_cert_file beside it, got none"
    elif options.tls_min_version == "1.3" and grpc_transport == "grpcio":
        yield "tls_min_version: expected grpc_transport 'native' with '1.3', got 'grpcio'"


class HttpOptions(BaseModel):
    """Bounds on what callers may do to the HTTP port before their request is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    http_max_connections: int = Field(default=4096, ge=1, le=1_048_576)
    """Most HTTP connections that are open at one time; further ones are answered with 429 and closed. The process must
    be allowed as many open files."""
    http_max_headers: int = Field(default=100, ge=1, le=10_000)
    """Most headers of one HTTP request; one with more is refused as ``headers_too_large`` (431)."""
    http_max_header_bytes: int = Field(default=32 * 1024, ge=256, le=1024 * 1024)
    """Most bytes of the request line and headers of one HTTP request; one with more is refused as
    ``headers_too_large`` (431)."""
    http_header_timeout_s: float = Field(default=20.0, ge=0.01, le=3600)
    """How long the headers of an HTTP request may take to come, from the first byte to the last; else 408."""
    http_body_timeout_s: float = Field(default=30.0, ge=0.01, le=3600)
    """A body must be complete within this time; it gets the same time again while it averages at least
    ``http_min_body_bytes_per_s``; else 408. Time in which the server does not read does not count."""
    http_min_body_bytes_per_s: int = Field(default=4096, ge=1, le=2**31 - 1)
    """How fast a body must come that takes longer than ``http_body_timeout_s``, in bytes per second."""
    http_answer_half_closed: bool = True
    """Whether requests that came whole before a FIN are answered. Callers that only end their sending side then get
    their answers, and requests of callers that gave up keep their places in the queue, because ``close()`` sends the
    same FIN. Off, a FIN cancels the requests of its connection."""
    http_send_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """How long a caller may take nothing of its answer before its connection is closed."""


_DAY_S = 86_400


class GrpcOptions(BaseModel):
    """How the gRPC port treats connections and streams."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    grpc_transport: Literal["native", "grpcio"] = "native"
    """What speaks HTTP/2 on the gRPC port: our own transport on the server's event loop, or the grpcio library, which
    costs several times as much a call and bounds less. The calls are the same."""
    grpc_response_compression: Literal["none", "deflate", "gzip"] = "none"
    """How gRPC answers are compressed. It costs the event loop about 20 ms for each megabyte of an answer, and helps
    over slow networks only. Compressed requests are always understood."""
    grpc_max_streams: int = Field(default=1024, ge=1, le=1_048_576)
    """Most gRPC streams that are open at one time; further ones are refused as ``overloaded``."""
    grpc_stream_requests: int = Field(default=256, ge=1, le=65536)
    """Most requests of one gRPC stream that are unanswered at one time; the next is read when one was answered."""
    grpc_stream_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=2**40)
    """Bytes of unanswered requests and unsent answers of one gRPC stream from which on no further request is read."""
    grpc_max_connections: int = Field(default=4096, ge=1, le=1_048_576)
    """Most gRPC connections that are open at one time; further ones are closed as they come, and their calls end with
    UNAVAILABLE. The process must be allowed as many open files."""
    grpc_message_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """A request message that has begun must be complete within this time; it gets the same time again while it averages
    at least ``grpc_min_message_bytes_per_s``; else its call ends with CANCELLED. On the ``native`` transport alone."""
    grpc_min_message_bytes_per_s: int = Field(default=4096, ge=1, le=2**31 - 1)
    """How fast a request message must come that takes longer than ``grpc_message_timeout_s``, in bytes per second."""
    grpc_send_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """How long a caller may take nothing of an answer before its call ends with CANCELLED, or nothing at all of what is
    sent to it before its connection is closed. On the ``native`` transport: grpcio has no such bound."""
    grpc_unsent_bytes: int = Field(default=1024**3, ge=1, le=2**44)
    """Bytes of answers that callers have not taken, of all gRPC connections, beyond which the one that has most of them
    loses its oldest calls as ``overloaded``; one that has a quarter begins no more while half of them wait. On the
    ``native`` transport: grpcio has no such bound."""
    grpc_max_connection_calls: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Most calls, streams among them, that one gRPC connection may have under way; more wait at the client. Unset: 1000
    more than ``grpc_max_streams`` on the ``native`` transport, any number on ``grpcio``."""
    grpc_max_connection_age_s: float | None = Field(default=None, ge=0.001, le=365 * _DAY_S)
    """Age at which a gRPC connection takes no new calls, so that clients spread over new servers. Unset: it lives as
    long as its client wants."""
    grpc_max_connection_age_grace_s: float | None = Field(default=None, ge=0, le=365 * _DAY_S)
    """How long the calls of a gRPC connection that is too old may take to finish. Unset: as long as they take."""
    grpc_max_connection_idle_s: float | None = Field(default=None, ge=0.001, le=365 * _DAY_S)
    """How long a gRPC connection without calls is kept. Unset: as long as its client wants."""
    grpc_keepalive_time_s: float = Field(default=7200.0, ge=0.001, le=365 * _DAY_S)
    """How long a gRPC connection may be silent before the server asks whether its client is there."""
    grpc_keepalive_timeout_s: float = Field(default=20.0, ge=0.001, le=_DAY_S)
    """How long a client may take to say that it is there before its gRPC connection is closed."""
    grpc_keepalive_permit_without_calls: bool = False
    """Ask connections without calls, and let clients ask on them, too."""
    grpc_http2_max_pings_without_data: int = Field(default=2, ge=0, le=2**31 - 1)
    """Most times that the server asks a client without sending it anything else; 0 for any number."""
    grpc_http2_min_recv_ping_interval_without_data_s: float = Field(default=300.0, ge=0, le=_DAY_S)
    """How often a client may ask whether the server is there, while nothing else is sent; more often is a strike."""
    grpc_http2_max_ping_strikes: int = Field(default=2, ge=0, le=2**31 - 1)
    """Strikes after which a client's gRPC connection is closed; 0 for any number."""


class TraceFileOptions(BaseModel):
    """Whether and where traces are written, and the trace settings that the server starts with."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    trace_file: Path | None = None
    """File that traces of requests are written to; numbered ones beside it have its name and ``.0``, ``.1``, … behind.
    What lies there under these names is replaced. Clients say which requests are traced, never where to. Unset: who
    asks for traces is refused as ``unsupported``."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    """Trace level at the start: ``TIMESTAMPS`` writes when a traced request passed each point of its way."""
    trace_rate: int = Field(default=1000, ge=1, le=2**31 - 1)
    """Trace rate at the start: one of so many requests is traced."""
    trace_count: int = Field(default=-1, ge=-1, le=2**31 - 1)
    """Trace count at the start: how many requests are traced before it ends; -1 for any number."""
    trace_log_frequency: int = Field(default=0, ge=0, le=2**31 - 1)
    """Log frequency at the start: how many traces make a numbered file; at 0 all go into one file."""
    trace_max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096, le=2**44)
    """Most bytes of traces that are written before the server is started anew, since clients say how many there are;
    later ones are dropped. A numbered file counts as 4096 at least."""


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
