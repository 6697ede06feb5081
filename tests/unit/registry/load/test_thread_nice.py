"""``thread_nice``: the threads of a model, and no others, have its nice level."""

import os
import sys
from pathlib import Path

import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.engine import thread_priority
from ortserve.registry.load.loaded_model import nice_without_effect
from ortserve.registry.load.pipeline import load_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has nice levels of threads")


def levels() -> dict[int, int]:
    """The nice level of each thread of this process."""
    return {
        int(task.name): os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()
    }


@pytest.mark.skipif(thread_priority.own_nice() == 19, reason="19 is the last level, and this process has it")
def test_worker_and_threads_of_the_session_have_the_level_and_no_other(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    before = levels()
    loaded = load_model(path, "m", ModelOptions(thread_nice=19, intra_op_threads=3, warmup_s=0.05))
    try:
        after = levels()
        made = {level for task, level in after.items() if task not in before}
        assert made == {19}
        assert len(after.keys() - before.keys()) >= 3, "the worker and two threads of the session"
        assert {task: level for task, level in after.items() if task in before} == before
        assert loaded.unbounded_because == "thread_nice holds for threads of the model"
    finally:
        loaded.close()


def test_own_level_leaves_short_runs_on_the_event_loop(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    options = ModelOptions(thread_nice=max(0, thread_priority.own_nice()), intra_op_threads=1, warmup_s=0.05)
    loaded = load_model(path, "m", options)
    loaded.close()
    assert not loaded.unbounded_because


def test_a_level_that_the_system_refuses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(which: int, process: int, level: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", fail)
    (reason,) = nice_without_effect(ModelOptions(thread_nice=3), has_global_threads=False, is_on_gpu=False)
    assert reason.startswith("thread_nice: level 3, below the process's ")
    assert reason.endswith("needs CAP_SYS_NICE or RLIMIT_NICE: Permission denied")


def test_shared_threads_and_gpus_are_warnings() -> None:
    options = ModelOptions(thread_nice=19)
    assert "it holds for workers only" in nice_without_effect(options, has_global_threads=True, is_on_gpu=False)[0]
    assert "CUDA streams" in nice_without_effect(options, has_global_threads=False, is_on_gpu=True)[0]
    assert nice_without_effect(ModelOptions(), has_global_threads=True, is_on_gpu=True) == []
