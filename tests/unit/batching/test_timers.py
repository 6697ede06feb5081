"""Timers that fire on time; tested in real time."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest
import uvloop

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.timers import FileDescriptorTimer, LoopTimer, best_timer

US = 1_000


def test_timer_fires_within_a_fraction_of_a_millisecond_of_its_time() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()
        alarm = best_timer(loop, rung.set)
        assert isinstance(alarm, FileDescriptorTimer)
        late_ns = []
        for _ in range(50):
            rung.clear()
            now_ns = time.monotonic_ns()
            alarm.set(now_ns + 300 * US, now_ns)
            await rung.wait()
            late_ns.append(time.monotonic_ns() - now_ns - 300 * US)
        alarm.close()
        return late_ns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late_ns = runner.run(main())
    assert min(late_ns) >= 0, "never early"
    assert statistics.median(late_ns) < 400 * US  # the loop's own timers are up to 1,000 µs late


def test_timer_set_again_fires_only_at_the_new_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rings: list[int] = []
        rung = asyncio.Event()

        def ring() -> None:
            rings.append(time.monotonic_ns())
            rung.set()

        alarm = best_timer(loop, ring)
        now_ns = time.monotonic_ns()
        alarm.set(now_ns + 100 * US, now_ns)
        alarm.set(now_ns + 5_000 * US, now_ns)
        await rung.wait()
        alarm.close()
        assert len(rings) == 1
        assert rings[0] >= now_ns + 5_000 * US

    asyncio.run(main())


def test_timer_of_a_passed_time_fires_at_once() -> None:
    async def main() -> None:
        rung = asyncio.Event()
        alarm = best_timer(asyncio.get_running_loop(), rung.set)
        now_ns = time.monotonic_ns()
        alarm.set(now_ns - 1_000 * US, now_ns)
        await asyncio.wait_for(rung.wait(), 10)
        alarm.close()

    asyncio.run(main())


def test_closed_timer_never_fires_and_may_be_set_and_closed_again() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        rings: list[None] = []
        alarm = LoopTimer(loop, lambda: rings.append(None))
        alarm.set(clock() + 1_000, clock())
        alarm.close()
        alarm.set(clock() + 1_000, clock())
        alarm.close()
        alarm.set(clock() + 1_000, clock())
        await asyncio.sleep(1)
        assert not rings

    run_virtual(main)

    async def on_the_clock() -> None:
        alarm = FileDescriptorTimer(asyncio.get_running_loop(), pytest.fail)
        now_ns = time.monotonic_ns()
        alarm.set(now_ns, now_ns)
        alarm.close()
        alarm.set(now_ns, now_ns)
        alarm.close()
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(on_the_clock())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_timer_that_was_never_set_takes_no_descriptor() -> None:
    async def main() -> None:
        before = open_descriptors()
        alarms = [best_timer(asyncio.get_running_loop(), pytest.fail) for _ in range(20)]
        assert open_descriptors() == before
        for alarm in alarms:
            alarm.close()

    asyncio.run(main())
