"""The file of the changes that calls made: what remains after a failure, and its limits."""

import asyncio
import errno
import fcntl
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from apart import UnavailableError
from hung_folders import hung
from ortserve.config.rollout import RolloutOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry import state_file
from ortserve.registry.state_file import FILE_NAME, NOTHING_CHANGED, EndedRollout, ModelState, StateFile

LABELLED = ModelState({"stable": 1})


async def refusal(state: StateFile, model: str) -> str:
    """The reason why a change of a model is refused. The change must not take effect."""
    before = state.of(model)
    with pytest.raises(ServeError) as caught:
        await state.put(model, ModelState({"stable": 2}))
    assert caught.value.kind is ErrorKind.CONFLICT
    assert state.of(model) == before
    return caught.value.message


async def test_half_of_a_file_that_a_killed_server_left_is_ignored_and_replaced(tmp_path: Path) -> None:
    await StateFile(tmp_path).put("m", LABELLED)
    (tmp_path / f".{FILE_NAME}.new").write_text('{"schema": "ortserve.st')
    state = StateFile(tmp_path)
    assert state.of("m") == LABELLED
    await state.put("n", LABELLED)
    assert not (tmp_path / f".{FILE_NAME}.new").exists()
    assert set(StateFile(tmp_path).models()) == {"m", "n"}


async def test_candidates_of_ended_rollouts_are_known_after_a_restart_until_a_call_tries_them_again(
    tmp_path: Path,
) -> None:
    state = ModelState()
    for candidate in (2, 3, 2, 4):
        state = state.with_end(EndedRollout(candidate, "stopped", "by a call"))
    await StateFile(tmp_path).put("m", state)
    state = StateFile(tmp_path).of("m")
    assert [state.has_tried(version) for version in (1, 2, 3, 4)] == [False, True, True, True]
    again = state.with_rollout(RolloutOptions(candidate=3))
    assert [again.has_tried(version) for version in (1, 2, 3, 4)] == [False, True, False, True]


async def test_change_is_refused_while_another_server_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_LOCK_WAIT_S", 0.1)
    state = StateFile(tmp_path)
    await state.put("m", LABELLED)
    with (tmp_path / f".{FILE_NAME}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "state.json: another server has held its lock for 0.1 s" in await refusal(state, "m")
    assert StateFile(tmp_path).of("m") == LABELLED


async def test_change_is_refused_while_the_folder_hangs_and_not_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    state = StateFile(folder)
    await state.put("m", LABELLED)
    monkeypatch.setattr(state_file, "_WRITE_S", 0.1)
    try:
        with hung(folder):
            assert "expected a folder that answers within 0.1 s: state.json is still" in await refusal(state, "m")
            assert "an earlier write of state.json has not ended" in await refusal(state, "m")
    except UnavailableError as error:
        pytest.skip(str(error))
    late = state._late
    assert late is not None
    await asyncio.wait({late})
    assert StateFile(folder).of("m") == LABELLED
    monkeypatch.undo()
    await state.put("m", NOTHING_CHANGED)


async def test_write_that_ends_after_its_caller_timed_out_takes_effect_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, changed = StateFile(tmp_path), ModelState({"stable": 2})
    await state.put("m", LABELLED)
    monkeypatch.setattr(state_file, "_WRITE_S", 0.1)
    sync, may_sync = os.fsync, threading.Event()

    def sync_slowly(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # the file has its name by then
            may_sync.wait()

    monkeypatch.setattr(os, "fsync", sync_slowly)
    changes: list[ModelState] = []
    state.on_change = lambda model: changes.append(state.of(model))
    with pytest.raises(ServeError, match="the change may take effect later"):
        await state.put("m", changed)
    assert state.of("m") == LABELLED
    may_sync.set()
    late = state._late
    assert late is not None
    await asyncio.wait({late})
    assert changes == [changed]
    assert state.of("m") == StateFile(tmp_path).of("m") == changed


async def test_versions_of_a_change_that_takes_effect_are_named_at_any_time(tmp_path: Path) -> None:
    """Otherwise a thread that reads the repository just then would leave a version out that a new label needs."""
    state = StateFile(tmp_path)
    named: list[frozenset[int]] = []

    class States(dict[str, ModelState]):
        def __setitem__(self, model: str, new: ModelState) -> None:
            named.append(state.versions_of(model))
            super().__setitem__(model, new)
            named.append(state.versions_of(model))

    state._states = States()
    await state.put("m", LABELLED)
    assert named == [{1}, {1}]


async def test_thread_in_the_middle_of_the_coming_changes_misses_none_when_one_takes_effect(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    changes = [asyncio.ensure_future(state.put(model, LABELLED)) for model in ("m", "n")]
    await asyncio.sleep(0)
    reading = iter(state._coming)
    found = [next(reading)]
    state.on_change = lambda model: found.extend(reading if model == "m" else ())
    await asyncio.gather(*changes)
    assert found == [("m", LABELLED), ("n", LABELLED)]


async def test_file_system_that_reports_a_timeout_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(_: int) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    state = StateFile(tmp_path)
    monkeypatch.setattr(os, "fsync", time_out)
    assert (await refusal(state, "m")).endswith("a folder to store the change in: state.json: Connection timed out")
    monkeypatch.undo()
    await state.put("m", LABELLED)


async def test_change_takes_effect_although_its_folder_cannot_be_synchronized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on some network file systems. The file has the change by then, so memory must have it, too."""
    sync = os.fsync

    def sync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files)
    state = StateFile(tmp_path)
    await state.put("m", LABELLED)
    assert state.of("m") == StateFile(tmp_path).of("m") == LABELLED
    assert "may not survive a loss of power" in caplog.text


async def test_model_without_changes_leaves_the_file_which_holds_a_limited_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_MAX_MODELS", 2)
    state = StateFile(tmp_path)
    for model in ("m", "n", "m"):
        await state.put(model, LABELLED)
    assert "it already has the maximum of 2 models" in await refusal(state, "o")
    await state.put("m", NOTHING_CHANGED)
    assert list(json.loads((tmp_path / FILE_NAME).read_text())["models"]) == ["n"]
    await state.put("o", LABELLED)
    nbytes = (tmp_path / FILE_NAME).stat().st_size
    monkeypatch.setattr(state_file, "_MAX_BYTES", nbytes)
    monkeypatch.setattr(state_file, "_MAX_MODELS", 3)
    assert f"of which a start would read at most {nbytes}" in await refusal(state, "n" * 100)
    assert set(StateFile(tmp_path).models()) == {"n", "o"}
