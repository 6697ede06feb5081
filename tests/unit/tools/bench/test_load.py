"""The send times of requests."""

from pathlib import Path

import numpy as np
import pytest

from ortserve.errors import ServeError
from ortserve.tools.bench.load import Load, arrival_times


def test_constant_arrivals_have_equal_gaps() -> None:
    times = arrival_times(Load(None, 500.0), 2.0, 1)

    assert len(times) == 1000
    assert set(np.diff(times)) == {2_000_000}


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = arrival_times(Load(None, 1000.0, "poisson"), 20.0, 1)
    gaps = np.diff(times) / 1e6

    assert abs(len(times) - 20_000) < 4 * 20_000**0.5
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert np.array_equal(times, arrival_times(Load(None, 1000.0, "poisson"), 20.0, 1)), "the same seed, the same times"
    assert times[-1] < 20e9


def test_bursts_come_together_at_the_rate() -> None:
    times = arrival_times(Load(None, 100.0, "bursts:10"), 1.0, 1)

    assert len(times) == 100
    values, counts = np.unique(times, return_counts=True)
    assert set(counts) == {10}
    assert set(np.diff(values)) == {100_000_000}


def test_times_of_a_file_begin_with_the_first_and_end_with_the_measurement(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("10.5\n10.0\n10.25\n99\n")

    times = arrival_times(Load(None, 0.0, str(file)), 5.0, 1)

    assert times.tolist() == [0, 250_000_000, 500_000_000]


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (Load(None, 10.0, "bursts:x"), "bursts:N"),
        (Load(None, 10.0, "bursts:0"), "bursts:N"),
        (Load(None, 10.0, "bursts:²"), "bursts:N"),
        (Load(None, 10.0, f"bursts:{1 << 64}"), "bursts:N"),
        (Load(None, 10.0, "sine"), "expected constant, poisson"),
        (Load(None, 1e7), "at most 20,000,000"),
        (Load(None, 0.0, "/nowhere/times"), "expected constant, poisson, bursts:N or a file of times"),
    ],
)
def test_wrong_arrivals_are_named(load: Load, problem: str) -> None:
    with pytest.raises(ServeError, match=problem):
        arrival_times(load, 10.0, 1)


@pytest.mark.parametrize("content", ["", "a b", "nan"])
def test_files_without_times_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "times.txt"
    file.write_text(content)

    with pytest.raises(ServeError, match="times"):
        arrival_times(Load(None, 0.0, str(file)), 10.0, 1)


def test_callers_are_shared_by_generators() -> None:
    assert [callers for callers, _ in Load(7).divide(3, 1.0, 1)] == [3, 2, 2]
