"""Bounds the requests that each step of an ensemble has under way, so that none fills memory ahead of a slower one."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

from ortserve.errors import ErrorKind, ServeError

MOST_WAITING: Final = 16_384
"""Requests of one load of an ensemble that wait to begin."""


class LimitedRun(Protocol):
    """One request of an ensemble on its way."""

    def begin_late(self) -> None:
        """Start the first steps; the request has waited. Raises nothing."""
        ...

    def start_late(self, number: int, since_ns: int) -> None:
        """Start a step, which counts as under way; the request has waited for it since then. Raises nothing."""
        ...


class StepLimits:
    """The requests of an ensemble that each step has under way, and those that wait. Loop thread only.

    Requests wait with their tensors for a step that is full. Meanwhile no other request of the ensemble begins, so that
    at most as many wait between steps as were under way: the limit times the number of steps. Steps of members with
    sequences have no limit: a request there may wait for the end of another sequence, whose requests must not wait for
    it. The runs of other members end by themselves.
    """

    def __init__(self, most: int, is_limited: Sequence[bool]) -> None:
        """``most`` requests may be under way in each step for which ``is_limited`` says so."""
        self._most: Final = most
        self._is_limited: Final = tuple(is_limited)
        self._under_way = [0] * len(self._is_limited)
        self._waiting: list[OrderedDict[LimitedRun, int]] = [OrderedDict() for _ in self._is_limited]
        """For each step, since when."""
        self._beginning: OrderedDict[LimitedRun, None] = OrderedDict()
        self._is_woken = False

    def may_begin(self, run: LimitedRun) -> bool:
        """Whether a request may begin at once. Otherwise ``begin_late`` is called once it may.

        Raises:
            ServeError: overloaded, if too many wait.
        """
        if not self._beginning and not any(self._waiting):
            return True
        if len(self._beginning) >= MOST_WAITING:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {len(self._beginning)} requests wait for steps with "
                f"max_inflight_requests {self._most}",
                retry_after_s=1,
            )
        self._beginning[run] = None
        return False

    def enter(self, number: int, run: LimitedRun, now_ns: int) -> bool:
        """Whether a step may start at once, and then counts as under way. Otherwise ``start_late`` is called."""
        is_full = self._under_way[number] >= self._most or bool(self._waiting[number])
        if is_full and self._is_limited[number]:
            self._waiting[number][run] = now_ns
            return False
        self._under_way[number] += 1
        return True

    def holds(self, run: LimitedRun) -> bool:
        """Whether a request waits, to begin or for a step."""
        return run in self._beginning or any(run in waiting for waiting in self._waiting)

    def leave(self, number: int) -> None:
        """A step has ended that was under way."""
        self._under_way[number] -= 1
        self._wake()

    def forget(self, run: LimitedRun) -> None:
        """A request has ended, and waits no more."""
        self._beginning.pop(run, None)
        for waiting in self._waiting:
            waiting.pop(run, None)
        self._wake()

    def _wake(self) -> None:
        # Not in this turn: many requests that all fail at once would nest their calls.
        if not self._is_woken and (self._beginning or any(self._waiting)):
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Start what waits and now may."""
        self._is_woken = False
        for number, waiting in enumerate(self._waiting):
            while waiting and self._under_way[number] < self._most:
                self._under_way[number] += 1
                run, since_ns = waiting.popitem(last=False)
                run.start_late(number, since_ns)
        while self._beginning and not any(self._waiting):
            run, _ = self._beginning.popitem(last=False)
            run.begin_late()
