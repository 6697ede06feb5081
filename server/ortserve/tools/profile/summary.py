"""From traces and times to a profile: which runs count, and what each operator and node costs in them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from statistics import fmean, stdev
from typing import Final

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
_QUIET_PART: Final = 4
"""One of so many pairs of runs counts."""
_COPIES: Final = frozenset(("MemcpyFromHost", "MemcpyToHost"))
_LONG_GAP: Final = 5
"""Times what profiling adds to an event."""
_MOST_GAPS: Final = 10
_MOST_SHAPES: Final = 4
_RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs without and with profiling.

    Attributes:
        plain_ns: Without.
        profiled_ns: With, of the same inputs.
        trace: Of the runs with profiling.
        samples: After how many runs the inputs repeat.
    """

    plain_ns: Sequence[int]
    profiled_ns: Sequence[int]
    trace: Trace
    samples: int = 1


def quiet_runs(runs: Runs) -> list[int]:
    """The positions of the quieter quarter of all pairs of runs with the same inputs.

    Other work on the machine only ever adds time. Pairs are chosen by the sum of both runs, which favours neither.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index in range(min(len(runs.plain_ns), len(runs.trace.runs))):
        groups[index % runs.samples].append(index)
    kept: list[int] = []
    for group in groups.values():
        group.sort(key=lambda index: runs.plain_ns[index] + runs.profiled_ns[index])
        kept.extend(group[: -(-len(group) // _QUIET_PART)])
    return sorted(kept)


def balance_of(runs: Runs, kept: Sequence[int]) -> Balance:
    """Where the time of the profiled runs goes."""
    traced = [runs.trace.runs[index] for index in kept]
    plain = [runs.plain_ns[index] / 1e6 for index in kept]
    operators = [_busy_us(run) / 1e3 for run in traced]
    plain_ms, profiled_ms = fmean(plain), fmean(runs.profiled_ns[index] for index in kept) / 1e6
    rest = [whole - part for whole, part in zip(plain, operators, strict=True)]
    share, profiler_ms = fmean(rest) / plain_ms, profiled_ms - plain_ms
    error = 1.96 * stdev(rest) / sqrt(len(rest)) / plain_ms if len(rest) > 1 else 1.0
    return Balance(
        runs=len(kept),
        measured=min(len(runs.plain_ns), len(runs.trace.runs)),
        plain_ms=plain_ms,
        profiled_ms=profiled_ms,
        operators_ms=fmean(operators),
        profiler_ms=profiler_ms,
        profiler_share=profiler_ms / profiled_ms,
        profiler_event_us=profiler_ms * 1e3 / max(1.0, fmean(len(run.calls) + 2 for run in traced)),
        rest_ms=fmean(rest),
        rest_share=share,
        rest_error=error,
        is_closed=abs(share) <= CLOSED_WITHIN if plain_ms >= LEAST_MS else None,
    )


def _busy_us(run: Run) -> int:
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
    self_us: int = 0
    total_us: int = 0
    gap_us: int = 0
    thread_us: int = 0
    wait_us: int = 0
    operations: int = 0
    operations_us: int = 0
    nbytes: int = 0
    nbytes_us: int = 0
    output_bytes: int = 0
    indices: dict[int, None] = field(default_factory=dict)
    """Of ``Trace.nodes``, in the order of their first calls."""

    def add(self, call: Call, traced: TracedNode, work: Work) -> None:
        self.calls += 1
        self.self_us += call.self_us
        self.total_us += call.total_us
        self.gap_us += call.gap_us
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

    @property
    def gflops(self) -> float | None:
        return self.operations / self.operations_us / 1e3 if self.operations_us and self.operations else None

    @property
    def gbytes(self) -> float | None:
        return self.nbytes / self.nbytes_us / 1e3 if self.nbytes_us and self.nbytes else None

    @property
    def wait_share(self) -> float | None:
        return self.wait_us / self.thread_us if self.thread_us else None


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
    kept = quiet_runs(runs)
    balance = balance_of(runs, kept)
    chosen = [trace.runs[index] for index in kept]
    is_parallel = any(run.is_parallel for run in chosen)
    places = {} if optimized is None else match_nodes(trace, optimized)
    works = [_work_of(node, places.get(index)) for index, node in enumerate(trace.nodes)]
    replacements, removed = find_replacements(source, optimized) if source and optimized else ([], [])
    replaced = {id(one.node): [_describe(node) for node in one.replaced] for one in replacements if not one.is_unchanged}

    by_node: dict[tuple[object, ...], _Sum] = defaultdict(_Sum)
    by_operator: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
    for run in chosen:
        for call in run.calls:
            node = trace.nodes[call.node]
            by_node[node.path, node.name, node.op].add(call, node, works[call.node])
            by_operator[node.op, node.provider].add(call, node, works[call.node])
    whole_us = sum(one.self_us for one in by_node.values()) or 1
    count = len(chosen)
    nodes = [
        _node_cost(one, trace, count, whole_us, is_parallel, works, places, replaced) for one in by_node.values()
    ]
    nodes.sort(key=lambda node: -node.self_ms)
    per_type = Counter((node.op, node.provider) for node in nodes)
    operators = [
        _operator_cost(op, name, per_type[op, name], one, count, whole_us) for (op, name), one in by_operator.items()
    ]
    operators.sort(key=lambda operator: -operator.self_ms)
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
        gaps=None if is_parallel else _gaps(nodes, chosen, balance),
        threads_use=_threads_use(trace.runs, by_node.values()),
        arenas=[Arena(name, peak, held) for name, (peak, held) in trace.arenas.items()],
        weight_bytes=_weight_bytes(trace, places),
        fusion=_fusion(source, optimized, replacements, removed, nodes) if source and optimized else None,
        notes=[*notes, *_doubts(balance)],
    )


def _doubts(balance: Balance) -> list[str]:
    if balance.plain_ms < LEAST_MS:
        return []
    if balance.rest_error > CLOSED_WITHIN:
        return ["the machine was too unsteady for a balance within 5 %: repeat with more --runs, or on a quiet machine"]
    return []


def _work_of(traced: TracedNode, place: Placed | None) -> Work:
    return find_work(traced, None, {}) if place is None else find_work(traced, place.node, place.constants)


def _node_cost(
    one: _Sum,
    trace: Trace,
    runs: int,
    whole_us: int,
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
        calls=one.calls / runs,
        self_ms=one.self_us / runs / 1e3,
        total_ms=one.total_us / runs / 1e3,
        mean_us=one.self_us / one.calls,
        share=one.self_us / whole_us,
        output_shapes=[kind for kind in kinds if kind][:_MOST_SHAPES],
        input_bytes=None if nbytes is None else max(0, nbytes - node.output_bytes),
        output_bytes=one.output_bytes // one.calls,
        gflops=one.gflops,
        gbytes=one.gbytes,
        wait_share=one.wait_share,
        gap_us=None if is_parallel else one.gap_us / one.calls,
        replaces=replaced.get(id(places[first].node), ()) if first in places else (),
    )


def _operator_cost(op: str, provider: str, nodes: int, one: _Sum, runs: int, whole_us: int) -> OperatorCost:
    return OperatorCost(
        op=op,
        provider=provider,
        nodes=nodes,
        calls=one.calls / runs,
        self_ms=one.self_us / runs / 1e3,
        total_ms=one.total_us / runs / 1e3,
        mean_us=one.self_us / one.calls,
        share=one.self_us / whole_us,
        gflops=one.gflops,
        gbytes=one.gbytes,
        wait_share=one.wait_share,
    )


def _gaps(nodes: Sequence[NodeCost], runs: Sequence[Run], balance: Balance) -> Gaps:
    total_ms = fmean(sum(call.gap_us for call in run.calls) for run in runs) / 1e3
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


def compare(one: Profile, other: Profile, times: Sequence[int], other_times: Sequence[int]) -> Comparison:
    """The second profile against the first.

    Args:
        one: The first profile.
        other: The second one.
        times: Of the first's runs without profiling.
        other_times: Of the second's, which alternated with them.
    """
    ratios = _ratios(times, other_times)
    low, high = ratios[round(0.025 * (len(ratios) - 1))], ratios[round(0.975 * (len(ratios) - 1))]
    mine, others = _by_operator(one), _by_operator(other)
    differences = []
    for op in {**mine, **others}:
        nodes, self_ms = mine.get(op, (None, 0.0))
        other_nodes, other_self_ms = others.get(op, (None, 0.0))
        differences.append(
            OperatorDifference(op, nodes, other_nodes, self_ms, other_self_ms, other_self_ms - self_ms)
        )
    differences.sort(key=lambda difference: -abs(difference.difference_ms))
    ratio = other.balance.plain_ms / one.balance.plain_ms
    return Comparison(ratio, min(low, ratio), max(high, ratio), not low <= 1 <= high, differences)


def _ratios(times: Sequence[int], other_times: Sequence[int]) -> list[float]:
    """Ratios of the means of the quieter quarters, of runs drawn again and again from those that were made; sorted."""
    random = Random(0)  # noqa: S311 - the same result for the same times
    pairs = list(zip(times, other_times, strict=False))
    found = []
    for _ in range(_RESAMPLES):
        drawn = random.choices(pairs, k=len(pairs))
        quiet = [sorted(column)[: -(-len(drawn) // _QUIET_PART)] for column in zip(*drawn, strict=True)]
        found.append(fmean(quiet[1]) / fmean(quiet[0]))
    return sorted(found)


def _by_operator(profile: Profile) -> dict[str, tuple[int, float]]:
    """Nodes and time by operator, on all providers."""
    found: dict[str, tuple[int, float]] = {}
    for operator in profile.operators:
        nodes, self_ms = found.get(operator.op, (0, 0.0))
        found[operator.op] = nodes + operator.nodes, self_ms + operator.self_ms
    return found


def middle_run(runs: Runs) -> Run:
    """The run with profiling that takes the median time of those that count."""
    kept = sorted(quiet_runs(runs), key=lambda index: runs.trace.runs[index].total_us)
    return runs.trace.runs[kept[len(kept) // 2]]
