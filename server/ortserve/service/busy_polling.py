"""Keeps the event loop from sleeping between the last answer and the next request, as ``poll_policy`` decides.

The loop asks the system for news without waiting as long as a callback is due in its next turn, so a callback that
schedules itself keeps it awake. Each such turn lets go of the interpreter lock while the system is asked.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.service.poll_policy import PollPolicy
from ortserve.telemetry.readings import PollReading

_ASK_EVERY_NS: Final = 5_000_000
"""How long an answer of ``may_poll`` holds: it is not compiled, and costs some microseconds."""


class BusyPolling:
    """Learns of each request that was queued and of its end. Loop thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        policy: PollPolicy,
        may_poll: Callable[[int], bool],
    ) -> None:
        """``may_poll`` says at a moment (monotonic ns) whether nothing else needs the processor."""
        self._loop = loop
        self._clock = clock
        self._policy = policy
        self._may_poll = may_poll
        self._turn_callback: Final = self._turn
        self._in_flight = 0
        self._idle_since_ns = 0  # 0 while requests are in flight
        self._began_ns = 0  # of the polling that lasts; 0 without any
        self._until_ns = 0
        self._is_due = False
        self._is_allowed = False
        self._asked_ns = -_ASK_EVERY_NS
        self._polled_ns = 0
        self._hits = 0
        self._misses = 0

    def reading(self) -> PollReading:
        """The counts so far. From any thread."""
        return PollReading(self._polled_ns, self._hits, self._misses)

    def on_request(self, now_ns: int) -> None:
        """A request is in flight from now on."""
        if self._in_flight == 0 and self._idle_since_ns:
            self._policy.observe_gap(now_ns - self._idle_since_ns)
            self._idle_since_ns = 0
            if self._began_ns:
                self._hits += 1
                self._polled_ns += max(0, now_ns - self._began_ns)
                self._began_ns = 0
        self._in_flight += 1

    def on_end(self, now_ns: int) -> None:
        """A request was answered, or left."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle_since_ns = now_ns
            if self._policy.is_likely and not self._is_due:
                # Not at once: answers are still to be written in this turn of the loop, and requests to be read.
                self._is_due = True
                self._loop.call_soon(self._turn_callback)

    def _turn(self) -> None:
        self._is_due = False
        if self._in_flight:
            return
        now_ns = self._clock()
        if self._began_ns == 0:
            budget_ns = self._policy.budget_ns(now_ns)
            if budget_ns and now_ns - self._asked_ns >= _ASK_EVERY_NS:
                self._asked_ns = now_ns
                self._is_allowed = self._may_poll(now_ns)
            if budget_ns == 0 or not self._is_allowed:
                return
            self._began_ns = now_ns
            self._until_ns = now_ns + budget_ns
        elif now_ns >= self._until_ns:
            polled_ns = now_ns - self._began_ns
            self._began_ns = 0
            self._misses += 1
            self._polled_ns += polled_ns
            self._policy.observe_waste(polled_ns)
            return
        self._is_due = True
        self._loop.call_soon(self._turn_callback)
