"""The start of a registry with a folder and a store in memory, with the real ONNX Runtime."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from fakes.store import StoreInMemory
from held_files import HeldFile, held_file
from models import members
from ortserve.config.model import LoadOptions
from ortserve.engine.process_memory import HeldMemory
from ortserve.registry.catalog import State
from ortserve.registry.registry import Registry
from ortserve.registry.stores import mirrors
from ortserve.registry.stores.cache import StoreCache
from ortserve.registry.stores.mirror import Mirror
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S

MIB = 1024 * 1024


class Start:
    """A registry of the folder ``models`` and of a store that has one model, ``far``, whose content does not arrive.

    With ``is_local``, it has the folder alone, and polls begin with the loads.
    """

    def __init__(
        self, folder: Path, budget_bytes: int | None = None, configuration: str = "", *, is_local: bool = False
    ) -> None:
        self.models = folder / "models"
        self.models.mkdir()
        self.store = StoreInMemory(far=members.affine(folder / "far.onnx", 1, 1).read_bytes())
        if configuration:
            self.store.files["far/model.yaml"] = configuration.encode()
        self.arrive = self.store.slow["far/1/model.onnx"] = threading.Event()
        cache = StoreCache(folder / "cache", 10**6)
        options = LoadOptions(warmup_s=0, intra_op_threads=1)
        mirror = Mirror("s3://b", self.store, cache, cache.view / "repository-0", options, time.monotonic_ns)
        folders, stores = [self.models, mirror.folder], mirrors.Mirrors([mirror], cache)
        self.prometheus = CollectorRegistry()
        self.registry = Registry(
            folders[:1] if is_local else folders,
            options,
            Metrics(self.prometheus),
            time.monotonic_ns,
            mirrors=None if is_local else stores,
            memory_budget_bytes=budget_bytes,
        )

    def put(self, name: str, options: str = "") -> None:
        (self.models / name / "1").mkdir(parents=True)
        members.affine(self.models / name / "1" / "model.onnx", 2, 0)
        if options:
            (self.models / name / "model.yaml").write_text(options)

    def hold_2_mib_per_model(self) -> None:
        ledger = self.registry._room._ledger

        def held() -> HeldMemory:
            loaded = [account for account in list(ledger._accounts) if account.measured_bytes is not None]
            return HeldMemory(2 * MIB * (len(loaded) + len(ledger._loading)), 0)

        ledger._read = held  # type: ignore[misc]

    def states(self) -> dict[str, State]:
        return {record.model: record.state for record in self.registry.records()}

    def failed_loads(self) -> dict[str, float]:
        counts = {
            name: self.prometheus.get_sample_value("ortserve_model_loads_total", {"model": name, "outcome": "failed"})
            for name in self.states()
        }
        return {name: count for name, count in counts.items() if count}

    async def reach(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError


@pytest_asyncio.fixture
async def local(tmp_path: Path) -> AsyncIterator[Start]:
    """A registry of a folder, with room for two models of 2 MiB, which loads one model at a time."""
    start = Start(tmp_path, int(4.25 * MIB), is_local=True)
    start.hold_2_mib_per_model()
    yield start
    await start.registry.close()


@pytest_asyncio.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr(mirrors, "_ARRIVALS_INTERVAL_S", 0.01)
    start = Start(tmp_path)
    yield start
    start.arrive.set()
    await start.registry.close()


async def test_ensemble_whose_member_loads_since_an_earlier_arrival_waits_for_it(start: Start) -> None:
    members.add_ensemble(
        start.models, "chain", ["x"], ["y"], [("slow", {"a": "x"}, {"b": "t"}), ("far", {"a": "t"}, {"b": "y"})]
    )
    members.add_ensemble(start.models, "outer", ["x"], ["y"], [("chain", {"x": "x"}, {"y": "y"})])
    with held_file(members.affine(start.models / "slow.onnx", 1, 1)) as file:
        loading = asyncio.create_task(start.registry.load_all())
        await file.wait()
        start.arrive.set()
        await start.reach(lambda: start.states().get("far") is State.READY)
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == dict.fromkeys(("slow", "far", "chain", "outer"), State.READY)
    assert start.failed_loads() == {}


async def test_member_on_demand_is_loaded_when_its_ensemble_is(start: Start) -> None:
    start.put("lazy", "load_policy: on_demand")
    members.add_ensemble(
        start.models, "chain", ["x"], ["y"], [("lazy", {"a": "x"}, {"b": "t"}), ("far", {"a": "t"}, {"b": "y"})]
    )
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: "lazy" in start.states())
    assert start.states() == {"lazy": State.GONE}
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert {state.model: state.state for state in start.registry.records() if state.state is not State.GONE} == (
        dict.fromkeys(("lazy", "far", "chain"), State.READY)
    )


async def test_model_that_was_unloaded_during_the_start_stays_unloaded(start: Start) -> None:
    start.put("near")
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states().get("near") is State.READY)
    assert not start.registry.is_loaded
    await start.registry.unload("near")
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.registry.is_loaded
    assert start.states() == {"near": State.GONE, "far": State.READY}


async def test_model_that_was_unloaded_during_its_load_at_the_start_stays_unloaded(start: Start) -> None:
    start.put("near")
    with held_file(start.models / "near" / "1" / "model.onnx") as file:
        loading = asyncio.create_task(start.registry.load_all())
        await file.wait()
        unloading = asyncio.create_task(start.registry.unload("near"))
        await start.reach(lambda: all(record.cancelled_because for record in start.registry.records_of("near")))
    await asyncio.wait_for(unloading, LONG_S)
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == {"far": State.READY}


async def test_model_that_was_unloaded_after_its_load_failed_at_the_start_is_not_tried_again(start: Start) -> None:
    start.put("near")
    (start.models / "near" / "1" / "model.onnx").write_bytes(b"no model")
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states().get("near") is State.FAILED)
    await start.registry.unload("near")
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == {"far": State.READY}


async def test_member_on_demand_that_was_unloaded_with_its_ensemble_stays_unloaded(start: Start) -> None:
    start.put("lazy", "load_policy: on_demand")
    members.add_ensemble(start.models, "chain", ["x"], ["y"], [("lazy", {"a": "x"}, {"b": "y"})])
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states().get("chain") is State.READY)
    await start.registry.unload("chain", with_members=True)
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == {"lazy": State.GONE, "chain": State.GONE, "far": State.READY}


async def test_member_on_demand_that_fails_is_not_tried_again_at_each_arrival(start: Start) -> None:
    start.put("lazy", "load_policy: on_demand")
    (start.models / "lazy" / "1" / "model.onnx").write_bytes(b"no model")
    members.add_ensemble(start.models, "chain", ["x"], ["y"], [("lazy", {"a": "x"}, {"b": "y"})])
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states().get("chain") is State.FAILED)
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.failed_loads() == {"lazy": 1, "chain": 1}


@pytest.mark.parametrize("options", ["required: true", "load_policy: pinned", ""])
async def test_memory_goes_to_the_models_that_come_first_whenever_their_files_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """There is room for two models of 2 MiB. The one that arrives last is the second by name."""
    monkeypatch.setattr(mirrors, "_ARRIVALS_INTERVAL_S", 0.01)
    start = Start(tmp_path, int(4.25 * MIB), options)
    start.hold_2_mib_per_model()
    for name in ("a", "lazy", "near", "other"):
        start.put(name, "load_policy: on_demand" if name == "lazy" else "")
    members.add_ensemble(start.models, "sum", ["x"], ["y"], [("near", {"a": "x"}, {"b": "y"})])
    loading = asyncio.create_task(start.registry.load_all())
    early = {"a": State.READY, "near": State.READY, "sum": State.READY, "lazy": State.GONE, "other": State.GONE}
    await start.reach(lambda: start.states() == early)
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == dict.fromkeys(early, State.GONE) | {"a": State.READY, "far": State.READY}
    assert all(record.is_on_demand for record in start.registry.records() if record.state is State.GONE)
    assert start.failed_loads() == {}
    await start.registry.close()


async def test_model_without_room_that_was_unloaded_during_the_start_stays_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_ARRIVALS_INTERVAL_S", 0.01)
    start = Start(tmp_path, int(6.25 * MIB))
    start.hold_2_mib_per_model()
    for name in ("a", "b", "c", "other"):
        start.put(name)
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states() == dict.fromkeys("abc", State.READY) | {"other": State.GONE})
    for name in ("b", "c", "other"):
        await start.registry.unload(name)
    start.arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == dict.fromkeys(("b", "c", "other"), State.GONE) | dict.fromkeys(("a", "far"), State.READY)
    await start.registry.close()


async def test_required_ensemble_whose_configuration_arrives_last_gets_its_member_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_ARRIVALS_INTERVAL_S", 0.01)
    start = Start(tmp_path, int(4.25 * MIB), "required: true")
    start.hold_2_mib_per_model()
    start.put("a")
    start.put("z")
    steps = [("z", {"a": "x"}, {"b": "t"}), ("far", {"a": "t"}, {"b": "y"})]
    folder = members.add_ensemble(tmp_path / "ensembles", "sum", ["x"], ["y"], steps, required="true")
    start.store.files |= {"sum/model.yaml": (folder / "model.yaml").read_bytes(), "sum/1/.keep": b""}
    arrive = start.store.slow["sum/model.yaml"] = threading.Event()
    loading = asyncio.create_task(start.registry.load_all())
    await start.reach(lambda: start.states() == {"a": State.READY, "z": State.READY})
    start.arrive.set()
    await start.reach(lambda: start.states() == {"a": State.READY, "z": State.GONE, "far": State.READY})
    arrive.set()
    await asyncio.wait_for(loading, LONG_S)
    assert start.states() == {"a": State.GONE, "z": State.READY, "far": State.READY, "sum": State.READY}
    assert start.failed_loads() == {}
    await start.registry.close()


def add_chain(start: Start, *steps: str) -> None:
    """An ensemble of models that were put, one after the other."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
    chained = [(step, {"a": tensors[place]}, {"b": tensors[place + 1]}) for place, step in enumerate(steps)]
    members.add_ensemble(start.models, "chain", ["x"], ["y"], chained)


@pytest.mark.parametrize("with_members", [True, False])
async def test_ensemble_that_is_unloaded_while_its_member_loads_at_the_start_stays_unloaded(
    local: Start, with_members: bool
) -> None:
    local.put("near")
    add_chain(local, "near")
    with held_file(local.models / "near" / "1" / "model.onnx") as file:
        loading = asyncio.create_task(local.registry.load_all())
        await file.wait()
        unloading = asyncio.create_task(local.registry.unload("chain", with_members=with_members))
        await local.reach(lambda: unloading.done() or bool(local.registry.records_of("near")[0].cancelled_because))
    await asyncio.wait_for(asyncio.gather(loading, unloading), LONG_S)
    assert local.states() == ({} if with_members else {"near": State.READY})


async def test_member_that_changes_at_the_start_delays_its_ensemble_which_does_not_fail(local: Start) -> None:
    local.put("near")
    add_chain(local, "near")
    path = local.models / "near" / "1" / "model.onnx"
    with held_file(path) as file:
        loading = asyncio.create_task(local.registry.load_all())
        await file.wait()
        new = members.affine(local.models / ".new", 3, 0)
        with held_file(new) as newer:
            new.rename(path)
            change = await local.registry.begin_poll()
            file.release()
            await newer.wait()
            assert local.states() == {"near": State.LOADING}
    await asyncio.wait_for(asyncio.gather(loading, change), LONG_S)
    assert local.states() == {"near": State.READY, "chain": State.READY}
    assert local.failed_loads() == {}


async def test_models_that_are_removed_during_the_start_do_not_serve(local: Start) -> None:
    local.put("a")
    local.put("near")
    add_chain(local, "near")
    with held_file(local.models / "a" / "1" / "model.onnx") as file:
        loading = asyncio.create_task(local.registry.load_all())
        await file.wait()
        for name in ("near", "chain"):
            (local.models / name).rename(local.models / f".{name}")
        await local.registry.poll()
        assert local.states() == {"a": State.LOADING}
    await asyncio.wait_for(loading, LONG_S)
    assert local.states() == {"a": State.READY}
    assert local.failed_loads() == {}


@pytest.mark.parametrize("options", ["required: true", ""])
async def test_start_ends_after_the_load_that_supersedes_one_of_its_loads(local: Start, options: str) -> None:
    """The first load of ``near`` waits for that of ``a`` and ends at once when it is superseded."""
    local.put("a", "required: true")
    local.put("near", options)
    path = local.models / "near" / "1" / "model.onnx"
    new = members.affine(local.models / ".new", 3, 0)
    with held_file(new) as newer:
        with held_file(local.models / "a" / "1" / "model.onnx") as file:
            loading = asyncio.create_task(local.registry.load_all())
            await file.wait()
            new.rename(path)
            change = await local.registry.begin_poll()
        await newer.wait()
        await local.reach(lambda: local.states()["a"] is State.READY)
        await local.registry.wait_for_poll(0)
        assert not local.registry.is_loaded
    await asyncio.wait_for(asyncio.gather(loading, change), LONG_S)
    assert local.registry.is_loaded
    assert local.states() == {"a": State.READY, "near": State.READY}


async def test_start_ends_although_each_poll_finds_a_model_that_was_written_again(local: Start) -> None:
    local.put("near")
    add_chain(local, "near")
    path = local.models / "near" / "1" / "model.onnx"
    held = HeldFile(path)
    loading = asyncio.create_task(local.registry.load_all())
    await held.wait()
    changes: list[asyncio.Task[None]] = []
    while not loading.done():
        assert len(changes) < 20
        last, held = held, HeldFile(members.affine(local.models / ".new", len(changes), 0))
        (local.models / ".new").rename(path)
        changes.append(await local.registry.begin_poll())
        last.release()
        await held.wait()
    assert local.registry.is_loaded
    assert local.states()["near"] is State.LOADING
    held.release()
    await asyncio.wait_for(asyncio.gather(*changes), LONG_S)
    assert local.states() == {"near": State.READY, "chain": State.READY}


async def test_pinned_model_that_a_poll_finds_during_the_start_gets_memory_before_the_others(local: Start) -> None:
    for name in ("a", "b"):
        local.put(name)
    with held_file(local.models / "b" / "1" / "model.onnx") as file:
        loading = asyncio.create_task(local.registry.load_all())
        await file.wait()
        local.put("near", "load_policy: pinned")
        change = await local.registry.begin_poll()
        await local.reach(lambda: local.registry.knows("near"))
    await asyncio.wait_for(asyncio.gather(loading, change), LONG_S)
    assert local.states() == {"a": State.READY, "b": State.GONE, "near": State.READY}
    assert local.failed_loads() == {}
