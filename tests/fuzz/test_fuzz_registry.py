"""Random changes of models, with requests beside them. Afterwards the registry must be whole, and hold nothing else.

A registry of a folder and of a store in memory, with the real ONNX Runtime: files appear, break, change and vanish,
polls or calls follow them, callers cancel, labels move, the store fails, and a budget makes models leave memory.
"""

import asyncio
import random
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fakes.inflight import submit_to
from fakes.store import StoreInMemory
from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from models import members
from ortserve.config.model import LoadOptions
from ortserve.engine.process_memory import HeldMemory
from ortserve.errors import ServeError
from ortserve.registry import changes
from ortserve.registry.catalog import State
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import ModelState, StateFile
from ortserve.registry.stores.cache import StoreCache
from ortserve.registry.stores.mirror import Mirror
from ortserve.registry.stores.mirrors import Mirrors
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S

pytestmark = LONG_ENOUGH

MIB: Final = 1024 * 1024
STEPS: Final = 100
WORLDS: Final = max(4, CASES // 1000)
FAR: Final = "far"
"""The model in the store."""
MODELS: Final = ("a", "b", FAR)
ENSEMBLES: Final = {"one": ("a",), "both": ("a", "b"), "deep": ("both", "a")}
"""Each ensemble with its steps."""
OPTIONS: Final = (
    "", "version_policy: {all: true}", "version_policy: {latest: 2}", "load_policy: on_demand", "load_policy: pinned",
    "{version_policy: {all: true}, labels: {stable: 1}}", "max_queue_rows: 7", "nonsense: 1",
)  # fmt: skip


class World:
    """A registry, its files, and what each version should answer. Each model holds 2 MiB."""

    def __init__(self, folder: Path, choices: random.Random) -> None:
        self._random = choices
        self.is_polled = choices.random() < 0.5
        self.budget_bytes = choices.choice([None, 5 * MIB, 9 * MIB])
        self._models, self._new = folder / "models", folder / "new"
        self._models.mkdir(parents=True)
        self._store = StoreInMemory()
        self.scales: dict[tuple[str, int], int] = {}
        """By model and version: the factor by which it multiplies."""
        self.serves_all = False
        """Whether all versions of each model should serve, not only the highest one."""
        self._written = 0
        policy = choices.choice(["start", "on_demand"])
        options = LoadOptions.model_validate({"warmup_s": 0, "intra_op_threads": 1, "load_policy": policy})
        cache = StoreCache(folder / "cache", 100 * MIB)
        mirror = Mirror("s3://b", self._store, cache, cache.view / "repository-0", options, time.monotonic_ns)
        self.registry = Registry(
            [self._models, mirror.folder],
            options,
            Metrics(CollectorRegistry()),
            time.monotonic_ns,
            state=StateFile(folder / "state"),
            mirrors=Mirrors([mirror], cache),
            memory_budget_bytes=self.budget_bytes,
            on_demand_wait_s=LONG_S,
            is_polled=self.is_polled,
        )
        self.ledger = ledger = self.registry._room._ledger

        def held() -> HeldMemory:
            loaded = [account for account in list(ledger._accounts) if account.measured_bytes is not None]
            return HeldMemory(2 * MIB * (len(loaded) + len(ledger._loading)), 0)

        ledger._read = held  # type: ignore[misc]
        self._calls: list[asyncio.Task[None]] = []
        for name in MODELS:
            self.write(name, 1)
        for name in ENSEMBLES:
            self.put_ensemble(name)

    def write(self, name: str, version: int, *, is_good: bool = True) -> None:
        """Write a version in one step: a model, or a file that is none."""
        self._written += 1
        content = members.affine(self._new, self._written, 0).read_bytes() if is_good else b"no model"
        self._put(name, f"{version}/model.onnx", content)
        self.scales[name, version] = self._written

    def configure(self, name: str, options: str) -> None:
        self._put(name, "model.yaml", options.encode())

    def _put(self, name: str, path: str, content: bytes) -> None:
        if name == FAR:
            self._store.files[f"{FAR}/{path}"] = content
            return
        file = self._models / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        self._new.write_bytes(content)
        self._new.replace(file)

    def _remove(self, name: str, version: int) -> None:
        self.scales.pop((name, version), None)
        self._store.files.pop(f"{name}/{version}/model.onnx", None)
        self._vanish(self._models / name / str(version))

    def _vanish(self, folder: Path) -> None:
        if folder.exists():
            folder.rename(self._new.with_name("vanishing"))
            shutil.rmtree(self._new.with_name("vanishing"))

    def put_ensemble(self, name: str) -> None:
        steps, source = [], "x"
        for place, member in enumerate(ENSEMBLES[name], 1):
            target = "y" if place == len(ENSEMBLES[name]) else f"t{place}"
            takes, gives = ("x", "y") if member in ENSEMBLES else ("a", "b")
            steps.append((member, {takes: source}, {gives: target}))
            source = target
        if not (self._models / name).exists():
            members.add_ensemble(self._models, name, ["x"], ["y"], steps)

    async def ask(self, name: str, version: str = "") -> float:
        """Send a request of ones. Returns the factor of the model."""
        served = await self.registry.wait_for(name, version)
        (output,) = await submit_to(served, (np.ones((1, 2), np.float32),), 1)
        return float(output[0, 0])

    def _call(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async def until_refused() -> None:
            with suppress(ServeError):
                await call()

        self._calls.append(asyncio.create_task(until_refused()))

    async def step(self, *, is_loaded: bool) -> None:
        """One random change, call or request."""
        choose, registry = self._random.choice, self.registry
        name, version, ensemble = choose(MODELS), choose([1, 2, 3]), choose(list(ENSEMBLES))
        either = choose([name, ensemble])
        labels = choose([{}, {"stable": version}])
        is_up = choose([True, False])  # always drawn, or the choices that follow would depend on the speed of the load
        follow = [partial(self._call, registry.poll)] * 5
        if not self.is_polled:
            follow = [partial(self._call, partial(registry.load, either))] * 4
            follow.append(partial(self._call, partial(registry.unload, either, with_members=choose([True, False]))))
        actions: list[Callable[[], object]] = [
            *[partial(self.write, name, version)] * 3,
            *[partial(self.write, name, version, is_good=False)] * 2,
            partial(self._remove, name, version),
            *[partial(self.configure, name, choose(OPTIONS))] * 2,
            partial(self._vanish, self._models / ensemble),
            partial(self.put_ensemble, ensemble),
            *[partial(self._call, partial(self.ask, either, choose(["", "1", "stable"])))] * 4,
            partial(self._call, partial(registry.change_state, name, ModelState(labels))),
            partial(choose(self._calls).cancel if self._calls else int),
            partial(setattr, self._store, "is_up", not is_loaded or is_up),
            *follow,
        ]
        choose(actions)()
        await asyncio.sleep(choose([0, 0, 0.001, 0.01, 0.05]))

    async def settle(self) -> None:
        """Wait until all calls and changes have ended. No version is under way then, and nothing else holds memory."""
        registry = self.registry
        await asyncio.wait_for(asyncio.gather(*self._calls, return_exceptions=True), LONG_S)
        for call in self._calls:
            assert call.cancelled() or call.exception() is None, call
        self._calls.clear()
        ends_s = time.monotonic() + LONG_S
        while registry.is_changing:
            assert time.monotonic() < ends_s, (registry._tasks, registry._draining._leaving)
            await asyncio.sleep(0.01)
        records = [*registry.records()]
        states = {(record.model, record.version): record.state for record in records}
        assert not {State.LOADING, State.WARMING, State.DRAINING}.intersection(states.values()), states
        assert not registry._versions._loading
        assert not registry._changes.sources
        assert not registry._room._together
        assert self.ledger._accounts == {record.account for record in records if record.account is not None}

    async def repair(self) -> None:
        """Make all files good, and load them."""
        self._store.is_up = True
        self.serves_all = not self.budget_bytes
        for name, version in sorted({*self.scales, *((name, 1) for name in MODELS)}):
            self.write(name, version)
        for name in MODELS:
            self.configure(name, "version_policy: {all: true}" if self.serves_all else "")
            await self.registry.change_state(name, ModelState())
        for name in ENSEMBLES:
            self.put_ensemble(name)
        await self._load(*MODELS, *ENSEMBLES)

    async def replace(self) -> None:
        """Replace the models, each by its highest version alone. The ensembles must follow: no call loads them."""
        self.serves_all = False
        for name in MODELS:
            self.write(name, self._versions(name)[-1])
            self.configure(name, "")
        await self._load(*MODELS)

    async def _load(self, *names: str) -> None:
        for name in names:
            if self.is_polled:
                await self.registry.poll()
                await asyncio.sleep(0.1)  # for the files of the store
            else:
                await self.registry.load(name)
        await self.settle()

    def _versions(self, name: str) -> list[int]:
        """The versions of a model that should serve, ascending."""
        versions = sorted(version for model, version in self.scales if model == name)
        return versions if self.serves_all else versions[-1:]

    async def check(self) -> None:
        """Ask each version that should serve, and no other one."""
        for name in MODELS:
            versions = self._versions(name)
            for version in versions:
                assert await asyncio.wait_for(self.ask(name, str(version)), LONG_S) == self.scales[name, version]
            assert {*self.registry.ready_versions(name)}.issubset(versions)
        a, b = (self.scales[name, self._versions(name)[-1]] for name in "ab")
        for name, factor in {"one": a, "both": a * b, "deep": a * b * a}.items():
            assert await asyncio.wait_for(self.ask(name), LONG_S) == factor
        await self.settle()


@pytest.mark.parametrize("number", range(WORLDS))
async def test_registry_is_whole_after_random_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(changes, "_FIRST_RETRY_S", 0)
    world = World(tmp_path, random.Random(f"{SEED} {number}"))
    registry = world.registry
    try:
        loading = asyncio.create_task(registry.load_all(None if world.is_polled else {"a", "one"}))
        for _ in range(STEPS):
            await world.step(is_loaded=loading.done())
        await asyncio.wait_for(loading, LONG_S)
        await world.settle()
        await world.repair()
        await world.check()
        await world.replace()
        await world.check()
        for name in (*ENSEMBLES, *MODELS):
            await asyncio.wait_for(registry.unload(name), LONG_S)
        await world.settle()
        assert registry.memory_use().held_bytes == 0
    finally:
        await asyncio.wait_for(registry.close(), LONG_S)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("run ")]
