"""A registry whose models are loaded by requests and evicted, with the real ONNX Runtime."""

import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from fakes.host_device import HostDevice
from fakes.inflight import submit_to
from held_files import held_file
from models import builders, members, sequences
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.core.inflight import InflightRequest
from ortserve.core.sequence import SequencePart
from ortserve.core.timing import Timing
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.engine.process_memory import HeldMemory
from ortserve.engine.provider_options import CPU
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry import changes, on_demand, version_loader
from ortserve.registry.catalog import ON_DEMAND, State
from ortserve.registry.ensemble.members import is_connected
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.registry import Registry
from ortserve.registry.repository.model_files import read_output_labels
from ortserve.service.models import ModelService
from ortserve.telemetry.metrics import Metrics

MIB = 1024 * 1024
Make = Callable[..., Registry]


@pytest.fixture
def prometheus() -> CollectorRegistry:
    return CollectorRegistry()


@pytest_asyncio.fixture
async def make(tmp_path: Path, prometheus: CollectorRegistry) -> AsyncIterator[Make]:
    """Creates a registry over ``tmp_path`` whose loads hold 2 MiB each, and closes it after the test."""
    made: list[Registry] = []

    def make_registry(
        memory_budget_bytes: int | None = None,
        runtime: DeviceRuntime | None = None,
        gpu_memory_budget_bytes: int | None = None,
    ) -> Registry:
        # Models without warm-up have no buffers on a device.
        options = LoadOptions.model_validate({"warmup_s": 0.1 if runtime else 0, "intra_op_threads": 1})
        registry = Registry(
            [tmp_path],
            options,
            Metrics(CollectorRegistry() if made else prometheus),
            time.monotonic_ns,
            runtime,
            memory_budget_bytes=memory_budget_bytes,
            gpu_memory_budget_bytes=gpu_memory_budget_bytes,
            on_demand_wait_s=30,
        )
        ledger = registry._room._ledger

        def held() -> HeldMemory:
            loaded = [account for account in list(ledger._accounts) if account.measured_bytes is not None]
            return HeldMemory(2 * MIB * (len(loaded) + len(ledger._loading)), 0)

        ledger._read = held  # type: ignore[misc]
        made.append(registry)
        return registry

    yield make_registry
    for registry in made:
        await asyncio.wait_for(registry.close(), 30)


def put(
    root: Path, name: str, version: int = 1, options: str = "", build: Callable[[Path], Path] = members.affine
) -> None:
    path = root / name / str(version) / "model.onnx"
    path.parent.mkdir(parents=True)
    build(path)
    if options:
        (root / name / "model.yaml").write_text(options)


def add_pair(root: Path, name: str = "pair", **more: str) -> Path:
    """An ensemble that uses ``m`` twice."""
    steps = [("m", {"a": "x"}, {"b": "t"}), ("m", {"a": "t"}, {"b": "y"})]
    return members.add_ensemble(root, name, ["x"], ["y"], steps, **more)


def states(registry: Registry, name: str) -> dict[int, tuple[State, str]]:
    return {record.version: (record.state, record.reason) for record in registry.records() if record.model == name}


async def ask(registry: Registry, name: str, version: str = "") -> str:
    """Send a request. Returns the version that answers."""
    served = await asyncio.wait_for(registry.wait_for(name, version), 30)
    await submit_to(served, (np.ones((1, 2), np.float32),), 1)
    return served.version


async def refused(registry: Registry, name: str, version: str = "") -> ServeError:
    with pytest.raises(ServeError) as caught:
        await ask(registry, name, version)
    return caught.value


def device_runtime() -> DeviceRuntime:
    """Host memory in place of a GPU, on which models of the CPU have buffers."""
    device = HostDevice()
    return DeviceRuntime(devices=Devices({CPU: DeviceProvider(lambda number: device)}))


def held_on_device(runtime: DeviceRuntime) -> int:
    (opened,) = runtime.devices.opened()
    return opened.ledger.total_bytes()


async def test_models_leave_a_device_whose_budget_they_exceed(tmp_path: Path, make: Make) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path, name, options="max_rows: 8\nload_policy: on_demand")
    runtime = device_runtime()
    registry = make(None, runtime)
    await registry.load_all()
    await ask(registry, "a")
    one = held_on_device(runtime)
    assert one > 1000, "the buffers of two batches"
    await registry.close()
    runtime = device_runtime()
    registry = make(None, runtime, gpu_memory_budget_bytes=2 * one)
    await registry.load_all()
    for name in ("a", "b", "c", "a", "b", "c"):
        assert await ask(registry, name) == "1"
    # The first loads expected less, the sizes of the files; the next load corrected that.
    assert held_on_device(runtime) <= 2 * one
    assert sum(record.state is State.READY for record in registry.records()) <= 2


async def test_model_larger_than_the_budget_of_a_device_says_so(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "a", options="max_rows: 8\nload_policy: on_demand")
    registry = make(10 * MIB, device_runtime(), gpu_memory_budget_bytes=100)
    await registry.load_all()
    error = await refused(registry, "a")
    assert error.kind is ErrorKind.NOT_READY
    assert "'a' needs about" in error.message
    assert "on cuda:0, gpu_memory_budget_bytes is 100 B" in error.message


async def test_the_budgets_of_host_and_device_hold_together(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "device", options="max_rows: 8\nload_policy: on_demand")
    put(tmp_path, "host", options="load_policy: pinned\ndevice_buffers: false")
    put(tmp_path, "third", options="load_policy: on_demand\ndevice_buffers: false")
    runtime = device_runtime()
    registry = make(int(4.5 * MIB), runtime, gpu_memory_budget_bytes=2**20)
    await registry.load_all()
    assert await ask(registry, "device") == "1"
    assert registry.find("device", "").device_bytes() == {"host:0": held_on_device(runtime)}
    assert registry.find("host", "").device_bytes() == {}
    assert await ask(registry, "third") == "1"
    assert states(registry, "device")[1] == (State.GONE, ON_DEMAND), "it left for the host's memory"
    assert held_on_device(runtime) == 0


async def test_version_does_not_leave_for_one_budget_if_the_other_one_has_no_room(tmp_path: Path, make: Make) -> None:
    registry = await load_two_versions(
        tmp_path, make, 4, runtime=device_runtime(), gpu_memory_budget_bytes=1 << 20, options="device_buffers: false"
    )
    (tmp_path / "m" / "3" / "weights").write_bytes(bytes(1 << 20))
    before = registry.find("m", "1")
    with pytest.raises(ServeError, match="on cuda:0, gpu_memory_budget_bytes is"):
        await asyncio.wait_for(registry.load("m"), 30)
    assert registry.find("m", "1") is before


async def test_load_of_an_ensemble_does_not_wait_for_memory_of_a_device(tmp_path: Path, make: Make) -> None:
    """The earlier load took more than half of the device's budget."""
    put(tmp_path, "m", options="max_rows: 8")
    add_pair(tmp_path)
    runtime = device_runtime()
    registry = make(None, runtime, gpu_memory_budget_bytes=1 << 20)
    await registry.load_all()
    room = registry._room
    member, pair = sorted(registry.records(), key=lambda record: record.model)
    assert member.source is not None
    assert pair.source is not None
    assert room.reserve(member, member.source) == 0
    room._gpu_budget_bytes = held_on_device(runtime)
    assert room._is_exceeded(), "the member's next load waits until the one before has left"
    assert room.reserve(pair, pair.source) == 0
    assert not room._is_exceeded()


async def test_reload_of_two_versions_does_not_wait_for_an_ensemble_that_follows_it(tmp_path: Path, make: Make) -> None:
    """The ensemble holds the old load of version 1 until both versions have loaded again, which exceeds the budget."""
    put(tmp_path, "m", 2)
    put(tmp_path, "m", 1, "{version_policy: {all: true}, labels: {stable: 1}}")
    add_pair(tmp_path)
    registry = make(int(6.5 * MIB))
    await registry.load_all()
    before = registry.find("m", "1")
    options = tmp_path / "m" / "model.yaml"
    options.write_text("{version_policy: {all: true}, labels: {stable: 1}, max_queue_rows: 7}")
    await asyncio.wait_for(registry.load("m"), 30)
    assert registry.find("m", "1") is not before
    assert await ask(registry, "pair") == "1"


@pytest.mark.parametrize("is_unloaded", [False, True])
async def test_request_for_an_ensemble_names_the_member_that_does_not_serve(
    tmp_path: Path, make: Make, is_unloaded: bool
) -> None:
    if is_unloaded:
        put(tmp_path, "m")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    await registry.unload("m")
    error = await refused(registry, "pair")
    assert error.kind is ErrorKind.NOT_READY
    assert "'m'" in error.message
    if not is_unloaded:
        put(tmp_path, "m")
    await registry.load("m")
    assert await ask(registry, "pair") == "1"


async def test_request_for_an_ensemble_does_not_load_a_member_that_failed(
    tmp_path: Path, make: Make, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, "m", build=builders.not_onnx)
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    for _ in range(3):
        assert "Protobuf parsing failed" in (await refused(registry, "pair")).message
    labels = {"model": "m", "outcome": "failed"}
    assert prometheus.get_sample_value("ortserve_model_loads_total", labels) == 1


async def test_ensemble_on_demand_comes_back_with_its_member(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    await ask(registry, "pair")
    await registry.unload("m")
    await registry.load("m")
    assert states(registry, "pair") == {1: (State.GONE, ON_DEMAND)}
    assert await ask(registry, "pair") == "1"


@pytest.mark.parametrize("comes", ["later", "back"])
async def test_ensemble_is_loaded_with_a_member_on_demand_that_a_poll_finds(
    tmp_path: Path, make: Make, comes: str
) -> None:
    add_pair(tmp_path, required="true")
    registry = make()
    if comes == "back":
        put(tmp_path, "m")
    await registry.load_all()
    if comes == "back":
        (tmp_path / "m").rename(tmp_path / ".m")
        await registry.poll()
    assert states(registry, "pair")[1][0] in (State.FAILED, State.GONE)
    put(tmp_path, "m", options="load_policy: on_demand")
    await registry.poll()
    assert states(registry, "pair") == {1: (State.READY, "")}


@pytest.mark.parametrize("way", ["request", "call", "poll"])
async def test_load_of_an_ensemble_evicts_none_of_its_members(tmp_path: Path, make: Make, way: str) -> None:
    for name in ("k", "m", "other"):
        put(tmp_path, name, options="load_policy: on_demand")
    steps = [("m", {"a": "x"}, {"b": "t"}), ("k", {"a": "t"}, {"b": "y"})]
    text = members.ensemble_text(["x"], ["y"], steps, load_policy="on_demand")
    folder = add_pair(tmp_path, load_policy="on_demand")
    if way != "poll":
        (folder / "model.yaml").write_text(text)
    registry = make(int(4.25 * MIB))
    await registry.load_all()
    await ask(registry, "m" if way != "poll" else "pair")  # from now on "m" is the least recently used
    await ask(registry, "other")
    for record in registry.records():
        record.stays_until_ns = 0
    if way == "call":
        await registry.load("pair")
    elif way == "poll":
        (folder / "model.yaml").write_text(text)
        await registry.poll()
    if way != "request":
        assert registry.ready_versions("pair") == [1]
    assert await ask(registry, "pair") == "1"
    assert registry.ready_versions("other") == []


async def test_changed_ensemble_in_memory_loads_the_members_that_it_needs_now(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    put(tmp_path, "other", options="load_policy: on_demand")
    folder = add_pair(tmp_path)
    registry = make()
    await registry.load_all()
    steps = [("m", {"a": "x"}, {"b": "t"}), ("other", {"a": "t"}, {"b": "y"})]
    (folder / "model.yaml").write_text(members.ensemble_text(["x"], ["y"], steps))
    await registry.poll()
    assert registry.ready_versions("other") == [1]
    assert registry.find("pair", "").properties["steps"] == "m/1, other/1"


async def test_server_stays_ready_while_a_request_loads_a_model(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make()
    service = ModelService(registry, server_name="", strict_readiness=True)
    await registry.load_all()
    readiness: set[bool] = set()
    registry.on_change = lambda: readiness.add(service.is_ready())
    await ask(registry, "m")
    assert readiness == {True}


@pytest.mark.parametrize("name", ["m", "pair"])
async def test_version_that_serves_answers_although_another_one_failed(tmp_path: Path, make: Make, name: str) -> None:
    put(tmp_path, "m", 2, build=builders.not_onnx)
    put(tmp_path, "m", 1, "{version_policy: {all: true}, load_policy: on_demand}")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    assert await ask(registry, name) == "1"
    assert "FAILED" in (await refused(registry, "m", "2")).message


async def test_request_loads_a_version_that_got_no_room_with_the_others(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", 2)
    put(tmp_path, "m", 1, "{version_policy: {all: true}, load_policy: on_demand}")
    put(tmp_path, "other", options="load_policy: pinned")
    registry = make(int(4.25 * MIB))
    await registry.load_all()
    assert await ask(registry, "m", "1") == "1"
    assert "too few" in (await refused(registry, "m", "2")).message
    await registry.unload("other")
    assert await ask(registry, "m", "2") == "2"


async def test_requests_that_do_not_wait_begin_the_load_of_a_version_that_got_no_room_now_and_then(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "m", 2)
    put(tmp_path, "m", 1, "{version_policy: {all: true}, load_policy: on_demand}")
    put(tmp_path, "other", options="load_policy: pinned")
    registry = make(int(4.25 * MIB))
    await registry.load_all()
    assert await ask(registry, "m", "1") == "1"

    async def begin() -> None:
        with pytest.raises(NotInMemoryError):
            registry.find_or_begin("m", "2")
        await asyncio.gather(*registry._tasks, return_exceptions=True)

    refused = registry._room._counts.refusals
    before = refused.total()
    for _ in range(3):
        await begin()
    assert refused.total() == before + 1
    await registry.unload("other")
    await begin()
    monkeypatch.setattr(on_demand, "_BEGIN_INTERVAL_NS", 0)
    await begin()
    assert registry.find_or_begin("m", "2").version == "2"


async def test_models_of_several_versions_leave_each_other_room_one_after_the_other(tmp_path: Path, make: Make) -> None:
    """There is room for one model and a half. Models with one of two versions in memory would all wait for room."""
    names, versions = ("a", "b", "c"), ("1", "2")
    for name in names:
        put(tmp_path, name, 2)
        put(tmp_path, name, 1, "{version_policy: {all: true}, load_policy: on_demand}")
    registry = make(int(6.5 * MIB))
    await registry.load_all()
    for _ in range(3):
        asked = [ask(registry, name, version) for name in names for version in versions]
        assert await asyncio.gather(*asked) == [*versions] * len(names)


async def load_two_versions(
    root: Path, make: Make, mib: int, options: str = "", third: Callable[[Path], Path] = members.affine, **budgets: Any
) -> Registry:
    """Load two versions of 2 MiB of a model under a budget, then put a third one, which replaces the first.

    Models that are there already are loaded, too.
    """
    put(root, "m", 2)
    put(root, "m", 1, f"version_policy: {{latest: 2}}\n{options}")
    registry = make(mib * MIB, **budgets)
    await registry.load_all()
    put(root, "m", 3, build=third)
    return registry


async def test_version_that_is_not_wanted_any_more_leaves_first_if_there_is_no_other_room(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "other", options="load_policy: pinned")
    add_pair(tmp_path)
    registry = await load_two_versions(tmp_path, make, 6, "load_policy: pinned")
    with held_file(tmp_path / "m" / "3" / "model.onnx") as file:
        loading = asyncio.create_task(asyncio.wait_for(registry.load("m"), 30))
        await file.wait()
        assert states(registry, "m")[1][0] in (State.DRAINING, State.GONE)
        assert await ask(registry, "m") == "2"
        assert await ask(registry, "pair") == "1"
    await loading
    assert await ask(registry, "m") == "3"
    assert await ask(registry, "m", "2") == "2"
    assert states(registry, "m")[1] == (State.GONE, "unloaded")
    assert await ask(registry, "pair") == "1"
    assert registry.memory_use().held_bytes == 6 * MIB


@pytest.mark.parametrize("kept", ["room", "label"])
async def test_version_that_is_not_wanted_any_more_serves_until_the_next_one_does(
    tmp_path: Path, make: Make, kept: str
) -> None:
    registry = await load_two_versions(
        tmp_path, make, 6 if kept == "room" else 4, "labels: {old: 1}" if kept == "label" else ""
    )
    with held_file(tmp_path / "m" / "3" / "model.onnx") as file:
        loading = asyncio.create_task(asyncio.wait_for(registry.load("m"), 30))
        if kept == "room":
            await file.wait()
            assert await ask(registry, "m", "1") == "1"
    if kept == "room":
        await loading
        assert states(registry, "m")[1][1] == "unloaded"
    else:
        with pytest.raises(ServeError, match="too few"):
            await loading
        assert await ask(registry, "m", "1") == "1"


async def test_version_that_left_for_one_that_fails_comes_back(tmp_path: Path, make: Make) -> None:
    registry = await load_two_versions(tmp_path, make, 4, third=builders.not_onnx)
    with pytest.raises(ServeError, match="Protobuf parsing failed"):
        await asyncio.wait_for(registry.load("m"), 30)
    assert await ask(registry, "m", "1") == "1"
    assert await ask(registry, "m") == "2"
    members.affine(tmp_path / "m" / "3" / "model.onnx")
    await asyncio.wait_for(registry.load("m"), 30)
    assert await ask(registry, "m") == "3"
    assert [record.version for record in registry.records() if record.state is State.READY] == [2, 3]


async def test_version_that_left_for_loads_that_were_superseded_comes_back_if_the_last_one_fails(
    tmp_path: Path, make: Make
) -> None:
    registry = await load_two_versions(tmp_path, make, 4)
    new, old = (tmp_path / "m" / str(version) / "model.onnx" for version in (3, 1))
    loads = []
    with held_file(old) as coming_back:
        with held_file(new) as first:
            loads.append(asyncio.create_task(registry.load("m")))
            await first.wait()
            members.affine(new.with_name("other"), 2).replace(new)
            loads.append(asyncio.create_task(registry.load("m")))
            while not registry.records_of("m")[-1].cancelled_because:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        await coming_back.wait()
        builders.not_onnx(new.with_name("broken")).replace(new)
        loads.append(asyncio.create_task(registry.load("m")))
        while not registry.records_of("m")[0].cancelled_because:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    ended = await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), 30)
    assert "Protobuf parsing failed" in str(ended[-1])
    assert await ask(registry, "m", "1") == "1"
    assert await ask(registry, "m") == "2"


async def test_unload_does_not_wait_for_a_version_that_left_for_the_next_one_to_come_back(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    registry = await load_two_versions(tmp_path, make, 4)
    with held_file(tmp_path / "m" / "3" / "model.onnx") as file:
        loading = asyncio.create_task(asyncio.wait_for(registry.load("m"), 30))
        await file.wait()
        caplog.set_level(logging.INFO)
        unloading = asyncio.create_task(registry.unload("m"))
        while not registry.records_of("m")[-1].cancelled_because:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    await asyncio.wait_for(unloading, 30)
    with pytest.raises(ServeError, match="the model is unloaded"):
        await loading
    assert "load cancelled" in caplog.messages[0]
    assert not [message for message in caplog.messages if message.startswith("model is ready")]


async def test_version_that_serves_on_for_one_that_failed_does_not_leave_for_a_new_load_of_another(
    tmp_path: Path, make: Make
) -> None:
    registry = await load_two_versions(tmp_path, make, 6, third=builders.not_onnx)
    with pytest.raises(ServeError, match="Protobuf parsing failed"):
        await asyncio.wait_for(registry.load("m"), 30)
    put(tmp_path, "other", options="load_policy: pinned")
    await registry.load("other")
    await registry._reconciler.load_again(registry.records_of("m")[1])
    assert await ask(registry, "m", "1") == "1"


async def test_versions_do_not_leave_for_one_that_has_no_room_without_them_either(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "other", options="load_policy: pinned")
    registry = await load_two_versions(tmp_path, make, 6)
    (tmp_path / "m" / "3" / "weights").write_bytes(bytes(3 * MIB))
    with pytest.raises(ServeError, match="too few"):
        await asyncio.wait_for(registry.load("m"), 30)
    assert await ask(registry, "m", "1") == "1"


async def test_only_version_serves_on_until_a_poll_finds_room_for_the_next_one(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_FIRST_RETRY_S", 0)
    put(tmp_path, "m")
    put(tmp_path, "other", options="load_policy: pinned")
    registry = make(4 * MIB)
    await registry.load_all()
    put(tmp_path, "m", 2)
    with pytest.raises(ServeError, match="too few"):
        await asyncio.wait_for(registry.load("m"), 30)
    assert await ask(registry, "m") == "1"
    (tmp_path / "other").rename(tmp_path / ".other")
    for _ in range(2):  # the first one unloads the other model
        await registry.poll()
    assert await ask(registry, "m") == "2"
    assert states(registry, "m")[1][1] == "unloaded"


async def test_refused_loads_are_logged_once(tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "pinned", options="load_policy: pinned")
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make(memory_budget_bytes=2 * MIB)
    await registry.load_all()
    caplog.set_level(logging.INFO, "ortserve")
    for _ in range(3):
        error = await refused(registry, "m")
        assert "models that cannot be evicted now hold" in error.message
    assert sum("model is not in memory" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("is_called", [False, True])
async def test_ensemble_is_loaded_as_soon_as_the_stable_version_of_its_member_has_room(
    tmp_path: Path, make: Make, is_called: bool
) -> None:
    put(tmp_path, "m", 2)
    put(tmp_path, "m", 1, "{version_policy: {all: true}, load_policy: on_demand, labels: {stable: 2}}")
    put(tmp_path, "other", options="load_policy: pinned")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make(int(4.25 * MIB))
    await registry.load_all()
    for _ in range(2):
        error = await refused(registry, "pair")
        assert "too few" in error.message
        assert error.retry_after_s == 1
    assert registry.ready_versions("m") == [1]
    await registry.unload("other")
    if is_called:
        await registry.load("pair")
    assert await ask(registry, "pair") == "1"
    assert registry.find("pair", "").properties["steps"] == "m/2, m/2"


async def test_ensemble_does_not_fail_while_requests_wait_for_a_load_of_its_member(tmp_path: Path, make: Make) -> None:
    """The member was evicted after the ensemble began to load, and its file is now held."""
    put(tmp_path, "m", options="load_policy: on_demand")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        waiting = asyncio.ensure_future(registry.wait_for("m", ""))
        await file.wait()
        async with registry._changes.lock("pair"):
            failures = await registry._reconciler.apply(registry._sources["pair"], is_forced=True)
        assert failures == ["version 1 is at UNAVAILABLE state: ensemble 'pair' depends on 'm', which is not in memory"]
        assert states(registry, "pair") == {1: (State.GONE, ON_DEMAND)}
    await asyncio.wait_for(waiting, 30)
    assert await ask(registry, "pair") == "1"


async def test_poll_offers_a_model_on_demand_again_that_failed(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_FIRST_RETRY_S", 0.0)
    put(tmp_path, "m", options="load_policy: on_demand")
    file = tmp_path / "m" / "1" / "model.onnx"
    good, stat = file.read_bytes(), file.stat()
    file.write_bytes(bytes(len(good)))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    registry = make()
    await registry.load_all()
    await refused(registry, "m")
    assert states(registry, "m")[1][0] is State.FAILED
    file.write_bytes(good)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await registry.poll()
    assert await ask(registry, "m") == "1"


@pytest.mark.parametrize("policy", ["start", "on_demand"])
async def test_version_that_served_before_an_eviction_serves_on_if_the_next_one_fails(
    tmp_path: Path, make: Make, prometheus: CollectorRegistry, policy: str
) -> None:
    put(tmp_path, "m", options=f"load_policy: {policy}")
    registry = make()
    await registry.load_all()
    assert await ask(registry, "m") == "1"
    registry._draining.evict("m")
    put(tmp_path, "m", 2, build=builders.not_onnx)
    await registry.poll()
    for _ in range(2):
        assert await ask(registry, "m") == "1"
        assert {version: state for version, (state, _) in states(registry, "m").items()} == {
            1: State.READY,
            2: State.FAILED,
        }
        registry._draining.evict("m")
    failures = {"model": "m", "outcome": "failed"}
    assert prometheus.get_sample_value("ortserve_model_loads_total", failures) == 1, "a retry is not due yet"
    (tmp_path / "m" / "2" / "model.onnx").write_bytes((tmp_path / "m" / "1" / "model.onnx").read_bytes())
    await registry.poll()
    assert await ask(registry, "m") == "2"
    assert [version for version, (state, _) in states(registry, "m").items() if state is State.READY] == [2]


async def test_request_waits_for_each_version_that_comes_back_if_the_next_one_fails(tmp_path: Path, make: Make) -> None:
    policy = "load_policy: on_demand\nversion_policy: {{{}}}"
    put(tmp_path, "m", 2)
    put(tmp_path, "m", options=policy.format("all: true"))
    registry = make()
    await registry.load_all()
    assert await ask(registry, "m") == "2"
    registry._draining.evict("m")
    put(tmp_path, "m", 3, policy.format("specific: [3]"), builders.not_onnx)
    await registry.poll()
    with held_file(tmp_path / "m" / "1" / "model.onnx") as file:
        first = asyncio.ensure_future(ask(registry, "m"))
        await asyncio.wait_for(file.wait(), 30)
        second = asyncio.ensure_future(ask(registry, "m", "2"))
        await asyncio.sleep(0)
    assert list(await asyncio.gather(first, second)) == ["2", "2"]


async def test_evicted_model_serves_on_while_its_configuration_is_broken(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    put(tmp_path, "never_loaded", options="load_policy: on_demand")
    registry = make()
    await registry.load_all()
    await ask(registry, "m")
    for _ in range(2):
        registry._draining.evict("m")
        for name in ("m", "never_loaded"):
            (tmp_path / name / "model.yaml").write_text("load_policy: [")
        await registry.poll()
        assert await ask(registry, "m") == "1"
        assert states(registry, "m")[1][1].startswith("model.yaml: is not YAML")
    assert "model.yaml: is not YAML" in (await refused(registry, "never_loaded")).message
    (tmp_path / "m" / "model.yaml").write_text("load_policy: on_demand")
    await registry.poll()
    assert states(registry, "m") == {1: (State.READY, "")}


async def test_evicted_version_whose_files_were_removed_leaves_the_reason_of_the_next_one(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make()
    await registry.load_all()
    await ask(registry, "m")
    registry._draining.evict("m")
    (tmp_path / "m" / "1").rename(tmp_path / "m" / "2")
    builders.not_onnx(tmp_path / "m" / "2" / "model.onnx")
    await registry.poll()
    assert "version 2 is at UNAVAILABLE state: " in (await refused(registry, "m")).message
    assert [state for state, _ in states(registry, "m").values()] == [State.FAILED]


async def test_label_moves_to_the_version_that_replaces_a_version_on_demand(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="{load_policy: on_demand, labels: {stable: 1}}")
    registry = make()
    await registry.load_all()
    (tmp_path / "m" / "1").rename(tmp_path / "m" / "2")
    (tmp_path / "m" / "model.yaml").write_text("{load_policy: on_demand, labels: {stable: 2}}")
    await registry.poll()
    assert await ask(registry, "m") == "2"
    assert await ask(registry, "m", "stable") == "2"


async def test_counts_go_on_over_an_eviction(tmp_path: Path, make: Make, prometheus: CollectorRegistry) -> None:
    put(tmp_path, "m", options="{buckets: [4], response_cache: true}")
    registry = make()
    await registry.load_all()

    def counts() -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in prometheus.collect()
            for sample in family.samples
            if family.type in ("counter", "histogram") and sample.labels.get("model") == "m"
        }

    await ask(registry, "m")
    before = counts()
    assert before["ortserve_staged_elements_total", "m", "1"] > 0
    registry._draining.evict("m")
    await ask(registry, "m")
    after = counts()
    assert {name: (count, after.get(name)) for name, count in before.items() if after.get(name, 0) < count} == {}
    assert after["ortserve_staged_elements_total", "m", "1"] == 2 * before["ortserve_staged_elements_total", "m", "1"]


async def test_failed_load_holds_no_memory(tmp_path: Path, make: Make, prometheus: CollectorRegistry) -> None:
    put(tmp_path, "m", build=builders.not_onnx)
    registry = make()
    await registry.load_all()
    assert registry._room._ledger.total_bytes == 0
    families = {family.name: family.samples for family in prometheus.collect()}
    assert families["ortserve_model_memory_bytes"] == []


async def test_load_of_a_member_on_demand_has_no_priority_at_the_start(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    add_pair(tmp_path)
    registry = make()
    await registry.load_all()
    assert [record.is_awaited for record in registry.records()] == [False, False]


async def test_members_of_required_ensembles_get_their_memory_first(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "a")
    put(tmp_path, "m")
    add_pair(tmp_path, required="true")
    registry = make(int(2.25 * MIB))
    await registry.load_all()
    assert (registry.ready_versions("pair"), registry.ready_versions("m")) == ([1], [1])
    assert states(registry, "a") == {1: (State.GONE, ON_DEMAND)}


async def test_more_instances_need_more_memory_than_the_last_load_took(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    registry = make(100 * MIB)
    await registry.load_all()
    assert registry._room.expect(registry._sources["m"]).nbytes == 2 * MIB
    (tmp_path / "m" / "model.yaml").write_text("instances: 8")
    changed = await registry._reader.read("m")
    assert changed is not None
    assert registry._room.expect(changed).nbytes > 4 * MIB


async def test_model_of_a_client_that_got_no_room_waits_for_no_request(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "other", options="load_policy: pinned")
    registry = make(int(2.25 * MIB))
    await registry.load_all()
    content = members.affine(tmp_path.parent / "sent.onnx").read_bytes()
    with pytest.raises(ServeError, match="too few"):
        await registry.load("m", config="{}", files={"file:1/model.onnx": content})
    assert (await refused(registry, "m")).kind is ErrorKind.NOT_FOUND


async def test_request_during_the_start_learns_when_to_retry(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "a")
    put(tmp_path, "m")
    registry = make(int(2.25 * MIB))
    await registry.load_all()
    (record,) = (record for record in registry.records() if record.model == "m")
    assert record.no_room is not None
    assert record.no_room.retry_after_s == 1


async def test_unload_ends_the_loads_of_all_versions_that_wait_for_a_slot(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "slow")
    put(tmp_path, "m", options="load_policy: on_demand\nversion_policy: {all: true}")
    put(tmp_path, "m", 2)
    registry = make(100 * MIB)
    with held_file(tmp_path / "slow" / "1" / "model.onnx") as file:
        slow = asyncio.ensure_future(registry.load("slow"))
        await file.wait()
        waiting = asyncio.ensure_future(registry.load("m"))
        while not registry._versions.is_loading("m"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        await asyncio.wait_for(registry.unload("m"), 30)
        with pytest.raises(ServeError, match="its load was cancelled: the model is unloaded"):
            await waiting
    await asyncio.wait_for(slow, 30)
    assert registry._room._ledger.total_bytes == 2 * MIB


async def test_request_waits_for_a_load_by_call_of_an_evicted_model(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    registry = make()
    await registry.load_all()
    registry._draining.evict("m")
    loading = asyncio.ensure_future(registry.load("m"))
    while states(registry, "m")[1][0] is not State.LOADING:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    assert await ask(registry, "m") == "1"
    await loading


async def test_request_waits_for_a_load_by_call_with_a_label_for_a_new_version(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand", build=builders.slow)
    registry = make()
    await registry.load_all()
    running = submit_to(await registry.wait_for("m", ""), (np.ones((1, 4), np.float32),), 1)
    registry._draining.evict("m")
    put(tmp_path, "m", 2, build=builders.slow)
    (tmp_path / "m" / "model.yaml").write_text("{load_policy: on_demand, labels: {stable: 2}}")
    loading = asyncio.ensure_future(registry.load("m"))
    answering = set()
    while not loading.done():
        if registry.labels("m"):  # while the last load drains, and while the next one is under way
            answering.add((await registry.wait_for("m", "")).version)
        await asyncio.sleep(0)
    assert answering == {"2"}
    await running
    await loading


async def test_request_waits_for_another_version_of_a_client_if_one_fails(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make()
    await registry.load_all()
    content = members.affine(tmp_path.parent / "sent.onnx").read_bytes()
    files = {"file:1/model.onnx": b"no model", "file:2/model.onnx": content}
    loading = asyncio.ensure_future(registry.load("m", config='{"version_policy": {"all": {}}}', files=files))
    while states(registry, "m")[1][0] is not State.FAILED:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    assert await ask(registry, "m") == "2"
    with pytest.raises(ServeError, match="version 1 is at UNAVAILABLE state"):
        await loading


@pytest.mark.parametrize("reason", ["files of a client", "a live sequence"])
async def test_model_that_would_not_come_back_whole_is_not_evicted(tmp_path: Path, make: Make, reason: str) -> None:
    put(tmp_path, "other", options="load_policy: on_demand")
    options = """{load_policy: on_demand, sequences: {states: [{input: STATE, output: NEXT}]}}"""
    put(tmp_path, "kept", options=options, build=sequences.delayed)
    registry = make(int(2.25 * MIB))
    await registry.load_all()

    async def send(part: SequencePart) -> None:
        served = await registry.wait_for("kept", "")
        request = InflightRequest(Timing(0), (np.ones((1, 4), np.float32),), 1)
        served.submit_part(request, served.terms(0), part)
        await request

    if reason == "a live sequence":
        await send(SequencePart(5, is_start=True))
    else:
        content = members.affine(tmp_path.parent / "sent.onnx").read_bytes()
        await registry.load("sent", config="{}", files={"file:1/model.onnx": content})
    assert "models that cannot be evicted now hold 2.0 MiB" in (await refused(registry, "other")).message
    if reason == "a live sequence":
        await send(SequencePart(5, is_end=True))
    else:
        await registry.unload("sent")
    assert await ask(registry, "other") == "1"


async def test_model_of_a_client_stays_in_memory_after_a_load_from_its_folder_has_failed(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "other", options="load_policy: on_demand")
    put(tmp_path, "m")
    registry = make(int(4.75 * MIB))
    await registry.load_all({"other"})
    content = members.affine(tmp_path.parent / "sent.onnx").read_bytes()
    await registry.load("m", config="{}", files={"file:1/model.onnx": content})
    folder = tmp_path / "m" / "1" / "model.onnx"
    good = folder.read_bytes()
    folder.write_bytes(b"no model")
    with pytest.raises(ServeError, match="expected an ONNX model"):
        await registry.load("m")
    registry._room._budget_bytes = int(2.25 * MIB)
    assert "models that cannot be evicted now hold 2.0 MiB" in (await refused(registry, "other")).message
    assert await ask(registry, "m") == "1"
    folder.write_bytes(good)
    registry._room._budget_bytes = int(4.75 * MIB)
    await registry.load("m")
    registry._room._budget_bytes = int(2.25 * MIB)
    assert await ask(registry, "other") == "1"


@pytest.mark.parametrize("labels", ["", "\nlabels: {stable: 1}"])
@pytest.mark.parametrize("is_valid", [True, False])
async def test_request_for_a_model_on_demand_waits_for_a_load_by_a_client(
    tmp_path: Path, make: Make, labels: str, is_valid: bool
) -> None:
    put(tmp_path, "m", options=f"load_policy: on_demand{labels}")
    registry = make()
    await registry.load_all()
    content = members.affine(tmp_path.parent / "sent.onnx").read_bytes() if is_valid else b"no model"
    loading = asyncio.ensure_future(registry.load("m", config="{}", files={"file:2/model.onnx": content}))
    while 2 not in states(registry, "m"):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    assert await ask(registry, "m") == ("2" if is_valid else "1")
    (error,) = await asyncio.gather(loading, return_exceptions=True)
    assert is_valid is not isinstance(error, ServeError)
    assert states(registry, "m") == ({2: (State.READY, "")} if is_valid else {1: (State.READY, "")})


def ensemble_of(member: str) -> str:
    """Triton's configuration of an ensemble with one step."""
    tensors = [{"name": name, "data_type": "TYPE_FP32", "dims": [2]} for name in "xy"]
    step = {"model_name": member, "model_version": -1, "input_map": {"x": "x"}, "output_map": {"y": "y"}}
    config = {"platform": "ensemble", "ensemble_scheduling": {"step": [step]}}
    return json.dumps({**config, "input": tensors[:1], "output": tensors[1:]})


async def test_ensemble_on_demand_is_loaded_on_request_after_a_client_made_it_contain_itself(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "m")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    with pytest.raises(ServeError, match="circular dependency between ensembles: pair -> pair"):
        await registry.load("pair", config=ensemble_of("pair"))
    assert states(registry, "pair") == {1: (State.GONE, ON_DEMAND)}
    assert await ask(registry, "pair") == "1"


async def test_request_for_an_ensemble_on_demand_waits_for_a_load_by_a_client_that_fails(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "m")
    add_pair(tmp_path, load_policy="on_demand")
    registry = make()
    await registry.load_all()
    loading = asyncio.ensure_future(registry.load("pair", config=ensemble_of("nope")))
    while states(registry, "pair")[1][0] is not State.LOADING:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    assert await ask(registry, "pair") == "1"
    with pytest.raises(ServeError, match="nope"):
        await loading


@pytest.mark.parametrize("file", ["file:1/model.onnx", "file:2/model.onnx", ""])
async def test_model_of_a_folder_is_evicted_and_loaded_again_after_a_load_by_a_client_has_failed(
    tmp_path: Path, make: Make, file: str
) -> None:
    put(tmp_path, "other", options="load_policy: on_demand")
    put(tmp_path, "m")
    registry = make(int(4.75 * MIB))
    await registry.load_all({"m", "other"})
    config = "{}" if file else '{"input": [{"name": "z", "data_type": "TYPE_FP32", "dims": [2]}]}'
    with pytest.raises(ServeError, match="expected an ONNX model" if file else "unexpected inference input 'z'"):
        await registry.load("m", config=config, files={file: b"no model"} if file else None)
    registry._room._budget_bytes = int(2.25 * MIB)
    assert await ask(registry, "other") == "1"
    assert states(registry, "m")[1] == (State.GONE, ON_DEMAND)
    assert await ask(registry, "m") == "1"


@pytest.mark.parametrize("file", ["file:1/model.onnx", "file:3/model.onnx", ""])
async def test_model_that_is_not_in_memory_is_loaded_by_a_request_after_a_load_by_a_client_has_failed(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    put(tmp_path, "m", 1)
    put(tmp_path, "m", 2, "{load_policy: on_demand, version_policy: {all: true}, labels: {stable: 1}}")
    registry = make()
    await registry.load_all()
    config = "{}" if file else '{"input": [{"name": "z", "data_type": "TYPE_FP32", "dims": [2]}]}'
    with pytest.raises(ServeError, match="expected an ONNX model" if file else "unexpected inference input 'z'"):
        await registry.load("m", config=config, files={file: b"no model"} if file else None)
    assert states(registry, "m") == dict.fromkeys((1, 2), (State.GONE, ON_DEMAND))
    assert registry.labels("m") == {"stable": 1}
    assert "labels changed" not in caplog.text
    assert await ask(registry, "m") == "1"
    assert await ask(registry, "m", "2") == "2"


async def test_evicted_version_for_which_a_load_by_a_client_failed_is_on_demand_again_with_its_label(
    tmp_path: Path, make: Make
) -> None:
    put(tmp_path, "m", build=lambda path: builders.identity(path, shape=("batch", 2)))
    put(tmp_path, "m", 2, "{version_policy: {all: true}, labels: {stable: 1}}")
    registry = make()
    await registry.load_all()
    registry._draining.evict("m")
    config = {"version_policy": {"all": {}}, "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [-1, 2]}]}
    with pytest.raises(ServeError, match="version 1 is at UNAVAILABLE state: unexpected inference input 'a'"):
        await registry.load("m", config=json.dumps(config))
    for reason in ("unexpected inference input 'a', allowed inputs are: x", ""):
        assert await ask(registry, "m") == "1"
        assert await ask(registry, "m", "2") == "2"
        assert states(registry, "m") == {1: (State.READY, reason), 2: (State.READY, "")}
        assert registry.labels("m") == {"stable": 1}
        registry._draining.evict("m")
    content = members.affine(tmp_path.parent / "sent.onnx").read_bytes()
    files = {"file:1/model.onnx": b"no model", "file:2/model.onnx": content, "file:3/model.onnx": b"no model"}
    with pytest.raises(ServeError, match=r"version 1 is at .*; version 3 is at UNAVAILABLE state: "):
        await registry.load("m", config=json.dumps({"version_policy": {"all": {}}}), files=files)
    assert {version: state for version, (state, _) in states(registry, "m").items()} == dict.fromkeys(
        (1, 2), State.READY
    )
    assert await ask(registry, "m") == "1"


async def test_evicted_version_serves_on_if_its_new_configuration_does_not_fit(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make()
    await registry.load_all()
    await ask(registry, "m")
    registry._draining.evict("m")
    (tmp_path / "m" / "model.yaml").write_text("{load_policy: on_demand, inputs: {z: {dims: [2]}}}")
    await registry.poll()
    assert await ask(registry, "m") == "1"
    assert states(registry, "m") == {1: (State.READY, "unexpected inference input 'z', allowed inputs are: a")}
    registry._draining.evict("m")
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"no model")
    await registry.poll()
    assert "expected an ONNX model" in (await refused(registry, "m")).message
    assert states(registry, "m")[1][0] is State.FAILED


async def test_load_begins_when_the_evicted_model_has_answered_and_is_freed(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    put(tmp_path, "slow", options="load_policy: on_demand", build=builders.slow)
    registry = make(int(2.25 * MIB))
    await registry.load_all()
    running = submit_to(await registry.wait_for("slow", ""), (np.ones((1, 4), np.float32),), 1)
    beside: set[tuple[State, bool]] = set()

    def look() -> None:
        states_now = {record.model: record.state for record in registry.records()}
        if states_now["m"] in (State.WARMING, State.READY):
            beside.add((states_now["slow"], running.request.is_settled))

    registry.on_change = look
    assert await ask(registry, "m") == "1"
    await running
    assert beside == {(State.GONE, True)}


async def test_unload_of_an_evicted_model_ends_its_series(
    tmp_path: Path, make: Make, prometheus: CollectorRegistry
) -> None:
    put(tmp_path, "m")
    registry = make()
    await registry.load_all()
    await ask(registry, "m")
    registry._draining.evict("m")
    await registry._draining.wait("m")

    def shown() -> set[str]:
        return {
            one.name for family in prometheus.collect() for one in family.samples if one.labels.get("version") == "1"
        }

    assert "ortserve_model_state" in shown()
    await registry.unload("m")
    assert "ortserve_model_state" not in shown()


async def test_unloaded_version_does_not_come_back_when_the_next_one_fails(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    registry = make()
    await registry.load_all()
    await registry.unload("m")
    put(tmp_path, "m", 2, build=builders.not_onnx)
    with pytest.raises(ServeError, match="version 2 is at UNAVAILABLE state: "):
        await registry.load("m")
    assert State.READY not in {state for state, _ in states(registry, "m").values()}


@pytest.mark.parametrize(("policy", "budget_bytes"), [("on_demand", 3 * MIB), ("start", 1024 * MIB)])
async def test_load_costs_the_loop_the_same_beside_many_models(
    tmp_path: Path, make: Make, policy: str, budget_bytes: int
) -> None:
    """With the small budget, ``a`` is loaded in place of ``b``; with the large one, beside all others."""
    options = f"load_policy: {policy}"
    for name in ("a", "b"):
        put(tmp_path, name, options=options)
    registry = make(budget_bytes)
    await registry.load_all()

    async def count_calls() -> Counter[str]:
        """Count calls on the loop's thread, except the sums of the ledger, which still grow with the models."""
        await registry.unload("a")
        await ask(registry, "b")
        for record in registry.records():
            record.stays_until_ns = 0  # Otherwise the load might have to wait, which takes further calls.
        counts: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and not frame.f_code.co_filename.endswith("ledger.py"):
                counts[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

        sys.setprofile(note)
        try:
            await registry.load("a")
        finally:
            sys.setprofile(None)
        return counts

    await count_calls()  # From the second load on, its cost is known.
    few = await count_calls()
    for number in range(60):
        put(tmp_path, f"other{number}", options=options)
    await registry.poll()
    many = await count_calls()
    in_memory = [record.model for record in registry.records() if record.state is State.READY]
    assert len(in_memory) == (1 if policy == "on_demand" else 62)
    assert few.total() > 200
    assert (many - few).total() < 50, (many - few).most_common(5)


async def test_request_waits_again_if_its_model_leaves_memory_as_soon_as_it_is_there(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "m", options="load_policy: on_demand")
    registry = make()
    await registry.load_all()
    on_demand = registry.wait_for.__self__  # type: ignore[attr-defined]
    load, loads = on_demand._load, 0

    async def load_and_evict(name: str) -> None:
        nonlocal loads
        await load(name)
        loads += 1
        if loads == 1:
            registry._draining.evict(name)

    monkeypatch.setattr(on_demand, "_load", load_and_evict)
    assert await ask(registry, "m") == "1"
    assert loads == 2


async def test_ensemble_is_loaded_if_a_member_left_memory_for_a_moment(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "m")
    add_pair(tmp_path)
    registry = make()
    await registry.load_all()
    registry._draining.evict("pair")
    found = Mock(side_effect=[NotInMemoryError("'m' is not in memory"), (registry.find("m", ""),) * 2])
    monkeypatch.setattr("ortserve.registry.version_loader.find_members", found)
    assert await ask(registry, "pair") == "1"


def add_deep(root: Path) -> None:
    """Two ensembles of ``m``: ``pair``, and ``deep``, which contains both of them."""
    add_pair(root)
    steps = [("pair", {"x": "x"}, {"y": "t"}), ("m", {"a": "t"}, {"b": "y"})]
    members.add_ensemble(root, "deep", ["x"], ["y"], steps)


async def test_request_waits_until_the_members_of_its_ensemble_are_reconnected(tmp_path: Path, make: Make) -> None:
    put(tmp_path, "m")
    add_deep(tmp_path)
    registry = make()
    await registry.load_all()
    registry._draining.evict("deep")
    before = registry.find("m", "")
    members.affine(tmp_path / "m" / "1" / "model.onnx", 2)
    async with registry._changes.lock("pair"):
        reload = asyncio.ensure_future(registry.load("m"))
        while registry.find("m", "") is before:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        tried, asked = asyncio.Event(), asyncio.ensure_future(ask(registry, "deep"))
        seen: list[State] = []

        def look() -> None:
            seen.append(states(registry, "deep")[1][0])
            if seen[-1] > State.READY and State.LOADING in seen:
                tried.set()

        registry.on_change = look
        await asyncio.wait_for(tried.wait(), 30)
        assert states(registry, "deep") == {1: (State.GONE, ON_DEMAND)}, "pair uses the load before"
    assert await asked == "1"
    await asyncio.wait_for(reload, 30)


async def test_ensemble_serves_while_a_label_moves_during_its_reconnection(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "m", options="version_policy: {all: true}")
    put(tmp_path, "m", 2)
    add_deep(tmp_path)
    registry = make()
    await registry.load_all()
    loop = asyncio.get_running_loop()
    loads = 0

    async def move(version: int) -> None:
        registry._catalog.set_labels("m", {"stable": version})

    def move_before_reading(options: ModelOptions, folder: Path | None) -> dict[str, tuple[str, ...]]:
        nonlocal loads
        loads += 1
        if loads == 2:  # of the deep one; pair has the other version
            asyncio.run_coroutine_threadsafe(move(2), loop).result()
        return read_output_labels(options, folder)

    monkeypatch.setattr(version_loader, "read_output_labels", move_before_reading)
    is_served: list[bool] = []
    registry.on_change = lambda: is_served.append(registry._catalog.serves("deep", ""))
    await move(1)
    await asyncio.wait_for(registry._reconciler.settle_labels("m"), 30)
    await asyncio.wait_for(registry._reconciler.settle_labels("m"), 30)
    assert all(is_served)
    assert loads >= 3
    deep = registry.find("deep", "")
    assert isinstance(deep, ServedEnsemble)
    assert is_connected(deep, registry._catalog)
