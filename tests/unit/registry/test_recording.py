"""Recordings: the selection of requests, the bounds of queue and disk, and files that appear only when complete."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ortserve.config.model import RecordOptions
from ortserve.config.options import ServerOptions, combination_problems
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent
from ortserve.errors import ServeError
from ortserve.registry.recording import MAX_WAITING_BYTES, Recording, Recordings, write_arrays

LONG_S = 30.0
FLOATS = TensorSpec("x", DataType.FP32, (-1, 4))
NAMES = TensorSpec("file", DataType.BYTES, (-1,), is_optional=True)
"""An input whose name is a parameter of ``numpy.savez``."""
SIGNATURE = ModelSignature((FLOATS, NAMES), ())
ROW: Arrays = (np.arange(4, dtype=np.float32)[np.newaxis], absent(1))


def begin(recordings: Recordings, *, share: float = 1.0, max_bytes: int = 2**20, name: str = "m") -> Recording:
    return recordings.begin(name, "1", SIGNATURE, RecordOptions(share=share, max_bytes=max_bytes))


def chosen(folder: Path, share: float, requests: int) -> list[int]:
    """The numbers of the recorded requests."""
    recordings = Recordings(folder)
    recording = begin(recordings, share=share, max_bytes=2**30)
    for number in range(requests):
        recording.observe((np.full((1, 4), number, np.float32), absent(1)), 1)
        if recording.counts()["dropped"]:
            raise AssertionError("the test is faster than the disk")
        if number % 500 == 499:
            recordings.enqueue(0, (written := threading.Event()).set)
            written.wait(LONG_S)
    recordings.close(LONG_S)
    return [int(load(path)["x"][0, 0]) for path in sorted((folder / "m" / "1").iterdir())]


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return dict(archive)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "m" / "1").iterdir())


def test_share_is_chosen_at_random_and_repeatable(tmp_path: Path) -> None:
    first = chosen(tmp_path / "one", 0.1, 3000)
    assert first == chosen(tmp_path / "other", 0.1, 3000)
    assert 240 <= len(first) <= 360  # 300, and 3.6 standard deviations
    assert len({number % 10 for number in first}) == 10


def test_requests_without_rows_are_not_recorded(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    recording.observe((np.zeros((0, 4), np.float32), absent(0)), 0)
    recordings.close(LONG_S)
    assert recording.counts() == {"recorded": 0, "dropped": 0, "failed": 0}


def test_requests_are_dropped_while_the_disk_is_behind(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    may_go_on = threading.Event()
    recordings.enqueue(MAX_WAITING_BYTES // 2, lambda: may_go_on.wait(LONG_S))
    large = (np.zeros((2**20, 4), np.float32), absent(2**20))
    recording.observe(large, 2**20)  # 16 MiB, and as much for the following placeholders
    for _ in range(2000):
        recording.observe(ROW, 1)
    waiting = 2000 - recording.counts()["dropped"]
    may_go_on.set()
    recordings.close(LONG_S)
    counts = recording.counts()
    assert 0 < waiting < 512
    assert counts["recorded"] + counts["failed"] == waiting + 1
    assert counts["failed"]  # the large one exceeds max_bytes and ends the recording


def test_close_waits_no_longer_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    may_go_on = threading.Event()
    recordings.enqueue(0, lambda: may_go_on.wait(LONG_S))
    recording.observe(ROW, 1)
    recordings.close(0.01)
    recording.observe(ROW, 1)
    may_go_on.set()
    assert recording.counts() == {"recorded": 0, "dropped": 1, "failed": 0}
    assert "waiting requests were not recorded" in caplog.text


def test_texts_that_numpy_would_change_are_not_recorded(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    kept = np.array(["", "ü\0x"], object)
    for texts in (kept, np.array(["cut\0", ""], object), np.array(["\ud800", ""], object)):
        recording.observe((np.zeros((2, 4), np.float32), texts), 2)
    long = np.array(["x" * 2**16, *[""] * 2**11], object)
    recording.observe((np.zeros((len(long), 4), np.float32), long), len(long))
    recordings.close(LONG_S)
    assert recording.counts() == {"recorded": 1, "dropped": 0, "failed": 3}
    assert np.char.decode(load(tmp_path / "m" / "1" / "00000001.npz")["file"], "utf-8").tolist() == kept.tolist()


def test_file_is_there_only_when_complete_and_a_failure_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[str]] = []

    def look_and_fail(*arguments: object) -> None:
        seen.append(names(tmp_path))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ortserve.registry.recording.write_arrays", look_and_fail)
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    may_go_on = threading.Event()
    recordings.enqueue(0, lambda: may_go_on.wait(LONG_S))
    recording.observe(ROW, 1)
    recording.observe(ROW, 1)
    may_go_on.set()
    recordings.close(LONG_S)
    assert seen == [[".00000001.npz.unfinished"]]
    assert names(tmp_path) == []
    assert recording.counts() == {"recorded": 0, "dropped": 0, "failed": 2}
    assert caplog.text.count("recording has ended") == 1
    assert recording.describe() == "off: No space left on device; 0 recorded, 0 dropped, 2 failed"


def test_servers_that_share_a_folder_keep_each_others_files(tmp_path: Path) -> None:
    servers = [Recordings(tmp_path), Recordings(tmp_path)]
    loads = [begin(server) for server in servers]
    for number in range(20):
        for index, recording in enumerate(loads):
            recording.observe((np.full((1, 4), 100 * index + number, np.float32), absent(1)), 1)
    for server in servers:
        server.close(LONG_S)
    found = sorted(int(load(path)["x"][0, 0]) for path in (tmp_path / "m" / "1").iterdir())
    assert found == [*range(20), *range(100, 120)]


def test_unfinished_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    for name in (".00000003.npz.unfinished", ".00000004.npz.unfinished", "00000007.npz"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / ".00000003.npz.unfinished", (0, 0))
    recordings = Recordings(tmp_path)
    recording = begin(recordings, max_bytes=3 * 4096)
    recording.observe(ROW, 1)
    recording.observe(ROW, 1)
    recordings.close(LONG_S)
    assert names(tmp_path) == [".00000004.npz.unfinished", "00000007.npz", "00000008.npz"]
    assert recording.counts()["recorded"] == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "elsewhere")
    recordings = Recordings(tmp_path)
    recording = begin(recordings)
    recording.observe(ROW, 1)
    recordings.close(LONG_S)
    assert "not a link" in recording.describe()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_reload_goes_on_behind_its_predecessor(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    before = begin(recordings, max_bytes=3 * 4096)
    before.observe(ROW, 1)
    after = begin(recordings, max_bytes=3 * 4096)
    for recording in (after, before, after, before):
        recording.observe(ROW, 1)
    recordings.close(LONG_S)
    assert names(tmp_path) == ["00000001.npz", "00000002.npz", "00000003.npz"]
    assert before.counts()["recorded"] + after.counts()["recorded"] == 3


def test_unusable_folder_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "no" / "such"):
        with pytest.raises(ServeError, match="record_dir: expected a writable folder"):
            Recordings(folder)


def test_folder_in_a_repository_is_rejected(tmp_path: Path) -> None:
    for folder, count in ((tmp_path, 1), (tmp_path / "a" / ".." / "b", 1), (tmp_path.parent, 0)):
        assert len(combination_problems(ServerOptions(repositories=(tmp_path,), record_dir=folder))) == count


def test_arrays_of_any_form_are_written_as_numpy_reads_them(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    arrays: dict[str, np.ndarray] = {
        "a/b:0": whole.transpose(2, 0, 1),
        "allow_pickle": np.broadcast_to(np.array(1.5, np.float16), (3, 2)),
        "unaligned": np.frombuffer(b"x" + bytes(16), np.float32, 4, 1),
        "empty": np.empty((2, 0), np.bool_),
        "large": np.random.default_rng(0).integers(0, 256, (3, 2**20 + 1), np.uint8),
    }
    with (tmp_path / "made.npz").open("wb") as file:
        write_arrays(file, arrays)
    found = load(tmp_path / "made.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
