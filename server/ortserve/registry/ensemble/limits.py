"""Limits the requests under way in each step of an ensemble, so that no step fills memory ahead of a slower one."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Final, Protocol

from ortserve.errors import ErrorKind, ServeError

MAX_WAITING: Final = 16_384
"""Maximum number of requests of one load of an ensemble that wait to begin."""

_STARTED_AT_ONCE: Final = 16
"""Maximum number of waiting steps and requests that start in a turn of the loop. If a model rejects all of them, each
takes about 0.1 ms."""


class LimitedRun(Protocol):
    """One request of an ensemble that may wait because of the limits."""

    @property
    def rows(self) -> int:
        """Number of rows of the request."""
        ...

    def begin_late(self) -> None:
        """Start the first steps of a request that has waited. Raises nothing."""
        ...

    def start_late(self, number: int, since_ns: int) -> None:
        """Start a step that already counts as under way. The request waits since ``since_ns``. Raises nothing."""
        ...


class StepLimits:
    """Counts the requests under way in each step of an ensemble, and queues those that must wait. Loop thread only.

    A request that waits for a full step holds its tensors. Meanwhile no other request of the ensemble begins, so that
    at most as many requests wait between steps as were under way: the limit times the number of steps. Steps of members
    with sequences have no limit. A request there may wait for the end of another sequence, whose requests must
    therefore not wait for this request. Runs of other members end by themselves.
    """

    def __init__(self, most: int, is_limited: Sequence[bool]) -> None:
        """At most ``most`` requests are under way in each step for which ``is_limited`` is True."""
        self._most: Final = most
        self._is_limited: Final = tuple(is_limited)
        self._under_way = [0] * len(self._is_limited)
        self._waiting: list[OrderedDict[LimitedRun, int]] = [OrderedDict() for _ in self._is_limited]
        """For each step, the waiting requests with the time since which each waits (monotonic)."""
        self._beginning: OrderedDict[LimitedRun, None] = OrderedDict()
        self._is_woken = False

    def may_begin(self, run: LimitedRun) -> bool:
        """Whether a request may begin at once. Otherwise ``begin_late`` is called once it may.

        Raises:
            ServeError: overloaded, if too many requests wait.
        """
        if not self._beginning and not any(self._waiting):
            return True
        if len(self._beginning) >= MAX_WAITING:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {len(self._beginning)} requests wait for steps with "
                f"max_inflight_requests {self._most}",
                retry_after_s=1,
            )
        self._beginning[run] = None
        return False

    def enter(self, number: int, run: LimitedRun, now_ns: int) -> bool:
        """Whether a step may start at once; it then counts as under way. Otherwise ``start_late`` is called later."""
        is_full = self._under_way[number] >= self._most or bool(self._waiting[number])
        if is_full and self._is_limited[number]:
            self._waiting[number][run] = now_ns
            return False
        self._under_way[number] += 1
        return True

    def holds(self, run: LimitedRun) -> bool:
        """Whether a request waits to begin or for a step."""
        return run in self._beginning or any(run in waiting for waiting in self._waiting)

    def waiting_rows(self) -> list[int]:
        """The rows of each request that waits to begin or for a step. Any thread may call it."""
        # list() of a dictionary is one step under the GIL, so the loop may change the dictionaries meanwhile.
        return [run.rows for run in {*list(self._beginning), *chain(*map(list, self._waiting))}]

    def leave(self, number: int) -> None:
        """Record that a step of a request has ended."""
        self._under_way[number] -= 1
        self._wake()

    def forget(self, run: LimitedRun) -> None:
        """Remove a request that has ended from all queues."""
        self._beginning.pop(run, None)
        for waiting in self._waiting:
            waiting.pop(run, None)
        self._wake()

    def _wake(self) -> None:
        # A later iteration of the loop does the work. Otherwise many requests that fail at once would nest their calls.
        if not self._is_woken and (self._beginning or any(self._waiting)):
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Start waiting steps and requests that now fit the limits. The rest follows in later turns of the loop."""
        self._is_woken = False
        for _ in range(_STARTED_AT_ONCE):
            if not self._start_next():
                return
        self._wake()

    def _start_next(self) -> bool:
        """Start one waiting step or request. Returns False if none fits the limits."""
        for number, waiting in enumerate(self._waiting):
            if waiting and self._under_way[number] < self._most:
                self._under_way[number] += 1
                run, since_ns = waiting.popitem(last=False)
                run.start_late(number, since_ns)
                return True
        if not self._beginning or any(self._waiting):
            return False
        run, _ = self._beginning.popitem(last=False)
        run.begin_late()
        return True
