"""Runs a measurement: loads on prepared targets in rounds, the search for the capacity, and the live view."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, Final

import numpy as np

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.bench.generator import Work
from ortserve.tools.bench.generators import Generators, Outcome
from ortserve.tools.bench.load import Load, arrival_times
from ortserve.tools.bench.points import NO_VERDICT, Observed, Subject, make_point
from ortserve.tools.bench.prepare import Prepared
from ortserve.tools.bench.result import Capacity, Point
from ortserve.tools.bench.samples import Chunk, join
from ortserve.tools.bench.saturation import Try, bracket, first_rate, is_sustained, next_rate
from ortserve.tools.bench.statistics import estimate_percentile, next_check
from ortserve.tools.bench.usage import UsageMeter, find_server

_LOOK_EVERY: Final = 37
"""Coprime with the number of different inputs, so that the answers to all of them are looked at."""
_LIVE_CHUNKS: Final = 4
_PROBE: Final = Load(8)
_PROBE_S: Final = 1.0
_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        seconds: Most for each load.
        warmup_s: Before each round, not measured.
        percent: The percentile that matters.
        precision: End when half its interval is at most this share of it; None to use all the time.
        slo_ms: Bound of the latency; None for none.
        timeout_s: For an answer.
        rounds: In which the loads take turns.
    """

    seconds: float
    warmup_s: float
    percent: float
    precision: float | None
    slo_ms: float | None
    timeout_s: float
    rounds: int


@dataclass(slots=True)
class _Series:
    """The rounds of one load on one target."""

    prepared: Prepared
    load: Load
    meter: UsageMeter
    outcomes: list[Outcome] = field(default_factory=list)
    batches: dict[int, int] = field(default_factory=dict)

    def count_batches(self, counts: dict[int, int]) -> None:
        for rows, count in counts.items():
            self.batches[rows] = self.batches.get(rows, 0) + count

    def point(self, settings: Settings) -> Point:
        prepared = self.prepared
        chunks = [chunk for outcome in self.outcomes for part in outcome.chunks for chunk in part]
        outputs = prepared.check([body for chunk in chunks for body in chunk.bodies])
        answers = sum(chunk.codes.count(0) for chunk in chunks)
        observed = Observed({rows: n for rows, n in self.batches.items() if n}, self.meter.usage(answers), outputs)
        subject = Subject(
            prepared.target, prepared.way, prepared.server, self.load, prepared.batch, prepared.address is None
        )
        return make_point(subject, self.outcomes, observed, settings.percent, settings.slo_ms)


class Measurement:
    """Measures with one set of generators. After Ctrl-C ``is_interrupted`` is set, and nothing more is measured."""

    def __init__(self, generators: Generators, settings: Settings, show: Callable[[str], object]) -> None:
        """``show`` gets a line about now, about four times a second."""
        self._generators = generators
        self._settings = settings
        self._show = show
        self.is_interrupted = False

    def measure(self, targets: Sequence[Prepared], loads: Sequence[Load]) -> list[Point]:
        """All loads on all targets, one after the other, in rounds."""
        settings = self._settings
        series = [_Series(prepared, load, _meter(prepared)) for prepared, load in product(targets, loads)]
        for number in range(settings.rounds):
            for one in series:
                if not self.is_interrupted:
                    self._run(one, settings.seconds / settings.rounds, number)
        return [one.point(settings) for one in series if one.outcomes]

    def find_capacity(self, prepared: Prepared, arrivals: str) -> tuple[list[Point], Capacity]:
        """Search for the highest rate that is sustained; each try takes the time of a load."""
        settings = replace(self._settings, precision=None)
        probe = _Series(prepared, _PROBE, _meter(prepared))
        self._run(probe, min(_PROBE_S, settings.seconds), 0)
        if self.is_interrupted:
            return [], Capacity(prepared.target, prepared.way, prepared.batch, None, None)
        rate: float | None = first_rate(probe.point(settings).throughput.value)
        points: list[Point] = []
        tries: list[Try] = []
        while rate is not None and not self.is_interrupted:
            one = _Series(prepared, Load(None, round(rate, 1), arrivals), _meter(prepared))
            self._run(one, settings.seconds, 0)
            point = one.point(settings)
            if self.is_interrupted:
                break
            points.append(point)
            tries.append(Try(rate, is_sustained(point, settings.percent, settings.slo_ms)))
            if point.generator.too_slow_because and not tries[-1].is_sustained:
                break  # it is the generator that cannot do more
            rate = next_rate(tries)
        points.sort(key=lambda point: point.rate or 0.0)
        return points, Capacity(prepared.target, prepared.way, prepared.batch, *bracket(tries))

    def _run(self, series: _Series, seconds: float, number: int) -> None:
        settings, prepared, load = self._settings, series.prepared, series.load
        total_s = settings.warmup_s + seconds
        times = arrival_times(load, total_s, _SEED + number) if load.is_open else None
        processes = len(self._generators.pids)
        if load.concurrency is not None and load.concurrency < processes:
            problem = f"--processes: expected at most one for each of {load.concurrency} callers, got {processes}"
            raise ServeError(ErrorKind.INVALID_INPUT, problem)
        works = [
            Work(
                prepared.key,
                prepared.plan,
                load.share(index, processes),
                None if times is None else times[index::processes],
                settings.warmup_s,
                seconds,
                settings.timeout_s,
                _LOOK_EVERY,
            )
            for index in range(processes)
        ]
        before: dict[int, int] = {}

        def begin() -> None:
            before.update(_batches(prepared))
            series.meter.begin()

        pace = _Pace(self._settings, f"{prepared.way} {load.label}", series, self._show)
        outcome = self._generators.offer(works, pace, begin)
        series.meter.end()
        self.is_interrupted |= outcome.is_interrupted
        series.count_batches({rows: count - before.get(rows, 0) for rows, count in _batches(prepared).items()})
        for finished in outcome.finished:
            series.count_batches(finished.batches or {})
        series.outcomes.append(outcome)


class _Pace:
    """Decides whether a load goes on, and shows how it does."""

    def __init__(self, settings: Settings, title: str, series: _Series, show: Callable[[str], object]) -> None:
        self._settings = settings
        self._title = title
        self._series = series
        self._show = show
        self._next_check = 100
        self._seen = 0

    def __call__(self, chunks: Sequence[Sequence[Chunk]], elapsed_s: float) -> bool:
        count = sum(map(len, chunks))
        if count == self._seen:
            return True
        self._seen = count
        self._series.meter.look()
        recent = [chunk for part in chunks for chunk in part[-_LIVE_CHUNKS:]]
        self._show(f"{self._title}: {_now(recent, elapsed_s, self._series.load)}")
        precision = self._settings.precision
        if precision is None or elapsed_s < 1:
            return True
        everything = list(chain(*(chain(*outcome.chunks) for outcome in self._series.outcomes), *chunks))
        answers = sum(chunk.codes.count(0) for chunk in everything)
        if answers < self._next_check:
            return True
        self._next_check = next_check(answers)
        latencies = join(everything).latencies_s(from_schedule=self._series.load.is_open)
        return estimate_percentile(latencies, self._settings.percent / 100).relative > precision


def _now(chunks: Sequence[Chunk], elapsed_s: float, load: Load) -> str:
    if elapsed_s < 0:
        return "warming up"
    samples = join(chunks)
    latencies = samples.latencies_s(from_schedule=load.is_open) * 1e3
    if not len(latencies):
        return f"{elapsed_s:.0f} s, no answers, {len(samples.codes)} errors"
    rate = len(latencies) / max(0.25, min(elapsed_s, 0.25 * _LIVE_CHUNKS))
    p50, p99 = np.percentile(latencies, [50, 99])
    errors = len(samples.codes) - len(latencies)
    return f"{elapsed_s:.0f} s, {rate:,.0f}/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms, {errors} errors"


def _meter(prepared: Prepared) -> UsageMeter:
    address = prepared.address
    return UsageMeter(find_server(address.host, address.port) if address else [])


def _batches(prepared: Prepared) -> dict[int, int]:
    """Batches by size so far; empty if the server does not say."""
    if prepared.control is None:
        return {}
    try:
        return prepared.control.batches(prepared.model, prepared.version)
    except (ServeError, LookupError, TypeError):
        return {}


def result_problems(
    points: Sequence[Point], percent: float, slo_ms: float | None, allowed_errors: float, *, is_search: bool
) -> list[str]:
    """Why a measurement is not good: for the exit status. In a search, loads that are too high are no problem."""
    problems: list[Any] = []
    for point in points:
        what = f"{point.target} {point.way} {point.load} batch {point.batch}"
        problems += [f"{what}: {NO_VERDICT}: {reason}" for reason in point.generator.too_slow_because]
        wrong = [one for one in point.failures if one.kind == "wrong_output"]
        problems += [f"{what}: {one.count} wrong outputs: {one.example}" for one in wrong]
        failed = sum(one.count for one in point.failures if one not in wrong)
        if is_search:
            continue
        if failed > allowed_errors * point.requests or not point.answers:
            kinds = ", ".join(f"{one.count} {one.kind}" for one in point.failures) or "no answers"
            problems.append(f"{what}: {failed} of {point.requests} requests failed: {kinds}")
        asked = point.percentile(percent)
        if slo_ms is not None and asked is not None and asked.ms > slo_ms:
            problems.append(f"{what}: p{percent:g} is {asked.ms:.3g} ms, more than the {slo_ms:g} ms of --slo")
    return problems
