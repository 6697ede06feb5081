"""The machine's processors and memory, from files in Linux's format."""

from pathlib import Path

import pytest

from fakes.clock import FakeClock
from ortserve.telemetry.machine import CpuReader, CpuReading

SECOND_NS = 1_000_000_000


def write(folder: Path, *ticks: int) -> None:
    """Write a ``stat`` with user, nice, system, idle, iowait, irq, softirq, steal and so on; others are 0."""
    counts = [*ticks, *[0] * (10 - len(ticks))]
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, counts))}\ncpu0 1 2 3\nintr 7\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 100, 0, 0, 100)
    (tmp_path / "meminfo").write_text(
        "MemTotal:        1000 kB\nMemFree:          100 kB\nMemAvailable:     250 kB\nHugePages_Total:       0\n"
    )
    return tmp_path


def test_utilization_covers_the_time_since_the_last_read(folder: Path) -> None:
    clock = FakeClock()
    reader = CpuReader(clock, folder)
    write(folder, 101, 1, 1, 110, 1, 1, 1, 1, 500, 500)  # 6 of 17 ticks; user ticks include those of guests
    assert reader.read() == CpuReading(6 / 17, 1000 * 1024, 750 * 1024)
    write(folder, 103, 1, 1, 112, 1, 1, 1, 1)
    clock.advance(SECOND_NS)
    assert reader.read().utilization == 2 / 4


def test_second_scrape_within_a_second_leaves_the_interval_of_the_next(folder: Path) -> None:
    clock = FakeClock()
    reader = CpuReader(clock, folder)
    assert reader.read().utilization is None, "no tick has passed"
    write(folder, 110, 0, 0, 190)
    assert reader.read().utilization == 0.1
    write(folder, 111, 0, 0, 190)
    clock.advance(SECOND_NS - 1)
    assert reader.read().utilization == 0.1
    write(folder, 190, 0, 0, 210)
    clock.advance(1)
    assert reader.read().utilization == 0.8


def test_decreasing_counts_give_no_negative_utilization(folder: Path) -> None:
    reader = CpuReader(FakeClock(), folder)
    write(folder, 105, 0, 0, 99)
    assert reader.read().utilization == 1


@pytest.mark.parametrize("content", [None, "", "cpu0 1 2 3 4 5 6 7 8", "cpu  1 2 3", "cpu  a b c d e f g h"])
def test_values_without_kernel_files_are_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
        (tmp_path / "meminfo").write_text("MemTotal: many")
    assert CpuReader(FakeClock(), tmp_path).read() == CpuReading()
