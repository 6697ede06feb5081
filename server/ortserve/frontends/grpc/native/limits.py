"""What one connection may have, and for how long."""

from dataclasses import dataclass
from typing import Final

from ortserve.config.grpc import GrpcOptions

_MAX_STREAMS: Final = 1000
"""Calls of one connection at one time, where no option says another number."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each connection. Times are seconds, None for no bound."""

    max_streams: int
    max_message_bytes: int
    keepalive_s: float
    keepalive_timeout_s: float
    min_ping_interval_s: float
    max_ping_strikes: int
    max_idle_s: float | None = None
    max_age_s: float | None = None
    max_age_grace_s: float | None = None


def connection_limits(options: GrpcOptions, *, max_message_bytes: int) -> Limits:
    """The limits that the options ask for."""
    return Limits(
        max_streams=options.grpc_max_connection_calls or _MAX_STREAMS,
        max_message_bytes=max_message_bytes,
        keepalive_s=options.grpc_keepalive_time_s,
        keepalive_timeout_s=options.grpc_keepalive_timeout_s,
        min_ping_interval_s=options.grpc_http2_min_recv_ping_interval_without_data_s,
        max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_idle_s=options.grpc_max_connection_idle_s,
        max_age_s=options.grpc_max_connection_age_s,
        max_age_grace_s=options.grpc_max_connection_age_grace_s,
    )
