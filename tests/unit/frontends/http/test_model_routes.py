"""Health answers for requests on a thread other than the event loop's, and statistics of many models."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, fields
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ortserve.frontends.http import model_routes
from ortserve.frontends.http.model_routes import HealthFromThreads, statistics_routes
from ortserve.frontends.http.responses import HttpResponse
from ortserve.service.management import ModelStatistics
from ortserve.telemetry.statistics import BatchSizeStatistics, Duration, InferStatistics, VersionStatistics


@dataclass
class Models:
    """The state that determines the answers."""

    is_exiting: bool = False
    lost: str = ""
    is_loaded: bool = True

    def is_ready(self) -> bool:
        return self.is_loaded


def json_answer(status: int, body: bytes) -> HttpResponse:
    return HttpResponse(status, body, ((b"content-type", b"application/json"),))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_only_the_two_health_paths_are_answered(loop: asyncio.AbstractEventLoop) -> None:
    models: Any = Models()
    answer = HealthFromThreads(models, loop).answer
    assert answer("/v2/health/live") == json_answer(200, b'{"live":true}')
    assert answer("/v2/health/ready") == json_answer(200, b'{"ready":true}')
    assert answer("/v2/health/ready?verbose=1") == json_answer(200, b'{"ready":true}')
    assert answer("/metrics") is None
    assert answer("/v2/health/ready/") is None
    models.is_loaded = False
    assert answer("/v2/health/ready") == json_answer(400, b'{"ready":false}')
    models.lost = "cuda:0 is lost"
    assert answer("/v2/health/live") == answer("/v2/health/ready") == json_answer(503, b'{"error":"cuda:0 is lost"}')
    models.is_exiting = True
    assert answer("/v2/health/live") == answer("/v2/health/ready") == json_answer(503, b'{"error":"Server exiting"}')


def test_blocked_loop_is_not_live(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "_LOOP_TIMEOUT_S", 0.05)
    is_seen = threading.Event()
    loop.call_soon_threadsafe(is_seen.wait)
    models: Any = Models()
    answer = HealthFromThreads(models, loop).answer("/v2/health/live")
    is_seen.set()
    assert answer == json_answer(503, b'{"error":"the event loop did not answer within 0.05 s"}')


class Statistics:
    """The statistics of some models, whose batches it forgets as soon as the next ones are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def statistics(self, name: str = "", version: str = "") -> AsyncIterator[ModelStatistics]:
        for number in range(self._count):
            batches: Any = [BatchSizeStatistics(number, Duration(), Duration(), Duration())]
            inference = InferStatistics(*[Duration() for _ in fields(InferStatistics)])
            yield ModelStatistics(0, VersionStatistics(f"m{number}", "1", 0, 0, 0, inference, {}, batches))
            batches.clear()


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_statistics_are_encoded_in_the_turn_in_which_they_are_read(count: int) -> None:
    """Thousands of models are read in many turns of the event loop; encoding all of them together would block it."""
    statistics: Any = Statistics(count)
    app = FastAPI(routes=statistics_routes(statistics).routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        document = (await client.get("/v2/models/stats")).json()
    found = [(one["name"], [batch["batch_size"] for batch in one["batch_stats"]]) for one in document["model_stats"]]
    assert found == [(f"m{number}", [number]) for number in range(count)]
