"""What can be set for the gRPC port alone: its connections, its streams, and how answers are compressed.

The connection options are gRPC's own channel arguments (github.com/grpc/grpc, doc/keepalive.md), with its defaults.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
