"""Divides the turns of the event loop among calls that read all models of a server."""

import asyncio


class LoopTurns:
    """Lets at most one of several calls run in each turn of the event loop. Loop thread only."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Return in a later turn, in which no other call returns from here. Calls return in the order of arrival."""
        async with self._turn:
            await asyncio.sleep(0)
