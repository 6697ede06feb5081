"""What one connection may have, and for how long; and what all may have together."""

from dataclasses import dataclass
from typing import Final

from ortserve.config.option_groups import GrpcOptions

_UNARY_CALLS: Final = 1000
"""Of one connection at one time beside ``grpc_max_streams``, where no option says another number: a client that has all
streams of the server still makes calls, and hears of the limit by the refusal of one stream more. One that has begun
and brought nothing yet takes some kilobytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each connection, where nothing else is said. Times are seconds, None for no bound.

    Attributes:
        max_connections: Of the port.
        max_streams: Calls at one time.
        max_message_bytes: Of a message, also without its compression.
        message_timeout_s: A message that has begun is whole in so long, or comes at the rate below in each such time.
        min_message_bytes_per_s: That rate.
        send_timeout_s: While its caller takes nothing of what is sent.
        max_unsent_bytes: Of answers that were not taken, of all connections.
        keepalive_s: Silence after which the peer is asked whether it is there.
        keepalive_timeout_s: For its answer.
        pings_without_calls: Whether either side may ask while there are no calls.
        max_useless_pings: Of ours without a call between them; 0 for any number.
        min_ping_interval_s: Between pings of the peer.
        max_ping_strikes: Pings that come sooner; 0 for any number.
        max_idle_s: Without calls.
        max_age_s: Until it takes no new calls.
        max_age_grace_s: For the calls of a connection that is too old.
    """

    max_connections: int = 4096
    max_streams: int = 1024 + _UNARY_CALLS
    max_message_bytes: int = 2**31 - 1
    message_timeout_s: float = 60.0
    min_message_bytes_per_s: int = 4096
    send_timeout_s: float = 60.0
    max_unsent_bytes: int = 1024**3
    keepalive_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    pings_without_calls: bool = False
    max_useless_pings: int = 2
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    max_idle_s: float | None = None
    max_age_s: float | None = None
    max_age_grace_s: float | None = None

    @property
    def tick_s(self) -> float:
        """How often to look at the clock, so that each bound is kept within a quarter of it."""
        bounds = (
            self.message_timeout_s,
            self.send_timeout_s,
            self.keepalive_s,
            self.keepalive_timeout_s,
            self.max_idle_s,
            self.max_age_s,
            self.max_age_grace_s,
        )
        return max(0.01, min(1.0, *(bound / 4 for bound in bounds if bound is not None)))


def connection_limits(options: GrpcOptions, *, max_message_bytes: int) -> Limits:
    """The limits that the options ask for."""
    return Limits(
        max_connections=options.grpc_max_connections,
        max_streams=options.grpc_max_connection_calls or options.grpc_max_streams + _UNARY_CALLS,
        max_message_bytes=max_message_bytes,
        message_timeout_s=options.grpc_message_timeout_s,
        min_message_bytes_per_s=options.grpc_min_message_bytes_per_s,
        send_timeout_s=options.grpc_send_timeout_s,
        max_unsent_bytes=options.grpc_unsent_bytes,
        keepalive_s=options.grpc_keepalive_time_s,
        keepalive_timeout_s=options.grpc_keepalive_timeout_s,
        pings_without_calls=options.grpc_keepalive_permit_without_calls,
        max_useless_pings=options.grpc_http2_max_pings_without_data,
        min_ping_interval_s=options.grpc_http2_min_recv_ping_interval_without_data_s,
        max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_idle_s=options.grpc_max_connection_idle_s,
        max_age_s=options.grpc_max_connection_age_s,
        max_age_grace_s=options.grpc_max_connection_age_grace_s,
    )


ENCODINGS: Final = {"none": b"", "deflate": b"deflate", "gzip": b"gzip"}
"""How answers are compressed, by the value of ``grpc_response_compression``."""
