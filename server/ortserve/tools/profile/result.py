"""The result of ``ortserve profile``, as ``--json`` writes it. Names carry units; times in ms are per run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Balance:
    """The parts of the time of a run with profiling: operators, the profiler, the rest, and interruptions.

    Times are means over the middle half of the runs that do the same work.

    Attributes:
        runs: The number of pairs of a run without and a run with profiling.
        plain_ms: Time of a run without profiling, measured by the caller.
        profiled_ms: Time of a run with profiling, measured by the caller: the sum of the next four parts.
        operators_ms: The sum of the self times of all nodes, without the profiler's part of them; in parallel mode, the
            time in which any node runs.
        profiler_ms: Time that profiling adds to a run: the median difference of the pairs, in processor time if one
            thread does all the work.
        rest_ms: Remaining time between and around operators: ONNX Runtime, and the call from Python. Negative if
            profiling slows operators down by more than `call_overhead_us`.
        interrupted_ms: Time beyond these parts, in which other work on the machine interrupted runs. Near 0 on a quiet
            machine.
        gaps_ms: Time in which no operator runs, profiler included; null in parallel mode.
        call_overhead_us: The profiler's part of the recorded time of each call. It is measured on other nodes, and
            subtracted from self times; null in parallel mode, where nothing is subtracted.
        profiler_share: `profiler_ms` as a share of the time without interruptions.
        rest_share: `rest_ms` as a share of the time without interruptions.
        rest_error: Half of the width of the 95 % interval of `profiler_ms`, as a share of the same time.
        clock_error: Share of the same time that may belong to operators or to the rest, because the profiler's clock
            counts whole microseconds: half of one for each call.
        is_closed: Whether operators and profiler account for the time without interruptions within 5 %. Null for runs
            under 5 ms, for fewer than six runs, and if other work or `clock_error` makes it uncertain.
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
    clock_error: float
    is_closed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a node, or of several together.

    Attributes:
        op: Operator.
        provider: Execution provider.
        calls: Calls per run.
        self_ms: Time per run without the nodes of inner graphs.
        total_ms: Time per run with the nodes of inner graphs.
        mean_us: `self_ms` per call.
        share: Share of the self times of all nodes.
        gflops: Achieved rate in 10⁹ operations per second, over the nodes whose shapes determine the number of
            operations; null if there are none.
        gbytes: Achieved rate in 10⁹ bytes per second, likewise.
        wait_share: Share of its time in parallel sections that the calling thread waits for others; null without
            parallel sections.
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
        nodes: Nodes of this type in the graph.
    """

    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost(Cost):
    """A node of the optimized graph.

    Attributes:
        name: Name of the node; `<operator>_<index>` if it has none.
        inside: The nodes whose graphs contain it, the outermost first.
        output_shapes: Shapes of the outputs, such as `float[1,32,384]`; the first ones if they differ between calls.
        call_bytes: Bytes that a call reads and writes at least, weights included; null if unknown.
        gap_us: Time before a call in which no operator ran; null in parallel mode.
        replaces: The nodes of the file that it replaces, such as `Add (Add_7)`; empty if the file has the node, or if
            the node was added.
    """

    name: str
    inside: Sequence[str]
    output_shapes: Sequence[str]
    call_bytes: int | None
    gap_us: float | None
    replaces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fusion:
    """The main graph before and after optimization. `replaces` of a node has the nodes that were fused into it.

    Attributes:
        before: Nodes of the file, without constants.
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
    """The costs of the operators of a model.

    Attributes:
        label: The model, or the settings that are compared.
        provider: Execution provider.
        threads: Threads of a run.
        settings: Session settings that were set for this profile.
        inputs: A description of the inputs.
        rows: Rows of a run; for a server, the mean rows of a batch.
        balance: The parts of the time of a run.
        operators: Costs by operator type, the most expensive first.
        nodes: Costs by node, the most expensive first.
        copies: The entries of `operators` that only copy between devices.
        wait_share: Share of its time in parallel sections that the calling thread waits for others; null without
            parallel sections.
        thread_blocks: Blocks of work per run that each other thread of the pool ran.
        fusion: The effect of optimization; null if the optimized graph is not known.
        notes: Limits of these figures.
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
        nodes: Nodes in the first graph; null if it does not have the operator.
        other_nodes: Nodes in the second graph; null if it does not have the operator.
        self_ms: Time per run in the first profile.
        other_self_ms: Time per run in the second profile.
    """

    op: str
    nodes: int | None
    other_nodes: int | None
    self_ms: float
    other_self_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second profile compared with the first. Their runs alternated.

    Attributes:
        ratio: Time of a run without profiling, the second divided by the first: the median of the pairs.
        ratio_low: Lower end of the 95 % interval of the ratio; of fewer than six pairs, the least ratio.
        ratio_high: Upper end.
        is_beyond_noise: Whether the interval is outside of 0.95 to 1.05; two sessions of one model may differ so much.
            False for fewer than six pairs.
        operators: Differences by operator, the largest first.
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
        version: Version of the model.
        requests: Requests that the batches answered.
        asked: Requests that were asked for.
        batches: Batches that were copied and run again.
        served_ms: Mean time of these batches in the serving session.
        ended_because: Why there are fewer requests than asked for; empty if there are not.
    """

    version: str
    requests: int
    asked: int
    batches: int
    served_ms: float
    ended_because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """One profile, or two compared ones.

    Attributes:
        profile: Profile of the model, or of the first variant.
        other: Profile of the second variant; null without `--compare`.
        comparison: The second profile compared with the first; null without `--compare`.
        server: The batches of the server; null for a model in this process.
    """

    schema: str = "ortserve.profile/1"
    profile: Profile
    other: Profile | None = None
    comparison: Comparison | None = None
    server: Batches | None = None
