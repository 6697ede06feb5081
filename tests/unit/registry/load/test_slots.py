"""The order in which waiting loads start, and loads that are not needed any more."""

import asyncio
import threading

import pytest

from ortserve.registry.load.load_limits import LoadRank, LoadSlots
from ortserve.registry.load.progress import LoadCancelledError, Progress


async def test_loads_begin_by_rank_and_then_in_their_order() -> None:
    slots = LoadSlots(1)
    began: list[str] = []

    async def load(name: str, rank: LoadRank) -> None:
        async with slots.take(rank):
            began.append(name)
            await asyncio.sleep(0)

    loads = [("first", LoadRank.OTHER), ("a", LoadRank.OTHER), ("b", LoadRank.OTHER)]
    loads += [("required", LoadRank.REQUIRED), ("awaited", LoadRank.AWAITED)]
    await asyncio.gather(*(load(name, rank) for name, rank in loads))
    assert began == ["first", "awaited", "required", "a", "b"]


async def test_load_that_continues_another_one_begins_before_those_of_equal_rank() -> None:
    slots = LoadSlots(1)
    began: list[str] = []

    async def load(name: str, rank: LoadRank) -> None:
        for part, continues in (("1", False), ("2", True)):
            async with slots.take(rank, continues=continues):
                began.append(name + part)
                await asyncio.sleep(0)

    loads = [("a", LoadRank.OTHER), ("b", LoadRank.OTHER), ("awaited", LoadRank.AWAITED)]
    await asyncio.gather(*(load(name, rank) for name, rank in loads))
    assert began == ["a1", "awaited1", "awaited2", "a2", "b1", "b2"]


async def test_load_of_the_last_rank_begins_although_more_urgent_ones_keep_coming() -> None:
    slots = LoadSlots(1)
    began: list[str] = []
    tasks: list[asyncio.Future[None]] = []

    async def load(name: str, rank: LoadRank) -> None:
        async with slots.take(rank):
            began.append(name)
            if rank is LoadRank.AWAITED and len(began) < 50 and "other" not in began:
                tasks.extend(asyncio.ensure_future(load("awaited", rank)) for _ in range(2))
            await asyncio.sleep(0)

    loads = [("awaited", LoadRank.AWAITED), ("other", LoadRank.OTHER)]
    tasks += [asyncio.ensure_future(load(name, rank)) for name, rank in loads]
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks)
    assert 5 < began.index("other") < 10


async def test_cancelled_wait_leaves_its_slot_to_the_next_load() -> None:
    slots = LoadSlots(1)
    began: list[str] = []

    async def load(name: str) -> None:
        async with slots.take(LoadRank.OTHER):
            began.append(name)

    async with slots.take(LoadRank.OTHER):
        waiting = [asyncio.ensure_future(load(name)) for name in ("cancelled", "next")]
        await asyncio.sleep(0)
        waiting[0].cancel()
    waiting[1].cancel()  # in the iteration of the loop in which it receives the slot
    await asyncio.wait(waiting)
    await asyncio.wait_for(load("last"), 10)
    assert began == ["last"]


def test_cancelled_load_ends_at_its_next_step_and_not_while_it_waits() -> None:
    progress = Progress(lambda: 0)
    progress.begin("opening")
    progress.cancel("the model is unloaded")
    progress.show("waiting for other loads")
    assert progress.describe() == "waiting for other loads, for 0 s"
    with pytest.raises(LoadCancelledError, match="its load was cancelled: the model is unloaded"):
        progress.begin("warming up")


def test_cancellation_interrupts_a_step_that_runs_or_follows() -> None:
    progress, interrupted = Progress(lambda: 0), threading.Event()
    with progress.interruptible(interrupted.set):
        progress.cancel("the model is unloaded")
    assert interrupted.is_set()
    interrupted.clear()
    with progress.interruptible(interrupted.set):
        assert interrupted.is_set()
    interrupted.clear()
    progress.cancel("the server stops")
    assert not interrupted.is_set()  # the step has ended
