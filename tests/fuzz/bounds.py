"""The number of fuzz cases, and the bounds on their time and on the server's memory.

Three thousand of each kind among all tests, fewer where each takes longer. ``make fuzz`` runs 100,000, or as many as
``CASES=1000000`` says, ``SEED=2`` others; for pytest they are ``ORTSERVE_TEST_FUZZ_CASES`` and
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

MOST_S: Final = 5.0
"""For one case, on a machine that does other things too."""

LONG_ENOUGH: Final = pytest.mark.timeout(120 * max(1.0, CASES / 10_000))
"""For a test: as long for each case as the usual number of them has."""

_CASES_PER_LOOK: Final = 100
_MIB: Final = 2**20


class MemoryWatch:
    """Looks at a server's peak now and then: what a case took, and gave back at once, is seen, too.

    Fails with the cases since the last look.
    """

    def __init__(self, pid: int, *, most_peak: int, most_growth: int) -> None:
        """Start measuring.

        Args:
            pid: Of the server.
            most_peak: Bytes that some cases, one after the other, may take at a time beside what was there before.
            most_growth: Bytes that all cases together may leave behind.
        """
        self._process = Path(f"/proc/{pid}")
        self._most_peak = most_peak
        self._most_growth = most_growth
        self._cases: list[str] = []
        self._begun = self._last = self._begin_peak()

    def after(self, case: str) -> None:
        """Count a case that was answered."""
        self._cases.append(case)
        if len(self._cases) == _CASES_PER_LOOK:
            self.look()

    def look(self) -> None:
        """Fail if it was too much."""
        peak = self._bytes("VmHWM") - self._last
        self._last = self._begin_peak()
        cases = f"cases {self._cases[0]} to {self._cases[-1]}" if self._cases else "no cases"
        assert peak < self._most_peak, f"{cases} took {peak / _MIB:.0f} MiB"
        grown = self._last - self._begun
        assert grown < self._most_growth, f"the server grew by {grown / _MIB:.0f} MiB, at last with {cases}"
        self._cases.clear()

    def _begin_peak(self) -> int:
        (self._process / "clear_refs").write_text("5")  # the peak begins anew, proc(5)
        return self._bytes("VmRSS")

    def _bytes(self, field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", (self._process / "status").read_text())
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def watching_memory(
    server: ServerProcess, *, most_peak: int = 64 * _MIB, most_growth: int = 200 * _MIB
) -> Iterator[MemoryWatch]:
    """Hold the cases of a ``with`` block to bounds, the last ones too.

    A peak of a few copies of one body of 4 MB, which is as much as the servers here take, is usual.
    """
    watch = MemoryWatch(server.pid, most_peak=most_peak, most_growth=most_growth)
    yield watch
    watch.look()
