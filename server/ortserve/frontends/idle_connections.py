"""The idle connections of a port: at its limit of connections, the longest idle one is closed for a new one.

Idle connections cost their peers nothing, so one caller could otherwise keep all others away until they time out.
"""

import fcntl
import termios
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, Protocol

from ortserve.clock import Clock

_CANDIDATES: Final = 16
"""Number of connections of which the longest idle one is evicted. A flood of new connections must not cost a search
among all open ones for each."""

_MOVES: Final = 256
"""Maximum number of connections that one search finds to have begun a request. Each is found once."""

_ARRIVAL_NS: Final = 1_000_000_000
"""Time for which the first request of a connection may be on its way."""

_ARRIVING_SHARE: Final = 4
"""Connections without a request so far have this time unless they are more than one of this number of connections."""


class Evictable(Protocol):
    """An open connection, or a stream of gRPC, as this module sees it."""

    @property
    def has_begun(self) -> bool:
        """Whether a request has begun: its head was complete."""
        ...

    def idle_ns(self, now_ns: int) -> int | None:
        """Return how long no request was in progress; None if the connection must not be closed.

        The time is at least 1, or 0 if a part of a request has arrived, or ``now_ns`` if the connection already closes.
        """
        ...

    def has_unread(self) -> bool:
        """Whether received bytes have not been read, which may be a request."""
        ...

    def evict(self) -> None:
        """Close the connection."""
        ...


class IdleConnections:
    """Finds the connection that a new one replaces. Loop thread only.

    Connections without a request so far are evicted before others, in the order of their arrival: a client or proxy has
    a use for those that have carried requests. New ones have a second for their first request, unless they are many.
    Only searches move a connection between both groups, so requests cost nothing.
    """

    def __init__(self, clock: Clock, on_evicted: Callable[[], object]) -> None:
        """``clock`` is that of ``Evictable.idle_ns``; ``on_evicted`` counts evictions."""
        self._clock = clock
        self._on_evicted = on_evicted
        self._unused: OrderedDict[Evictable, int] = OrderedDict()
        """Those without a request so far, with the time of their arrival. The first is the oldest."""
        self._used: OrderedDict[Evictable, None] = OrderedDict()

    def add(self, connection: Evictable) -> None:
        """Add a new connection."""
        self._unused[connection] = self._clock()

    def discard(self, connection: Evictable) -> None:
        """Remove a connection, which may have been evicted."""
        self._unused.pop(connection, None)
        self._used.pop(connection, None)

    def evict_one(self) -> bool:
        """Evict an idle connection. Returns False if none of the candidates is idle."""
        now_ns = self._clock()
        unused = self._next_unused()
        found = _longest_idle(unused, now_ns)
        if found is None:
            for each in unused:  # the next search has others
                self._unused.move_to_end(each)
        if found is None or not self._is_due(found, now_ns):
            used = list(islice(self._used, _CANDIDATES))
            for each in used:
                self._used.move_to_end(each)
            found = _longest_idle(used, now_ns) or found
        if found is None:
            return False
        self.discard(found)
        found.evict()
        self._on_evicted()
        return True

    def _is_due(self, unused: Evictable, now_ns: int) -> bool:
        is_late = now_ns - self._unused[unused] >= _ARRIVAL_NS
        return is_late or len(self._unused) * _ARRIVING_SHARE > len(self._unused) + len(self._used)

    def _next_unused(self) -> list[Evictable]:
        """Return the oldest connections without a request so far."""
        begun: list[Evictable] = []
        unused: list[Evictable] = []
        for connection in self._unused:
            (begun if connection.has_begun else unused).append(connection)
            if len(unused) == _CANDIDATES or len(begun) == _MOVES:
                break
        for connection in begun:
            del self._unused[connection]
            self._used[connection] = None
        return unused


def has_unread_bytes(connected: Any) -> bool:
    """Whether the system holds received bytes of a socket; None, which stands for no socket, has none."""
    return connected is not None and any(fcntl.ioctl(connected.fileno(), termios.FIONREAD, bytes(4)))


def _longest_idle(candidates: Iterable[Evictable], now_ns: int) -> Evictable | None:
    found: Evictable | None = None
    found_ns = -1
    for candidate in candidates:
        idle_ns = candidate.idle_ns(now_ns)
        if idle_ns is not None and idle_ns > found_ns and not candidate.has_unread():
            found, found_ns = candidate, idle_ns
    return found
