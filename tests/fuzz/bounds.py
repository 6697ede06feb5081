"""The number of fuzz cases, and the bounds on their time and on the server's memory.

A normal run has three thousand cases of each kind, fewer of slow kinds. ``make fuzz`` runs 100,000; ``CASES=1000000``
sets another number and ``SEED=2`` other cases. Under pytest these are ``ORTSERVE_TEST_FUZZ_CASES`` and
``ORTSERVE_TEST_FUZZ_SEED``.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from servers import ServerProcess

CASES: Final = int(os.environ.get("ORTSERVE_TEST_FUZZ_CASES", "3000"))
SEED: Final = int(os.environ.get("ORTSERVE_TEST_FUZZ_SEED", "1"))

MAX_S: Final = 5.0
"""Maximum time of one case, on a machine with other load."""

LONG_ENOUGH: Final = pytest.mark.timeout(120 * max(1.0, CASES / 10_000))
"""Timeout of a test, proportional to the number of cases."""

_CASES_PER_LOOK: Final = 100
_MIB: Final = 2**20


class MemoryWatch:
    """Samples a server's peak memory from time to time, which includes memory that a case has already released.

    It fails with the names of the cases since the last sample.
    """

    def __init__(self, pid: int, *, most_peak: int, most_growth: int) -> None:
        """Start measuring.

        Args:
            pid: Process id of the server.
            most_peak: Maximum peak in bytes above the memory at the last sample.
            most_growth: Maximum growth in bytes over all cases together.
        """
        self._process = Path(f"/proc/{pid}")
        self._most_peak = most_peak
        self._most_growth = most_growth
        self._cases: list[str] = []
        self._begun = self._last = self._begin_peak()

    def after(self, case: str) -> None:
        """Count an answered case."""
        self._cases.append(case)
        if len(self._cases) == _CASES_PER_LOOK:
            self.look()

    def look(self) -> None:
        """Sample the memory. Fails if a bound is exceeded."""
        peak = self._bytes("VmHWM") - self._last
        self._last = self._begin_peak()
        cases = f"cases {self._cases[0]} to {self._cases[-1]}" if self._cases else "no cases"
        assert peak < self._most_peak, f"{cases} took {peak / _MIB:.0f} MiB"
        grown = self._last - self._begun
        assert grown < self._most_growth, f"the server grew by {grown / _MIB:.0f} MiB, at last with {cases}"
        self._cases.clear()

    def _begin_peak(self) -> int:
        (self._process / "clear_refs").write_text("5")  # resets the peak, see proc(5)
        return self._bytes("VmRSS")

    def _bytes(self, field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", (self._process / "status").read_text())
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def watching_memory(
    server: ServerProcess, *, most_peak: int = 64 * _MIB, most_growth: int = 200 * _MIB
) -> Iterator[MemoryWatch]:
    """Hold the cases in a ``with`` block to bounds, including the last ones.

    A peak of a few copies of one body of 4 MB, the maximum that these servers accept, is normal.
    """
    watch = MemoryWatch(server.pid, most_peak=most_peak, most_growth=most_growth)
    yield watch
    watch.look()
