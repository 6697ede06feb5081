"""Connections of a generator, with at most one request on each: idle ones, and requests that wait for one."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from ortserve.tools.bench.samples import Ticket


class Lane(Protocol):
    """A connection or stream."""

    def send(self, ticket: Ticket) -> None:
        """Send a request. The lane is not idle until it has called ``Pool.give_back``."""
        ...

    def close(self) -> None:
        """Close without a call back."""
        ...


class Pool:
    """Lends lanes to tickets, and opens more if all are in use. Loop thread only."""

    def __init__(
        self,
        open_lane: Callable[[], Coroutine[Any, Any, Lane]],
        most: int,
        on_failed: Callable[[Ticket, str, str], object],
    ) -> None:
        """Begin without lanes.

        Args:
            open_lane: Opens one more; raises OSError.
            most: Lanes at a time.
            on_failed: Called for tickets for which no lane can be opened, with the kind and an example.
        """
        self._open_lane = open_lane
        self._most: Final = most
        self._on_failed = on_failed
        self._idle: list[Lane] = []
        self.lanes: Final[set[Lane]] = set()
        self._waiting: deque[Ticket] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        """Open lanes before a measurement. Raises OSError."""
        for _ in range(min(count, self._most) - len(self.lanes)):
            lane = await self._open_lane()
            self.lanes.add(lane)
            self._idle.append(lane)

    def send(self, ticket: Ticket) -> None:
        """Send a request now, or as soon as there is a lane for it."""
        if self._idle:
            self._idle.pop().send(ticket)
            return
        self._waiting.append(ticket)
        if len(self.lanes) + len(self._opening) < self._most and len(self._opening) < len(self._waiting):
            task = asyncio.ensure_future(self._add_lane())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def give_back(self, lane: Lane) -> None:
        """The lane is idle again."""
        if lane not in self.lanes:
            return
        if self._waiting:
            lane.send(self._waiting.popleft())
        else:
            self._idle.append(lane)

    def lose(self, lane: Lane) -> None:
        """The lane is closed; requests that wait get another one."""
        self.lanes.discard(lane)
        if lane in self._idle:
            self._idle.remove(lane)
        if self._waiting:
            self.send(self._waiting.popleft())

    def expire(self, sent_before_ns: int) -> None:
        """Fail requests that have waited for a lane since then."""
        while self._waiting and self._waiting[0].sent_ns < sent_before_ns:
            self._on_failed(self._waiting.popleft(), "timeout", "no connection was free in time")

    def close(self) -> None:
        """Close all lanes."""
        for task in self._opening:
            task.cancel()
        for lane in list(self.lanes):
            lane.close()
        self.lanes.clear()
        self._idle.clear()

    async def _add_lane(self) -> None:
        try:
            lane = await self._open_lane()
        except OSError as error:
            if self._waiting:
                kind = "connection_refused" if isinstance(error, ConnectionRefusedError) else "connection_failed"
                self._on_failed(self._waiting.popleft(), kind, error.strerror or str(error))
            return
        self.lanes.add(lane)
        self.give_back(lane)
