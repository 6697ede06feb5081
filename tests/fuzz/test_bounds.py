"""The memory watch detects allocated and released memory and names the cases between two samples."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from fuzz.bounds import MemoryWatch

MIB = 2**20
TAKER = "for line in iter(input, ''): taken = b'x' * int(line); del taken; print()"


@pytest.fixture
def taker() -> Iterator[tuple[int, Callable[[int], None]]]:
    """The id of a process, and a function that makes it allocate a number of bytes for a moment."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def take(size: int) -> None:
            asks.write(f"{size}\n")
            asks.flush()
            answers.readline()

        take(1)
        yield process.pid, take
        asks.write("\n")


def test_case_with_a_memory_peak_fails_with_its_neighbours(taker: tuple[int, Callable[[int], None]]) -> None:
    pid, take = taker
    watch = MemoryWatch(pid, most_peak=50 * MIB, most_growth=50 * MIB)
    for number in range(100):
        take(10 * MIB)
        watch.after(f"small/{number}")
    take(100 * MIB)
    watch.after("large/0")
    watch.after("large/1")
    with pytest.raises(AssertionError, match=r"cases large/0 to large/1 took \d+ MiB"):
        watch.look()
