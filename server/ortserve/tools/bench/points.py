"""Computes a point of the result from the outcomes of its requests. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, Literal

import numpy as np

from ortserve.tools.bench.generators import Seen
from ortserve.tools.bench.outcomes import Chunk, answers_between, join
from ortserve.tools.bench.result import (
    BatchSize,
    FailureCount,
    Generator,
    LoadOnTarget,
    OutputCheck,
    Percentile,
    Phase,
    Point,
    ServerUsage,
)
from ortserve.tools.client import read_timing
from ortserve.tools.statistics import Estimate, estimate_percentile, estimate_rate, histogram

PERCENTS: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
NO_VERDICT: Final = "no verdict"
"""Marks problems of the generator itself."""
_BUSY: Final = 0.8
_WAIT_SHARE: Final = 0.1
_SENT: Final = 0.99
_LATE_US: Final = 1000.0
_LATE_SHARE: Final = 0.05


def make_point(
    subject: LoadOnTarget,
    rounds: Sequence[Seen],
    percent: float,
    slo_ms: float | None,
    *,
    batches: Mapping[int, int],
    usage: ServerUsage | None,
    outputs: OutputCheck | None,
) -> Point:
    """Make the point of one load from its rounds.

    Args:
        subject: The load and its target.
        rounds: The outcomes of each round.
        percent: The percentile of ``--percentile``.
        slo_ms: The latency bound of ``--slo``; None without one.
        batches: Counts of the batches that ran meanwhile, by rows.
        usage: The usage of the server; None if unknown.
        outputs: The result of comparing answers; None if none was compared. Rates leave out the share of wrong ones.
    """
    right_share = 1 - outputs.different / outputs.checked if outputs and outputs.checked else 1.0
    parts = [_Part(seen, is_open=subject.concurrency is None) for seen in rounds]
    chunks = [chunk for seen in rounds for chunk in seen.chunks]
    seconds = sum(part.seconds for part in parts)
    latencies_ms = np.concatenate([part.latencies_s for part in parts]) * 1e3
    goodput = None if slo_ms is None else sum(part.answers_within(slo_ms) for part in parts) / seconds * right_share
    late_us = np.concatenate([part.outcomes.sent_ns - part.outcomes.due_ns for part in parts]) / 1e3
    percents = sorted({*PERCENTS, percent}) if len(latencies_ms) else []
    percentiles = {one: _percentile(latencies_ms, one) for one in percents}
    edges, counts = histogram(latencies_ms)
    reason: Literal["precision", "time", "interrupted"] = "time"
    if any(seen.is_interrupted for seen in rounds):
        reason = "interrupted"
    elif all(seen.is_precise for seen in rounds):
        reason = "precision"
    return Point(
        **asdict(subject),
        seconds=seconds,
        stopped_because=reason,
        requests=len(late_us),
        answers=len(latencies_ms) - (outputs.different if outputs else 0),
        failures=_failures(chunks, outputs),
        throughput=_mean_rate([part.rate for part in parts], right_share),
        goodput_per_s=goodput,
        mean_ms=float(latencies_ms.mean()) if len(latencies_ms) else None,
        percentiles=tuple(percentiles.values()),
        most_ms=float(latencies_ms.max()) if len(latencies_ms) else None,
        is_overloaded=any(part.is_overloaded for part in parts),
        phases=_phases([timing for chunk in chunks for timing in chunk.timings]),
        batches=tuple(BatchSize(rows, count) for rows, count in sorted(batches.items()) if count),
        usage=usage,
        generator=_generator(rounds, late_us, subject, percentiles.get(percent), percentiles.get(50.0)),
        outputs=outputs,
        histogram_ms=tuple(edges),
        histogram=tuple(counts),
    )


class _Part:
    """The figures of one round."""

    def __init__(self, seen: Seen, *, is_open: bool) -> None:
        self.outcomes, self._is_open = join(seen.chunks), is_open
        begin_ns = min(one.begin_ns for one in seen.finished)
        end_ns = max(one.end_ns for one in seen.finished)
        self.seconds = (end_ns - begin_ns) / 1e9
        self.latencies_s = self.outcomes.latencies_s(from_schedule=is_open)
        self._answers = answers_between(seen.chunks, begin_ns, end_ns)
        self.rate = estimate_rate((self._answers.done_ns - begin_ns) / 1e9, self.seconds)
        self.is_overloaded = is_open and self._is_overloaded(begin_ns, end_ns)

    def answers_within(self, slo_ms: float) -> int:
        """The number of answers in the round whose latency is at most ``slo_ms``."""
        return int((self._answers.latencies_s(from_schedule=self._is_open) * 1e3 <= slo_ms).sum())

    def _is_overloaded(self, begin_ns: int, end_ns: int) -> bool:
        """Whether the number of waiting requests grew, and too few requests were answered by the end of the round."""
        outcomes = self.outcomes
        waiting = [
            int(((outcomes.due_ns <= at) & (outcomes.done_ns > at)).sum())
            for at in np.linspace(begin_ns + (end_ns - begin_ns) / 4, end_ns, 7).astype(np.int64)
        ]
        early, late = float(np.mean(waiting[:3])), float(np.mean(waiting[-3:]))
        answered = int((outcomes.is_answered & (outcomes.done_ns <= end_ns)).sum())
        return late > max(4.0, 1.5 * early) and answered < 0.97 * len(outcomes.due_ns)


def _percentile(latencies_ms: np.ndarray, percent: float) -> Percentile:
    found = estimate_percentile(latencies_ms, percent / 100)
    return Percentile(percent, found.value, found.low, found.high)


def _mean_rate(rates: Sequence[Estimate], share: float) -> Estimate:
    """The mean over rounds of equal length, multiplied by ``share``. The errors of rounds are independent."""
    count = len(rates)
    value = sum(rate.value for rate in rates) / count * share
    if any(rate.high is None for rate in rates):
        return Estimate(value)
    reach = sum(((rate.high or 0.0) - rate.value) ** 2 for rate in rates) ** 0.5 / count * share
    return Estimate(value, max(0.0, value - reach), value + reach)


def _failures(chunks: Sequence[Chunk], outputs: OutputCheck | None) -> tuple[FailureCount, ...]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for chunk in chunks:
        counts += chunk.failures
        examples |= chunk.examples
    if outputs is not None and outputs.different:
        counts["wrong_output"], examples["wrong_output"] = outputs.different, outputs.example
    return tuple(FailureCount(kind, count, examples[kind]) for kind, count in counts.most_common())


def _phases(timings: Sequence[bytes]) -> tuple[Phase, ...]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for timing in timings:
        for name, ms in read_timing(timing.decode("latin-1")):
            values[name].append(ms)
    return tuple(Phase(name, float(np.mean(ms)), *np.percentile(ms, [50, 99]).tolist()) for name, ms in values.items())


def _generator(
    rounds: Sequence[Seen], late_us: np.ndarray, load: LoadOnTarget, asked: Percentile | None, median: Percentile | None
) -> Generator:
    finished = [one for seen in rounds for one in seen.finished]
    cpu_share = max(one.cpu_ns / (one.end_ns - one.begin_ns) for one in finished)
    due = sum(one.due or 0 for one in finished)
    sent_share = min(1.0, len(late_us) / due) if due else 1.0
    waited_us = sum(one.waited_ns for one in finished) / 1e3 / max(1, len(late_us))
    if load.concurrency is not None:  # callers of a closed loop are never late
        late_us = late_us[:0]
    late_p50_us, late_p99_us = np.percentile(late_us, [50, 99]).tolist() if len(late_us) else (None, None)
    reasons: list[str] = []
    if load.server:  # in this process it is the model that keeps the generator busy
        reasons = judge_generator(cpu_share, late_us, sent_share, asked)
        if median is not None and waited_us > _WAIT_SHARE * median.ms * 1e3:
            reasons.append(
                f"answers waited {waited_us:,.0f} µs for the generator, "
                f"more than {_WAIT_SHARE:.0%} of the median of {median.ms:.3g} ms"
            )
    return Generator(
        processes=len(rounds[0].finished),
        cpu_share=cpu_share,
        late_p50_us=late_p50_us,
        late_p99_us=late_p99_us,
        sent_share=sent_share,
        too_slow_because=tuple(reasons),
        waited_us=waited_us,
    )


def judge_generator(cpu_share: float, late_us: np.ndarray, sent_share: float, asked: Percentile | None) -> list[str]:
    """The reasons why the figures may be those of the generator instead of the target; empty if there are none.

    Latencies of an open loop include the lateness of the sending. It must not exceed 1 ms in the median. At the
    percentile of ``--percentile`` it must not exceed the larger of 1 ms and a twentieth of the latency.
    """
    reasons = []
    if cpu_share > _BUSY:
        reasons.append(f"a generator kept its processor busy for {cpu_share:.0%} of the time, more than {_BUSY:.0%}")
    if sent_share < _SENT:
        reasons.append(f"only {sent_share:.1%} of the requests that were due could be sent, less than {_SENT:.0%}")
    bounds = {50.0: _LATE_US} | ({asked.percent: max(_LATE_US, _LATE_SHARE * asked.ms * 1e3)} if asked else {})
    for percent, bound in bounds.items() if len(late_us) else ():
        late = float(np.percentile(late_us, percent))
        if late > bound:
            reasons.append(f"p{percent:g} of requests was sent {late:,.0f} µs late, more than {bound:,.0f} µs")
    return reasons
