"""From traces and times to a profile: which runs count, and what each operator and node costs in them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median
from typing import Any, Final, TypeAlias

from ortserve.model_file.graph import Graph, Node
from ortserve.tools.profile.matching import Placed, Replacement, find_replacements, match_nodes
from ortserve.tools.profile.result import (
    Arena,
    Balance,
    Comparison,
    Fused,
    Fusion,
    Gaps,
    NodeCost,
    OperatorCost,
    OperatorDifference,
    Profile,
    Threads,
)
from ortserve.tools.profile.trace import Call, Run, Trace, TracedNode
from ortserve.tools.profile.work import Work, find_work, tensor_bytes

CLOSED_WITHIN: Final = 0.05
LEAST_MS: Final = 5.0
"""Shorter runs consist of operators that the profiler, with its clock of 1 µs, cannot measure."""
_FAST_PART: Final = 4
_SESSIONS_DIFFER: Final = 0.05
"""Two sessions of one model, in one process, took 0.93 to 1.00 of each other's time on a busy machine."""
_COPIES: Final = frozenset(("MemcpyFromHost", "MemcpyToHost"))
_BUSY_SHARE: Final = 0.1
_LONG_GAP: Final = 5
"""Times what profiling adds to an event."""
_MOST_GAPS: Final = 10
_MOST_SHAPES: Final = 4


@dataclass(frozen=True, slots=True)
class RunTime:
    """How long a run took, and how much of it the calling thread was on a processor."""

    wall_ns: int
    cpu_ns: int


Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions of runs that do the same work, such as those on the same sample; each run is in one group."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs without and with profiling.

    Attributes:
        plain: Without.
        profiled: With, of the same inputs.
        trace: Of the runs with profiling.
        groups: Positions of runs that do the same work.
        is_single_threaded: Whether the calling thread does all the work.
    """

    plain: Sequence[RunTime]
    profiled: Sequence[RunTime]
    trace: Trace
    groups: Groups
    is_single_threaded: bool = False

    @property
    def on_one_thread(self) -> bool:
        """Whether the calling thread did all the work, as the others of the pool had none or do not exist."""
        last = self.trace.runs[-1]
        return self.is_single_threaded or not (last.is_parallel or any(last.blocks.values()) or not last.blocks)


def typical(values: Mapping[int, float], groups: Groups) -> float:
    """The mean over all runs, with the mean of the middle half of its group for each: interruptions drop out of it."""
    count = sum(len(group) for group in groups)
    return sum(len(group) * _middle_mean([values.get(run, 0.0) for run in group]) for group in groups) / count


def _middle_mean(values: list[float]) -> float:
    values.sort()
    cut = len(values) // 4 if len(values) > 3 else (len(values) - 1) // 2
    return fmean(values[cut : len(values) - cut])


def balance_of(runs: Runs, operators_ms: float, gaps_ms: float) -> Balance:
    """Where the time of the profiled runs goes.

    Args:
        runs: The runs.
        operators_ms: The sum of the typical self times of all nodes.
        gaps_ms: The sum of the typical gaps before them; 0 in parallel mode, where there are none.
    """
    groups = runs.groups
    plain = typical({run: time.wall_ns / 1e6 for run, time in enumerate(runs.plain)}, groups)
    profiled = typical({run: time.wall_ns / 1e6 for run, time in enumerate(runs.profiled)}, groups)
    around = {
        run: time.wall_ns / 1e6 - (busy_us(traced) + (traced.gaps_us if gaps_ms else 0)) / 1e3
        for run, (time, traced) in enumerate(zip(runs.profiled, runs.trace.runs, strict=True))
    }
    outside_ms = gaps_ms + typical(around, groups)
    profiler, low, high = _added_ms(runs)
    rest, undisturbed = outside_ms - profiler, operators_ms + outside_ms
    error, interrupted = (high - low) / 2 / undisturbed, profiled - undisturbed
    is_closed: bool | None = None
    if undisturbed - profiler >= LEAST_MS and error <= CLOSED_WITHIN:
        is_closed = abs(rest) <= CLOSED_WITHIN * undisturbed
        if not is_closed and interrupted > _BUSY_SHARE * profiled:
            is_closed = None
    return Balance(
        runs=len(runs.profiled),
        plain_ms=plain,
        profiled_ms=profiled,
        operators_ms=operators_ms,
        profiler_ms=profiler,
        rest_ms=rest,
        interrupted_ms=interrupted,
        profiler_share=profiler / undisturbed,
        profiler_event_us=profiler * 1e3 / max(1.0, fmean(len(run.calls) + 2 for run in runs.trace.runs)),
        rest_share=rest / undisturbed,
        rest_error=error,
        is_closed=is_closed,
    )


def _added_ms(runs: Runs) -> tuple[float, float, float]:
    """What profiling adds to a run: the median of pairs of runs, and its 95 % interval.

    If one thread does all the work, its time on the processor is compared, as other work on the machine disturbs it
    least: on two processors with eight busy processes, medians of 50 pairs varied by 0.2 ms, those of the time by 1.5.
    """
    pairs = zip(runs.plain, runs.profiled, strict=True)
    if runs.on_one_thread:
        added = sorted(profiled.cpu_ns - plain.cpu_ns for plain, profiled in pairs)
    else:
        added = sorted(profiled.wall_ns - plain.wall_ns for plain, profiled in pairs)
    low, high = _median_interval(len(added))
    return median(added) / 1e6, added[low] / 1e6, added[high] / 1e6


def _median_interval(count: int) -> tuple[int, int]:
    """The ranks in sorted values between which the median lies with 95 %, by the binomial distribution."""
    reach = 0.98 * sqrt(count)
    return max(0, int(count / 2 - reach)), min(count - 1, int(count / 2 + reach))


def busy_us(run: Run) -> int:
    """The time in which any operator ran."""
    if not run.is_parallel:
        return run.operators_us
    busy = until = 0
    for call in sorted(run.calls, key=lambda call: call.start_us):
        end = call.start_us + call.total_us
        busy += max(0, end - max(call.start_us, until))
        until = max(until, end)
    return busy


@dataclass(slots=True)
class _Sum:
    """Calls of a node, or of an operator; times in µs."""

    calls: int = 0
    whole_us: int = 0
    self_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By run, as the two below."""
    total_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gap_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    thread_us: int = 0
    wait_us: int = 0
    operations: int = 0
    operations_us: int = 0
    nbytes: int = 0
    nbytes_us: int = 0
    output_bytes: int = 0
    indices: dict[int, None] = field(default_factory=dict)
    """Of ``Trace.nodes``, in the order of their first calls."""

    def add(self, run: int, call: Call, traced: TracedNode, work: Work) -> None:
        self.calls += 1
        self.whole_us += call.self_us
        self.self_us[run] += call.self_us
        self.total_us[run] += call.total_us
        self.gap_us[run] += call.gap_us
        self.thread_us += call.thread_us
        self.wait_us += call.wait_us
        self.output_bytes += traced.output_bytes
        if work.operations is not None:
            self.operations += work.operations
            self.operations_us += call.self_us
        if work.nbytes is not None:
            self.nbytes += work.nbytes
            self.nbytes_us += call.self_us
        self.indices[call.node] = None

    def figures(self, runs: int, self_ms: float, total_ms: float, whole_ms: float) -> dict[str, Any]:
        """The fields that nodes and operators have in common."""
        # Of the typical time, as much belongs to calls of known work as of all time.
        ns_per_us = self_ms * runs * 1e6 / self.whole_us if self.whole_us else 0.0
        return {
            "calls": self.calls / runs,
            "self_ms": self_ms,
            "total_ms": total_ms,
            "mean_us": self_ms * 1e3 * runs / self.calls,
            "share": self_ms / whole_ms,
            "gflops": _rate(self.operations, self.operations_us * ns_per_us),
            "gbytes": _rate(self.nbytes, self.nbytes_us * ns_per_us),
            "wait_share": self.wait_us / self.thread_us if self.thread_us else None,
        }


def _rate(count: int, ns: float) -> float | None:
    """10⁹ per second; None if the count or the time is not known."""
    return count / ns if count and ns else None


def profile_of(
    runs: Runs,
    *,
    label: str,
    provider: str,
    threads: int,
    settings: Mapping[str, str],
    inputs: str,
    rows: float,
    source: Graph | None,
    optimized: Graph | None,
    notes: Iterable[str],
) -> Profile:
    """The profile of a model; ``source`` is the graph of its file, ``optimized`` the one that ran, None if unknown."""
    trace = runs.trace
    count = len(trace.runs)
    groups = runs.groups
    is_parallel = any(run.is_parallel for run in trace.runs)
    places = {} if optimized is None else match_nodes(trace, optimized)
    works = [_work_of(node, places.get(index)) for index, node in enumerate(trace.nodes)]
    replacements, removed = find_replacements(source, optimized) if source and optimized else ([], [])
    replaced = {
        id(one.node): [_describe(node) for node in one.replaced] for one in replacements if not one.is_unchanged
    }

    by_node: dict[tuple[object, ...], _Sum] = defaultdict(_Sum)
    by_operator: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
    for number, run in enumerate(trace.runs):
        for call in run.calls:
            node = trace.nodes[call.node]
            by_node[node.path, node.name, node.op].add(number, call, node, works[call.node])
            by_operator[node.op, node.provider].add(number, call, node, works[call.node])
    # Times of operators and of the whole are sums over the nodes, as medians of sums would not add up.
    times = {
        key: (typical(one.self_us, groups) / 1e3, typical(one.total_us, groups) / 1e3) for key, one in by_node.items()
    }
    whole_ms = sum(self_ms for self_ms, _ in times.values()) or 1e-9
    nodes, per_type = [], defaultdict(list)
    for key, one in by_node.items():
        figures = one.figures(count, *times[key], whole_ms)
        nodes.append(_node_cost(one, figures, groups, trace, is_parallel, works, places, replaced))
        per_type[nodes[-1].op, nodes[-1].provider].append(nodes[-1])
    nodes.sort(key=lambda node: -node.self_ms)
    operators = []
    for (op, name), of_type in per_type.items():
        self_ms, total_ms = sum(node.self_ms for node in of_type), sum(node.total_ms for node in of_type)
        figures = by_operator[op, name].figures(count, self_ms, total_ms, whole_ms)
        operators.append(OperatorCost(op=op, provider=name, nodes=len(of_type), **figures))
    operators.sort(key=lambda operator: -operator.self_ms)
    busy_ms = typical({number: busy_us(run) / 1e3 for number, run in enumerate(trace.runs)}, groups)
    gaps_ms = sum(typical(one.gap_us, groups) for one in by_node.values()) / 1e3
    balance = balance_of(runs, busy_ms, 0.0) if is_parallel else balance_of(runs, whole_ms, gaps_ms)
    return Profile(
        label=label,
        provider=provider,
        threads=threads,
        settings=settings,
        inputs=inputs,
        rows=rows,
        opening_ms=trace.opening_us / 1e3,
        balance=balance,
        operators=operators,
        nodes=nodes,
        copies=[operator for operator in operators if operator.op in _COPIES],
        gaps=None if is_parallel else _gaps(nodes, gaps_ms, balance),
        threads_use=_threads_use(trace.runs, by_node.values()),
        arenas=[Arena(name, peak, held) for name, (peak, held) in trace.arenas.items()],
        weight_bytes=_weight_bytes(trace, places),
        fusion=_fusion(source, optimized, replacements, removed, nodes) if source and optimized else None,
        notes=[*notes, *_doubts(balance)],
    )


def _doubts(balance: Balance) -> list[str]:
    doubts = []
    if balance.interrupted_ms > _BUSY_SHARE * balance.profiled_ms:
        share = 100 * balance.interrupted_ms / balance.profiled_ms
        doubts.append(f"the machine was busy: {share:.0f} % of the time of the runs went to interruptions")
    if balance.rest_error > CLOSED_WITHIN and balance.operators_ms >= LEAST_MS:
        doubts.append("what the profiler adds varied too much to tell: repeat with more --runs, or with --threads 1")
    return doubts


def _work_of(traced: TracedNode, place: Placed | None) -> Work:
    return find_work(traced, None, {}) if place is None else find_work(traced, place.node, place.constants)


def _node_cost(
    one: _Sum,
    figures: Mapping[str, Any],
    groups: Groups,
    trace: Trace,
    is_parallel: bool,
    works: Sequence[Work],
    places: Mapping[int, Placed],
    replaced: Mapping[int, Sequence[str]],
) -> NodeCost:
    first = next(iter(one.indices))
    node = trace.nodes[first]
    kinds = dict.fromkeys(", ".join(_shape_text(*shape) for shape in trace.nodes[i].outputs) for i in one.indices)
    nbytes = works[first].nbytes
    return NodeCost(
        name=node.name,
        op=node.op,
        provider=node.provider,
        inside=node.path,
        output_shapes=[kind for kind in kinds if kind][:_MOST_SHAPES],
        input_bytes=None if nbytes is None else max(0, nbytes - node.output_bytes),
        output_bytes=one.output_bytes // one.calls,
        gap_us=None if is_parallel else typical(one.gap_us, groups) / figures["calls"],
        replaces=replaced.get(id(places[first].node), ()) if first in places else (),
        **figures,
    )


def _gaps(nodes: Sequence[NodeCost], total_ms: float, balance: Balance) -> Gaps:
    bound_us = _LONG_GAP * max(1.0, balance.profiler_event_us)
    long = sorted((node for node in nodes if (node.gap_us or 0) > bound_us), key=lambda node: -(node.gap_us or 0))
    return Gaps(total_ms, balance.profiler_ms, {node.name: node.gap_us or 0.0 for node in long[:_MOST_GAPS]})


def _threads_use(runs: Sequence[Run], sums: Iterable[_Sum]) -> Threads | None:
    first, last = runs[0].blocks, runs[-1].blocks
    if not last:
        return None
    between = max(1, len(runs) - 1)
    blocks = [(count - first.get(thread, 0)) / between for thread, count in last.items()]
    parts = [(one.wait_us, one.thread_us) for one in sums]
    whole_us = sum(thread_us for _, thread_us in parts)
    wait = sum(wait_us for wait_us, _ in parts) / whole_us if whole_us else 0.0
    mean = fmean(blocks)
    return Threads(wait, blocks, max(blocks) / mean if mean else 1.0)


def _weight_bytes(trace: Trace, places: Mapping[int, Placed]) -> int:
    """Weights as the kernels read them, each constant once; of the trace alone without prepacked ones."""
    if not places:
        largest: dict[tuple[object, ...], int] = {}
        for node in trace.nodes:
            key = (node.path, node.name, node.op)
            largest[key] = max(largest.get(key, 0), node.weight_bytes)
        return sum(largest.values())
    constants = {
        name: tensor
        for place in places.values()
        for name in place.node.inputs
        if (tensor := place.constants.get(name)) is not None
    }
    return sum(tensor_bytes(tensor) for tensor in constants.values())


def _fusion(
    source: Graph,
    optimized: Graph,
    replacements: Sequence[Replacement],
    removed: Sequence[Node],
    nodes: Sequence[NodeCost],
) -> Fusion:
    costs = {(node.op, tuple(node.replaces)): node.self_ms for node in nodes if node.replaces and not node.inside}
    fused = []
    for one in replacements:
        texts = [_describe(node) for node in one.replaced]
        if texts and not one.is_unchanged:
            cost = costs.get((one.node.op, tuple(texts)), 0.0)
            fused.append(Fused(one.node.name or one.node.outputs[0], one.node.op, texts, cost))
    fused.sort(key=lambda one: -one.self_ms)
    return Fusion(
        before=sum(node.op != "Constant" for node in source.nodes),
        after=len(optimized.nodes),
        fused=fused,
        removed=dict(Counter(node.op for node in removed).most_common()),
        added=dict(Counter(one.node.op for one in replacements if not one.replaced).most_common()),
    )


def _describe(node: Node) -> str:
    return f"{node.op} ({node.name or next(filter(None, node.outputs), '')})"


def _shape_text(dtype: str, dims: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def compare(one: Profile, other: Profile, runs: Runs, other_runs: Runs) -> Comparison:
    """The second profile against the first. Runs alternated; those of one thread are compared by processor time."""
    by_cpu = runs.on_one_thread and other_runs.on_one_thread
    ratios = sorted(
        after.cpu_ns / before.cpu_ns if by_cpu else after.wall_ns / before.wall_ns
        for before, after in zip(runs.plain, other_runs.plain, strict=False)
    )
    low, high = _median_interval(len(ratios))
    mine, others = _by_operator(one), _by_operator(other)
    differences = []
    for op in {**mine, **others}:
        nodes, self_ms = mine.get(op, (None, 0.0))
        other_nodes, other_self_ms = others.get(op, (None, 0.0))
        differences.append(OperatorDifference(op, nodes, other_nodes, self_ms, other_self_ms, other_self_ms - self_ms))
    differences.sort(key=lambda difference: -abs(difference.difference_ms))
    is_beyond = ratios[high] < 1 - _SESSIONS_DIFFER or ratios[low] > 1 + _SESSIONS_DIFFER
    return Comparison(median(ratios), ratios[low], ratios[high], is_beyond, differences)


def _by_operator(profile: Profile) -> dict[str, tuple[int, float]]:
    """Nodes and time by operator, on all providers."""
    found: dict[str, tuple[int, float]] = {}
    for operator in profile.operators:
        nodes, self_ms = found.get(operator.op, (0, 0.0))
        found[operator.op] = nodes + operator.nodes, self_ms + operator.self_ms
    return found


def middle_run(runs: Runs) -> Run:
    """A quiet run with profiling, for a view of it: at the end of the fastest quarter."""
    return sorted(runs.trace.runs, key=lambda run: run.total_us)[len(runs.trace.runs) // _FAST_PART]
