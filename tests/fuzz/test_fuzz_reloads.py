"""Random reloads, evictions, labels and rollouts beside requests. All files are good, so no request may fail.

Each model multiplies by another factor in each version that is written, so that an answer tells which load gave it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fakes.encoded import AS_IS, Given
from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from models import members
from ortserve.batching.response_cache import ResponseCache
from ortserve.config.model import LoadOptions
from ortserve.core.dtypes import DataType
from ortserve.core.request import DecodingPlace, InferRequest
from ortserve.core.tensor import Tensor
from ortserve.errors import ServeError
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import StateFile
from ortserve.service.inference import InferenceService
from ortserve.service.labels import LabelService
from ortserve.service.recorder import Recorder
from ortserve.service.rollout.control import RolloutService
from ortserve.telemetry.metrics import Metrics
from servers import LONG_S

pytestmark = LONG_ENOUGH

STEPS: Final = 200
WORLDS: Final = max(3, CASES // 1000)
ENSEMBLES: Final = {"one": ("a",), "both": ("a", "b"), "deep": ("both", "a")}
"""Each ensemble with its steps."""
HOLDERS: Final = {"a": ("deep", "both", "one"), "b": ("deep", "both"), "both": ("deep",)}
"""The ensembles that leave memory with a model, in this order."""
OPTIONS: Final = (
    "", "load_policy: on_demand", "response_cache: true", "max_queue_rows: 7000", "labels: {stable: 1}",
    "labels: {stable: 2}\nrollout: {candidate: 1, mode: canary, share: 0.5}",
    "labels: {stable: 2}\nrollout: {candidate: 1, mode: shadow, share: 0.5}",
)  # fmt: skip


class World:
    """A server without frontends: two models with two versions each, and ensembles of them."""

    def __init__(self, folder: Path, choices: random.Random) -> None:
        self._random = choices
        self.is_polled = choices.random() < 0.5
        self._models, self._new = folder / "models", folder / "new"
        self._models.mkdir(parents=True)
        self.written: list[tuple[str, int]] = [("", 0)]
        """The model and the version that multiply by the index."""
        policy = choices.choice(["start", "on_demand"])
        options = LoadOptions.model_validate({"warmup_s": 0, "intra_op_threads": 1, "load_policy": policy})
        metrics, clock = Metrics(CollectorRegistry()), time.monotonic_ns
        self.cache = ResponseCache(choices.choice([5_000, 1_000_000]))
        self.registry = Registry(
            [self._models],
            options,
            metrics,
            clock,
            cache=self.cache,
            state=StateFile(folder / "state"),
            on_demand_wait_s=LONG_S,
            is_polled=self.is_polled,
        )
        self._labels = LabelService(self.registry)
        self._rollouts = RolloutService(self.registry, self._labels, clock)
        self._service = InferenceService(self.registry, Recorder(metrics, clock), clock, max_inflight_bytes=1 << 30)
        self._calls: list[asyncio.Task[None]] = []
        for name in "ab":
            self.write(name, 1)
            self.write(name, 2)
            self.configure(name, "")
        for name, steps in ENSEMBLES.items():
            self._put_ensemble(name, steps)

    def _put_ensemble(self, name: str, models: tuple[str, ...]) -> None:
        steps, source = [], "x"
        for place, member in enumerate(models, 1):
            target = "y" if place == len(models) else f"t{place}"
            takes, gives = ("x", "y") if member in ENSEMBLES else ("a", "b")
            steps.append((member, {takes: source}, {gives: target}))
            source = target
        more = {"response_cache": "true"} if self._random.random() < 0.5 else {}
        members.add_ensemble(self._models, name, ["x"], ["y"], steps, **more)

    def write(self, name: str, version: int) -> None:
        """Write a version in one step."""
        members.affine(self._new, len(self.written), 0)
        file = self._models / name / str(version) / "model.onnx"
        file.parent.mkdir(parents=True, exist_ok=True)
        self._new.replace(file)
        self.written.append((name, version))

    def configure(self, name: str, options: str) -> None:
        self._new.write_text(f"version_policy: {{all: true}}\n{options}")
        self._new.replace(self._models / name / "model.yaml")

    def evict(self, name: str) -> None:
        """Evict a model as a load of another one would."""
        leaving = [*HOLDERS.get(name, ()), name]
        if not any(map(self.registry._must_stay, leaving)):
            for one in leaving:
                self.registry._draining.evict(one)

    async def ask(self, name: str, factor: int, place: DecodingPlace) -> None:
        """Send a request without a version, and check its answer."""
        array = np.full((1, 2), factor, np.float32)
        tensor = Tensor("x" if name in ENSEMBLES else "a", DataType.FP32, array)
        request = InferRequest(name, "", "", [tensor], [], {})
        given = Given(lambda: request, place)
        answer = await asyncio.wait_for(self._service.serve(self._service.receive("http"), given, AS_IS), LONG_S)
        found = float(answer.outputs[0].array[0, 0]) / factor
        if name in "ab":
            assert self.written[int(found)] == (name, int(answer.model_version))
        elif name == "one":
            assert self.written[int(found)][0] == "a"

    def _call(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async def until_refused() -> None:
            with suppress(ServeError):  # such as a load whose files change meanwhile
                await call()

        self._calls.append(asyncio.create_task(until_refused()))

    async def step(self) -> None:
        """One random change, call or request."""
        choose = self._random.choice
        name, version, any_name = choose("ab"), choose([1, 2]), choose(["a", "b", *ENSEMBLES])
        place, factor = choose([DecodingPlace.INLINE, DecodingPlace.THREAD]), choose([1, 2, 3])
        rollout = {"candidate": version, "mode": choose(["canary", "shadow"]), "share": 0.5}
        labels = {"stable": choose([version, None])}
        follow = self.registry.poll if self.is_polled else partial(self.registry.load, any_name)
        asking = partial(self.ask, any_name, factor, place)
        actions: list[Callable[[], object]] = [
            *[lambda: self._calls.append(asyncio.create_task(asking()))] * 14,
            *[partial(self.write, name, version)] * 3,
            partial(self.configure, name, choose(OPTIONS)),
            *[partial(self.evict, any_name)] * 2,
            partial(self._call, partial(self._labels.change, name, labels)),
            partial(self._call, partial(self._labels.rollback, name)),
            partial(self._call, partial(self._rollouts.promote, name, choose([version, None]))),
            partial(self._call, partial(self._rollouts.start, name, rollout)),
            partial(self._call, partial(self._rollouts.stop, name)),
            *[partial(self._call, follow)] * 3,
            partial(choose(self._calls).cancel if self._calls else int),
        ]
        choose(actions)()
        await asyncio.sleep(choose([0, 0, 0.001, 0.01]))

    async def settle(self) -> None:
        """Wait until all calls and changes have ended. Fails if a request failed."""
        await asyncio.wait_for(asyncio.gather(*self._calls, return_exceptions=True), LONG_S)
        for call in self._calls:
            if not call.cancelled() and (error := call.exception()) is not None:
                raise error
        ends_s = time.monotonic() + LONG_S
        while self.registry.is_changing:
            assert time.monotonic() < ends_s, self.registry._tasks
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", range(WORLDS))
async def test_no_request_fails_while_models_change(tmp_path: Path, number: int) -> None:
    world = World(tmp_path, random.Random(f"{SEED} {number}"))
    registry = world.registry
    try:
        await asyncio.wait_for(registry.load_all(), LONG_S)
        for _ in range(STEPS):
            await world.step()
        await world.settle()
        for name in (*reversed(ENSEMBLES), "a", "b"):
            await asyncio.wait_for(registry.unload(name), LONG_S)
        assert (registry.memory_use().held_bytes, world.cache.nbytes) == (0, 0)
    finally:
        await asyncio.wait_for(registry.close(), LONG_S)
