"""Health answers for requests on a thread other than the event loop's."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ortserve.frontends.http import model_routes
from ortserve.frontends.http.model_routes import HealthFromThreads
from ortserve.frontends.http.responses import HttpResponse


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
