"""How many rows are offered a second, whatever becomes of them."""

import math
from typing import Final

_STEP_NS: Final = 1e9
_MEMORY_NS: Final = 5e9


class ArrivalRate:
    """An exponentially weighted rate that forgets within some seconds. Written on the loop thread only."""

    __slots__ = ("_at_ns", "_per_s", "_rows")

    def __init__(self) -> None:
        self._per_s = 0.0
        self._rows = 0
        self._at_ns = 0

    def count(self, rows: int, now_ns: int) -> None:
        self._rows += rows
        if now_ns - self._at_ns > _STEP_NS:  # not for each request: it is asked for once in a while
            self._per_s = self.per_s(now_ns)
            self._rows = 0
            self._at_ns = now_ns

    def per_s(self, now_ns: int) -> float:
        """Rows a second."""
        passed_ns = now_ns - self._at_ns
        if self._at_ns == 0 or passed_ns <= 0:
            return self._per_s
        kept = math.exp(-passed_ns / _MEMORY_NS)
        return kept * self._per_s + (1 - kept) * self._rows / (passed_ns / 1e9)
