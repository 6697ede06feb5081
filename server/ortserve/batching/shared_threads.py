"""Sharing threads between models: in time of predicted work, not in batches or requests.

Each run holds some of the threads. While they are all held, models wait, and the one that has had the least work goes
next (start-time fair queueing). A model with long batches thus gets no more of them than one with short ones.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from ortserve.batching.latency import known_ns

_FREE: Final = 0.0


class Share:
    """One model's claim: how many threads its runs hold, and whom to tell when it is its turn."""

    __slots__ = ("_shared", "had_ns", "threads", "wake")

    def __init__(self, shared: "SharedThreads", threads: int, wake: Callable[[], None]) -> None:
        self._shared = shared
        self.threads = threads
        self.wake = wake
        self.had_ns = _FREE
        """Work so far, on the virtual clock of those who share."""

    def may_start(self) -> bool:
        """Whether a run may start now. If not, ``wake`` is called when it is this model's turn."""
        return self._shared._may_start(self)

    def withdraw(self) -> None:
        """Say that there is nothing to run after all, so that others get the turn."""
        self._shared._withdraw(self)

    def begin(self, predicted_ns: float | None) -> None:
        """Start a run that ``may_start`` allowed."""
        self._shared._begin(self, known_ns(predicted_ns))

    def charge(self, predicted_ns: float | None, *, wants_more: bool) -> None:
        """Note a run that ``may_start`` allowed and that holds no threads, because it happens on the event loop.

        Args:
            predicted_ns: What it takes.
            wants_more: Whether ``may_start`` is called again soon; if not, others get the turn.
        """
        self._shared._charge(self, known_ns(predicted_ns))
        self._shared._go_on(self, wants_more=wants_more)

    def end(self) -> None:
        """Give the run's threads back."""
        self._shared._end(self)

    @property
    def parallel_runs(self) -> int:
        """How many of the model's runs there are threads for at a time."""
        return self._shared._threads // self.threads

    def slowdown(self) -> float:
        """How many times longer work takes here than by itself, because others want the threads too."""
        return self._shared._slowdown(self)


class SharedThreads:
    """Threads that models share: the processors of the host, by one for all. Loop thread only."""

    def __init__(self, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        self._threads = threads
        self._free = threads
        self._loop = loop
        self._waiting: dict[Share, None] = {}
        self._running: dict[Share, int] = {}
        self._clock_ns = _FREE

    @property
    def free_threads(self) -> int:
        """Threads that no run holds."""
        return self._free

    def share(self, threads: int, wake: Callable[[], None]) -> Share:
        """A new claim, for a model whose runs use so many threads (all of them where it uses more)."""
        return Share(self, min(threads, self._threads), wake)

    def _may_start(self, share: Share) -> bool:
        if not self._waiting and share.threads <= self._free:
            return True
        self._waiting[share] = None
        # Nobody overtakes the first, though his run would fit: else long runs would wait for ever.
        return self._first() is share and share.threads <= self._free

    def _withdraw(self, share: Share) -> None:
        if share in self._waiting:
            del self._waiting[share]
            self._tell_first()

    def _go_on(self, share: Share, *, wants_more: bool) -> None:
        if wants_more:
            # Among those who wait from now on, or the next to begin would move the clock beyond its claim.
            self._waiting[share] = None
        else:
            self._waiting.pop(share, None)
        self._tell_first()

    def _begin(self, share: Share, predicted_ns: float) -> None:
        self._charge(share, predicted_ns)
        self._waiting.pop(share, None)
        self._free -= share.threads
        self._running[share] = self._running.get(share, 0) + 1
        self._tell_first()

    def _charge(self, share: Share, predicted_ns: float) -> None:
        # Who was idle begins at the present, with no credit for the time it did not want.
        self._clock_ns = max(self._clock_ns, min((share.had_ns, *(other.had_ns for other in self._waiting))))
        share.had_ns = max(share.had_ns, self._clock_ns) + predicted_ns * share.threads

    def _end(self, share: Share) -> None:
        self._free += share.threads
        self._running[share] -= 1
        if not self._running[share]:
            del self._running[share]
        self._tell_first()

    def _slowdown(self, share: Share) -> float:
        wanted = sum([other.threads for other in {share, *self._running, *self._waiting}])
        return max(1.0, wanted / self._threads)

    def _first(self) -> Share:
        return min(self._waiting, key=lambda share: max(share.had_ns, self._clock_ns))

    def _tell_first(self) -> None:
        if self._waiting:
            first = self._first()
            if first.threads <= self._free:
                self._loop.call_soon(first.wake)
