"""REST calls that manage the server leave other callers their turns of the event loop."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from ortserve.frontends.http.management_routes import shared_memory_routes
from ortserve.service.shared_memory import RegionStatus


class Regions:
    """Registered regions of any number."""

    def __init__(self, count: int) -> None:
        self.known = [RegionStatus(f"r{number}", "/key", number, 1) for number in range(count)]

    def status(self, kind: type[RegionStatus], name: str) -> list[RegionStatus]:
        return self.known


async def turns_of(count: int) -> tuple[int, Any]:
    """The turns of the loop that a list of regions takes, and the list."""
    regions: Any = Regions(count)
    app = FastAPI(routes=shared_memory_routes(regions).routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answering = asyncio.create_task(client.get("/v2/systemsharedmemory/status"))
        turns = 0
        while not answering.done():
            await asyncio.sleep(0)
            turns += 1
    return turns, orjson.loads(answering.result().content)


@pytest.mark.parametrize("count", [0, 1, 250, 251, 2000])
async def test_regions_are_listed_in_turns(count: int) -> None:
    await turns_of(0)  # the first call imports modules
    few, _ = await turns_of(1)
    turns, listed = await turns_of(count)
    assert listed == [
        {"name": f"r{number}", "key": "/key", "offset": number, "byte_size": 1} for number in range(count)
    ]
    assert turns - few >= (count - 1) // 250
