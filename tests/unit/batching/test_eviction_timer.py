"""The timer that sweeps the queue and evicts requests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fakes.clock import FakeClock
from fakes.inflight import inflight
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.queue import RequestQueue
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.statistics import Decisions
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

MS = 1_000_000


class Stage:
    """A queue without runs, and the times of evictions since the start of the test."""

    def __init__(self, loop: VirtualTimeLoop, clock: FakeClock) -> None:
        self.clock = clock
        self.began_ns = clock()
        self.queue = RequestQueue()
        self.decisions = Decisions()
        self.scheduler = Scheduler(self.queue, self.decisions, loop, clock, lambda: None)
        self.evicted_ns: dict[int | None, int] = {}

    @property
    def now_ns(self) -> int:
        return self.clock() - self.began_ns

    def wait(self, by_ns: int | None, key: object = None) -> InflightRequest:
        """Enqueue a request with a deadline, in nanoseconds since the start of the test."""
        finish_by_ns = None if by_ns is None else self.began_ns + by_ns
        request = inflight((), 1, Timing(0, self.clock()), finish_by_ns=finish_by_ns)
        request.on_settled = lambda _: self.evicted_ns.setdefault(by_ns, self.now_ns)
        request.withdraw = self.scheduler.on_cancelled
        self.queue.push(self.queue.shape_class(key), request, 8)
        if request.expires_ns is not None:
            self.scheduler.sweep_after(request.expires_ns, self.clock())
        return request


def on_stage(main: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    run_virtual(lambda loop, clock: main(Stage(loop, clock)))


def test_requests_are_evicted_after_their_deadlines_and_sweeps_are_a_millisecond_apart() -> None:
    async def main(stage: Stage) -> None:
        for by_ns in (5 * MS, 3 * MS, 3 * MS + 10, None):
            stage.wait(by_ns, key="a")
        stage.wait(4 * MS + 500_000, key="b")
        await asyncio.sleep(1)
        assert stage.evicted_ns == {
            3 * MS: 3 * MS + 1,
            3 * MS + 10: 4 * MS + 1,
            4 * MS + 500_000: 5 * MS + 1,
            5 * MS: 5 * MS + 1,
        }
        assert (stage.queue.rows, stage.decisions.dropped_late) == (1, 4)

    on_stage(main)


def test_request_that_is_added_later_may_expire_first() -> None:
    async def main(stage: Stage) -> None:
        stage.wait(20 * MS)
        await asyncio.sleep(1e-3)
        stage.wait(7 * MS)
        await asyncio.sleep(1)
        assert stage.evicted_ns == {7 * MS: 7 * MS + 1, 20 * MS: 20 * MS + 1}

    on_stage(main)


def test_deadline_that_has_passed_is_noticed_at_once() -> None:
    async def main(stage: Stage) -> None:
        await asyncio.sleep(1e-3)
        request = stage.wait(-MS)
        await asyncio.sleep(0.1e-3)
        with pytest.raises(ServeError, match="Request timeout expired") as caught:
            request.take_outputs()
        assert caught.value.kind is ErrorKind.DEADLINE
        assert stage.evicted_ns == {-MS: MS}

    on_stage(main)


def test_sweep_of_a_long_queue_delays_the_next_one_by_a_microsecond_a_request() -> None:
    async def main(stage: Stage) -> None:
        for _ in range(5000):
            stage.wait(None)
        for by_ns in (1, 2 * MS):
            stage.wait(by_ns)
        await asyncio.sleep(1)
        assert stage.evicted_ns == {1: 2, 2 * MS: 2 + 5002 * 1000}

    on_stage(main)


def test_cancelled_request_frees_its_place_and_is_not_evicted() -> None:
    async def main(stage: Stage) -> None:
        request = stage.wait(5 * MS)
        stage.wait(None)
        assert request.cancel()
        assert (stage.queue.rows, stage.decisions.left) == (1, 1)
        await asyncio.sleep(1)
        assert stage.decisions.dropped_late == 0

    on_stage(main)


def test_nothing_is_evicted_after_close() -> None:
    async def main(stage: Stage) -> None:
        stage.wait(None)
        stage.wait(2000 * MS)
        await asyncio.sleep(1)
        stage.scheduler.close()
        await asyncio.sleep(2)
        assert stage.evicted_ns == {}

    on_stage(main)
