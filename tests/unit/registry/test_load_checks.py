"""Checks of a loaded version before it serves, in a registry with the real ONNX Runtime."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from fakes.inflight import submit_to
from models import builders, members, sequences
from ortserve.config.model import LoadOptions
from ortserve.errors import ServeError
from ortserve.registry import dependents
from ortserve.registry.catalog import State
from ortserve.registry.load import golden_check
from ortserve.registry.load.golden_samples import GOLDEN_MISSING
from ortserve.registry.registry import Registry
from ortserve.telemetry.metrics import Metrics


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """A registry over ``tmp_path``, which the test fills before it loads anything."""
    options = LoadOptions.model_validate({"warmup_s": 0.05, "intra_op_threads": 1})
    registry = Registry([tmp_path], options, Metrics(CollectorRegistry()), time.monotonic_ns)
    yield registry
    await registry.close()


def put(root: Path, name: str, options: str = "") -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "model.yaml").write_text(options)
    return root / name / "1" / "model.onnx"


async def test_ensemble_without_the_samples_that_it_requires_fails(tmp_path: Path, registry: Registry) -> None:
    members.affine(put(tmp_path, "double"))
    steps = [("double", {"a": "a"}, {"b": "b"})]
    members.add_ensemble(tmp_path, "strict", ["a"], ["b"], steps, golden_required="true")
    await registry.load_all()
    (record,) = registry.records_of("strict")
    assert (record.state, record.reason) == (State.FAILED, GOLDEN_MISSING)
    assert registry.ready_versions("double") == [1]


async def test_samples_of_an_ensemble_wait_for_a_member_whose_queue_is_full(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.slow(put(tmp_path, "slow", "{max_rows: 1, max_queue_rows: 1}"), steps=300)
    members.add_ensemble(tmp_path, "e", ["x"], ["y"], [("slow", {"x": "x"}, {"y": "y"})])
    await registry.load_all()
    x = np.ones((1, 4), np.float32)
    (y,) = await submit_to(registry.find("e", ""), (x,), 1)
    (tmp_path / "e" / "1" / "golden").mkdir()
    arrays: dict[str, Any] = {"input.x": x.repeat(8, 0), "output.y": y.repeat(8, 0)}
    np.savez(tmp_path / "e" / "1" / "golden" / "a.npz", **arrays)
    await registry.load("e")
    before = registry.find("e", "")
    assert before.properties["golden"].startswith("8 samples agree")
    monkeypatch.setattr(dependents, "_RETRY_S", 3.0)

    async def keep_full() -> None:
        while True:
            with suppress(ServeError):
                submit_to(registry.find("slow", ""), (x,), 1)
            await asyncio.sleep(0)

    async def replace_member(*, is_busy: bool) -> None:
        full = asyncio.ensure_future(keep_full()) if is_busy else None
        monkeypatch.setattr(golden_check, "_BUSY_NS", 50_000_000 if is_busy else 10_000_000_000)
        builders.slow(tmp_path / "slow" / "1" / "model.onnx", steps=300)
        await registry.load("slow")
        if full is not None:
            full.cancel()

    await replace_member(is_busy=True)
    assert registry.find("e", "") is before
    await replace_member(is_busy=False)
    second = registry.find("e", "")
    assert second is not before
    await replace_member(is_busy=True)  # Its retry is the one that was scheduled for the first load.
    while registry.find("e", "") is second:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    (after,) = registry.find("e", "").members  # type: ignore[attr-defined]
    assert after is registry.find("slow", "")


async def test_models_with_sequences_are_not_compared_by_speed(
    tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    options = "{max_slowdown: 1.5, sequences: {states: [{input: STATE, output: NEXT}]}}"
    file = sequences.delayed(put(tmp_path, "m", options))
    await registry.load_all()
    before = registry.find("m", "")
    sequences.delayed(file)
    await registry.load("m")
    assert registry.find("m", "") is not before
    said = [vars(record)["fields"]["reason"] for record in caplog.records if record.message == "option has no effect"]
    assert said == ["max_slowdown: ensembles and models with sequences are not compared"]
