"""Whether the event loop is to poll for the next request instead of sleeping, and for how long: decisions only.

A loop that sleeps is woken by the kernel, on a processor that has become cold meanwhile: that takes longer than the
whole answer of a tiny model. A loop that polls pays for it with processor time. It is worth its price where the next
request comes soon, as that of a client which sends one request after the other, and never where it does not.
"""

from typing import Final

DEFAULT_MAX_NS: Final = 200_000
"""Longest gap worth polling for. At evenly spread 5,000 requests a second a process is busy for a third of its time
anyway; the gaps of slower loads are longer."""

_GAPS: Final = 8
_LIKELY: Final = 6
"""Of the last ``_GAPS`` gaps, those that must have been short enough."""

_GAIN: Final = 0.125
_LEAST_BUDGET_NS: Final = 20_000

_WASTE_SHARE: Final = 0.05
"""Of all time, what polling may take without a request at its end."""

_MAX_CREDIT_NS: Final = 2_000_000
"""Waste that may come at once, after a time without any."""


class PollPolicy:
    """Learns the gaps between the last answer and the next request, over all callers. Times are monotonic ns."""

    def __init__(self, max_ns: int = DEFAULT_MAX_NS) -> None:
        """``max_ns`` is the longest time to poll for one request; 0 for never."""
        self._max_ns = max_ns
        self._short = 0  # a bit for each of the last gaps, the newest lowest
        self._gap_ns = 0.0
        self._credit_ns = 0.0
        self._credited_ns = 0

    @property
    def is_likely(self) -> bool:
        """Whether the next request will probably come soon enough."""
        return self._short.bit_count() >= _LIKELY

    def observe_gap(self, gap_ns: int) -> None:
        """The server had nothing to do for so long, and then a request came."""
        is_short = gap_ns <= self._max_ns
        self._short = (self._short << 1 | is_short) & ((1 << _GAPS) - 1)
        if is_short:
            self._gap_ns += _GAIN * (gap_ns - self._gap_ns) if self._gap_ns else gap_ns

    def budget_ns(self, now_ns: int) -> int:
        """How long to poll at most, now that the last request is answered; 0 to sleep."""
        if not self.is_likely:
            return 0
        earned_ns = (now_ns - self._credited_ns) * _WASTE_SHARE
        self._credit_ns = min(_MAX_CREDIT_NS, self._credit_ns + earned_ns)
        self._credited_ns = now_ns
        budget_ns = min(self._max_ns, max(_LEAST_BUDGET_NS, int(2 * self._gap_ns)))
        return budget_ns if budget_ns <= self._credit_ns else 0

    def observe_waste(self, polled_ns: int) -> None:
        """It was polled for so long, and no request came."""
        self._credit_ns -= polled_ns
