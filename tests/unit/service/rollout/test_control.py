"""Concurrent calls about labels and rollouts: each call decides from the state that it then changes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fakes.clock import FakeClock
from ortserve.config.rollout import RolloutOptions, make_rollout_options
from ortserve.config.versions import MAX_LABELS
from ortserve.core.version_names import STABLE
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import ON_DEMAND, State, VersionRecord
from ortserve.registry.state_file import ModelState
from ortserve.service.labels import LabelService
from ortserve.service.rollout import control
from ortserve.service.rollout.control import RolloutService
from ortserve.service.rollout.decision import Decision


class FakeRegistry:
    """A model ``m`` with versions that serve, whose state is in memory."""

    def __init__(self) -> None:
        self.state = ModelState({STABLE: 1}, rollout=make_rollout_options({"candidate": 2}))
        self.records = [VersionRecord("m", version, lambda: None) for version in (1, 2, 3)]
        for record in self.records:
            record.state = State.READY
        self.has_room = False
        self.on_model_change: Any = None
        self.find_or_begin: Any = None

    def knows(self, model: str) -> bool:
        return model == "m"

    def changed_models(self) -> list[str]:
        return ["m", "unknown"]

    def records_of(self, model: str) -> list[VersionRecord]:
        return self.records if model == "m" else []

    def ready_versions(self, model: str) -> list[int]:
        return [record.version for record in self.records]

    def labels(self, model: str) -> dict[str, int]:
        return dict(self.state.labels)

    def state_of(self, model: str) -> ModelState:
        return self.state

    def rollout(self, model: str) -> RolloutOptions | None:
        return self.state.rollout

    def set_rollout(self, model: str, rollout: object) -> None:
        pass

    async def wait_for(self, model: str, version: str) -> None:
        if not self.has_room:
            raise ServeError(ErrorKind.NOT_READY, f"no room for '{model}' for 2.0 s", retry_after_s=2)
        self.records[int(version) - 1].state = State.READY

    async def change_state(self, model: str, state: ModelState) -> None:
        await asyncio.sleep(0)
        self.state = state
        self.on_model_change(model)


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def labels(registry: FakeRegistry) -> LabelService:
    return LabelService(registry)  # type: ignore[arg-type]


@pytest.fixture
def rollouts(registry: FakeRegistry, labels: LabelService) -> RolloutService:
    return RolloutService(registry, labels, FakeClock())  # type: ignore[arg-type]


async def let_turns_pass() -> None:
    """Let the loop turn as often as several attempts to end a rollout take."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_promotion_of_a_version_is_of_that_version_though_another_rollout_begins(
    registry: FakeRegistry, rollouts: RolloutService
) -> None:
    beginning = asyncio.create_task(rollouts.start("m", {"candidate": 3}))
    promoting = asyncio.create_task(rollouts.promote("m", 2))
    await asyncio.gather(beginning, promoting)

    assert registry.labels("m")[STABLE] == 2


async def test_rollback_ends_a_rollout_that_begins_before_it(registry: FakeRegistry, rollouts: RolloutService) -> None:
    await rollouts.stop("m")
    beginning = asyncio.create_task(rollouts.start("m", {"candidate": 3}))
    rolling_back = asyncio.create_task(rollouts.rollback("m"))
    await asyncio.gather(beginning, rolling_back)

    ended = registry.state.ended
    assert ended is not None
    assert (ended.candidate, ended.result) == (3, "rolled_back")
    assert registry.labels("m")[STABLE] == 1


async def test_version_that_does_not_serve_is_refused_with_its_reason(
    registry: FakeRegistry, labels: LabelService
) -> None:
    registry.records[2].state, registry.records[2].reason = State.FAILED, "truncated"
    with pytest.raises(ServeError, match=r"promote: expected .* \(1, 2, 3\), got 3, which is FAILED \(truncated\)"):
        await labels.promote("m", 3)


async def test_version_that_is_not_in_memory_is_loaded_before_a_call_makes_it_stable(
    registry: FakeRegistry, rollouts: RolloutService
) -> None:
    record = registry.records[2]
    record.state, record.reason = State.GONE, ON_DEMAND
    with pytest.raises(ServeError, match="promote: no room for 'm'") as caught:
        await rollouts.promote("m", 3)
    assert caught.value.retry_after_s == 2
    registry.has_room = True
    await rollouts.promote("m", 3)
    assert (registry.labels("m")[STABLE], record.state) == (3, State.READY)


@pytest.mark.parametrize("version", [None, 2])
async def test_candidate_that_does_not_serve_is_not_promoted(
    registry: FakeRegistry, rollouts: RolloutService, version: int | None
) -> None:
    registry.records[1].state = State.FAILED
    with pytest.raises(ServeError, match="promote: expected a version of model 'm' that serves"):
        await rollouts.promote("m", version)
    assert registry.labels("m")[STABLE] == 1


async def test_rollback_goes_once_to_the_version_before_and_only_while_it_serves(
    registry: FakeRegistry, rollouts: RolloutService
) -> None:
    await rollouts.promote("m", 2)
    registry.records[0].state = State.FAILED
    with pytest.raises(ServeError, match="rollback: expected a version of model 'm' that serves"):
        await rollouts.rollback("m")
    assert registry.labels("m")[STABLE] == 2
    registry.records[0].state = State.READY
    await rollouts.rollback("m")
    assert registry.labels("m")[STABLE] == 1
    with pytest.raises(ServeError, match="no promotion to roll back"):
        await rollouts.rollback("m")


async def test_promotion_by_rules_waits_until_the_candidate_serves_and_is_logged_once(
    registry: FakeRegistry, rollouts: RolloutService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_RETRY_S", 0)
    registry.on_model_change("m")
    registry.records[1].state = State.FAILED
    rollouts._on_decision(rollouts._live["m"], Decision("promoted", "it kept the rules"))
    await let_turns_pass()
    assert "expected a version of model 'm' that serves" in rollouts.read("m").problem
    assert registry.labels("m")[STABLE] == 1
    assert sum("the end of a rollout cannot be stored" in message for message in caplog.messages) == 1
    registry.records[1].state = State.READY
    await let_turns_pass()
    ended = registry.state.ended
    assert ended is not None
    assert (registry.labels("m")[STABLE], ended.result) == (2, "promoted")


async def test_call_starts_a_rollout_again_whose_end_by_rules_is_not_stored_yet(
    registry: FakeRegistry, rollouts: RolloutService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_RETRY_S", 0)
    registry.on_model_change("m")
    registry.records[1].state = State.FAILED
    decided = rollouts._live["m"]
    decided.is_over = True
    rollouts._on_decision(decided, Decision("promoted", "it kept the rules"))
    await let_turns_pass()
    registry.records[1].state = State.READY
    await rollouts.start("m", {"candidate": 2})
    assert not rollouts._live["m"].is_over
    await let_turns_pass()
    assert (rollouts.read("m").problem, registry.state.ended, registry.labels("m")[STABLE]) == ("", None, 1)


async def test_rollout_beside_a_stable_version_that_does_not_exist_says_so(
    registry: FakeRegistry, rollouts: RolloutService
) -> None:
    registry.state = ModelState({STABLE: 9})
    with pytest.raises(
        ServeError, match="version 9 of model 'm', which is labelled 'stable', does not exist"
    ) as caught:
        await rollouts.start("m", {"candidate": 2})
    assert caught.value.kind is ErrorKind.CONFLICT


async def test_changes_of_too_many_labels_are_refused_before_their_versions_are_looked_up(
    registry: FakeRegistry, labels: LabelService
) -> None:
    lookups = 0
    records_of = registry.records_of

    def count_lookups(model: str) -> list[VersionRecord]:
        nonlocal lookups
        lookups += 1
        return records_of(model)

    registry.records_of = count_lookups  # type: ignore[method-assign]
    with pytest.raises(ServeError, match=f"labels: expected at most {MAX_LABELS - 1}") as caught:
        await labels.change("m", {f"label{number}": 1 for number in range(5000)})
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert lookups < 10


async def test_rollouts_of_all_models_are_read_while_they_run_and_after_their_end(
    registry: FakeRegistry, rollouts: RolloutService
) -> None:
    registry.on_model_change("m")
    running = rollouts.read_all()
    assert list(running) == ["m"]
    assert running["m"] == rollouts.read("m")
    assert running["m"].options is not None
    ended = (await rollouts.stop("m")).describe()["ended"]
    assert ended == {"candidate": 2, "result": "stopped", "reason": "by a call"}
    assert rollouts.read_all()["m"].describe()["ended"] == ended
    registry.state = ModelState()
    assert rollouts.read_all() == {}


async def test_problem_of_a_rollout_is_shown_while_it_lasts_and_logged_each_time_it_begins(
    registry: FakeRegistry, rollouts: RolloutService, caplog: pytest.LogCaptureFixture
) -> None:
    working = registry.state
    for _ in range(2):
        registry.state = replace(working, labels={})
        registry.on_model_change("m")
        registry.on_model_change("m")
        assert "label" in rollouts.read_all()["m"].problem
        registry.state = working
        registry.on_model_change("m")
        assert rollouts.read_all()["m"].problem == ""
    assert sum("rollout has no effect" in line for line in caplog.messages) == 2
