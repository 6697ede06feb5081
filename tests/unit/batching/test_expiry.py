"""When the queue is looked through for those who have waited too long."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.expiry import ExpiryAlarm
from ortserve.batching.riders import Rider
from ortserve.core.promise import Promise
from ortserve.core.timing import Timing

MS = 1_000_000


class Stage:
    """An alarm and the times at which it rang, since the stage was set."""

    def __init__(self, loop: VirtualTimeLoop, clock: FakeClock) -> None:
        self.loop = loop
        self.clock = clock
        self.began_ns = clock()
        self.rang_ns: list[int] = []
        self.alarm = ExpiryAlarm(loop, lambda: self.rang_ns.append(self.now_ns))

    @property
    def now_ns(self) -> int:
        return self.clock() - self.began_ns

    def expect(self, by_ns: int | None) -> None:
        by_ns = None if by_ns is None else self.began_ns + by_ns
        rider = Rider((), 1, Promise(), Timing(0), finish_by_ns=by_ns)
        self.alarm.expect(rider, self.clock())

    def on_sweep(self, next_ns: float = math.inf, looked_at: int = 1) -> None:
        self.alarm.on_sweep(looked_at, self.began_ns + next_ns, self.clock())


def on_stage(main: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    run_virtual(lambda loop, clock: main(Stage(loop, clock)))


def test_alarm_rings_once_after_the_first_moment() -> None:
    async def main(stage: Stage) -> None:
        for by_ns in (5 * MS, 3 * MS, 4 * MS):
            stage.expect(by_ns)
        await asyncio.sleep(1)
        assert stage.rang_ns == [3 * MS + 1]

    on_stage(main)


def test_next_moment_is_that_of_the_look_or_of_who_came_since() -> None:
    async def main(stage: Stage) -> None:
        stage.on_sweep(9 * MS)
        stage.expect(20 * MS)
        stage.expect(7 * MS)
        await asyncio.sleep(1)
        assert stage.rang_ns == [7 * MS + 1]

    on_stage(main)


def test_moment_that_has_passed_rings_at_once() -> None:
    async def main(stage: Stage) -> None:
        await asyncio.sleep(1e-3)
        stage.expect(-MS)
        await asyncio.sleep(0.1e-3)
        assert stage.rang_ns == [MS]

    on_stage(main)


def test_looks_are_as_far_apart_as_they_are_long() -> None:
    async def main(stage: Stage) -> None:
        stage.on_sweep(looked_at=10)
        stage.expect(1)
        await asyncio.sleep(1.5e-3)
        assert stage.rang_ns == [MS]
        stage.on_sweep(1, looked_at=5000)
        stage.expect(2)
        await asyncio.sleep(1)
        assert stage.rang_ns == [MS, MS + MS // 2 + 5 * MS]

    on_stage(main)


def test_nobody_is_looked_for_where_nobody_can_be_late_or_all_is_over() -> None:
    async def main(stage: Stage) -> None:
        stage.on_sweep()
        stage.expect(None)
        await asyncio.sleep(1)
        stage.expect(2000 * MS)
        stage.alarm.close()
        await asyncio.sleep(2)
        assert stage.rang_ns == []

    on_stage(main)
