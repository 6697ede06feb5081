"""What ``ortserve profile --json`` prints. Times are milliseconds per run unless the name says otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SCHEMA: Final = "ortserve.profile/1"


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the time of a run with profiling goes: operators, the profiler, the rest, and interruptions.

    Times are means over the middle half of the runs that do the same work, such as those on one sample.

    Attributes:
        runs: Pairs of a run without and one with profiling.
        plain_ms: A run without profiling, on the clock of the caller.
        profiled_ms: A run with profiling, likewise: the sum of the four parts below.
        operators_ms: The sum of the self times of all nodes.
        profiler_ms: What profiling adds to a run: the median difference of the pairs, of the time on the processor if
            one thread does all the work.
        rest_ms: The remaining time between operators and around them: ONNX Runtime, and the call from Python. Negative
            if self times contain costs of the profiler.
        interrupted_ms: What a run takes beyond that: other work on the machine interrupts most runs somewhere, each
            operator seldom. Near 0 on a quiet machine.
        profiler_share: Of the time without interruptions.
        profiler_event_us: ``profiler_ms`` by event of the profiler.
        rest_share: Of the time without interruptions.
        rest_error: Half of the width of the 95 % interval of ``profiler_ms``, by the same time.
        is_closed: Whether operators and profiler come within 5 % of the time without interruptions. None for runs under
            5 ms, whose operators are too short for the profiler's clock of 1 µs, and if other work makes it uncertain.
    """

    runs: int
    plain_ms: float
    profiled_ms: float
    operators_ms: float
    profiler_ms: float
    rest_ms: float
    interrupted_ms: float
    profiler_share: float
    profiler_event_us: float
    rest_share: float
    rest_error: float
    is_closed: bool | None


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator type on one execution provider.

    Attributes:
        op: Operator.
        provider: Execution provider.
        nodes: In the graph.
        calls: Per run.
        self_ms: Without the operators of inner graphs.
        total_ms: With them.
        mean_us: ``self_ms`` per call.
        share: Of all operators' self times.
        gflops: Achieved, 10⁹ operations per second, of the nodes for which shapes say them; None if for none.
        gbytes: Achieved, 10⁹ bytes per second, likewise.
        wait_share: Of the threads' time that the calling thread waited for the others; None with one thread.
    """

    op: str
    provider: str
    nodes: int
    calls: float
    self_ms: float
    total_ms: float
    mean_us: float
    share: float
    gflops: float | None
    gbytes: float | None
    wait_share: float | None


@dataclass(frozen=True, slots=True)
class NodeCost:
    """A node of the optimized graph; fields as in ``OperatorCost``.

    Attributes:
        inside: The nodes whose graphs contain it, the outermost first.
        output_shapes: Of its tensors, ``float[1,32,384]``; the first kinds if they differ between calls.
        input_bytes: Read by a call at least, weights included, if known.
        output_bytes: Written by a call.
        gap_us: Mean time before it in which no operator ran; None in parallel mode.
        replaces: The nodes of the file that it is in place of, ``Add (Add_7)``; empty if it is one of the file, or if
            it was added.
    """

    name: str
    op: str
    provider: str
    inside: Sequence[str]
    calls: float
    self_ms: float
    total_ms: float
    mean_us: float
    share: float
    output_shapes: Sequence[str]
    input_bytes: int | None
    output_bytes: int
    gflops: float | None
    gbytes: float | None
    wait_share: float | None
    gap_us: float | None
    replaces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Time of no operator in a run; None in parallel mode.

    Attributes:
        total_ms: Profiler included.
        profiler_ms: What profiling adds to a run, nearly all of it here.
        longest: Nodes after long gaps, by name, with the mean in µs.
    """

    total_ms: float
    profiler_ms: float
    longest: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Threads:
    """How the threads of the pool shared the work; the calling thread is one of them.

    Attributes:
        wait_share: Of the calling thread's time in parallel sections, waiting for the others.
        blocks: Blocks of work per run that each other thread took.
        imbalance: The most blocks of a thread divided by their mean; 1 is even.
    """

    wait_share: float
    blocks: Sequence[float]
    imbalance: float


@dataclass(frozen=True, slots=True)
class Arena:
    """Memory that an execution provider's arena had in use at most, and that it held."""

    provider: str
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Fused:
    """A node of the optimized graph in place of other nodes of the file."""

    name: str
    op: str
    replaces: Sequence[str]
    self_ms: float


@dataclass(frozen=True, slots=True)
class Fusion:
    """The main graph before and after optimization.

    Attributes:
        before: Nodes of the file, constants apart.
        after: Nodes that run.
        fused: The nodes in place of others, the most expensive first.
        removed: Nodes of the file without a successor, by operator.
        added: Nodes without a predecessor, by operator.
    """

    before: int
    after: int
    fused: Sequence[Fused]
    removed: Mapping[str, int]
    added: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """What the operators of a model cost.

    Attributes:
        label: The model, and the settings that it is compared by.
        provider: Execution provider.
        threads: Of a run.
        settings: Session settings that were set for this profile.
        inputs: Where they come from.
        rows: Of a run; for a server, of each batch on average.
        opening_ms: How long ONNX Runtime took to open it for profiling.
        copies: Operators that only copy between devices.
        threads_use: None with one thread.
        gaps: None in parallel mode, in which operators overlap.
        fusion: None if the optimized graph is not known.
        notes: What limits these figures.
    """

    label: str
    provider: str
    threads: int
    settings: Mapping[str, str]
    inputs: str
    rows: float
    opening_ms: float
    balance: Balance
    operators: Sequence[OperatorCost]
    nodes: Sequence[NodeCost]
    copies: Sequence[OperatorCost]
    gaps: Gaps | None
    threads_use: Threads | None
    arenas: Sequence[Arena]
    weight_bytes: int
    fusion: Fusion | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """An operator in two profiles; milliseconds and nodes of None where a profile does not have it."""

    op: str
    nodes: int | None
    other_nodes: int | None
    self_ms: float
    other_self_ms: float
    difference_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second profile against the first, from runs that alternate.

    Attributes:
        ratio: Of the times of runs without profiling, the second by the first: the median of the pairs.
        ratio_low: Lower end of the 95 % interval of the ratio.
        ratio_high: Upper end.
        is_beyond_noise: Whether the interval leaves out 0.95 to 1.05, by which two sessions of one model may differ.
        operators: The largest difference first.
    """

    ratio: float
    ratio_low: float
    ratio_high: float
    is_beyond_noise: bool
    operators: Sequence[OperatorDifference]


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a running server that were profiled.

    Attributes:
        requests: That they answered.
        asked: Requests that were asked for.
        batches: Copied and run again.
        served_ms: Mean time of the same batches in the serving session.
        ended_because: Why there are fewer requests than asked; empty if there are not.
    """

    url: str
    version: str
    requests: int
    asked: int
    batches: int
    served_ms: float
    ended_because: str


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The result.

    Attributes:
        schema: Of this form.
        profile: Of the model, or the first of two.
        other: The second of two.
        comparison: Of the two.
        server: Where the batches come from; None for a model in this process.
    """

    schema: str
    profile: Profile
    other: Profile | None = None
    comparison: Comparison | None = None
    server: Batches | None = None
