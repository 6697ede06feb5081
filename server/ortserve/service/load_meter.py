"""Load reports: the utilization of the server, measured on request and at most twice a second."""

import math
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from ortserve.clock import Clock
from ortserve.codecs.load_report import LoadReport
from ortserve.telemetry.metrics import Metrics

_FRESH_NS: Final = 500_000_000
"""How long a report is reused. Load balancers read weights once a second."""

_MEMORY_NS: Final = 5e9
"""Time constant of the means, the same as that of the arrival rates in the saturation."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at one moment. Only an unload of a model lowers the last two."""

    at_ns: int
    process_ns: int
    loop_ns: int
    requests: int
    faults: int


class _Rates(NamedTuple):
    """The counters per second; processor time as a number of processors."""

    processors: float
    loop: float
    requests: float
    faults: float


class LoadMeter:
    """Measures the load. Constructed and used on the loop thread, whose processor time is the load of the loop."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        processors: int,
        clock: Clock,
        process_clock: Clock = time.process_time_ns,
        loop_clock: Clock = time.thread_time_ns,
    ) -> None:
        """Begin to measure.

        Args:
            metrics: The counts of requests, and the saturation of the models.
            processors: Number of processors that the process may use.
            clock: Monotonic nanoseconds.
            process_clock: Processor time of the process in nanoseconds.
            loop_clock: Processor time of the calling thread in nanoseconds.
        """
        self._metrics = metrics
        self._processors = processors
        self._clock = clock
        self._process_clock = process_clock
        self._loop_clock = loop_clock
        self._counts = self._count()
        self._rates: _Rates | None = None
        self._report: LoadReport | None = None

    def report(self) -> LoadReport:
        """The load of the last seconds; the same object until the next measurement."""
        now_ns = self._clock()
        if self._report is None or now_ns - self._counts.at_ns >= _FRESH_NS:
            self._report = self._measure()
        return self._report

    def _measure(self) -> LoadReport:
        counts = self._count()
        rates = self._rates = _smoothed(self._rates, self._counts, counts)
        self._counts = counts
        saturation = self._metrics.total_saturation()
        return LoadReport(
            # The saturation is summed over models, because they share the device. The server is full when the device is
            # full, or the event loop, where requests to tiny models spend most of their time.
            max(saturation, rates.loop),
            rates.processors / self._processors,
            rates.requests,
            rates.faults,
            {"saturation": saturation, "event_loop_utilization": rates.loop},
        )

    def _count(self) -> _Counts:
        requests, faults = self._metrics.total_requests()
        return _Counts(self._clock(), self._process_clock(), self._loop_clock(), requests, faults)


def _smoothed(known: _Rates | None, before: _Counts, now: _Counts) -> _Rates:
    passed_ns = max(now.at_ns - before.at_ns, 1)
    seconds = passed_ns / 1e9
    # The totals shrink when a model is unloaded, because its counts are removed.
    latest = _Rates(
        (now.process_ns - before.process_ns) / passed_ns,
        (now.loop_ns - before.loop_ns) / passed_ns,
        max(0, now.requests - before.requests) / seconds,
        max(0, now.faults - before.faults) / seconds,
    )
    if known is None:
        return latest
    kept = math.exp(-passed_ns / _MEMORY_NS)
    return _Rates(*(kept * old + (1 - kept) * new for old, new in zip(known, latest, strict=True)))
