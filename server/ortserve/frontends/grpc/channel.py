"""Options of the gRPC port as grpc takes them: channel arguments, in its names and milliseconds."""

from typing import Final

import grpc

from ortserve.codecs.grpc_answer import MAX_MESSAGE_BYTES
from ortserve.config.option_groups import GrpcOptions

COMPRESSIONS: Final = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}
"""By the value of ``grpc_response_compression``."""


_MAX_METADATA_BYTES: Final = 16 * 1024
"""Of one call, each entry counted as 32 more than it has; the ``native`` transport has the same."""

_MAX_PENDING: Final = 100_000
"""Some kilobytes each; so many come within a second at most."""


def channel_arguments(
    options: GrpcOptions, *, max_body_bytes: int, handshake_timeout_s: float | None = None
) -> tuple[tuple[str, int], ...]:
    """Say what holds for every connection; of what is unset here grpc has no bound."""
    bounds = {
        "grpc.max_concurrent_streams": options.grpc_max_connection_calls,
        "grpc.max_connection_age_ms": _ms_or_none(options.grpc_max_connection_age_s),
        "grpc.max_connection_age_grace_ms": _ms_or_none(options.grpc_max_connection_age_grace_s),
        "grpc.max_connection_idle_ms": _ms_or_none(options.grpc_max_connection_idle_s),
        "grpc.server_handshake_timeout_ms": _ms_or_none(handshake_timeout_s),
    }
    return (
        # Of a message as it is read: grpc refuses a longer one, and one that becomes longer by decompression, with
        # RESOURCE_EXHAUSTED before it is kept.
        ("grpc.max_receive_message_length", max_body_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Beyond the soft limit, 8 KiB by itself, grpc refuses some calls by chance.
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        # Of all connections, calls that came and were not begun yet: from 1,000 on grpc would cancel some, by chance.
        # They are begun as soon as the loop has its turn, and bounded where they wait then.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        # Two servers that share a port by accident would each get some of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", options.grpc_max_connections),
        ("grpc.keepalive_time_ms", _ms(options.grpc_keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(options.grpc_keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", int(options.grpc_keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", options.grpc_http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",  # of pings received, on a server
            _ms(options.grpc_http2_min_recv_ping_interval_without_data_s),
        ),
        ("grpc.http2.max_ping_strikes", options.grpc_http2_max_ping_strikes),
        *((name, value) for name, value in bounds.items() if value is not None),
    )


_MAX_MS: Final = 2**31 - 2  # grpc keeps an int, whose highest value means "never"


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), _MAX_MS)


def _ms_or_none(seconds: float | None) -> int | None:
    return None if seconds is None else _ms(seconds)
