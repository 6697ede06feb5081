"""Timers for sequences that are idle or wait for a slot for too long, and for requests that are late."""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.batching.sequence_table import Sequence, SequenceTable, Turn
from ortserve.clock import Clock

ENDED_AT_ONCE: Final = 1000
"""Maximum number of sequences that end in one turn of the event loop, which takes about 5 ms. The others end later."""
_LATE_TIMER_S: Final = 0.001
"""Additional delay of the idle timer, so that at least one sequence has expired when it fires."""


class SequenceTimers:
    """Reports sequences that are idle, or wait for a slot, for too long, and late requests. Loop thread only."""

    def __init__(
        self,
        table: SequenceTable,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_expired: Callable[[Sequence], None],
        on_waited: Callable[[Sequence], None],
        on_late: Callable[[Turn], None],
    ) -> None:
        """Watch nothing yet.

        Args:
            table: Knows when idle sequences expire.
            loop: The running event loop.
            clock: Monotonic nanoseconds.
            on_expired: Removes a sequence that was idle for too long.
            on_waited: Ends a sequence that has waited too long for a slot.
            on_late: Fails a request whose deadline has passed before its run.
        """
        self._table = table
        self._loop = loop
        self._clock = clock
        self._on_expired = on_expired
        self._on_waited = on_waited
        self._on_late = on_late
        self._idle_timer: asyncio.TimerHandle | None = None
        self._limits: dict[Sequence, tuple[int, asyncio.TimerHandle]] = {}

    def watch_idle(self) -> None:
        """Set the timer for the next sequence that expires. A timer that is already set stays, as it fires earlier."""
        if self._idle_timer is not None:
            return
        due_ns = self._table.next_expiry_ns()
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - self._clock()) / 1e9) + _LATE_TIMER_S
            self._idle_timer = self._loop.call_later(delay_s, self._expire)

    def limit_wait(self, sequence: Sequence, by_ns: int, now_ns: int) -> None:
        """Report a sequence that still waits for a slot at ``by_ns``, or at an earlier limit that was set before."""
        known = self._limits.get(sequence)
        if known is not None:
            if known[0] <= by_ns:
                return
            known[1].cancel()
        handle = self._loop.call_later(max(0.0, (by_ns - now_ns) / 1e9), self._end_wait, sequence)
        self._limits[sequence] = (by_ns, handle)

    def stop_limit(self, sequence: Sequence) -> None:
        """Note that a sequence no longer waits for a slot."""
        known = self._limits.pop(sequence, None)
        if known is not None:
            known[1].cancel()

    def limit_turn(self, turn: Turn) -> None:
        """Report a request at its deadline, if it has one, until ``Turn.stop_timer``."""
        by_ns = turn.terms.answer_by_ns
        if by_ns is not None:
            delay_s = max(0.0, (by_ns - self._clock()) / 1e9)
            turn.timer = self._loop.call_later(delay_s, self._on_late, turn)

    def close(self) -> None:
        """Stop the idle timer."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _expire(self) -> None:
        self._idle_timer = None
        for sequence in self._table.expired(self._clock(), ENDED_AT_ONCE):
            self._on_expired(sequence)
        self.watch_idle()

    def _end_wait(self, sequence: Sequence) -> None:
        self._limits.pop(sequence, None)
        self._on_waited(sequence)
