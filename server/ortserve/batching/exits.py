"""Acting on ``departures``: those who do not ride are taken out of the queue, told why, and counted."""

import asyncio
import math
from collections.abc import Iterable, Sequence

from ortserve.batching.departures import GIVEN_UP, Departure, leave_search, sweep, turn_away
from ortserve.batching.expiry import ExpiryAlarm
from ortserve.batching.isolation import Group
from ortserve.batching.learned import Decisions
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RiderQueue, ShapeClass
from ortserve.batching.riders import Rider, settle
from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError


class Exits:
    """Those of one batcher. Loop thread only."""

    def __init__(self, queue: RiderQueue, decisions: Decisions, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        """``queue`` and ``decisions`` are the batcher's own."""
        self._queue = queue
        self._decisions = decisions
        self._clock = clock
        self._expiry = ExpiryAlarm(loop, self._drop_expired)

    def expect(self, rider: Rider, now_ns: int) -> None:
        """A rider waits that may come to be too late: it is told then, wherever it stands in the queue."""
        self._expiry.expect(rider, now_ns)

    def leave(self, rider: Rider) -> None:
        """A rider's caller no longer waits: its place in the queue, if it still has one, is free at once."""
        rider.promise.cancel()
        if rider.promise.cancelled() and self._queue.leave(rider):
            self._decisions.left += 1

    def turn_away(self, shape_class: ShapeClass, policy: BatchPolicy, now_ns: int) -> None:
        """Have those leave who might ride now and are not to."""
        found = turn_away(shape_class.riders, policy, shape_class.batch_latency, now_ns)
        self._see_off(shape_class, found)

    def give_up(self, shape_class: ShapeClass, count: int) -> None:
        """Have the first riders leave, for whose sake others would be late."""
        self._tell(Departure(rider, GIVEN_UP) for rider in self._queue.take(shape_class, count))

    def leave_search(self, group: Group, now_ns: int) -> Group:
        """A group that is to run again, without those whose callers left or whose deadline has come too near since."""
        departures = leave_search(group.riders, now_ns)
        if not departures:
            return group
        for departure in departures:
            departure.rider.timing.taken_ns = now_ns  # work was done for it, which tells it from a refusal
        self._tell(departures)
        gone = {departure.rider for departure in departures}
        riders = [rider for rider in group.riders if rider not in gone]
        return Group(group.shape_class, riders, sum([rider.rows for rider in riders]), group.search)

    def refuse_all(self, error: ServeError) -> None:
        """Nobody who waits will ever ride."""
        for shape_class in self._queue.waiting():
            riders = list(shape_class.riders)
            self._queue.remove(shape_class, riders)
            for rider in riders:
                settle(rider.promise, error=error)

    def close(self) -> None:
        """Look through the queue no more."""
        self._expiry.close()

    def _drop_expired(self) -> None:
        now_ns = self._clock()
        looked_at = 0
        next_ns = math.inf
        for shape_class in self._queue.waiting():
            looked_at += len(shape_class.riders)
            found = sweep(shape_class.riders, now_ns)
            self._see_off(shape_class, found.departures)
            next_ns = min(next_ns, found.next_ns)
        self._expiry.on_sweep(looked_at, next_ns, now_ns)

    def _see_off(self, shape_class: ShapeClass, departures: Sequence[Departure]) -> None:
        if departures:
            self._queue.remove(shape_class, [departure.rider for departure in departures])
            self._decisions.left += sum(departure.why is None for departure in departures)
            self._tell(departures)

    def _tell(self, departures: Iterable[Departure]) -> None:
        for departure in departures:
            if departure.why is not None:
                self._decisions.dropped_late += 1
                error = ServeError(ErrorKind.DEADLINE, f"Request timeout expired: {departure.why}")
                settle(departure.rider.promise, error=error)
