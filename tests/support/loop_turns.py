"""Counts the event loop's iterations while a coroutine runs."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_counting_turns(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Run ``work``. Returns its result, and the number of iterations of the event loop meanwhile."""
    task = asyncio.create_task(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return await task, turns
