"""Runs a measurement: loads on prepared targets in rounds, the search for the capacity, and the live line."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from ortserve.errors import invalid_input
from ortserve.tools.bench.generator import LoadPart
from ortserve.tools.bench.generators import Generators, Seen
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.outcomes import join
from ortserve.tools.bench.points import NO_VERDICT, make_point
from ortserve.tools.bench.prepare import Prepared
from ortserve.tools.bench.result import Capacity, LoadOnTarget, Point
from ortserve.tools.bench.usage import UsageMeter
from ortserve.tools.statistics import estimate_percentile, next_check

_LIVE_CHUNKS: Final = 4
_PROBE_CALLERS: Final = 8
"""Least number of callers of the probe before a search. Each generator has one at least."""
_PROBE_S: Final = 1.0
_SEED: Final = 1
_BRACKET: Final = 1.06
"""The search ends when the ratio of the lowest exceeded rate to the highest sustained rate is at most this."""
_MAX_TRIES: Final = 14


class _Series:
    """The rounds of one load on one target. It shows their progress, and ends them early if they are precise enough."""

    def __init__(self, prepared: Prepared, load: Load, given: Namespace, show: Callable[[str], object]) -> None:
        self._prepared, self._load, self._given, self._show = prepared, load, given, show
        self._meter = UsageMeter(prepared.control)
        self._next_check = 100
        self._shown = 0
        self.rounds: list[Seen] = []

    def run(self, generators: Generators, seconds: float, precision: float | None) -> bool:
        """Run one round. Returns whether it was interrupted; the figures of an interrupted warm-up are left out."""
        prepared, load, given, processes = self._prepared, self._load, self._given, generators.count
        if load.concurrency is not None and load.concurrency < processes:
            expected = f"expected at most one for each of {load.concurrency} callers"
            raise invalid_input(f"--processes: {expected}, got {processes}")
        parts = [
            LoadPart(
                key=id(prepared),
                plan=prepared.plan,
                callers=callers,
                times_ns=times_ns,
                warmup_s=given.warmup_s,
                seconds=seconds,
                timeout_s=given.timeout_s,
            )
            for callers, times_ns in load.divide(processes, given.warmup_s + seconds, _SEED + len(self.rounds))
        ]
        seen = generators.offer(parts, partial(self._look, precision=precision))
        self._meter.end()
        for finished in seen.finished:
            self._meter.batches.update(finished.batches)
        if not seen.is_interrupted or any(chunk.times for chunk in seen.chunks):
            self.rounds.append(seen)
        return seen.is_interrupted

    def point(self) -> Point:
        """The joint result of the rounds."""
        prepared, load, given, meter = self._prepared, self._load, self._given, self._meter
        names = (prepared.target, prepared.way, prepared.server, load.label)
        subject = LoadOnTarget(*names, load.concurrency, load.rate, prepared.batch)
        chunks = [chunk for seen in self.rounds for chunk in seen.chunks]
        usage = meter.usage(sum(chunk.answers for chunk in chunks))
        outputs = prepared.check([body for chunk in chunks for body in chunk.bodies])
        percent, slo_ms = given.percentile, given.slo_ms
        return make_point(subject, self.rounds, percent, slo_ms, batches=meter.batches, usage=usage, outputs=outputs)

    def _look(self, seen: Seen, elapsed_s: float, precision: float | None) -> bool:
        """Whether the load goes on. Returns at once if no chunk has arrived since the last call."""
        if elapsed_s >= 0:
            self._meter.begin()
        if len(seen.chunks) == self._shown:
            return True
        self._shown = len(seen.chunks)
        self._meter.look()
        self._show(f"{self._prepared.way} {self._load.label}: {self._now(seen, elapsed_s)}")
        if precision is None or elapsed_s < 1:
            return True
        chunks = [chunk for one in (*self.rounds, seen) for chunk in one.chunks]
        answers = sum(chunk.answers for chunk in chunks)
        if answers < self._next_check:
            return True
        self._next_check = next_check(answers)
        latencies = join(chunks).latencies_s(from_schedule=self._load.is_open)
        return estimate_percentile(latencies, self._given.percentile / 100).relative > precision

    def _now(self, seen: Seen, elapsed_s: float) -> str:
        if elapsed_s < 0:
            return "warming up"
        outcomes = join(seen.chunks[-_LIVE_CHUNKS:])
        latencies = outcomes.latencies_s(from_schedule=self._load.is_open) * 1e3
        errors = len(outcomes.due_ns) - len(latencies)
        if not len(latencies):
            return f"{elapsed_s:.0f} s, no answers, {errors} errors"
        rate = len(latencies) / max(0.25, float(np.ptp(outcomes.done_ns)) / 1e9)
        p50, p99 = np.percentile(latencies, [50, 99])
        return f"{elapsed_s:.0f} s, {rate:,.0f}/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms, {errors} errors"


class Measurement:
    """Measures with one set of generators. Ctrl-C sets ``is_interrupted``, and nothing more is measured."""

    def __init__(self, generators: Generators, given: Namespace, show: Callable[[str], object]) -> None:
        """``show`` gets a line about the current state a few times a second."""
        self._generators = generators
        self._given = given
        self._show = show
        self.is_interrupted = False

    def measure(self, targets: Sequence[Prepared], loads: Sequence[Load]) -> list[Point]:
        """Measure all loads on all targets, one after the other, in rounds."""
        given = self._given
        series = [_Series(*pair, given, self._show) for pair in product(targets, loads)]
        for one in series * given.rounds:
            self._run(one, given.seconds / given.rounds, given.precision)
        return [one.point() for one in series if one.rounds]

    def find_capacity(self, prepared: Prepared) -> tuple[list[Point], Capacity]:
        """Search for the highest sustained rate. Each try takes as long as a load."""
        given = self._given
        points: list[Point] = []
        tries: dict[float, bool | None] = {}
        probe = _Series(prepared, Load(max(_PROBE_CALLERS, self._generators.count)), given, self._show)
        self._run(probe, min(_PROBE_S, given.seconds), None)
        rate = first_rate(probe.point().throughput.value) if probe.rounds else None
        while rate is not None:
            one = _Series(prepared, Load(None, round(rate, 1), given.arrivals), given, self._show)
            self._run(one, given.seconds, None)
            if self.is_interrupted:
                break
            points.append(one.point())
            tries[rate] = is_sustained(points[-1], given.percentile, given.slo_ms)
            rate = next_rate(tries)
        points.sort(key=lambda point: point.rate or 0.0)
        low, high = bracket(tries)
        exceeded = high if high is not None and tries[high] is False else None
        return points, Capacity(prepared.target, prepared.way, prepared.batch, low, exceeded)

    def _run(self, series: _Series, seconds: float, precision: float | None) -> None:
        if not self.is_interrupted:
            self.is_interrupted = series.run(self._generators, seconds, precision)


def first_rate(throughput: float) -> float:
    """The first rate to try: a part of the throughput of a closed loop."""
    return max(1.0, throughput * 0.3)


def next_rate(tries: Mapping[float, bool | None]) -> float | None:
    """The next rate to try; None when the bracket is narrow enough. ``tries`` says which rates were sustained.

    Rates without a verdict count as too high, because the generator may manage lower ones.

    The rate doubles until one is too high. Then the bracket is halved on a logarithmic scale.
    """
    if len(tries) >= _MAX_TRIES:
        return None
    low, high = bracket(tries)
    if low is None:
        return high / 2 if high is not None and high >= 1 else None
    if high is None:
        return low * 2
    return None if high <= low * _BRACKET else (low * high) ** 0.5


def bracket(tries: Mapping[float, bool | None]) -> tuple[float | None, float | None]:
    """The highest sustained rate below the lowest rate that is too high, and the latter. None if there is none."""
    high = min((rate for rate, is_sustained in tries.items() if not is_sustained), default=None)
    good = (rate for rate, is_sustained in tries.items() if is_sustained and (high is None or rate < high))
    return max(good, default=None), high


def is_sustained(point: Point, percent: float, slo_ms: float | None) -> bool | None:
    """Whether no queue grew, at most 0.1 % of the requests failed, and the percentile is within the bound, if any.

    None if not, and the generator may be the reason.
    """
    asked = point.percentile(percent)
    within = slo_ms is None or (asked is not None and asked.ms <= slo_ms)
    if not point.is_overloaded and point.failed <= 0.001 * point.requests and point.answers > 0 and within:
        return True
    return None if point.generator.too_slow_because else False


def result_problems(points: Sequence[Point], given: Namespace, *, is_search: bool) -> list[str]:
    """The reasons for exit status 1. A search may exceed the capacity, so its failures and latencies are no problem."""
    problems: list[str] = []
    percent, slo_ms = given.percentile, given.slo_ms
    for point in points:
        what = f"{point.target} {point.way} {point.load} batch {point.batch}"
        problems += [f"{what}: {NO_VERDICT}: {reason}" for reason in point.generator.too_slow_because]
        wrong = point.outputs.different if point.outputs else 0
        if point.outputs and wrong:
            problems.append(f"{what}: {wrong} wrong outputs: {point.outputs.example}")
        if is_search:
            continue
        failed = point.failed - wrong
        if not point.requests:
            reason = "earlier ones took longer" if point.concurrency else "none was due, or earlier ones took longer"
            within = f"no request could be sent within {point.seconds:.2g} s"
            problems.append(f"{what}: {within}, because {reason}: allow more --seconds")
        elif failed > given.allow_errors * point.requests or not point.answers:
            kinds = ", ".join(f"{one.count} {one.kind}" for one in point.failures)
            how = f"{failed} of {point.requests} requests failed: {kinds}" if kinds else "no request was answered"
            problems.append(f"{what}: {how}")
        asked = point.percentile(percent)
        if slo_ms is not None and asked is not None and asked.ms > slo_ms:
            problems.append(f"{what}: p{percent:g} is {asked.ms:.3g} ms, more than the {slo_ms:g} ms of --slo")
    return problems
