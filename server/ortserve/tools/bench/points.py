"""From what the generators saw to a point of the result. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ortserve.tools.bench.generators import Outcome
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.result import (
    BatchSize,
    FailureCount,
    Generator,
    OutputCheck,
    Percentile,
    Phase,
    Point,
    ServerUsage,
)
from ortserve.tools.bench.samples import Chunk, Samples, join
from ortserve.tools.bench.statistics import (
    Estimate,
    estimate_percentile,
    estimate_rate,
    histogram,
    settled_from,
    trend,
)

PERCENTS: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
NO_VERDICT: Final = "no verdict"
"""Begins the reason in problems of the generator itself."""
_BUSY: Final = 0.8
_WAIT_SHARE: Final = 0.1
_SENT: Final = 0.99
_LATE_US: Final = 1000.0
_LATE_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Subject:
    """What a point is about."""

    target: str
    way: str
    server: str
    load: Load
    batch: int
    is_in_process: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """What else was seen during the load."""

    batches: dict[int, int]
    usage: ServerUsage | None
    outputs: OutputCheck | None


def make_point(
    subject: Subject, outcomes: Sequence[Outcome], observed: Observed, percent: float, slo_ms: float | None
) -> Point:
    """Join the rounds of one load.

    Raises:
        ValueError: No generator has finished.
    """
    parts = [_Part(outcome, subject.load) for outcome in outcomes]
    seconds = sum(part.seconds for part in parts)
    latencies = np.concatenate([part.latencies for part in parts])
    failures = _failures(outcomes, observed.outputs)
    rates = [part.rate for part in parts]
    wrong = observed.outputs.different if observed.outputs else 0
    percents = sorted({*PERCENTS, percent})
    percentiles = tuple(_percentile(latencies, one) for one in percents) if len(latencies) else ()
    asked, median = (next((one for one in percentiles if one.percent == wanted), None) for wanted in (percent, 50.0))
    throughput = _mean_rate(rates)
    edges, counts = histogram(latencies * 1e3)
    reason: Literal["precision", "time", "interrupted"] = "time"
    if any(outcome.is_interrupted for outcome in outcomes):
        reason = "interrupted"
    elif all(outcome.is_stopped for outcome in outcomes):
        reason = "precision"
    return Point(
        subject.target,
        subject.way,
        subject.server,
        subject.load.label,
        "open" if subject.load.is_open else "closed",
        subject.load.concurrency,
        subject.load.rate,
        subject.batch,
        seconds,
        reason,
        sum(part.sent for part in parts),
        len(latencies) - wrong,
        failures,
        throughput,
        throughput.value * subject.batch,
        None if slo_ms is None else float((latencies <= slo_ms / 1e3).sum()) / seconds,
        float(latencies.mean()) * 1e3 if len(latencies) else None,
        percentiles,
        float(latencies.max()) * 1e3 if len(latencies) else None,
        sum(part.unsettled_s for part in parts),
        trend(latencies),
        any(part.is_overloaded for part in parts),
        sum(chunk.nbytes for part in parts for chunk in part.chunks) / max(1, len(latencies)),
        _phases([timing for part in parts for chunk in part.chunks for timing in chunk.timings]),
        tuple(BatchSize(rows, count) for rows, count in sorted(observed.batches.items())),
        observed.usage,
        _generator(parts, subject, asked, median),
        observed.outputs,
        tuple(edges),
        tuple(counts),
    )


class _Part:
    """One round: its latencies in the order of time, and its rates."""

    def __init__(self, outcome: Outcome, load: Load) -> None:
        self.chunks: list[Chunk] = [chunk for chunks in outcome.chunks for chunk in chunks]
        self.samples: Samples = join(self.chunks)
        self.processes = len(outcome.chunks)
        begin_ns = min(one.begin_ns for one in outcome.finished)
        self.end_ns = max(one.end_ns for one in outcome.finished)
        self.seconds = (self.end_ns - begin_ns) / 1e9
        self.latencies = self.samples.latencies_s(from_schedule=load.is_open)
        done_s = (self.samples.done_ns[self.samples.is_answered] - begin_ns) / 1e9
        self.rate = estimate_rate(done_s, 0.0, self.seconds)
        cut = settled_from(self.latencies)
        due_s = (self.samples.due_ns[self.samples.is_answered] - begin_ns) / 1e9
        self.unsettled_s = float(due_s[cut]) if cut else 0.0
        last = [chunks[-1] for chunks in outcome.chunks if chunks]
        self.sent = sum(chunk.sent for chunk in last)
        self.due = sum(self.sent if one.due is None else one.due for one in outcome.finished)
        self.cpu_share = max((chunk.cpu_ns for chunk in last), default=0) / 1e9 / self.seconds
        self.is_overloaded = load.is_open and self._is_overloaded(begin_ns)

    def _is_overloaded(self, begin_ns: int) -> bool:
        """Whether requests wait at the end, more and more of them, and fewer were answered in time than came."""
        samples, span = self.samples, self.end_ns - begin_ns
        if not len(samples.due_ns):
            return self.sent > 0
        waiting = [
            int(((samples.due_ns <= at) & (samples.done_ns > at)).sum())
            for at in np.linspace(begin_ns + span / 4, self.end_ns, 7).astype(np.int64)
        ]
        early, late = float(np.mean(waiting[:3])), float(np.mean(waiting[-3:]))
        answered = int((samples.is_answered & (samples.done_ns <= self.end_ns)).sum())
        return late > max(4.0, 1.5 * early) and answered < 0.97 * len(samples.due_ns)


def _percentile(latencies: np.ndarray, percent: float) -> Percentile:
    found = estimate_percentile(latencies * 1e3, percent / 100)
    return Percentile(percent, found.value, found.low, found.high)


def _mean_rate(rates: Sequence[Estimate]) -> Estimate:
    """Of rounds of one length; their errors are independent."""
    count = len(rates)
    value = sum(rate.value for rate in rates) / count
    if any(rate.high is None for rate in rates):
        return Estimate(value)
    reach = sum((float(rate.high or 0) - rate.value) ** 2 for rate in rates) ** 0.5 / count
    return Estimate(value, max(0.0, value - reach), value + reach)


def _failures(outcomes: Sequence[Outcome], outputs: OutputCheck | None) -> tuple[FailureCount, ...]:
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for outcome in outcomes:
        for chunk in (chunk for chunks in outcome.chunks for chunk in chunks):
            examples.update({failure.kind: failure.example for failure in chunk.failures})
            for code in chunk.codes.translate(None, b"\0"):
                kind = chunk.failures[code - 1].kind
                counts[kind] = counts.get(kind, 0) + 1
    if outputs is not None and outputs.different:
        counts["wrong_output"], examples["wrong_output"] = outputs.different, outputs.example
    return tuple(FailureCount(kind, counts[kind], examples[kind]) for kind in sorted(counts, key=lambda k: -counts[k]))


def _phases(timings: Sequence[bytes]) -> tuple[Phase, ...]:
    """Read values of ``Server-Timing``; what is malformed is left out."""
    values: dict[str, list[float]] = {}
    for timing in timings:
        for entry in timing.decode("latin-1").split(","):
            name, *parameters = (part.strip() for part in entry.split(";"))
            for parameter in parameters:
                key, _, text = parameter.partition("=")
                if key == "dur" and text.replace(".", "", 1).isdigit():
                    values.setdefault(name, []).append(float(text))
    return tuple(
        Phase(name, float(np.mean(ms)), *(float(value) for value in np.percentile(ms, [50, 99])))
        for name, ms in values.items()
    )


def _generator(
    parts: Sequence[_Part], subject: Subject, asked: Percentile | None, median: Percentile | None
) -> Generator:
    cpu_share = max(part.cpu_share for part in parts)
    late_us = np.concatenate([(part.samples.sent_ns - part.samples.due_ns) / 1e3 for part in parts])
    if not subject.load.is_open or not len(late_us):
        p50 = p99 = None
        sent_share = 1.0
    else:
        p50, p99 = (float(value) for value in np.percentile(late_us, [50, 99]))
        sent_share = min(1.0, sum(part.sent for part in parts) / max(1, sum(part.due for part in parts)))
    ended = sum(len(part.samples.codes) for part in parts)
    wait_ms = own_wait_ms(cpu_share, sum(part.seconds for part in parts), ended // parts[0].processes, subject.load)
    reasons: list[str] = []
    if not subject.is_in_process:
        reasons = judge_generator(cpu_share, late_us, sent_share, subject.load, asked)
        if median is not None and wait_ms > _WAIT_SHARE * median.ms:
            reasons.append(
                f"answers waited about {wait_ms:.2g} ms for the generator, "
                f"more than {_WAIT_SHARE:.0%} of the median of {median.ms:.3g} ms"
            )
    return Generator(max(part.processes for part in parts), cpu_share, p50, p99, sent_share, tuple(reasons))


def own_wait_ms(cpu_share: float, seconds: float, requests: int, load: Load) -> float:
    """How long an answer waits in the mean, until a generator has processed the answers before it.

    The generator is a queue with one worker: its time for a request, times busy / (1 - busy), if requests come at
    random. A lone caller never waits.

    Args:
        cpu_share: Of one processor, by the busiest process.
        seconds: Measured.
        requests: That ended in this time, of one process.
        load: Which was offered.
    """
    busy = min(cpu_share, 0.99)
    others = 1.0 if load.concurrency is None else 1 - 1 / load.concurrency
    return busy * seconds / max(1, requests) * busy / (1 - busy) * others * 1e3


def judge_generator(
    cpu_share: float, late_us: np.ndarray, sent_share: float, load: Load, asked: Percentile | None
) -> list[str]:
    """Why the generator, not the target, may have made the figures; empty if nothing says so.

    Lateness is judged at the percentile that was asked for: it is part of the latencies, and above 1 ms and a twentieth
    of them they are the generator's.
    """
    reasons = []
    if cpu_share > _BUSY:
        reasons.append(f"a generator kept its processor busy for {cpu_share:.0%} of the time, more than {_BUSY:.0%}")
    if load.is_open and len(late_us):
        if sent_share < _SENT:
            reasons.append(f"only {sent_share:.1%} of the requests that were due could be sent, less than {_SENT:.0%}")
        for percent, ms in {(50.0, 0.0), (asked.percent, asked.ms) if asked else (50.0, 0.0)}:
            late = float(np.percentile(late_us, percent))
            bound = max(_LATE_US, _LATE_SHARE * ms * 1e3)
            if late > bound:
                reasons.append(f"p{percent:g} of requests was sent {late:,.0f} µs late, more than {bound:,.0f} µs")
    return sorted(reasons)
