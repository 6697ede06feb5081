import errno
import os
from pathlib import Path

import numpy as np
import pytest

from models import builders
from ortserve.engine.child_process import ObjectInChild, call_in_child
from ortserve.errors import ErrorKind, OutOfMemoryError, ServeError, invalid_input
from ortserve.tools.speed import Timed, _Block, _speed, _Trial, compare_speed
from ortserve.tools.statistics import Estimate
from ortserve.tools.subject import Subject

pytestmark = pytest.mark.usefixtures("importable", "preloaded_commands")


def trial(seconds: np.ndarray) -> _Trial:
    return _Trial([_Block(10, float(one), 2 * float(one)) for one in seconds], 1000, 0.5)


def test_the_ratio_comes_from_pairs_of_blocks() -> None:
    """Meanwhile the machine becomes slower by a factor of ten, which affects both models."""
    drift = np.geomspace(0.001, 0.01, 30)
    noise = np.random.default_rng(0).normal(1, 0.01, (5, 30))
    speed = _speed([trial(drift * one) for one in noise], [trial(drift / 2)] * 5)
    assert speed.ratio.value == pytest.approx(2, rel=0.01)
    assert 1.95 < (speed.ratio.low or 0) < 2 < (speed.ratio.high or 0) < 2.05
    assert speed.is_faster
    assert not speed.is_slower
    assert speed.cpu_ms == pytest.approx(2 * speed.median_ms, rel=0.01)
    assert speed.runs == 1500


def test_intervals_cover_the_truth_although_processes_of_one_model_differ() -> None:
    """The layout of memory makes a process slower for its whole life, which more blocks do not average out."""
    random = np.random.default_rng(1)
    found = 0
    for _ in range(400):
        first, second = (
            [trial(0.001 * random.normal(1, 0.04) * random.normal(1, 0.002, 8)) for _ in range(5)] for _ in range(2)
        )
        speed = _speed(first, second)
        found += speed.is_faster or speed.is_slower
    assert found / 400 == pytest.approx(0.05, abs=0.03)


def test_times_do_not_contradict_their_ratio() -> None:
    """The second model is faster in each pair of blocks, but the median over its own blocks is longer."""
    first, second = trial(np.array([0.001, 0.001, 0.003])), trial(np.array([0.0009, 0.0014, 0.0014]))
    own, other = _speed([first] * 5, [first] * 5), _speed([first] * 5, [second] * 5)
    assert other.ratio.value == pytest.approx(1 / 0.9)
    assert own.median_ms == pytest.approx(1)
    assert own.median_ms / other.median_ms == pytest.approx(other.ratio.value)


def test_the_first_model_is_as_fast_as_itself() -> None:
    first = [trial(np.array([0.001, 0.002])) for _ in range(5)]
    assert _speed(first, first).ratio == Estimate(1.0, 1.0, 1.0)


def test_a_slow_model_runs_few_times_beyond_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortserve.tools.speed._BLOCK_S", 0.005)
    timed = Timed(Subject("slow", builders.slow(tmp_path / "slow.onnx", steps=10_000)), threads=1)
    feeds = [{"x": np.zeros((1, 4), np.float32)}] * 4
    (speed,) = compare_speed([timed], feeds, seconds=0.01)
    assert speed.runs == 10, "two blocks of one run in each process"


class Counter:
    def __init__(self, value: int) -> None:
        if value < 0:
            raise invalid_input("expected a value from 0")
        self.value = value

    def add(self, more: int, *, times: int = 1) -> int:
        self.value += more * times
        return self.value

    def end(self) -> None:
        os._exit(3)


def test_an_object_in_another_process_keeps_its_state() -> None:
    with ObjectInChild(60, Counter, 3) as counter, ObjectInChild(60, Counter, 10) as other:
        assert counter.call(Counter.add, 4) == 7
        assert other.call(Counter.add, 1) == 11
        assert counter.call(Counter.add, 4, times=2) == 15
        with pytest.raises(ServeError, match="exit status 3"):
            counter.call(Counter.end)
        with pytest.raises(ServeError, match="has ended"):
            counter.call(Counter.add, 1)
        assert other.call(Counter.add, 1) == 12


def test_an_object_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(ServeError, match="expected a value from 0"):
        ObjectInChild(60, Counter, -1)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.onnx")


def run_out_of_memory() -> None:
    raise OutOfMemoryError("too little memory")  # its constructor takes no kind


def test_errors_of_another_process_keep_their_kind() -> None:
    """The exit status depends on it: neither a full disk nor a crashed process is a wrong argument."""
    with pytest.raises(OSError, match="No space left") as full:
        call_in_child(60, fill_the_disk)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "model.onnx")
    for function, argument, says in ((run_out_of_memory, (), "^too little memory"), (os._exit, (3,), "exit status 3")):
        with pytest.raises(ServeError, match=says) as failed:
            call_in_child(60, function, *argument)
        assert failed.value.kind is ErrorKind.INTERNAL
