"""How often the event loop served others while a coroutine ran."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_counting_turns(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Run ``work``. Returns its result, and how many turns of the event loop it took."""
    task = asyncio.create_task(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return await task, turns
