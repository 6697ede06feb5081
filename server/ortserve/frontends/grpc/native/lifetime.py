"""How long a connection may go on, and when to ask whether its peer is there. Pure; ``connection`` does it."""

from enum import Enum, auto
from typing import Final

from ortserve.frontends.grpc.native.limits import Limits

HANDSHAKE_S: Final = 10.0
"""Until a connection has said that it is HTTP/2."""

FRAME_S: Final = 20.0
"""For a frame other than DATA, at most 16 KiB, or a header block, at most 64 KiB: 26 kbit/s will do."""

STALL_S: Final = 60.0
"""For which a closed connection may keep what it still has to send."""


class Due(Enum):
    """What is to be done with a connection now."""

    NOTHING = auto()
    ABORT = auto()
    RETIRE = auto()
    """Drain it, for its age; its calls have the grace to finish."""
    DRAIN = auto()
    """Drain it, for it has no calls."""
    PING = auto()


class Lifetime:
    """Of one connection; told what happens, asked now and then.

    Attributes:
        heard_ns: When anything came.
        useful_ns: When a call last began or ended.
        abort_ns: When to end it in any case; None for never.
    """

    def __init__(self, limits: Limits, now_ns: int, max_age_s: float | None) -> None:
        """``max_age_s`` is this connection's own, so that not all that came together leave together."""
        self._limits = limits
        self._made_ns = self.heard_ns = self.useful_ns = now_ns
        self._max_age_s = max_age_s
        self.abort_ns: int | None = None
        self._is_draining = False
        self._pinged_ns: int | None = None
        self._useless_pings = 0
        self._useful_at_ping_ns = now_ns

    def begin_drain(self, now_ns: int, grace_s: float | None) -> None:
        """No calls will come any more; after ``grace_s`` it is to end in any case, None for as long as it takes."""
        self._is_draining = True
        if grace_s is not None:
            self.abort_by(now_ns, grace_s)

    def abort_by(self, now_ns: int, in_s: float) -> None:
        """End it in ``in_s`` at the latest."""
        by_ns = now_ns + int(in_s * 1e9)
        self.abort_ns = by_ns if self.abort_ns is None else min(self.abort_ns, by_ns)

    def is_over(self, now_ns: int) -> bool:
        """Whether it is to end in any case."""
        return self.abort_ns is not None and now_ns >= self.abort_ns

    def look(self, now_ns: int, *, has_settings: bool, has_calls: bool, unfinished_since_ns: int | None) -> Due:
        """Say what is due; what was said to be due counts as done."""
        limits = self._limits
        if self.is_over(now_ns):
            return Due.ABORT
        if not has_settings:
            return Due.ABORT if now_ns - self._made_ns > HANDSHAKE_S * 1e9 else Due.NOTHING
        if unfinished_since_ns is not None and now_ns - unfinished_since_ns > FRAME_S * 1e9:
            return Due.ABORT
        if not self._is_draining:
            if self._max_age_s is not None and now_ns - self._made_ns >= self._max_age_s * 1e9:
                return Due.RETIRE
            is_idle = limits.max_idle_s is not None and not has_calls
            if is_idle and now_ns - self.useful_ns >= (limits.max_idle_s or 0.0) * 1e9:
                return Due.DRAIN
        return self._look_for_peer(now_ns, has_calls=has_calls)

    def _look_for_peer(self, now_ns: int, *, has_calls: bool) -> Due:
        limits = self._limits
        if self._pinged_ns is not None:
            if self.heard_ns >= self._pinged_ns:
                self._pinged_ns = None
            elif now_ns - self._pinged_ns >= limits.keepalive_timeout_s * 1e9:
                return Due.ABORT
            return Due.NOTHING
        if now_ns - self.heard_ns < limits.keepalive_s * 1e9 or not (has_calls or limits.pings_without_calls):
            return Due.NOTHING
        if self.useful_ns != self._useful_at_ping_ns:
            self._useless_pings = 0
        elif 0 < limits.max_useless_pings <= self._useless_pings:
            return Due.NOTHING
        self._useful_at_ping_ns = self.useful_ns
        self._useless_pings += 1
        self._pinged_ns = now_ns
        return Due.PING
