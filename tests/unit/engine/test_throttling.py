"""A quota that held the process back, by files as the kernel writes them."""

from pathlib import Path

from ortserve.engine.throttling import Throttling

S = 1_000_000_000


def test_throttled_periods_count_for_ten_seconds(tmp_path: Path) -> None:
    file = tmp_path / "cpu.stat"
    file.write_text("usage_usec 9\nnr_periods 8\nnr_throttled 3\nthrottled_usec 5\n")
    throttling = Throttling([file], S)
    assert not throttling.is_recent(3 * S)
    file.write_text("usage_usec 9\nnr_periods 8\nnr_throttled 4\nthrottled_usec 5\n")
    assert not throttling.is_recent(3 * S + 1)  # it was looked at within the last second
    assert throttling.is_recent(4 * S)
    assert throttling.is_recent(13 * S)
    assert not throttling.is_recent(14 * S)


def test_without_a_quota_nothing_is_read(tmp_path: Path) -> None:
    assert not Throttling([], S).is_recent(5 * S)
    assert not Throttling([tmp_path / "missing"], S).is_recent(5 * S)
