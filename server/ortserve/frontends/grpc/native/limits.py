"""The limits of connections, and the decisions about old, silent and idle connections. Pure."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ortserve.config.option_groups import GrpcOptions

_UNARY_CALLS: Final = 1000
"""Default number of concurrent calls per connection beyond ``grpc_max_streams``. So a client with all its streams open
can still make unary calls, and the rejection of one more stream names the limit. A call that has started and sent no
message takes some kilobytes."""

HANDSHAKE_S: Final = 10.0
"""Time in which the peer must send the preface and its SETTINGS."""

FRAME_S: Final = 20.0
"""Time in which a frame other than DATA (at most 16 KiB) or a header block (at most 64 KiB) must be complete: 26 kbit/s
are enough."""

STALL_S: Final = 60.0
"""Time in which a closed connection must have sent its remaining bytes."""

RESPONSE_ENCODINGS: Final = {"none": b"", "deflate": b"deflate", "gzip": b"gzip"}
"""``grpc-encoding`` of answers by the value of ``grpc_response_compression``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each connection unless stated otherwise. Times are seconds; None means no bound.

    Attributes:
        max_connections: Open connections of the port.
        max_streams: Concurrent calls.
        max_message_bytes: Size of a message, before and after decompression.
        message_timeout_s: Time in which a message must be complete, or arrive at ``min_message_bytes_per_s``.
        min_message_bytes_per_s: Minimum rate of a message that takes longer.
        send_timeout_s: Time in which a caller must read some bytes of an answer.
        max_unsent_bytes: Size of the unsent answers of all connections together.
        keepalive_s: Silence of the peer after which the server sends a PING.
        keepalive_timeout_s: Time in which the peer must react to this PING.
        pings_without_calls: Whether both sides may send PINGs while no call is open.
        max_useless_pings: Number of PINGs that the server sends without a call between them; 0 for any number.
        min_ping_interval_s: Minimum time between PINGs of the peer.
        max_ping_strikes: Number of PINGs that the peer may send too soon; 0 for any number.
        max_idle_s: Time without calls after which the connection drains.
        max_age_s: Age at which the connection drains.
        max_age_grace_s: Time that the calls of a connection have after it began to drain for its age.
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
        """Interval of the checks. Each bound of 0.04 s or more is exceeded by at most a quarter, and by at most 1 s."""
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
    """Return the limits that the options set."""
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


class LifetimeAction(Enum):
    """The next action on a connection."""

    NOTHING = auto()
    ABORT = auto()
    RETIRE = auto()
    """Drain it for its age, with the grace for its calls."""
    DRAIN = auto()
    """Drain it because it has no calls."""
    PING = auto()


class Lifetime:
    """Decides when to ping, drain or abort one connection. The connection calls ``next_action`` at each tick.

    Attributes:
        heard_ns: Time at which the last bytes arrived.
        useful_ns: Time at which a call last began or ended.
        abort_ns: Time at which the connection ends at the latest; None for no bound.
        is_draining: Whether the connection accepts no new calls.
    """

    def __init__(self, limits: Limits, now_ns: int, max_age_s: float | None) -> None:
        """``max_age_s`` is the age at which this connection drains; None for no bound."""
        self._limits = limits
        self._made_ns = self.heard_ns = self.useful_ns = now_ns
        self._max_age_s = max_age_s
        self.abort_ns: int | None = None
        self.is_draining = False
        self._pinged_ns: int | None = None
        self._useless_pings = 0
        self._useful_at_ping_ns = now_ns

    def begin_drain(self, now_ns: int, grace_s: float | None) -> None:
        """Accept no new calls from now on. The connection ends after ``grace_s`` at the latest; None for no bound."""
        self.is_draining = True
        if grace_s is not None:
            self.abort_by(now_ns, grace_s)

    def abort_by(self, now_ns: int, in_s: float) -> None:
        """End the connection in ``in_s`` at the latest."""
        by_ns = now_ns + int(in_s * 1e9)
        self.abort_ns = by_ns if self.abort_ns is None else min(self.abort_ns, by_ns)

    def is_over(self, now_ns: int) -> bool:
        """Whether ``abort_ns`` has passed."""
        return self.abort_ns is not None and now_ns >= self.abort_ns

    def next_action(
        self, now_ns: int, *, has_settings: bool, has_calls: bool, unfinished_since_ns: int | None
    ) -> LifetimeAction:
        """Return the next action, which the connection performs.

        Args:
            now_ns: Monotonic time.
            has_settings: Whether the peer has sent the preface and its SETTINGS.
            has_calls: Whether calls are open.
            unfinished_since_ns: Start of the incomplete frame or header block; None without one.
        """
        limits = self._limits
        if self.is_over(now_ns):
            return LifetimeAction.ABORT
        if not has_settings:
            return LifetimeAction.ABORT if now_ns - self._made_ns > HANDSHAKE_S * 1e9 else LifetimeAction.NOTHING
        if unfinished_since_ns is not None and now_ns - unfinished_since_ns > FRAME_S * 1e9:
            return LifetimeAction.ABORT
        if not self.is_draining:
            if self._max_age_s is not None and now_ns - self._made_ns >= self._max_age_s * 1e9:
                return LifetimeAction.RETIRE
            is_idle = limits.max_idle_s is not None and not has_calls
            if is_idle and now_ns - self.useful_ns >= (limits.max_idle_s or 0.0) * 1e9:
                return LifetimeAction.DRAIN
        return self._check_peer(now_ns, has_calls=has_calls)

    def _check_peer(self, now_ns: int, *, has_calls: bool) -> LifetimeAction:
        limits = self._limits
        if self._pinged_ns is not None:
            if self.heard_ns >= self._pinged_ns:
                self._pinged_ns = None
            elif now_ns - self._pinged_ns >= limits.keepalive_timeout_s * 1e9:
                return LifetimeAction.ABORT
            return LifetimeAction.NOTHING
        if now_ns - self.heard_ns < limits.keepalive_s * 1e9 or not (has_calls or limits.pings_without_calls):
            return LifetimeAction.NOTHING
        if self.useful_ns != self._useful_at_ping_ns:
            self._useless_pings = 0
        elif 0 < limits.max_useless_pings <= self._useless_pings:
            return LifetimeAction.NOTHING
        self._useful_at_ping_ns = self.useful_ns
        self._useless_pings += 1
        self._pinged_ns = now_ns
        return LifetimeAction.PING
