"""Trace files on a real disk, which may be full, slow or gone."""

import json
import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ortserve.errors import ServeError
from ortserve.telemetry import trace_files
from ortserve.telemetry.trace_files import TraceFiles

MANY = 10**9


def records(*numbers: int) -> list[bytes]:
    return [b'{"id":%d}' % number for number in numbers]


def ids(path: Path) -> list[int]:
    return [trace["id"] for trace in json.loads(path.read_bytes())]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse to let any file grow beyond ``size``, as a full disk would."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_growing_file_replaces_the_one_of_before_and_is_whole_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier server, and longer than what comes now")
    files = TraceFiles(path, max_bytes=MANY)
    assert path.read_text().startswith("of an earlier")
    files.append(records(1, 2))
    files.append(records(3))
    files.close()
    assert ids(path) == [1, 2, 3]
    assert names(tmp_path) == ["trace.json"]


def test_numbered_files_count_from_zero_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=MANY)
    files.number(records(1, 2))
    files.append(records(3))
    files.number(records(4))
    files.close()
    assert names(tmp_path) == ["trace.json", "trace.json.0", "trace.json.1"]
    assert [ids(tmp_path / f"trace.json.{number}") for number in (0, 1)] == [[1, 2], [4]]


@pytest.mark.parametrize("name", ["", "missing/trace.json", "folder", "link", "dangling", "file/x", "a\0b", "a" * 300])
def test_path_that_cannot_be_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ServeError, match="trace_file: expected a plain file, or none yet, in a folder"):
        TraceFiles(tmp_path / name if name else Path("/"), max_bytes=MANY)


def test_links_that_somebody_puts_in_the_way_are_never_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "trace.json"
    victim.write_text("precious")
    files = TraceFiles(path, max_bytes=MANY)
    for name in ("trace.json", "trace.json.0", "trace.json.0.unfinished"):
        (tmp_path / name).symlink_to(victim)
    files.append(records(1))
    files.number(records(2))
    files.close()
    assert victim.read_text() == "precious"
    assert ids(tmp_path / "trace.json.0") == [2]
    assert not (tmp_path / "trace.json.0").is_symlink()
    (told, fields), (_, lost) = lines(caplog)
    assert told == "traces cannot be written"
    assert fields["file"] == str(path)
    assert lost == {"count": 1}


def test_full_disk_loses_traces_once_told_and_leaves_whole_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=MANY)
    files.append(records(*range(20)))
    files._writer.submit(int).result()  # the thread has come so far
    with files_of_at_most(path.stat().st_size + 50):
        for _ in range(3):
            files.append(records(*range(100)))
        files.number(records(*range(100)))
        files._writer.submit(int).result()
        assert ids(path) == list(range(20))
    files.append(records(99))
    files.close()
    assert ids(path) == [*range(20), 99]
    assert names(tmp_path) == ["trace.json"]
    assert [told for told, _ in lines(caplog)] == ["traces cannot be written", "traces were lost"]
    assert lines(caplog)[1][1] == {"count": 400}


def test_no_more_is_written_than_the_operator_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(tmp_path / "trace.json", max_bytes=3 * 4096)
    for number in range(10):
        files.number(records(number))
    files.append(records(0))
    files.close()
    assert names(tmp_path) == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert lines(caplog) == [
        ("traces are dropped", {"reason": "trace_max_bytes: 12288 bytes are written"}),
        ("traces were lost", {"count": 8}),
    ]


def test_disk_that_is_slower_than_traces_come_loses_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "_MOST_WAITING_BYTES", 100)
    is_slow = threading.Event()
    files = TraceFiles(tmp_path / "trace.json", max_bytes=MANY)
    files._writer.submit(is_slow.wait)
    for number in range(50):
        files.append(records(number))
    is_slow.set()
    files.close()
    written = ids(tmp_path / "trace.json")
    assert written == list(range(len(written)))
    assert 5 < len(written) < 20
    assert lines(caplog) == [
        ("traces are dropped", {"reason": "the disk is slower than traces come"}),
        ("traces were lost", {"count": 50 - len(written)}),
    ]


def test_what_comes_after_the_end_is_lost_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(tmp_path / "trace.json", max_bytes=MANY)
    files.close()
    files.append(records(1))
    assert names(tmp_path) == []
    assert caplog.records == []


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
