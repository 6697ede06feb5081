"""Whether the CPU quota of a cgroup has lately held this process back: then it has no processor time to spend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

_LOOK_EVERY_NS: Final = 1_000_000_000
_RECENT_NS: Final = 10_000_000_000


class Throttling:
    """Counts throttled periods by the kernel's ``cpu.stat`` files (cgroups(7)). One thread only."""

    def __init__(self, files: Sequence[Path], now_ns: int) -> None:
        """``files`` are those of the cgroups that have a quota; empty where none has."""
        self._files = files
        self._looked_ns = now_ns
        self._periods = self._read()
        self._throttled_ns: int | None = None

    def is_recent(self, now_ns: int) -> bool:
        """Whether a quota was used up in the last 10 s. Reads the files once a second at most: some 20 µs each."""
        if self._files and now_ns - self._looked_ns >= _LOOK_EVERY_NS:
            self._looked_ns = now_ns
            periods = self._read()
            if periods != self._periods:
                self._periods = periods
                self._throttled_ns = now_ns
        return self._throttled_ns is not None and now_ns - self._throttled_ns < _RECENT_NS

    def _read(self) -> int:
        return sum(map(_throttled_periods, self._files))


def _throttled_periods(file: Path) -> int:
    try:
        counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return int(counts.get("nr_throttled", "0"))
    except (OSError, ValueError):
        return 0
