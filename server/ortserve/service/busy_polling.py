"""Busy polling: keeps the event loop awake between the last answer and the next request.

The kernel wakes a sleeping loop on a processor that has become cold, which takes longer than the whole answer of a tiny
model. Polling costs processor time. So the loop polls only if the next request is likely to arrive soon, as from a
client that sends one request after the other. ``PollPolicy`` decides; ``BusyPolling`` acts.

The loop checks for I/O without waiting while a callback is due in its next turn, so a callback that schedules itself
keeps it awake. Each such turn releases the interpreter lock during the check.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.telemetry.readings import PollReading

_ASK_INTERVAL_NS: Final = 5_000_000
"""How long a result of ``may_poll`` holds: the call is not compiled and takes some microseconds."""

_GAPS: Final = 8
_LIKELY: Final = 6
"""Number of the last ``_GAPS`` gaps that must have been short enough."""

_GAIN: Final = 0.125
"""Weight of a gap in the mean of the short ones."""
_MIN_BUDGET_NS: Final = 20_000
"""Minimum time to poll, however short the gaps are."""

_WASTE_SHARE: Final = 0.05
"""The share of all time that polling may take without a request at its end."""

_MAX_CREDIT_NS: Final = 2_000_000
"""Limit of the time for wasted polling that accumulates by ``_WASTE_SHARE``."""


class PollPolicy:
    """Learns the gaps between the last answer and the next request, over all callers. Times are in monotonic ns."""

    def __init__(self, max_ns: int) -> None:
        """``max_ns`` is the longest time to poll for one request; 0 for never."""
        self._max_ns = max_ns
        self._short = 0  # a bit for each of the last gaps, the newest lowest
        self._gap_ns = 0.0
        self._credit_ns = 0.0
        self._credited_ns = 0

    @property
    def is_likely(self) -> bool:
        """Whether the next request will probably come soon enough."""
        return self._short.bit_count() >= _LIKELY

    def observe_gap(self, gap_ns: int) -> None:
        """Note that the server was idle for ``gap_ns`` before a request arrived."""
        is_short = gap_ns <= self._max_ns
        self._short = (self._short << 1 | is_short) & ((1 << _GAPS) - 1)
        if is_short:
            self._gap_ns += _GAIN * (gap_ns - self._gap_ns) if self._gap_ns else gap_ns

    def budget_ns(self, now_ns: int) -> int:
        """Maximum time to poll now that the last request is answered; 0 to sleep."""
        if not self.is_likely:
            return 0
        earned_ns = (now_ns - self._credited_ns) * _WASTE_SHARE
        self._credit_ns = min(_MAX_CREDIT_NS, self._credit_ns + earned_ns)
        self._credited_ns = now_ns
        budget_ns = min(self._max_ns, max(_MIN_BUDGET_NS, int(2 * self._gap_ns)))
        return budget_ns if budget_ns <= self._credit_ns else 0

    def observe_waste(self, polled_ns: int) -> None:
        """Note that the loop polled for ``polled_ns`` and no request arrived."""
        self._credit_ns -= polled_ns


class BusyPolling:
    """Polls between requests. The service reports when each request is queued and when it ends. Loop thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        policy: PollPolicy,
        may_poll: Callable[[int], bool],
    ) -> None:
        """``may_poll`` returns, for a time in monotonic ns, whether nothing else needs the processor."""
        self._loop = loop
        self._clock = clock
        self._policy = policy
        self._may_poll = may_poll
        self._turn_callback: Final = self._turn
        self._in_flight = 0
        self._idle_since_ns = 0  # 0 while requests are in flight
        self._began_ns = 0  # when the present polling began; 0 while the loop does not poll
        self._until_ns = 0
        self._is_due = False
        self._is_allowed = False
        self._asked_ns = -_ASK_INTERVAL_NS
        self._polled_ns = 0
        self._hits = 0
        self._misses = 0

    def reading(self) -> PollReading:
        """The counts so far. Any thread."""
        return PollReading(self._polled_ns, self._hits, self._misses)

    def on_request(self, now_ns: int) -> None:
        """Note that a request is in flight."""
        if self._in_flight == 0 and self._idle_since_ns:
            self._policy.observe_gap(now_ns - self._idle_since_ns)
            self._idle_since_ns = 0
            if self._began_ns:
                self._hits += 1
                self._polled_ns += max(0, now_ns - self._began_ns)
                self._began_ns = 0
        self._in_flight += 1

    def on_end(self, now_ns: int) -> None:
        """Note that a request was answered or cancelled."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle_since_ns = now_ns
            if self._policy.is_likely and not self._is_due:
                # In the next turn: this one may still write answers and read requests.
                self._is_due = True
                self._loop.call_soon(self._turn_callback)

    def _turn(self) -> None:
        self._is_due = False
        if self._in_flight:
            return
        now_ns = self._clock()
        if self._began_ns == 0:
            budget_ns = self._policy.budget_ns(now_ns)
            if budget_ns and now_ns - self._asked_ns >= _ASK_INTERVAL_NS:
                self._asked_ns = now_ns
                self._is_allowed = self._may_poll(now_ns)
            if budget_ns == 0 or not self._is_allowed:
                return
            self._began_ns = now_ns
            self._until_ns = now_ns + budget_ns
        elif now_ns >= self._until_ns:
            # A later turn means that the loop was busy, or the process suspended, and did not poll meanwhile.
            polled_ns = self._until_ns - self._began_ns
            self._began_ns = 0
            self._misses += 1
            self._polled_ns += polled_ns
            self._policy.observe_waste(polled_ns)
            return
        self._is_due = True
        self._loop.call_soon(self._turn_callback)
