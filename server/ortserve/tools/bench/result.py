"""The result of ``ortserve bench``: what ``--json`` prints, and what ``--compare`` reads again."""

from dataclasses import dataclass
from typing import Literal

from ortserve.tools.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of the latencies.

    Attributes:
        percent: The share of the answers with this latency or less, in percent.
        ms: The latency.
        low_ms: Lower end of the 95 % interval; null with too few samples for an interval.
        high_ms: Upper end of the 95 % interval.
    """

    percent: float
    ms: float
    low_ms: float | None
    high_ms: float | None


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures of one kind.

    Attributes:
        kind: The kind, such as ``http_503``, ``timeout`` or ``wrong_output``.
        count: The number of failed requests.
        example: The text of one of the failures.
    """

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the time on the server, from ``Server-Timing`` of some answers.

    Attributes:
        name: The name that the server gives it.
        mean_ms: Mean of its times.
        p50_ms: Median of its times.
        p99_ms: 99th percentile of its times.
    """

    name: str
    mean_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Batches of one size that ran during the measurement.

    Attributes:
        rows: Rows of a batch.
        batches: The number of batches.
    """

    rows: int
    batches: int


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """The usage of a server on this machine.

    Attributes:
        processes: Processes of the server, with their children.
        processors: Processors that it kept busy on average.
        cpu_us_per_request: Processor time per answered request.
        resident_bytes: Largest resident memory.
        machine_busy: Share of the processor time of this machine that all processes used together.
    """

    processes: int
    processors: float
    cpu_us_per_request: float
    resident_bytes: int
    machine_busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Generator:
    """The load generator itself.

    Attributes:
        processes: The number of its processes.
        cpu_share: Share of one processor that its busiest process used.
        late_p50_us: Median of the time from due to sent, in an open loop; null in a closed one.
        late_p99_us: 99th percentile of that time.
        sent_share: Share of the due requests that were sent; 1 in a closed loop.
        too_slow_because: Reasons why the figures may be those of the generator instead of the target; empty if none.
        waited_us: Mean time from the arrival of an answer to its processing by the generator.
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
        checked: Answers that were compared; 0 if answers cannot be compared.
        different: Answers that differed.
        expected: The source of the expected outputs, or why there are none.
        example: The first difference; empty if there is none.
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
        target: The target as given.
        way: The protocol, or the kind of run in this process.
        server: Name and version that the server gives; empty for a model in this process.
        load: The load in words; equal loads have equal words.
        concurrency: Callers of a closed loop, whose latency counts from the sending; null in an open loop.
        rate: Requests per second asked for in an open loop, whose latency counts from the schedule; null in a closed
            loop.
        batch: Rows of a request.
        seconds: Duration of the measurement, without warm-up.
        stopped_because: Whether the interval was narrow enough, the time was over, or Ctrl-C ended the load.
        requests: Requests sent in this time.
        answers: Requests that were answered without a failure.
        failures: Failures by kind.
        throughput: Right answers per second, with the 95 % interval: answers less the share of compared ones that were
            wrong.
        goodput_per_s: Right answers per second within ``--slo``; null without it.
        mean_ms: Mean latency; null without answers.
        percentiles: Percentiles of the latency.
        most_ms: Longest latency; null without answers.
        is_overloaded: Whether requests came faster than answers, so that more and more of them waited.
        phases: Phases of the time on the server.
        batches: Batches that ran on the server or in the batcher, by size.
        usage: Usage of the server; null if unknown.
        generator: The load generator itself.
        outputs: Result of comparing answers; null if none was compared.
        histogram_ms: Edges of the bins of the histogram of latencies.
        histogram: Answers in each bin.
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
        target: The target as given.
        way: The protocol, or the kind of run in this process.
        batch: Rows of a request.
        sustained_per_s: The highest rate that was sustained; null if none was.
        exceeded_per_s: The lowest rate that was not sustained; null if all were, or if that rate may have been too high
            for the generator only.
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
        version: Version of ortserve.
        began: Time of the beginning, in UTC and ISO 8601.
        machine: Processors and load of the machine of the generator.
        model: Name of the model on servers; empty if only models in this process were measured.
        inputs: A description of the inputs.
        percentile: The percentile that precision, ``--slo`` and capacity use.
        slo_ms: The latency bound of ``--slo``; null without one.
        points: One point for each load on each target.
        capacities: Capacities of the targets; empty without ``--find-capacity``.
        is_interrupted: Whether Ctrl-C ended the measurement early; ``points`` has what was measured until then.
        problems: Reasons why the exit status is not 0.
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
