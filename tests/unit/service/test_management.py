"""Statistics of the models that serve."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from loop_turns import run_counting_turns
from models import builders
from ortserve.config.model import LoadOptions
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.service.management import ModelStatistics, StatisticsService
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.series import ModelMetrics


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """``a`` in versions 2 and 10, ``b`` in version 1, and ``bad``, which cannot be loaded."""
    for version in ("2", "10"):
        (tmp_path / "a" / version).mkdir(parents=True)
        builders.identity(tmp_path / "a" / version / "model.onnx")
    (tmp_path / "a" / "model.yaml").write_text("version_policy: {all: true}")
    builders.identity(tmp_path / "b.onnx")
    builders.not_onnx(tmp_path / "bad.onnx")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all()
    yield registry
    await registry.close()


async def test_statistics_of_a_version_of_a_model_and_of_all_models(registry: Registry) -> None:
    service = StatisticsService(registry, time.monotonic_ns)

    async def named(name: str = "", version: str = "") -> list[tuple[str, str]]:
        return [(one.version.name, one.version.version) async for one in service.statistics(name, version)]

    assert await named() == [("a", "2"), ("a", "10"), ("b", "1")]
    assert await named("a") == [("a", "2"), ("a", "10")]
    assert await named("a", "10") == [("a", "10")]


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("none", "", "requested model 'none' is not available"),
        ("none", "1", "requested model 'none' is not available"),
        ("bad", "", "requested model 'bad' is not available"),
        ("a", "3", "requested model version is not available for model 'a'"),
    ],
)
async def test_version_that_does_not_serve_has_no_statistics(
    registry: Registry, name: str, version: str, text: str
) -> None:
    with pytest.raises(ServeError) as caught:
        await anext(StatisticsService(registry, time.monotonic_ns).statistics(name, version))
    assert (caught.value.kind, caught.value.message) == (ErrorKind.INVALID_INPUT, text)


async def test_statistics_of_many_versions_leave_the_loop_to_others() -> None:
    served = SimpleNamespace(metrics=ModelMetrics("m", "1"))
    names = [f"m{number}" for number in range(100)]
    registry: Any = SimpleNamespace(names=lambda: names, ready_versions=lambda _: [1], find=lambda *_: served)
    service = StatisticsService(registry, time.monotonic_ns)

    async def list_all() -> list[ModelStatistics]:
        return [one async for one in service.statistics()]

    found, turns = await run_counting_turns(list_all())
    assert len(found) == 100
    assert turns >= 4


async def test_concurrent_statistics_of_many_versions_share_no_turn() -> None:
    served = SimpleNamespace(metrics=ModelMetrics("m", "1"))
    found: list[int] = []
    """The number of versions that each turn of the loop has described."""

    def find(*_: str) -> SimpleNamespace:
        found[-1] += 1
        return served

    registry: Any = SimpleNamespace(names=lambda: ["m"] * 40, ready_versions=lambda _: [1], find=find)
    service = StatisticsService(registry, time.monotonic_ns)

    async def list_all() -> list[ModelStatistics]:
        return [one async for one in service.statistics()]

    calls = asyncio.gather(*(list_all() for _ in range(20)))
    while not calls.done():
        found.append(0)
        await asyncio.sleep(0)
    assert sum(found) == 20 * 40
    assert max(found) == 25


async def test_last_inference_has_the_time_of_the_wall_clock(registry: Registry) -> None:
    service = StatisticsService(registry, lambda: 5_000_000_000, lambda: 1_700_000_000_000_000_000)
    registry.find("b", "").metrics.observe_success("http", Timing(1, 2, 3, 4, 5, 2_000_000_000), 1)
    assert [one.last_inference_ms async for one in service.statistics()] == [0, 0, 1_700_000_000_000 - 3_000]
