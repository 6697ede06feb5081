"""The console's events: shared frames of changes, a bounded queue per viewer, and a bounded number of viewers."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from fakes.clock import FakeClock
from loop_turns import run_counting_turns
from ortserve.config.rollout import RolloutOptions
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import ON_DEMAND, State, VersionRecord
from ortserve.registry.residency.ledger import HostAccount
from ortserve.registry.state_file import EndedRollout
from ortserve.service.observation import MAX_VIEWERS, Observation, Viewer
from ortserve.service.rollout.control import RolloutStatus
from ortserve.service.rollout.decision import Figures
from ortserve.telemetry.history import RING_INTERVAL_S

SECOND_NS = 1_000_000_000


class FakeRegistry:
    """Records without files or sessions."""

    def __init__(self, *names: str) -> None:
        self.known = [VersionRecord(name, 1, lambda: None) for name in names]
        self.named: dict[str, int] = {}
        self.reloads: dict[VersionRecord, VersionRecord] = {}

    def records(self) -> list[VersionRecord]:
        return self.known

    def labels(self, model: str) -> dict[str, int]:
        return self.named

    def successor(self, record: VersionRecord) -> VersionRecord | None:
        return self.reloads.get(record)


class Stage:
    """An observation whose passes the test triggers."""

    def __init__(self, *names: str) -> None:
        registry: Any = FakeRegistry(*names)
        self.registry = registry
        self.clock = FakeClock()
        self.encoded: list[str] = []
        self.rollouts: dict[str, RolloutStatus] = {}
        self.observation = Observation(registry, lambda: self.rollouts, dict, self.clock, encode=self.encode)

    def encode(self, name: str, document: Mapping[str, Any]) -> bytes:
        self.encoded.append(name)
        return json.dumps([name, document]).encode()

    async def step(self, *, is_sample: bool = False) -> None:
        self.clock.advance(SECOND_NS)
        if is_sample:
            self.observation._sample += 1
        await self.observation._read_versions(is_sample=is_sample)

    def answer(self, number: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.registry.known[number].metrics.observe_success("http", Timing(0, 1, 2, 3, 4, 5), 1)


async def events(viewer: Viewer) -> list[tuple[str, Any]]:
    """The waiting events, and None for the end."""
    found = []
    while viewer._events:
        event = await viewer.next()
        assert event is not None
        name, document = json.loads(event)
        found.append((name, document))
    return found


async def test_viewers_share_one_encoded_frame_of_what_changed() -> None:
    stage = Stage("busy", "idle")
    viewers = [await stage.observation.view(None) for _ in range(3)]
    ((name, first),) = await events(viewers[0])
    assert name == "models"
    assert first["whole"]
    assert [row["name"] for row in first["models"]] == ["busy", "idle"]
    await events(viewers[1])
    await events(viewers[2])
    stage.encoded.clear()
    stage.answer(times=4)
    await stage.step()
    assert stage.encoded == ["models"]
    for viewer in viewers:
        ((_, update),) = await events(viewer)
        assert not update["whole"]
        assert [(row["name"], row["rate"]) for row in update["models"]] == [("busy", 4)]
        assert update["server"] == {"viewers": 3}


async def test_watched_version_brings_its_history_and_details() -> None:
    stage = Stage("m")
    await stage.step()
    for _ in range(3):
        stage.answer(times=RING_INTERVAL_S)
        await stage.step(is_sample=True)
    viewer = await stage.observation.view(("m", "1"))
    (_, history), _ = await events(viewer)
    rate = history["columns"].index("requests_per_s")
    assert [row[rate] for row in history["rows"]] == [5, 5, 5]
    stage.answer(times=2)
    stage.registry.known[0].metrics.observe_failure("http", ErrorKind.DEADLINE, 1)
    await stage.step()
    _, (name, details) = await events(viewer)
    assert name == "model"
    assert details["rates"]["requests_per_s"] == 2
    assert details["errors"] == details["recent_errors"] == {"deadline": 1}


async def test_loads_are_followed_and_dropped_versions_are_gone() -> None:
    stage = Stage("a", "b")
    viewer = await stage.observation.view(None)
    await events(viewer)
    stage.registry.known[0].advance(State.FAILED, "no such file")
    del stage.registry.known[1]
    await stage.step()
    ((_, update),) = await events(viewer)
    assert [(row["name"], row["state"], row["why"]) for row in update["models"]] == [("a", "FAILED", "no such file")]
    assert update["gone"] == [["b", "1"]]


async def test_rows_tell_labels_reloads_memory_and_versions_that_are_not_in_memory() -> None:
    stage = Stage("m")
    viewer = await stage.observation.view(None)
    await events(viewer)
    (record,) = stage.registry.known
    stage.registry.named = {"stable": 1, "canary": 2, "best": 1}
    stage.registry.reloads[record] = VersionRecord("m", 1, lambda: None)
    record.account = HostAccount(42, 1)
    record.advance(State.READY)
    await stage.step()
    ((_, update),) = await events(viewer)
    (row,) = update["models"]
    assert (row["labels"], row["memory"]) == (["best", "stable"], 42)
    assert (row["state"], row["why"], row["reload"]) == ("READY", "", "waiting for its turn")
    record.advance(State.DRAINING, ON_DEMAND)
    await stage.step()
    ((_, update),) = await events(viewer)
    assert update["models"][0]["why"] == "evicted: it leaves memory when its requests are answered"
    record.advance(State.GONE, ON_DEMAND)
    record.no_room = ServeError(ErrorKind.NOT_READY, "7 bytes too few")
    await stage.step()
    ((_, update),) = await events(viewer)
    assert update["models"][0]["state"] == "NOT_IN_MEMORY"
    assert update["models"][0]["why"] == f"{ON_DEMAND}; the last load got no room: 7 bytes too few"


async def test_frames_bring_the_rollouts_that_changed() -> None:
    stage = Stage("m")
    ended = RolloutStatus(None, "", Figures(), {}, EndedRollout(2, "stopped", "by a call"))
    stage.rollouts = {"old": ended, "new": RolloutStatus(RolloutOptions(candidate=2), "", Figures(), {}, None)}
    viewer = await stage.observation.view(None)
    ((_, whole),) = await events(viewer)
    assert list(whole["rollouts"]) == ["old", "new"]
    assert whole["rollouts"]["old"]["ended"] == {"candidate": 2, "result": "stopped", "reason": "by a call"}
    await stage.step()
    stage.rollouts["new"] = RolloutStatus(RolloutOptions(candidate=2), "", Figures(requests=5), {}, None)
    await stage.step()
    del stage.rollouts["old"]
    await stage.step()
    updates = [update["rollouts"] for _, update in await events(viewer)]
    assert [list(update) for update in updates] == [[], ["new"], ["old"]]
    assert (updates[1]["new"]["figures"]["requests"], updates[2]["old"]) == (5, None)


async def test_reload_begins_new_counts_and_continues_the_history() -> None:
    stage = Stage("m")
    await stage.step()
    stage.answer(times=9)
    await stage.step(is_sample=True)
    stage.registry.known[0] = VersionRecord("m", 1, lambda: None)
    await stage.step()
    stage.answer(times=3)
    await stage.step(is_sample=True)
    viewer = await stage.observation.view(("m", "1"))
    (_, history), _ = await events(viewer)
    assert [row[0] > 0 for row in history["rows"]] == [True, True]
    assert all(value >= 0 for row in history["rows"] for value in row)


@pytest.mark.parametrize("is_evicted", [False, True])
async def test_errors_before_and_after_a_load_are_recent_errors(is_evicted: bool) -> None:
    """The counts of a version that comes back after an eviction continue; those of a reloaded one begin at 0."""
    stage = Stage("m")
    await stage.step()
    metrics = stage.registry.known[0].metrics
    for _ in range(9):
        metrics.observe_failure("http", ErrorKind.DEADLINE, 1)
    for _ in range(13):
        await stage.step(is_sample=True)
    stage.registry.known[0] = VersionRecord("m", 1, lambda: None, metrics=metrics if is_evicted else None)
    await stage.step()
    stage.registry.known[0].metrics.observe_failure("http", ErrorKind.DEADLINE, 1)
    viewer = await stage.observation.view(("m", "1"))
    await stage.step()
    *_, (_, details) = await events(viewer)
    assert (details["errors"]["deadline"], details["recent_errors"]["deadline"]) == (10 if is_evicted else 1, 10)


async def test_slow_viewer_is_dropped_and_delays_no_other() -> None:
    stage = Stage("m")
    slow, fast = await stage.observation.view(None), await stage.observation.view(None)
    for _ in range(20):
        await stage.step()
        *_, (_, frame) = await events(fast)
    assert not slow.is_open
    assert fast.is_open
    assert frame["server"]["viewers"] == 1
    while await slow.next() is not None:
        pass


async def test_first_viewer_of_many_versions_does_not_hold_the_event_loop() -> None:
    stage = Stage(*(f"m{number}" for number in range(500)))
    second = asyncio.create_task(stage.observation.view(None))
    first, turns = await run_counting_turns(stage.observation.view(None))
    assert turns >= 2 * 500 / 50  # they are listed first, then read
    for viewer in (first, await second):
        ((_, whole),) = await events(viewer)
        assert len(whole["models"]) == 500


async def test_viewers_are_bounded() -> None:
    stage = Stage("m")
    viewers = [await stage.observation.view(None) for _ in range(MAX_VIEWERS)]
    with pytest.raises(ServeError, match="the console has 32 viewers, the maximum") as caught:
        await stage.observation.view(None)
    assert caught.value.kind is ErrorKind.OVERLOADED
    stage.observation.leave(viewers[0])
    await stage.observation.view(None)


async def test_drain_ends_all_streams_and_accepts_no_other() -> None:
    stage = Stage("m")
    viewer = await stage.observation.view(None)
    await events(viewer)
    waiting = asyncio.create_task(viewer.next())
    await asyncio.sleep(0)
    stage.observation.close()
    assert json.loads(await waiting or b"") == ["end", {"reason": "the server is draining"}]
    assert await viewer.next() is None
    with pytest.raises(ServeError, match="Server exiting"):
        await stage.observation.view(None)


async def test_idle_versions_take_no_memory_for_a_history() -> None:
    stage = Stage("m")
    for _ in range(5):
        await stage.step(is_sample=True)
    (version,) = stage.observation._versions.values()
    assert version.ring is None
