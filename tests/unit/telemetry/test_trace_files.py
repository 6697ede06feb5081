"""Trace files on a real disk, the record of a trace, and the times of writes."""

import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ortserve.core.timing import Timing
from ortserve.errors import ServeError
from ortserve.telemetry import trace_files
from ortserve.telemetry.trace_files import Sampling, Traced, TraceFiles, encode_record
from scarcity import files_of_at_most

MANY = 10**9
LONG_S = 30.0


def records(*numbers: int) -> list[bytes]:
    return [b'{"id":%d}' % number for number in numbers]


def ids(path: Path) -> list[int]:
    return [trace["id"] for trace in json.loads(path.read_bytes())]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


def test_growing_file_replaces_an_old_one_and_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier server, and longer than what comes now")
    files = TraceFiles(path, max_bytes=MANY)
    assert path.read_text().startswith("of an earlier")
    files.append(records(1, 2))
    files.append(records(3))
    files.close(LONG_S)
    assert ids(path) == [1, 2, 3]
    assert names(tmp_path) == ["trace.json"]


def test_numbered_files_count_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=MANY)
    files.write_numbered(records(1, 2))
    files.append(records(3))
    files.write_numbered(records(4))
    files.close(LONG_S)
    assert names(tmp_path) == ["trace.json", "trace.json.0", "trace.json.1"]
    assert [ids(tmp_path / f"trace.json.{number}") for number in (0, 1)] == [[1, 2], [4]]


@pytest.mark.parametrize("name", ["", "missing/trace.json", "folder", "link", "dangling", "file/x", "a\0b", "a" * 300])
def test_path_that_cannot_be_a_file_is_rejected_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ServeError, match="trace_file: expected a regular file or a new name in a writable folder"):
        TraceFiles(tmp_path / name if name else Path("/"), max_bytes=MANY)


def test_symbolic_links_are_never_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim, path = tmp_path / "victim", tmp_path / "trace.json"
    victim.write_text("precious")
    files = TraceFiles(path, max_bytes=MANY)
    for name in ("trace.json", "trace.json.0", "trace.json.0.unfinished"):
        (tmp_path / name).symlink_to(victim)
    files.append(records(1))
    files.write_numbered(records(2))
    files.close(LONG_S)
    assert victim.read_text() == "precious"
    assert ids(tmp_path / "trace.json.0") == [2]
    assert not (tmp_path / "trace.json.0").is_symlink()
    (message, fields), (_, lost) = lines(caplog)
    assert message == "traces cannot be written"
    assert fields["file"] == str(path)
    assert lost == {"count": 1}


def test_full_disk_drops_traces_logs_once_and_leaves_valid_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=MANY)
    files.append(records(*range(20)))
    files._writer.submit(int).result()  # waits until the thread has written
    with files_of_at_most(path.stat().st_size + 50):
        for _ in range(3):
            files.append(records(*range(100)))
        files.write_numbered(records(*range(100)))
        files._writer.submit(int).result()
        assert ids(path) == list(range(20))
    files.append(records(99))
    files.close(LONG_S)
    assert ids(path) == [*range(20), 99]
    assert names(tmp_path) == ["trace.json"]
    assert [message for message, _ in lines(caplog)] == ["traces cannot be written", "traces were dropped"]
    assert lines(caplog)[1][1] == {"count": 400}


def test_trace_bytes_stay_within_the_configured_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(tmp_path / "trace.json", max_bytes=3 * 4096)
    for number in range(10):
        files.write_numbered(records(number))
    files.append(records(0))
    files.close(LONG_S)
    assert names(tmp_path) == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert lines(caplog) == [
        ("traces are dropped", {"reason": "trace_max_bytes: 12288 bytes have been written"}),
        ("traces were dropped", {"count": 8}),
    ]


def test_slow_disk_drops_traces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "_MAX_WAITING_BYTES", 100)
    is_slow = threading.Event()
    files = TraceFiles(tmp_path / "trace.json", max_bytes=MANY)
    files._writer.submit(is_slow.wait)
    for number in range(50):
        files.append(records(number))
    is_slow.set()
    files.close(LONG_S)
    written = ids(tmp_path / "trace.json")
    assert written == list(range(len(written)))
    assert 5 < len(written) < 20
    assert lines(caplog) == [
        ("traces are dropped", {"reason": "the disk is too slow"}),
        ("traces were dropped", {"count": 50 - len(written)}),
    ]


def test_close_does_not_wait_for_a_disk_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    files = TraceFiles(path, max_bytes=MANY)
    os.mkfifo(path)  # opening it waits for a reader
    files.append(records(1))
    files.append(records(2))
    files.close(0.1)
    logged = lines(caplog)
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    files._writer.shutdown()
    assert logged == [("queued traces were not written", {"timeout_s": 0.1})]


def test_records_after_close_are_dropped_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TraceFiles(tmp_path / "trace.json", max_bytes=MANY)
    files.close(LONG_S)
    files.append(records(1))
    assert names(tmp_path) == []
    assert caplog.records == []


@pytest.fixture(autouse=True)
def has_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


WHOLE = Timing(10, 20, 30, 40, 50, 60, begun_ns=5)


def trace(
    timing: Timing = WHOLE, *, protocol: str = "http", request_id: str = "", sent_ns: int | None = 70
) -> dict[str, Any]:
    text = encode_record(Traced(7, "m", "3", request_id, protocol), timing, ended_ns=60, sent_ns=sent_ns)
    document: dict[str, Any] = json.loads(text)
    return document


def timestamps(document: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["ns"] for one in document["timestamps"]}


def test_answered_request_has_every_timestamp_in_order() -> None:
    document = trace()
    assert {key: value for key, value in document.items() if key != "timestamps"} == {
        "id": 7,
        "model_name": "m",
        "model_version": 3,
    }
    assert list(timestamps(document).items()) == [
        ("HTTP_RECV_START", 5),
        ("HTTP_RECV_END", 10),
        ("REQUEST_START", 10),
        ("QUEUE_START", 20),
        ("COMPUTE_START", 30),
        ("COMPUTE_INPUT_END", 40),
        ("COMPUTE_OUTPUT_START", 50),
        ("COMPUTE_END", 60),
        ("REQUEST_END", 60),
        ("HTTP_SEND_START", 60),
        ("HTTP_SEND_END", 70),
    ]


def test_grpc_timestamps_have_their_own_names() -> None:
    found = timestamps(trace(Timing(10, 20, 30, 40, 50, 60), protocol="grpc"))
    assert (found["GRPC_WAITREAD_START"], found["GRPC_WAITREAD_END"]) == (10, 10)
    assert (found["GRPC_SEND_START"], found["GRPC_SEND_END"]) == (60, 70)
    assert not any(name.startswith("HTTP") for name in found)


@pytest.mark.parametrize(
    ("timing", "missing"),
    [
        (Timing(10), {"QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}),
        (Timing(10, 20), {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}),
        (Timing(10, 20, 30), {"COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"}),
        (Timing(10, 20, 30, 40), {"COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"}),
        (Timing(10, 20, 30, 40, 50), set()),
    ],
)
def test_failed_request_has_timestamps_up_to_the_failure(timing: Timing, missing: set[str]) -> None:
    found = timestamps(trace(timing))
    assert set(timestamps(trace())) - set(found) == missing
    assert list(found.values()) == sorted(found.values())


def test_disconnected_request_has_no_send_timestamps() -> None:
    assert set(timestamps(trace())) - set(timestamps(trace(sent_ns=None))) == {"HTTP_SEND_START", "HTTP_SEND_END"}


@pytest.mark.parametrize("request_id", ['"]', "a\nb", "é\0\ud800", "\\"])
def test_request_id_may_be_any_text(request_id: str) -> None:
    assert trace(request_id=request_id)["request_id"] == request_id


def test_long_request_id_is_cut() -> None:
    assert trace(request_id="a" * 10_000_000)["request_id"] == "a" * 256


@dataclass
class FakeFiles:
    """Records writes: ``grown`` is the growing file, ``numbered`` the others."""

    grown: list[bytes] = field(default_factory=list)
    numbered: list[list[bytes]] = field(default_factory=list)

    def append(self, records: Sequence[bytes]) -> None:
        self.grown += records

    def write_numbered(self, records: Sequence[bytes]) -> None:
        self.numbered.append([*records])


@pytest.fixture
def files() -> FakeFiles:
    return FakeFiles()


def sampling(files: Any, **settings: Any) -> Sampling:
    return Sampling(files, **{"is_on": True, "rate": 1, "count": -1, "log_frequency": 0} | settings)


def trace_all(into: Sampling, *records: bytes) -> None:
    for record in records:
        assert into.take()
        into.collect(record)


def test_log_frequency_is_the_traces_per_file(files: FakeFiles) -> None:
    one = sampling(files, log_frequency=2)
    trace_all(one, b"a", b"b", b"c", b"d", b"e")
    assert files.numbered == [[b"a", b"b"], [b"c", b"d"]]
    one.close()
    assert files.numbered[2:] == [[b"e"]]
    assert files.grown == []


def test_without_log_frequency_traces_are_written_together_at_the_end(files: FakeFiles) -> None:
    one = sampling(files)
    trace_all(one, b"a", b"b")
    assert files == FakeFiles()
    one.close()
    assert files == FakeFiles(grown=[b"a", b"b"])


def test_file_is_written_before_many_traces_are_buffered(files: FakeFiles) -> None:
    trace_all(sampling(files), *[bytes(1000)] * 100)
    assert 60 <= len(files.grown) < 100


def test_count_writes_a_numbered_file_once_complete(files: FakeFiles) -> None:
    one = sampling(files, count=3)
    trace_all(one, b"a")
    assert one.take()
    assert one.take()
    one.collect(b"c")  # while b is being written
    assert files.numbered == []
    one.collect(b"b")
    assert files == FakeFiles(numbered=[[b"a", b"c", b"b"]])
    assert not one.take()
    one.close()
    assert files.grown == []


def test_incomplete_count_stays_in_the_growing_file(files: FakeFiles) -> None:
    one = sampling(files, count=3)
    trace_all(one, b"a")
    one.close()
    assert files == FakeFiles(grown=[b"a"])


@pytest.mark.parametrize("settings", [{"log_frequency": 10**9}, {"count": 10**9}])
def test_memory_bound_ends_a_numbered_file_early(files: FakeFiles, settings: dict[str, int]) -> None:
    trace_all(sampling(files, **settings), *[bytes(2**20)] * 5)
    assert [len(records) for records in files.numbered] == [4]


def test_running_request_is_written_after_changed_settings(files: FakeFiles) -> None:
    one = sampling(files, log_frequency=5)
    assert one.take()
    one.close()
    one.collect(b"a")
    assert files.numbered == [[b"a"]]
