"""Whether a peer asks more often than it may whether we are there, as grpc counts it. Pure.

https://github.com/grpc/grpc/blob/master/doc/keepalive.md, and grpc's ``ping_abuse_policy.cc``.
"""

from typing import Final

from ortserve.frontends.grpc.native.limits import Limits

_IDLE_INTERVAL_S: Final = 7200.0
"""Between pings on a connection without calls, where clients shall not ping one."""


class PingStrikes:
    """Of one connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heard_ns: int | None = None
        self._strikes = 0

    def on_ping(self, now_ns: int, *, has_calls: bool) -> bool:
        """Count a ping; whether that was one too many."""
        limits = self._limits
        is_idle = not has_calls and not limits.pings_without_calls
        interval_s = _IDLE_INTERVAL_S if is_idle else limits.min_ping_interval_s
        heard_ns, self._heard_ns = self._heard_ns, now_ns
        if heard_ns is None or now_ns - heard_ns >= interval_s * 1e9:
            return False
        self._strikes += 1
        return 0 < limits.max_ping_strikes < self._strikes

    def forget(self) -> None:
        """Something of a call was sent since: pings go with that."""
        self._heard_ns = None
        self._strikes = 0
