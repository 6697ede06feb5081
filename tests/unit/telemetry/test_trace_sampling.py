"""When traces are written: each file's worth together, and nothing is kept for ever."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ortserve.telemetry.trace_sampling import Sampling


@dataclass
class FakeFiles:
    """Keeps what is written: ``grown`` the file that grows, ``numbered`` the others."""

    grown: list[bytes] = field(default_factory=list)
    numbered: list[list[bytes]] = field(default_factory=list)

    def append(self, records: Sequence[bytes]) -> None:
        self.grown += records

    def number(self, records: Sequence[bytes]) -> None:
        self.numbered.append([*records])


@pytest.fixture
def files() -> FakeFiles:
    return FakeFiles()


def sampling(files: FakeFiles, **settings: Any) -> Sampling:
    return Sampling(files, **{"is_on": True, "rate": 1, "count": -1, "log_frequency": 0} | settings)


def trace(into: Sampling, *records: bytes) -> None:
    for record in records:
        assert into.take()
        into.collect(record)


def test_log_frequency_makes_a_file_of_so_many_traces_each(files: FakeFiles) -> None:
    one = sampling(files, log_frequency=2)
    trace(one, b"a", b"b", b"c", b"d", b"e")
    assert files.numbered == [[b"a", b"b"], [b"c", b"d"]]
    one.close()
    assert files.numbered[2:] == [[b"e"]]
    assert files.grown == []


def test_without_log_frequency_traces_are_written_together_at_the_end(files: FakeFiles) -> None:
    one = sampling(files)
    trace(one, b"a", b"b")
    assert files == FakeFiles()
    one.close()
    assert files == FakeFiles(grown=[b"a", b"b"])


def test_file_grows_before_much_is_kept(files: FakeFiles) -> None:
    trace(sampling(files), *[bytes(1000)] * 100)
    assert 60 <= len(files.grown) < 100


def test_count_makes_a_numbered_file_when_its_last_trace_is_there(files: FakeFiles) -> None:
    one = sampling(files, count=3)
    trace(one, b"a")
    assert one.take()
    assert one.take()
    one.collect(b"c")  # while b is on its way
    assert files.numbered == []
    one.collect(b"b")
    assert files == FakeFiles(numbered=[[b"a", b"c", b"b"]])
    assert not one.take()
    one.close()
    assert files.grown == []


def test_count_that_is_cut_short_leaves_its_traces_in_the_file_that_grows(files: FakeFiles) -> None:
    one = sampling(files, count=3)
    trace(one, b"a")
    one.close()
    assert files == FakeFiles(grown=[b"a"])


@pytest.mark.parametrize("settings", [{"log_frequency": 10**9}, {"count": 10**9}])
def test_memory_ends_a_numbered_file_early(files: FakeFiles, settings: dict[str, int]) -> None:
    trace(sampling(files, **settings), *[bytes(2**20)] * 5)
    assert [len(records) for records in files.numbered] == [4]


def test_request_under_way_when_settings_change_is_still_written(files: FakeFiles) -> None:
    one = sampling(files, log_frequency=5)
    assert one.take()
    one.close()
    one.collect(b"a")
    assert files.numbered == [[b"a"]]
