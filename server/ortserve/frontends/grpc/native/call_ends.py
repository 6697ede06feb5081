"""Ends calls that end together in several turns of the event loop.

A client that exits may leave thousands of calls on any number of connections, and thousands of calls may have the same
deadline or stall together. Each takes about 10 µs to end, and more if a task runs it.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

_TURN_CALLS: Final = 100
"""Maximum number of calls that end in a turn of the event loop, in about 1 ms."""


class CallEnds:
    """Calls of all connections of a port that are to end. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Iterator[None]] = deque()

    def add(self, ends: Iterator[None]) -> None:
        """End the calls that ``ends`` ends, one with each step, from the next turn on and after those added before."""
        self._waiting.append(ends)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._end_some)

    def _end_some(self) -> None:
        left = _TURN_CALLS
        try:
            while left and self._waiting:
                for _ in self._waiting[0]:
                    left -= 1
                    if not left:
                        break
                else:
                    self._waiting.popleft()
        finally:  # an iterator that raised has no further step
            if self._waiting:
                self._loop.call_soon(self._end_some)
