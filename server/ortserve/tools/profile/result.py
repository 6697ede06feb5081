"""What ``ortserve profile --json`` prints. Times are milliseconds per run unless the name says otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the time of a run with profiling goes: operators, the profiler, the rest, and interruptions.

    Times are means over the middle half of the runs that do the same work.

    Attributes:
        runs: Pairs of a run without and one with profiling.
        plain_ms: A run without profiling, on the clock of the caller.
        profiled_ms: A run with profiling, likewise: the sum of the four parts below.
        operators_ms: The sum of the self times of all nodes, without the profiler's part of them; in parallel mode, the
            time in which any node runs.
        profiler_ms: What profiling adds to a run: the median difference of the pairs, of the time on the processor if
            one thread does all the work.
        rest_ms: The remaining time between operators and around them: ONNX Runtime, and the call from Python. Negative
            if operators are slower with the profiler for another reason than `call_overhead_us`.
        interrupted_ms: What a run takes beyond that: other work on the machine interrupts most runs somewhere, each
            operator seldom. Near 0 on a quiet machine.
        gaps_ms: Time between operators in which none runs, profiler included; null in parallel mode.
        call_overhead_us: The profiler's part of the recorded time of each call, measured on other nodes and taken out
            of self times; null in parallel mode, where it is not.
        profiler_share: Of the time without interruptions.
        rest_share: Of the time without interruptions.
        rest_error: Half of the width of the 95 % interval of `profiler_ms`, by the same time.
        is_closed: Whether operators and profiler come within 5 % of the time without interruptions. Null for runs under
            5 ms, whose operators are too short for the profiler's clock of 1 µs, and if other work makes it uncertain.
    """

    runs: int
    plain_ms: float
    profiled_ms: float
    operators_ms: float
    profiler_ms: float
    rest_ms: float
    interrupted_ms: float
    gaps_ms: float | None
    call_overhead_us: float | None
    profiler_share: float
    rest_share: float
    rest_error: float
    is_closed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a node, or of several together.

    Attributes:
        op: Operator.
        provider: Execution provider.
        calls: Per run.
        self_ms: Without the nodes of inner graphs.
        total_ms: With them.
        mean_us: `self_ms` per call.
        share: Of the self times of all nodes.
        gflops: Achieved, 10⁹ operations per second, of the nodes whose shapes say how many; null if of none.
        gbytes: Achieved, 10⁹ bytes per second, likewise.
        wait_share: Of the calling thread's time in parallel sections, waiting for the others; null without sections.
    """

    op: str
    provider: str
    calls: float
    self_ms: float
    total_ms: float
    mean_us: float
    share: float
    gflops: float | None
    gbytes: float | None
    wait_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost(Cost):
    """An operator type on one execution provider.

    Attributes:
        nodes: In the graph.
    """

    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost(Cost):
    """A node of the optimized graph.

    Attributes:
        name: Of the node; `<operator>_<index>` if it has none.
        inside: The nodes whose graphs contain it, the outermost first.
        output_shapes: Of its tensors, `float[1,32,384]`; the first kinds if they differ between calls.
        call_bytes: Read and written by a call at least, weights included; null if unknown.
        gap_us: Time before a call in which no operator ran; null in parallel mode.
        replaces: The nodes of the file that it is in place of, `Add (Add_7)`; empty if it is one of the file, or if it
            was added.
    """

    name: str
    inside: Sequence[str]
    output_shapes: Sequence[str]
    call_bytes: int | None
    gap_us: float | None
    replaces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fusion:
    """The main graph before and after optimization; `replaces` of a node has the nodes that were fused into it.

    Attributes:
        before: Nodes of the file, constants apart.
        after: Nodes that run.
        removed: Nodes of the file without a successor, by operator.
        added: Nodes without a predecessor, by operator.
    """

    before: int
    after: int
    removed: Mapping[str, int]
    added: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """What the operators of a model cost.

    Attributes:
        label: The model, or the settings that it is compared by.
        provider: Execution provider.
        threads: Of a run.
        settings: Session settings that were set for this profile.
        inputs: Where they come from.
        rows: Of a run; for a server, of each batch on average.
        balance: Where the time goes.
        operators: By type, the most expensive first.
        nodes: The most expensive first.
        copies: Those of `operators` that only copy between devices.
        wait_share: Of the calling thread's time in parallel sections, waiting for the others; null without sections.
        thread_blocks: Blocks of work per run that each other thread of the pool took.
        fusion: Null if the optimized graph is not known.
        notes: What limits these figures.
    """

    label: str
    provider: str
    threads: int
    settings: Mapping[str, str]
    inputs: str
    rows: float
    balance: Balance
    operators: Sequence[OperatorCost]
    nodes: Sequence[NodeCost]
    copies: Sequence[OperatorCost]
    wait_share: float | None
    thread_blocks: Sequence[float]
    fusion: Fusion | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """An operator in two profiles.

    Attributes:
        op: Operator, on all execution providers.
        nodes: In the first graph; null if it does not have the operator.
        other_nodes: In the second graph, likewise.
        self_ms: In the first profile.
        other_self_ms: In the second profile.
    """

    op: str
    nodes: int | None
    other_nodes: int | None
    self_ms: float
    other_self_ms: float


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
        version: Of the model.
        requests: That the batches answered.
        asked: Requests that were asked for.
        batches: Copied and run again.
        served_ms: Mean time of the same batches in the serving session.
        ended_because: Why there are fewer requests than asked; empty if there are not.
    """

    version: str
    requests: int
    asked: int
    batches: int
    served_ms: float
    ended_because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """The result.

    Attributes:
        profile: Of the model, or the first of two.
        other: The second of two.
        comparison: Of the two.
        server: Where the batches come from; null for a model in this process.
    """

    schema: str = "ortserve.profile/1"
    profile: Profile
    other: Profile | None = None
    comparison: Comparison | None = None
    server: Batches | None = None
