"""From traces and times to a profile: which runs count, and what each operator and node costs in them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

from ortserve.model_file.graph import Graph, Node
from ortserve.tools.profile.balance import Groups, Runs, balance_of, busy_us, doubts_of, median_interval, typical
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

_COPIES: Final = frozenset(("MemcpyFromHost", "MemcpyToHost"))
_LONG_GAP: Final = 5
"""Times what profiling adds to an event."""
_MOST_GAPS: Final = 10
_MOST_SHAPES: Final = 4
_SESSIONS_DIFFER: Final = 0.05
"""Two sessions of one model, in one process, took 0.93 to 1.00 of each other's time on a busy machine."""


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
        notes=[*notes, *doubts_of(balance)],
    )


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
    low, high = median_interval(len(ratios))
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
