"""The result of ``ortserve bench``: what ``--json`` prints, and what ``--compare`` reads again."""

from dataclasses import dataclass
from typing import Literal

from ortserve.tools.bench.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of the latencies.

    Attributes:
        percent: Of the answers.
        ms: At most this long.
        low_ms: Beginning of the 95 % interval; null with too few samples for one.
        high_ms: Its end.
    """

    percent: float
    ms: float
    low_ms: float | None
    high_ms: float | None


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Requests that failed in one way.

    Attributes:
        kind: ``http_503``, ``timeout``, ``wrong_output``.
        count: Of requests.
        example: The text of one.
    """

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the server's own time, from ``Server-Timing`` of some answers.

    Attributes:
        name: As the server says.
        mean_ms: Of these answers.
        p50_ms: Likewise.
        p99_ms: Likewise.
    """

    name: str
    mean_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Batches of so many rows that ran meanwhile.

    Attributes:
        rows: Of a batch.
        batches: How many ran.
    """

    rows: int
    batches: int


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What the server used, if it is on this machine.

    Attributes:
        processes: With its children.
        processors: Kept busy, in the mean.
        cpu_us_per_request: Of an answered request.
        resident_bytes: Most at a time.
        machine_busy: Share of the processor time of this machine that all its processes used.
    """

    processes: int
    processors: float
    cpu_us_per_request: float
    resident_bytes: int
    machine_busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Generator:
    """How the load generator itself did.

    Attributes:
        processes: Of it.
        cpu_share: Of one processor, by the busiest process.
        late_p50_us: By how much requests of an open loop were sent later than due; null in a closed one.
        late_p99_us: Likewise.
        sent_share: Of the requests that were due; 1 in a closed loop.
        too_slow_because: Why the figures are the generator's rather than the target's; empty if they are not.
        waited_us: Mean time between the arrival of an answer and its processing by the generator.
    """

    processes: int
    cpu_share: float
    late_p50_us: float | None
    late_p99_us: float | None
    sent_share: float
    too_slow_because: tuple[str, ...]
    waited_us: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Answers that were compared with the expected outputs.

    Attributes:
        checked: How many were compared; 0 if nothing can be compared.
        different: Of them.
        expected: Where the expected outputs come from, or why there are none.
        example: The first difference; empty for none.
    """

    checked: int
    different: int
    expected: str
    example: str


@dataclass(frozen=True, slots=True)
class LoadOnTarget:
    """One load on one target. ``Point`` describes the attributes."""

    target: str
    way: str
    server: str
    load: str
    concurrency: int | None
    rate: float | None
    batch: int


@dataclass(frozen=True, slots=True)
class Point(LoadOnTarget):
    """One load on one target.

    Attributes:
        target: As given.
        way: The protocol, or the kind of run in this process.
        server: Name and version, as it says; empty in this process.
        load: In words; equal loads have equal words.
        concurrency: Callers of a closed loop, whose latency counts from the sending; null in an open one.
        rate: Asked requests per second of an open loop, whose latency counts from the schedule; null in a closed one.
        batch: Rows of a request.
        seconds: Measured, warm-up apart.
        stopped_because: The interval was narrow enough, the time was over, or Ctrl-C.
        requests: That were sent in this time.
        answers: Of them, without failures.
        failures: By kind.
        throughput: Answers per second, with the interval.
        goodput_per_s: Answers per second within ``--slo``; null without it.
        mean_ms: Latency.
        percentiles: Of the latency.
        most_ms: The longest.
        is_overloaded: Requests came faster than answers, and more and more waited.
        phases: Of the server's time.
        batches: That ran on the server or in the batcher.
        usage: Of the server; null if unknown.
        generator: Its own account.
        outputs: What the comparison of answers found; null if none was compared.
        histogram_ms: Edges of the bars.
        histogram: Answers in each.
    """

    seconds: float
    stopped_because: Literal["precision", "time", "interrupted"]
    requests: int
    answers: int
    failures: tuple[FailureCount, ...]
    throughput: Estimate
    goodput_per_s: float | None
    mean_ms: float | None
    percentiles: tuple[Percentile, ...]
    most_ms: float | None
    is_overloaded: bool
    phases: tuple[Phase, ...]
    batches: tuple[BatchSize, ...]
    usage: ServerUsage | None
    generator: Generator
    outputs: OutputCheck | None
    histogram_ms: tuple[float, ...]
    histogram: tuple[int, ...]

    @property
    def failed(self) -> int:
        return sum(one.count for one in self.failures)

    def percentile(self, percent: float) -> Percentile | None:
        """One of the percentiles; None if nothing was answered."""
        return next((one for one in self.percentiles if one.percent == percent), None)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest sustained rate that ``--find-capacity`` found.

    Attributes:
        target: As given.
        way: The protocol or kind of run.
        batch: Rows of a request.
        sustained_per_s: The highest rate that was sustained; null if none was.
        exceeded_per_s: The lowest that was not; null if all were.
    """

    target: str
    way: str
    batch: int
    sustained_per_s: float | None
    exceeded_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A measurement.

    Attributes:
        schema: Changes with the meaning of the fields.
        version: Of ortserve.
        began: In UTC, ISO 8601.
        machine: Processors and load of the machine of the generator.
        model: Its name on servers; empty if only models in this process were measured.
        inputs: Where they came from.
        percentile: That decides about precision, ``--slo`` and capacity.
        slo_ms: Latency that answers should have; null if none was given.
        points: Loads and targets.
        capacities: Empty without ``--find-capacity``.
        is_interrupted: Ctrl-C ended it early; ``points`` is what was measured.
        problems: Why the exit status is not 0.
    """

    schema: Literal["ortserve.bench/1"] = "ortserve.bench/1"
    version: str
    began: str
    machine: str
    model: str
    inputs: str
    percentile: float
    slo_ms: float | None
    points: tuple[Point, ...]
    capacities: tuple[Capacity, ...]
    is_interrupted: bool
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A value of two results: the second divided by the first, and whether that is beyond the noise."""

    way: str
    load: str
    batch: int
    value: str
    first: float
    second: float
    ratio: float
    low: float | None
    high: float | None
    is_significant: bool


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """What ``--compare`` prints: changes from the first to the second result, and what only one of them has."""

    schema: Literal["ortserve.bench.comparison/1"]
    first: str
    second: str
    changes: tuple[Change, ...]
    only_in_one: tuple[str, ...]
    problems: tuple[str, ...]
