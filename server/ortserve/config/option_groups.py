"""Groups of the server's options: keys, TLS, HTTP, gRPC, trace files, stores and OpenTelemetry.

Each class declares one group; ``options`` joins them. The TLS options are named like those of Kubernetes' and etcd's
servers. The gRPC connection options are gRPC's channel arguments (github.com/grpc/grpc, doc/keepalive.md) with their
defaults. Unset OpenTelemetry options follow the variables ``OTEL_...``, which its libraries read.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from ortserve.config.declaration import DECLARATION

_DAY_S: Final = 86_400

_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([A-Za-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
_MAX_PORT: Final = 65_535


def _reject_empty(given: object) -> object:
    if given == "":
        raise ValueError("expected path, got ''")
    return given


OptionalPath: TypeAlias = Annotated[Path | None, BeforeValidator(_reject_empty)]
"""A path, or None if unset. An empty text, such as of ``--infer-keys-file "$UNSET"``, is not the working directory."""


class AccessOptions(BaseModel):
    """Keys for groups of calls. A group without a file needs no key. No option holds a key itself, only file names."""

    model_config = DECLARATION

    infer_keys_file: OptionalPath = None
    """File of the keys for inference, one per line, or a folder of such files, for example a mounted Kubernetes Secret.
    Empty lines and lines that begin with ``#`` are ignored. Callers send ``Authorization: Bearer KEY``, over gRPC as
    the metadata ``authorization``. Health needs no key. Unset: inference needs no key."""
    metadata_keys_file: OptionalPath = None
    """File or folder of the keys for metadata, configurations, statistics, learned batch times, the repository index,
    the documentation and gRPC reflection. Unset: these calls need no key."""
    control_keys_file: OptionalPath = None
    """File or folder of the keys for loading and unloading models, changing labels, shared memory, trace settings, log
    settings and profiling. Unset: these calls need no key."""
    metrics_keys_file: OptionalPath = None
    """File or folder of the keys for the metrics port. Unset: metrics need no key."""
    keys_poll_s: float = Field(default=5.0, ge=0.01, le=3600)
    """Interval at which key files are read again. New content takes effect when a second read, at most one second
    later, finds the same content. Replace files by renaming: a file that is written slowly could take effect half
    written. If a file is missing, empty or malformed, its previous keys stay valid."""


class TlsOptions(BaseModel):
    """Encryption of connections, and client certificates. One server certificate holds for all ports."""

    model_config = DECLARATION

    tls_cert_file: OptionalPath = None
    """The server's certificate in PEM, followed by its intermediate certificates. The HTTP and gRPC ports then accept
    only TLS. The TLS files are checked every second; new ones are used for new connections after two checks found the
    same content. New files that are unusable, not yet valid or expired while the old ones are valid are logged and
    ignored. Unset: no TLS."""
    tls_key_file: OptionalPath = None
    """The private key of ``tls_cert_file`` in PEM, without a passphrase."""
    tls_client_ca_file: OptionalPath = None
    """Certificates of authorities in PEM. Clients of the HTTP and gRPC ports must present a certificate that one of
    them signed (mutual TLS). With ``grpc_transport: grpcio`` a client can resume a session after its certificate has
    expired. Unset: clients need no certificate."""
    tls_min_version: Literal["1.2", "1.3"] = "1.2"
    """Lowest TLS version that is accepted. ``1.3`` requires ``grpc_transport: native``, because grpcio has no such
    setting."""
    tls_handshake_timeout_s: float = Field(default=10.0, ge=0.1, le=600)
    """Time limit of a TLS handshake; the connection is closed afterwards."""
    tls_metrics: bool = False
    """Use TLS on the metrics port, too. That port never requests a client certificate, because Kubernetes' probes have
    none. Off by default, so that enabling TLS breaks no scrape."""


def tls_problems(options: TlsOptions, *, grpc_transport: str) -> Iterator[str]:
    """Yield one line per combination of TLS options that is not allowed."""
    if options.tls_cert_file is not None and options.tls_key_file is None:
        yield f"tls_key_file: expected the private key of tls_cert_file '{options.tls_cert_file}', got none"
    if options.tls_cert_file is None:
        for name in ("tls_key_file", "tls_client_ca_file", "tls_metrics"):
            if getattr(options, name):
                yield f"{name}: expected tls_cert_file to be set, too, got none"
    elif options.tls_min_version == "1.3" and grpc_transport == "grpcio":
        yield "tls_min_version: expected grpc_transport 'native' with '1.3', got 'grpcio'"


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each origin has the form in which browsers send it, because an origin of another form never matches.

    ``null`` is refused: any page can become such an origin.
    """
    if len(origins) > 1 and "*" in origins:
        raise ValueError(f"expected either * or a list of origins, got {', '.join(origins)}")
    for origin in origins:
        found = _ORIGIN.fullmatch(origin)
        scheme, host, port = found.groups() if found else ("", "", "")
        is_web = scheme in _DEFAULT_PORTS
        is_alias = is_web and (host.lower() != host or port == _DEFAULT_PORTS[scheme])
        if origin != "*" and (found is None or is_alias or int((port or ":0")[1:]) > _MAX_PORT):
            expected = "https://app.example.com or http://localhost:3000, in lower case, without a path or default port"
            raise ValueError(f"expected * or origins as browsers send them, such as {expected}, got {origin[:200]!r}")
    return origins


class HttpOptions(BaseModel):
    """Limits of the HTTP port for connections and requests that are not complete yet, and pages of other origins."""

    model_config = DECLARATION

    http_max_connections: int = Field(default=4096, ge=1, le=1_048_576)
    """Maximum number of open HTTP connections. A further one replaces an idle one: first those that have carried no
    request, then those that were idle for longest, then those whose request arrives slowly, which is answered with
    429, or whose answer is read slowly. If there is none of these, the further one is answered with 429 and closed. The
    process needs a limit of at least as many open files."""
    http_max_headers: int = Field(default=100, ge=1, le=10_000)
    """Maximum number of headers of an HTTP request; a request with more is rejected as ``headers_too_large`` (431)."""
    http_max_header_bytes: int = Field(default=32 * 1024, ge=256, le=1024 * 1024)
    """Maximum size of the request line and headers of an HTTP request; a larger request is rejected as
    ``headers_too_large`` (431)."""
    http_header_timeout_s: float = Field(default=20.0, ge=0.01, le=3600)
    """Time limit for receiving the headers of an HTTP request, from the first byte on; slower requests are answered
    with 408."""
    http_body_timeout_s: float = Field(default=30.0, ge=0.01, le=3600)
    """Time limit for receiving a body. The limit is renewed while the body averages at least
    ``http_min_body_bytes_per_s``; otherwise the request is answered with 408. Time in which the server does not read
    does not count."""
    http_min_body_bytes_per_s: int = Field(default=4096, ge=1, le=2**31 - 1)
    """Minimum average rate of a body that takes longer than ``http_body_timeout_s``, in bytes per second. At the limit
    of connections, an answer that is read more slowly for a sixth of ``http_send_timeout_s`` may be cut for a new
    connection."""
    http_answer_half_closed: bool = True
    """Answer complete requests of a connection after the client sent a FIN. Clients that close only their sending side
    then receive their answers. ``close()`` sends the same FIN, so requests of clients that gave up stay in the queue.
    Off: a FIN cancels the requests of its connection."""
    http_send_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """Time limit for a client that receives nothing of its answer; the connection is closed afterwards."""
    http_unsent_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Limit of unsent answers of all HTTP connections, in bytes. Beyond it, connections are reset: first those whose
    unsent bytes, multiplied by the time for which they were not read, are the most. Unset: an eighth of the memory
    available to the process, at most 1 GiB."""
    cors_origins: Annotated[tuple[str, ...], AfterValidator(_check_origins)] = Field(
        default=(), json_schema_extra={"expects": "* or list of origins"}
    )
    """Origins whose pages may call the REST port from a browser and read its answers (CORS), such as
    ``https://app.example.com``; ``*`` for the pages of all origins. Calls that change the server need a key of
    ``control_keys_file`` from such pages. Unset: browsers give the answers to no page of another origin."""


class GrpcOptions(BaseModel):
    """Connections, streams and compression of the gRPC port."""

    model_config = DECLARATION

    grpc_transport: Literal["native", "grpcio"] = "native"
    """HTTP/2 implementation of the gRPC port. ``native`` is the server's own, on its event loop. ``grpcio`` is the
    grpcio library, which costs several times as much per call and enforces fewer limits. Both serve the same calls."""
    grpc_response_compression: Literal["none", "deflate", "gzip"] = "none"
    """Compression of gRPC answers. It costs the event loop about 20 ms per megabyte of answer and helps only over slow
    networks. Compressed requests are always accepted."""
    grpc_max_streams: int = Field(default=1024, ge=1, le=1_048_576)
    """Maximum number of open gRPC streams of inference, and, counted apart, of health and reflection. A further one of
    inference replaces an idle one, which fails as ``overloaded``: first those that have carried no request, then those
    that have waited longest for their next one, for at least a minute. If none is idle, the further one fails."""
    grpc_stream_requests: int = Field(default=256, ge=1, le=65536)
    """Maximum number of unanswered requests of one gRPC stream; the next one is read after an answer."""
    grpc_stream_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=2**40)
    """Size of the unanswered requests and unsent answers of one gRPC stream at which the server stops reading requests
    from it."""
    grpc_max_connections: int = Field(default=4096, ge=1, le=1_048_576)
    """Maximum number of open gRPC connections. A further one replaces an idle one, which gets GOAWAY: first those that
    have carried no call, then those that were idle for longest, then those of which all calls wait for a caller that
    sends a message or reads an answer slowly. If there is none of these, the further one is closed at once, and its
    calls fail with UNAVAILABLE; grpcio replaces none. The process needs a limit of at least as many open files."""
    grpc_message_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """Time limit for receiving the message of a unary call, or a message of a stream that has begun. The limit is
    renewed while the message averages at least ``grpc_min_message_bytes_per_s``; otherwise the call ends with
    CANCELLED. ``native`` transport only."""
    grpc_min_message_bytes_per_s: int = Field(default=4096, ge=1, le=2**31 - 1)
    """Minimum average rate of a request message that takes longer than ``grpc_message_timeout_s``, in bytes per second.
    At the limit of connections, one whose calls are all below this rate, for a sixth of that time or with answers for a
    sixth of ``grpc_send_timeout_s``, may be closed for a new one."""
    grpc_send_timeout_s: float = Field(default=60.0, ge=0.01, le=3600)
    """Time limit for a caller that receives nothing of an answer: the call then ends with CANCELLED. A connection that
    receives nothing at all for this time is closed. ``native`` transport only; grpcio has no such limit."""
    grpc_unsent_bytes: int | None = Field(default=None, ge=1, le=2**44)
    """Limit of unsent answers of all gRPC connections, in bytes. Beyond it, the oldest calls of a connection fail as
    ``overloaded``: of the one whose unsent bytes, multiplied by the time for which they were not read, are the most. A
    connection that holds a quarter of the limit starts no further calls while half of the limit is in use. Unset: an
    eighth of the memory available to the process, at most 1 GiB. ``native`` transport only; grpcio has no such
    limit."""
    grpc_max_connection_calls: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Maximum number of concurrent calls of one gRPC connection, streams included; further calls wait at the client.
    Unset: 1000 more than ``grpc_max_streams`` on the ``native`` transport, unlimited on ``grpcio``."""
    grpc_max_connection_age_s: float | None = Field(default=None, ge=0.001, le=365 * _DAY_S)
    """Age at which a gRPC connection accepts no new calls, so that clients spread over new servers. Unset: no limit."""
    grpc_max_connection_age_grace_s: float | None = Field(default=None, ge=0, le=365 * _DAY_S)
    """Time for the calls of a gRPC connection to finish after it reached ``grpc_max_connection_age_s``. Unset: no
    limit."""
    grpc_max_connection_idle_s: float | None = Field(default=None, ge=0.001, le=365 * _DAY_S)
    """Time after which a gRPC connection without calls is closed. Unset: no limit."""
    grpc_keepalive_time_s: float = Field(default=7200.0, ge=0.001, le=365 * _DAY_S)
    """Time without data after which the server sends a ping on a gRPC connection."""
    grpc_keepalive_timeout_s: float = Field(default=20.0, ge=0.001, le=_DAY_S)
    """Time limit for the answer to a ping; the gRPC connection is closed afterwards."""
    grpc_keepalive_permit_without_calls: bool = False
    """Send pings on gRPC connections without calls, and allow clients to do so."""
    grpc_http2_max_pings_without_data: int = Field(default=2, ge=0, le=2**31 - 1)
    """Maximum number of consecutive pings that the server sends without other data. 0: unlimited."""
    grpc_http2_min_recv_ping_interval_without_data_s: float = Field(default=300.0, ge=0, le=_DAY_S)
    """Minimum interval between a client's pings while the server sends no data. A ping that comes earlier is a
    strike."""
    grpc_http2_max_ping_strikes: int = Field(default=2, ge=0, le=2**31 - 1)
    """Number of strikes after which the client's gRPC connection is closed. 0: unlimited."""


class TraceFileOptions(BaseModel):
    """Trace files, and the trace settings at the start; clients change them through the trace extension."""

    model_config = DECLARATION

    trace_file: OptionalPath = None
    """File for traces of requests; numbered files beside it append ``.0``, ``.1``, and so on to its name. Existing
    files of these names are replaced. Clients choose which requests are traced, but not the file. At its end the server
    writes the last traces for at most 5 s. Unset: requests to trace are rejected as ``unsupported``."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    """Trace level at the start. ``TIMESTAMPS`` records when a traced request reached each step."""
    trace_rate: int = Field(default=1000, ge=1, le=2**31 - 1)
    """Trace rate at the start: one of this many requests is traced."""
    trace_count: int = Field(default=-1, ge=-1, le=2**31 - 1)
    """Trace count at the start: number of requests to trace. -1: unlimited."""
    trace_log_frequency: int = Field(default=0, ge=0, le=2**31 - 1)
    """Log frequency at the start: number of traces per numbered file. 0: all traces in one file."""
    trace_max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096, le=2**44)
    """Maximum size of all traces that the server writes until its restart; later traces are dropped. Clients choose the
    number of traces, so this is the limit of disk use. A numbered file counts as at least 4096 bytes."""


class StoreOptions(BaseModel):
    """Repositories in object stores, in archives and on a model hub, and their cache. Needs the extra ``stores``."""

    model_config = DECLARATION

    store_cache_dir: OptionalPath = None
    """Folder for the files of repositories in stores; created if it is missing. Restarts and servers on the same
    machine share it. It must not be writable by others: models are code. Unset: ``ortserve/stores`` in
    ``XDG_CACHE_HOME`` or ``~/.cache``."""
    store_cache_bytes: int = Field(default=32 * 1024**3, ge=1, le=2**50)
    """Maximum size of the files in ``store_cache_dir``. Files that no server uses are evicted, the least recently used
    first; a model that does not fit beside the files in use is not loaded."""
    store_timeout_s: float = Field(default=30.0, ge=0.1, le=3600)
    """Time after which a fetch fails if nothing arrives, or less than 1 KiB per second; a store's errors are retried
    for as long."""
    store_check_etags: bool = True
    """Compare ETags that look like MD5 digests with the contents. Turn it off for buckets that are encrypted by SSE-KMS
    or SSE-C, whose ETags are not digests. Files listed in ``SHA256SUMS`` are always checked against its digests."""


class OtlpOptions(BaseModel):
    """Traces of requests, exported by the OpenTelemetry protocol. Needs the extra ``otel``."""

    model_config = DECLARATION

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        json_schema_extra={"expects": "URL such as http://collector:4318"},
    )
    """URL of the OpenTelemetry collector: ``http://collector:4318``, or ``http://collector:4317`` for gRPC;
    ``https://`` for TLS. Unset: the value of ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_ENDPOINT``;
    without these, no traces are exported. Needs the extra ``otel``: if it is missing, the option stops the start, while
    the variables only cause a warning."""
    otlp_protocol: Literal["http/protobuf", "grpc"] | None = None
    """Protocol of the export. HTTP uses the path ``/v1/traces`` of the endpoint. Unset: the value of
    ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` or ``OTEL_EXPORTER_OTLP_PROTOCOL``, else ``http/protobuf``."""
    otlp_sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests without ``traceparent`` that are traced. A ``traceparent`` of the caller decides for its
    request. Unset: the values of ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``, else all requests."""
    otlp_service_name: str | None = Field(default=None, min_length=1, json_schema_extra={"expects": "text, not empty"})
    """Service name in traces. Unset: the value of ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES``, else
    ``server_name``."""
    otlp_flush_timeout_s: float = Field(default=5.0, ge=0, le=3600)
    """Time limit for sending the last traces when the server stops."""
