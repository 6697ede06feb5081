"""Shares threads fairly between models: by predicted work, not by batches or requests.

Each run holds some of the threads. While all are held, models wait, and the model with the least work so far runs next
(start-time fair queueing). So a model with long batches gets no more of the threads than one with short batches. A run
that has ended counts as at most twice its time.

A short run need not wait for much longer ones to end: it overtakes them, and the operating system divides the
processors between their threads meanwhile. Runs that are too long for the event loop hold at most twice the threads.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from ortserve.batching.inline_runs import MAX_RUN_NS

_NO_WORK: Final = 0.0
_MIN_OVERTAKEN: Final = 4
"""A run may overtake runs that take at least this many times longer. Below, it would gain less than they lose. A run
that is short enough for the event loop may overtake any."""
_UNKNOWN_NS: Final = 20_000_000
"""The time that a run of unknown time counts as, for runs that may overtake it."""
_MAX_RATIO: Final = 2.0
"""A run that has ended counts as at most this multiple of its time. Otherwise, after one slow first batch, predictions
that are far too long would make a model wait for minutes while others are busy."""


class Share:
    """The share of one model: how many threads its runs hold, and a callback for its turn. Loop thread only."""

    __slots__ = ("_shared", "next_ns", "overtakes", "run_ns", "runs", "threads", "wake", "work_ns")

    def __init__(self, shared: "SharedThreads", threads: int, wake: Callable[[], None]) -> None:
        self._shared = shared
        self.threads = threads
        self.wake = wake
        self.work_ns = _NO_WORK
        """Work so far, on the virtual clock of all shares."""
        self.runs = 0
        """Runs that hold threads."""
        self.run_ns: float | None = None
        """Predicted time of the shortest run since the model last held no threads; None if that of one is unknown."""
        self.next_ns = math.inf
        """Predicted time of the next run; infinite if it may not overtake others."""
        self.overtakes = False
        """Whether ``may_start`` allowed the next run to overtake those that hold the threads."""

    def may_start(self, next_ns: float | None = None) -> bool:
        """Whether a run may start now. Otherwise ``wake`` is called when it is this model's turn.

        A run that is short, by its predicted time ``next_ns``, needs no free threads while the model has had less time
        than those that hold them.
        """
        shared = self._shared
        self.next_ns = math.inf if next_ns is None else next_ns
        self.overtakes = self.threads > shared.free_threads
        if not shared.waiting and (not self.overtakes or self.has_threads):
            return True
        shared.waiting[self] = None
        # No share overtakes the first, even if its run would fit, because long runs would starve.
        return shared.first() is self and self.has_threads

    @property
    def has_threads(self) -> bool:
        """Whether the threads that the next run needs are free, or the run may overtake those that hold them."""
        shared = self._shared
        if self.threads <= shared.free_threads:
            return True
        if self.next_ns > MAX_RUN_NS and self.threads > shared.threads + shared.free_threads:
            return False
        work_ns = max(self.work_ns, shared.clock_ns)
        for other in shared.running:
            run_ns = _UNKNOWN_NS if other.run_ns is None else other.run_ns
            if self.next_ns > max(MAX_RUN_NS, run_ns / _MIN_OVERTAKEN):
                return False
            if other.run_ns is not None and work_ns >= other.work_ns:
                return False
        return True

    def withdraw(self) -> None:
        """Pass the turn on, because the model has nothing to run."""
        shared = self._shared
        if self in shared.waiting:
            del shared.waiting[self]
            shared.wake_first()

    def begin(self, predicted_ns: float) -> None:
        """Take the threads for a run that ``may_start`` allowed; ``predicted_ns`` is 0 if its time is unknown."""
        shared = self._shared
        self._count(predicted_ns)
        shared.waiting.pop(self, None)
        shared.free_threads -= self.threads
        if not self.runs:
            self.run_ns = predicted_ns or None
        elif self.run_ns is not None:
            self.run_ns = min(self.run_ns, predicted_ns) or None
        self.runs += 1
        shared.running[self] = None
        if shared.waiting:
            shared.wake_first()

    def charge(self, predicted_ns: float, *, wants_more: bool) -> None:
        """Count a run that ``may_start`` allowed and that holds no threads because it uses the event loop.

        Args:
            predicted_ns: Predicted time of the run; 0 if it is unknown.
            wants_more: Whether ``may_start`` is called again soon; otherwise the turn passes on.
        """
        shared = self._shared
        self._count(predicted_ns)
        if wants_more:
            # The share counts as waiting; otherwise the next run to begin would move the clock past it.
            shared.waiting[self] = None
        else:
            shared.waiting.pop(self, None)
        if shared.waiting:
            shared.wake_first()

    def end(self, predicted_ns: float = 0.0, took_ns: float = 0.0) -> None:
        """Release the threads of a run. ``predicted_ns`` is that of ``begin``; 0 to count the run as predicted."""
        shared = self._shared
        if predicted_ns > _MAX_RATIO * took_ns:
            self.work_ns -= (predicted_ns - _MAX_RATIO * took_ns) * self.threads
        shared.free_threads += self.threads
        self.runs -= 1
        if not self.runs:
            del shared.running[self]
        if shared.waiting:
            shared.wake_first()

    @property
    def parallel_runs(self) -> int:
        """The number of the model's runs that the threads suffice for at a time."""
        return self._shared.threads // self.threads

    def slowdown(self) -> float:
        """How many times longer work takes because other models use the threads, too."""
        shared = self._shared
        wanted = 0
        for other in {self, *shared.running, *shared.waiting}:
            wanted += other.threads
        return max(1.0, wanted / shared.threads)

    def _count(self, predicted_ns: float) -> None:
        # A share that was idle begins at the present clock, without credit for the idle time.
        shared = self._shared
        least_ns = self.work_ns
        for other in shared.waiting:
            least_ns = min(least_ns, other.work_ns)
        shared.clock_ns = max(shared.clock_ns, least_ns)
        self.work_ns = max(self.work_ns, shared.clock_ns) + predicted_ns * self.threads


class SharedThreads:
    """The threads that all models of the host share. Loop thread only.

    Attributes:
        threads: Number of threads.
        free_threads: Threads that no run holds; negative while runs overtake others.
        waiting: Shares that want to start a run.
        running: Shares whose runs hold threads.
        clock_ns: The virtual clock: the least work so far of the shares that want to run. It never goes back.
    """

    def __init__(self, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        self.threads: Final = threads
        self.free_threads = threads
        self.waiting: dict[Share, None] = {}
        self.running: dict[Share, None] = {}
        self.clock_ns = _NO_WORK
        self._loop = loop

    def share(self, threads: int, wake: Callable[[], None]) -> Share:
        """A new share for a model whose runs use ``threads`` threads, at most all of them."""
        return Share(self, min(threads, self.threads), wake)

    def first(self) -> Share:
        """The waiting share with the least work so far. There is at least one."""
        return min(self.waiting, key=lambda share: max(share.work_ns, self.clock_ns))

    def wake_first(self) -> None:
        """Wake the first waiting share, if there is one and its threads are free."""
        if self.waiting:
            first = self.first()
            if first.has_threads:
                self._loop.call_soon(first.wake)
