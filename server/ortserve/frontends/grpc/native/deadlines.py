"""When callers wait no longer: one alarm for all streams of a connection, at the first of their deadlines.

Most calls end long before theirs, so that a call with a deadline seldom costs a timer.
"""

import asyncio
from collections.abc import Callable, Mapping

from ortserve.clock import Clock
from ortserve.frontends.grpc.native.stream import Stream


class Deadlines:
    """Loop thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        streams: Mapping[int, Stream],
        on_late: Callable[[Stream], None],
    ) -> None:
        """``streams`` are those that are open; ``on_late`` ends the one whose deadline has passed."""
        self._loop = loop
        self._clock = clock
        self._streams = streams
        self._on_late = on_late
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ns = 0

    def set(self, stream: Stream, by_ns: int) -> None:
        """Have a stream ended when its time has come."""
        stream.deadline_ns = by_ns
        if self._alarm is None or by_ns < self._alarm_ns:
            if self._alarm is not None:
                self._alarm.cancel()
            self._wake_at(by_ns, self._clock())

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake_at(self, by_ns: int, now_ns: int) -> None:
        self._alarm_ns = by_ns
        self._alarm = self._loop.call_later(max(0, by_ns - now_ns) / 1e9, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        now_ns = self._clock()
        first_ns: int | None = None
        for stream in list(self._streams.values()):
            by_ns = stream.deadline_ns
            if by_ns is None:
                continue
            if by_ns <= now_ns:
                self._on_late(stream)
            elif first_ns is None or by_ns < first_ns:
                first_ns = by_ns
        if first_ns is not None and self._alarm is None:
            self._wake_at(first_ns, now_ns)
