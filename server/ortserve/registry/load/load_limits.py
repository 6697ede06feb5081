"""Limits concurrent loads: a load holds a slot, and processors or devices while it computes."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAX_LOADS: Final = 4
"""Maximum number of concurrent loads on any number of processors: opening a model takes its weights' memory twice."""


class LoadRank(IntEnum):
    """The order in which waiting loads begin, lowest first."""

    AWAITED = 0
    """Requests wait for the load."""
    REQUIRED = 1
    """The server is ready only after the load."""
    OTHER = 2


_FAIR_TURN: Final = 8
"""Of this many slots that are passed on, the last one goes to the load that has waited longest, whatever its rank. Only
a load that continues comes before it."""


@dataclass(frozen=True, slots=True)
class _WaitingLoad:
    """A load that waits for a slot.

    Attributes:
        rank: Rank of the load.
        continues: Whether its caller has just given back a slot.
        place: Number of the call, ascending.
        turn: Done when the load has a slot.
    """

    rank: LoadRank
    continues: bool
    place: int
    turn: asyncio.Future[None]


class LoadSlots:
    """Limits the number of concurrent loads. Waiting loads begin by rank. Loop thread only."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: list[_WaitingLoad] = []
        self._places = 0
        self._given = 0

    @asynccontextmanager
    async def take(self, rank: LoadRank, *, continues: bool = False) -> AsyncIterator[None]:
        """Hold a slot. Loads of equal rank are served in the order of their calls, and no load waits forever.

        Args:
            rank: Rank of the load.
            continues: Whether the caller has just given back a slot, to take precedence over equal ranks. Models of
                which a part is in memory cannot be evicted, and would keep each other from being loaded whole.
        """
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._places += 1
            self._waiting.append(_WaitingLoad(rank, continues, self._places, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it got the slot in the same turn of the loop
                    self._give()
                raise
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._pass_on)  # after a load that continues has taken its place
        else:
            self._free += 1

    def _pass_on(self) -> None:
        self._waiting = [load for load in self._waiting if not load.turn.done()]
        if not self._waiting:
            self._free += 1
            return
        self._given += 1
        is_fair = self._given % _FAIR_TURN == 0
        first = min(self._waiting, key=lambda load: (0 if is_fair else load.rank, not load.continues, load.place))
        first.turn.set_result(None)


class LoadLimiter:
    """Lends processors to loads in the order of their requests, and devices to one load at a time. Any thread.

    A load holds one processor. While it measures a session of several threads, it holds one processor per thread, so
    that no other load disturbs the measurement. Sessions are opened concurrently. A load on a device holds no
    processor, because it mostly waits.
    """

    def __init__(self, processors: int) -> None:
        """``processors`` is the number that all loads together may hold, at least 1."""
        self._processors: Final = processors
        self._free = processors
        self._waiting: deque[object] = deque()
        self._on_device: LoadPermit | None = None
        self._analyzing: LoadPermit | None = None
        self._changed = threading.Condition()
        """Its lock guards all of these, and what the permits hold."""

    @contextmanager
    def permit(self, on_wait: Callable[[], None] = lambda: None) -> Iterator["LoadPermit"]:
        """Lend a processor to one load. ``on_wait`` is called whenever the load begins to wait."""
        permit = LoadPermit(self, on_wait)
        permit._take(1)
        try:
            yield permit
        finally:
            permit.release()


class LoadPermit:
    """The processors or devices that one load holds. Only the thread of the load uses it, except ``release``.

    A load returns what it holds before it waits for more, so that no two loads wait for each other.
    """

    def __init__(self, limiter: LoadLimiter, on_wait: Callable[[], None]) -> None:
        self._limiter = limiter
        self._on_wait = on_wait
        self._held = 0
        """The number of processors that the load holds."""
        self._is_released = False

    @property
    def is_on_device(self) -> bool:
        """Whether the load holds the devices for its remaining steps, instead of a processor."""
        return self._limiter._on_device is self

    def release(self) -> None:
        """Return everything, and neither hold nor wait for anything any more, whatever the load does. Any thread."""
        limiter = self._limiter
        with limiter._changed:
            self._is_released = True
            limiter._free += self._held
            self._held = 0
            if limiter._on_device is self:
                limiter._on_device = None
            if limiter._analyzing is self:
                limiter._analyzing = None
            limiter._changed.notify_all()

    @contextmanager
    def analyzing(self) -> Iterator[None]:
        """Run work that holds the interpreter lock, one load at a time. Concurrent work would take no less time."""
        limiter = self._limiter
        with limiter._changed:
            limiter._changed.wait_for(lambda: self._is_released or limiter._analyzing is None)
            if not self._is_released:
                limiter._analyzing = self
        try:
            yield
        finally:
            with limiter._changed:
                if limiter._analyzing is self:
                    limiter._analyzing = None
                    limiter._changed.notify_all()

    def move_to_device(self) -> None:
        """Exchange the processor for the devices."""
        limiter = self._limiter
        assert not self.is_on_device
        self._give()
        with limiter._changed:
            if limiter._on_device is not None and not self._is_released:
                self._on_wait()
                limiter._changed.wait_for(lambda: self._is_released or limiter._on_device is None)
            if not self._is_released:
                limiter._on_device = self

    @contextmanager
    def measuring(self, threads: int) -> Iterator[None]:
        """Hold one processor for each of ``threads`` threads, at most all processors."""
        wanted = min(threads, self._limiter._processors)
        if self.is_on_device or wanted <= 1:
            yield
            return
        self._give()
        self._take(wanted)
        try:
            yield
        finally:
            self._give()
            self._take(1)

    def _take(self, processors: int) -> None:
        limiter = self._limiter
        with limiter._changed:
            if not self._is_released and (limiter._waiting or limiter._free < processors):
                self._on_wait()
                place = object()
                limiter._waiting.append(place)
                # First come, first served: otherwise a load that needs all processors would wait for all others.
                limiter._changed.wait_for(
                    lambda: self._is_released or (limiter._waiting[0] is place and limiter._free >= processors)
                )
                limiter._waiting.remove(place)
                limiter._changed.notify_all()
            if not self._is_released:
                limiter._free -= processors
                self._held = processors

    def _give(self) -> None:
        with self._limiter._changed:
            self._limiter._free += self._held
            self._held = 0
            self._limiter._changed.notify_all()
