"""Being woken when somebody in a queue has waited too long, by one timer for the whole queue.

A deadline that passes deep in the queue is to be answered then, not when a batch reaches it; and who rides in time, as
nearly all do, is to pay nothing for it. So the timer is set for the first who may be late and not touched when that one
rides: it rings for nobody now and then, and the queue is looked through for the next.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from ortserve.batching.alarm import LoopAlarm
from ortserve.batching.riders import Rider

_REST_NS: Final = 1_000_000
"""Between two looks through the queue: the loop's timers come in whole milliseconds anyhow."""
_REST_PER_RIDER_NS: Final = 1_000
"""To look at a rider takes less than 0.1 µs (measured): looking through takes a tenth of the loop's time at most."""


class ExpiryAlarm:
    """Rings once after the first moment that was expected has passed. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], object]) -> None:
        """``ring`` is to look through the queue and to tell by ``on_sweep`` what it found."""
        self._alarm = LoopAlarm(loop, ring)
        self._rings_ns = math.inf
        self._rests_until_ns = 0.0

    def expect(self, rider: Rider, now_ns: int) -> None:
        """A rider waits that may come to be too late."""
        if rider.expires_ns is not None:
            self._ring_after(rider.expires_ns, now_ns)

    def on_sweep(self, looked_at: int, next_ns: float, now_ns: int) -> None:
        """The queue was looked through: so many riders, of whom the next is too late after ``next_ns``, if finite."""
        self._rings_ns = math.inf
        self._rests_until_ns = float(now_ns + max(_REST_NS, looked_at * _REST_PER_RIDER_NS))
        self._ring_after(next_ns, now_ns)

    def close(self) -> None:
        """Never ring again."""
        self._alarm.close()

    def _ring_after(self, by_ns: float, now_ns: int) -> None:
        rings_ns = max(by_ns + 1, self._rests_until_ns)
        if rings_ns < self._rings_ns:
            self._rings_ns = rings_ns
            self._alarm.set(int(rings_ns), now_ns)
