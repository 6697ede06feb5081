"""The limits of connections, and the decisions about old, silent and idle connections. Pure."""

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

STREAM_WINDOW: Final = 1024 * 1024
"""Bytes that a peer may send on one stream before it gets a WINDOW_UPDATE."""

CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""The same for a whole connection: enough for networks with a long delay, and little enough to hold in memory."""


def max_calls(options: GrpcOptions) -> int:
    """Return the maximum number of concurrent calls of a connection."""
    return options.grpc_max_connection_calls or options.grpc_max_streams + _UNARY_CALLS


def tick_s(options: GrpcOptions) -> float:
    """Return the interval of the checks of a connection.

    Each time limit of 0.04 s or more is exceeded by at most a quarter, and by at most 1 s.
    """
    limits_s = (
        options.grpc_message_timeout_s,
        options.grpc_send_timeout_s,
        options.grpc_keepalive_time_s,
        options.grpc_keepalive_timeout_s,
        options.grpc_max_connection_idle_s,
        options.grpc_max_connection_age_s,
        options.grpc_max_connection_age_grace_s,
    )
    return max(0.01, min(1.0, *(limit_s / 4 for limit_s in limits_s if limit_s is not None)))


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

    def __init__(self, options: GrpcOptions, now_ns: int, max_age_s: float | None) -> None:
        """``max_age_s`` is the age at which this connection drains; None for no bound."""
        self._options = options
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
        options = self._options
        if self.is_over(now_ns):
            return LifetimeAction.ABORT
        if not has_settings:
            return LifetimeAction.ABORT if now_ns - self._made_ns > HANDSHAKE_S * 1e9 else LifetimeAction.NOTHING
        if unfinished_since_ns is not None and now_ns - unfinished_since_ns > FRAME_S * 1e9:
            return LifetimeAction.ABORT
        if not self.is_draining:
            if self._max_age_s is not None and now_ns - self._made_ns >= self._max_age_s * 1e9:
                return LifetimeAction.RETIRE
            is_idle = options.grpc_max_connection_idle_s is not None and not has_calls
            if is_idle and now_ns - self.useful_ns >= (options.grpc_max_connection_idle_s or 0.0) * 1e9:
                return LifetimeAction.DRAIN
        return self._check_peer(now_ns, has_calls=has_calls)

    def _check_peer(self, now_ns: int, *, has_calls: bool) -> LifetimeAction:
        options = self._options
        if self._pinged_ns is not None:
            if self.heard_ns >= self._pinged_ns:
                self._pinged_ns = None
            elif now_ns - self._pinged_ns >= options.grpc_keepalive_timeout_s * 1e9:
                return LifetimeAction.ABORT
            return LifetimeAction.NOTHING
        may_ping = has_calls or options.grpc_keepalive_permit_without_calls
        if not may_ping or now_ns - self.heard_ns < options.grpc_keepalive_time_s * 1e9:
            return LifetimeAction.NOTHING
        if self.useful_ns != self._useful_at_ping_ns:
            self._useless_pings = 0
        elif 0 < options.grpc_http2_max_pings_without_data <= self._useless_pings:
            return LifetimeAction.NOTHING
        self._useful_at_ping_ns = self.useful_ns
        self._useless_pings += 1
        self._pinged_ns = now_ns
        return LifetimeAction.PING
