"""Labels and rollouts of a registry over a repository on disk, with the real ONNX Runtime."""

import asyncio
import os
import shutil
import stat
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from models import builders
from ortserve.config.model import LoadOptions
from ortserve.config.rollout import make_rollout_options
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry import state_file
from ortserve.registry.catalog import State
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import ModelState, StateFile
from ortserve.service.labels import LabelService
from ortserve.service.rollout.live import LiveRollout
from ortserve.telemetry.metrics import Metrics


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """A registry over ``tmp_path``, which the test fills before it loads anything."""
    options = LoadOptions.model_validate({"warmup_s": 0, "intra_op_threads": 1})
    state = StateFile(tmp_path / ".state")
    registry = Registry([tmp_path], options, Metrics(CollectorRegistry()), time.monotonic_ns, state=state)
    yield registry
    await registry.close()


def put(root: Path, *versions: int, options: str) -> Path:
    for version in versions:
        (root / "m" / str(version)).mkdir(parents=True)
        builders.identity(root / "m" / str(version) / "model.onnx")
    (root / "m" / "model.yaml").write_text(options)
    return root / "m"


def states(registry: Registry) -> dict[int, State]:
    return {record.version: record.state for record in registry.records_of("m")}


async def test_label_of_a_missing_version_is_logged_once_until_the_model_is_unloaded(
    tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1, options="labels: {gone: 9, later: 8}")
    await registry.load_all()
    await registry.change_state("m", ModelState({"later": 1, "lost": 7}))
    for _ in range(2):
        await registry.load("m")
    await registry.unload("m")
    await registry.load("m")
    said = [record for record in caplog.records if record.message == "labels name versions that do not exist"]
    assert [vars(record)["fields"]["labels"] for record in said] == ["gone=9, later=8", *["gone=9, lost=7"] * 2]


async def test_candidate_of_the_file_serves_on_without_its_files(tmp_path: Path, registry: Registry) -> None:
    folder = put(
        tmp_path, 1, 2, options="labels: {stable: 1}\nrollout: {candidate: 2}\nversion_policy: {specific: [1]}"
    )
    await registry.load_all()
    shutil.rmtree(folder / "2")
    await registry.poll()
    assert states(registry) == {1: State.READY, 2: State.READY}


async def test_change_of_labels_drains_no_version_while_the_latest_load_has_failed(
    tmp_path: Path, registry: Registry
) -> None:
    folder = put(tmp_path, 1, 2, options="version_policy: {all: true}")
    await registry.load_all()
    (folder / "1" / "model.onnx").write_bytes(b"no model")
    (folder / "model.yaml").write_text("version_policy: {specific: [1]}")
    with pytest.raises(ServeError, match="load failed for model 'm'"):
        await registry.load("m")
    await registry.change_state("m", ModelState({"old": 1}))
    while registry.is_changing:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    assert states(registry) == {1: State.READY, 2: State.READY}
    builders.identity(folder / "1" / "model.onnx")
    await registry.load("m")
    assert states(registry)[2] >= State.DRAINING


async def test_change_that_was_refused_keeps_no_version_loaded(tmp_path: Path, registry: Registry) -> None:
    folder = put(tmp_path, 1, 2, options="labels: {old: 1}")
    await registry.load_all()
    (tmp_path / ".state").write_text("a file instead of a folder")
    with pytest.raises(ServeError) as caught:
        await registry.change_state("m", ModelState({"kept": 1}))
    assert caught.value.kind is ErrorKind.CONFLICT
    (folder / "model.yaml").write_text("")
    await registry.load("m")
    assert states(registry)[1] >= State.DRAINING


async def test_version_of_a_change_that_is_written_late_serves_until_the_change_takes_effect(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, 1, 2, options="version_policy: {all: true}")
    await registry.load_all()
    monkeypatch.setattr(state_file, "_WRITE_S", 0.1)
    sync, may_sync = os.fsync, threading.Event()

    def sync_slowly(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # the file has its name by then
            assert may_sync.wait(60)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    with pytest.raises(ServeError, match="the change may take effect later"):
        await registry.change_state("m", ModelState({"kept": 1}))
    (folder / "model.yaml").write_text("version_policy: {specific: [2]}")
    await registry.load("m")
    changed = asyncio.Event()
    registry.on_model_change = lambda name: changed.set()
    may_sync.set()
    await asyncio.wait_for(changed.wait(), 60)
    assert registry.find("m", "kept").version == "1"


async def test_rollout_stays_attached_to_stable_when_that_is_loaded_again(tmp_path: Path, registry: Registry) -> None:
    folder = put(tmp_path, 1, 2, options="labels: {stable: 1}")
    await registry.load_all()
    options = make_rollout_options({"candidate": 2})
    with ThreadPoolExecutor() as threads:
        rollout = LiveRollout("m", options, registry.find, time.monotonic_ns, threads, lambda *decision: None)
        registry.set_rollout("m", rollout)
        before = registry.find("m", "")
        builders.unnamed_dims(folder / "1" / "model.onnx")
        await registry.load("m")
        assert registry.find("m", "") is not before
        assert registry.find("m", "").rollout is rollout
        assert registry.find("m", "2").rollout is None


async def test_calls_load_an_evicted_model_first(tmp_path: Path, registry: Registry) -> None:
    put(tmp_path, 1, 2, options="{labels: {stable: 1}, version_policy: {all: true}}")
    await registry.load_all()
    service = LabelService(registry)
    for call, stable in ((partial(service.promote, "m", 2), 2), (partial(service.rollback, "m"), 1)):
        registry._draining.evict("m")
        await registry._draining.wait("m")
        await call()
        assert registry.find("m", "").version == str(stable)


async def test_load_by_a_client_without_an_evicted_version_loads_it_for_its_label(
    tmp_path: Path, registry: Registry
) -> None:
    folder = put(tmp_path, 1, options="version_policy: {all: true}")
    await registry.load_all()
    await registry.change_state("m", ModelState({"stable": 1}))
    registry._draining.evict("m")
    content = (folder / "1" / "model.onnx").read_bytes()
    await registry.load("m", config="{}", files={"file:2/model.onnx": content})
    assert states(registry) == {1: State.READY, 2: State.READY}
    assert registry.find("m", "").version == "1"


async def test_first_stable_label_for_a_missing_version_leaves_the_requests_of_an_evicted_model_alone(
    tmp_path: Path, registry: Registry
) -> None:
    folder = put(tmp_path, 1, options="")
    await registry.load_all()
    registry._draining.evict("m")
    (folder / "model.yaml").write_text("labels: {stable: 2}")
    await registry.load("m")
    assert registry.find("m", "").version == "1"
