"""The event loop in virtual time, which other tests of batching use."""

import asyncio
import threading

import pytest

from fakes.clock import FakeClock
from fakes.loop import StalledError, VirtualTimeLoop, run_virtual


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> int:
        began_ns = clock()
        await asyncio.sleep(3600)
        return clock() - began_ns

    assert run_virtual(main) == 3600 * 10**9


def test_timers_fire_in_the_order_of_their_time_at_their_time() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> list[tuple[int, int]]:
        fired: list[tuple[int, int]] = []
        began_ns = clock()

        def fire(due_ns: int) -> None:
            fired.append((due_ns, clock() - began_ns))

        for due_ns in (300, 100, 200):
            loop.call_later(due_ns / 1e9, fire, due_ns)
        await asyncio.sleep(1)
        return fired

    assert run_virtual(main) == [(100, 100), (200, 200), (300, 300)]


def test_wait_that_cannot_end_is_an_error() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError):
        run_virtual(main)


def test_another_thread_wakes_the_loop() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> str:
        result: asyncio.Future[str] = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(result.set_result, "hello"))
        thread.start()
        thread.join()
        return await result

    assert run_virtual(main) == "hello"


def test_exception_in_a_callback_fails_the_test() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_virtual(main)
