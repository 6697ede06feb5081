"""Computes profiles from runs: the cost of each operator and node, and the difference of two profiles. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ortserve.engine.placement import COPIES
from ortserve.model_file.graph import Node
from ortserve.tools.profile.matching import MatchedNode, find_replacements, match_nodes
from ortserve.tools.profile.result import Comparison, Fusion, NodeCost, OperatorCost, OperatorDifference, Profile
from ortserve.tools.profile.runs import MIN_PAIRS, Runs, balance_of, doubts_of, median_interval, times_ns, typical
from ortserve.tools.profile.trace import NodeKey, Run, TracedNode
from ortserve.tools.profile.work import find_work

_MAX_SHAPES: Final = 4
_NOTHING: Final = (None, 0.0)
"""Nodes and time of an operator that a profile does not have."""
_SESSIONS_DIFFER: Final = 0.05
"""Two sessions of one model in one process took 0.93 to 1.00 of each other's time on a busy machine."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum over all calls of a node. ``operations`` and ``nbytes`` are None if they are unknown for some calls."""

    kinds: Sequence[TracedNode]
    """The node once per set of shapes."""
    matched: MatchedNode | None
    calls: int
    operations: int | None
    nbytes: int | None
    self_ms: float
    total_ms: float
    gap_ms: float
    thread_us: float
    wait_us: float


def profile_of(runs: Runs) -> Profile:
    """The profile of a model."""
    sums, self_us, gap_us = _add_up(runs)
    fusion, replaced = _compare_graphs(runs)
    count, whole_ms = len(runs.trace.runs), sum(one.self_ms for one in sums) or 1e-9
    by_type: dict[tuple[str, str], list[_Sum]] = defaultdict(list)
    for one in sums:
        by_type[one.kinds[0].op, one.kinds[0].provider].append(one)
    operators = [OperatorCost(nodes=len(held), **_cost(held, count, whole_ms)) for held in by_type.values()]
    operators.sort(key=lambda operator: -operator.self_ms)
    nodes = [
        NodeCost(
            name=one.kinds[0].name,
            inside=one.kinds[0].path,
            output_shapes=_shape_texts(one.kinds),
            call_bytes=None if one.nbytes is None else one.nbytes // one.calls,
            gap_us=None if runs.is_parallel else one.gap_ms * 1e3 * count / one.calls,
            replaces=replaced.get(id(one.matched.node), ()) if one.matched else (),
            **_cost([one], count, whole_ms),
        )
        for one in sorted(sums, key=lambda one: -one.self_ms)
    ]
    balance = balance_of(runs, self_us, gap_us)
    return Profile(
        label=runs.label,
        provider=runs.provider,
        threads=runs.threads,
        settings=runs.settings,
        inputs=runs.inputs,
        rows=runs.rows,
        balance=balance,
        operators=operators,
        nodes=nodes,
        copies=[operator for operator in operators if operator.op in COPIES],
        wait_share=_wait_share(sums),
        thread_blocks=_blocks(runs.trace.runs),
        fusion=fusion,
        notes=[*runs.notes, *doubts_of(balance)],
    )


def _add_up(runs: Runs) -> tuple[list[_Sum], np.ndarray, np.ndarray]:
    """The sums of all nodes, and their self times and gaps in µs, both of shape (nodes, runs)."""
    trace = runs.trace
    # In parallel mode another node may run during the profiler's part of a call.
    overhead_us = 0.0 if runs.is_parallel else runs.call_overhead_us
    calls = Counter(call.node for run in trace.runs for call in run.calls)
    of_node: dict[NodeKey, list[int]] = defaultdict(list)
    for index in sorted(calls):  # without nodes that only warm-up runs called
        of_node[trace.nodes[index].key].append(index)
    rows = {index: row for row, indices in enumerate(of_node.values()) for index in indices}
    times_us = np.zeros((5, len(of_node), len(trace.runs)))
    for number, run in enumerate(trace.runs):
        for call in run.calls:
            self_us, total_us = call.self_us - overhead_us, call.total_us - overhead_us * call.calls
            times_us[:, rows[call.node], number] += (self_us, total_us, call.gap_us, call.thread_us, call.wait_us)
    # Times of operators and of whole runs are sums of these values, because typical values of sums would not add up.
    typical_ms = typical(times_us[:3], runs.groups).clip(0).T / 1e3
    threads_us = times_us[3:].sum(axis=-1).T
    matches = {} if runs.optimized is None else match_nodes(trace, runs.optimized)
    sums = []
    for row, (key, indices) in enumerate(of_node.items()):
        matched = matches.get(key)
        node, constants = (matched.node, matched.constants) if matched else (None, {})
        kinds, called = [trace.nodes[index] for index in indices], [calls[index] for index in indices]
        works = [find_work(kind, node, constants) for kind in kinds]
        (self_ms, total_ms, gap_ms), (thread_us, wait_us) = typical_ms[row].tolist(), threads_us[row].tolist()
        found = _Sum(
            kinds=kinds,
            matched=matched,
            calls=sum(called),
            operations=_weighted([one.operations for one in works], called),
            nbytes=_weighted([one.nbytes for one in works], called),
            self_ms=self_ms,
            total_ms=total_ms,
            gap_ms=gap_ms,
            thread_us=thread_us,
            wait_us=wait_us,
        )
        sums.append(found)
    return sums, times_us[0], times_us[2]


def _weighted(amounts: Sequence[int | None], calls: Sequence[int]) -> int | None:
    known = [amount * count for amount, count in zip(amounts, calls, strict=True) if amount is not None]
    return sum(known) if len(known) == len(calls) else None


def _cost(sums: Sequence[_Sum], runs: int, whole_ms: float) -> dict[str, Any]:
    """The fields of ``Cost`` for several nodes together."""
    calls, self_ms = sum(one.calls for one in sums), sum(one.self_ms for one in sums)
    return {
        "op": sums[0].kinds[0].op,
        "provider": sums[0].kinds[0].provider,
        "calls": calls / runs,
        "self_ms": self_ms,
        "total_ms": sum(one.total_ms for one in sums),
        "mean_us": self_ms * 1e3 * runs / calls,
        "share": self_ms / whole_ms,
        "gflops": _rate([(one.operations, one.self_ms) for one in sums], runs),
        "gbytes": _rate([(one.nbytes, one.self_ms) for one in sums], runs),
        "wait_share": _wait_share(sums),
    }


def _rate(parts: Sequence[tuple[int | None, float]], runs: int) -> float | None:
    """The rate in 10⁹ per second, over the parts whose amount is known."""
    amount = sum(amount for amount, _ in parts if amount is not None)
    run_ms = sum(self_ms for amount, self_ms in parts if amount is not None)
    return amount / runs / (run_ms * 1e6) if amount and run_ms else None


def _wait_share(sums: Sequence[_Sum]) -> float | None:
    thread_us = sum(one.thread_us for one in sums)
    return sum(one.wait_us for one in sums) / thread_us if thread_us else None


def _blocks(runs: Sequence[Run]) -> list[float]:
    """Blocks of work per run, by thread. The trace has their counts since the start of the session."""
    first, last = runs[0].blocks, runs[-1].blocks
    return [(count - first.get(thread, 0)) / max(1, len(runs) - 1) for thread, count in last.items()]


def _shape_texts(kinds: Iterable[TracedNode]) -> list[str]:
    texts = dict.fromkeys(
        ", ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in kind.outputs) for kind in kinds
    )
    return [text for text in texts if text][:_MAX_SHAPES]


def _compare_graphs(runs: Runs) -> tuple[Fusion | None, dict[int, list[str]]]:
    """The graph before and after optimization, and the nodes that each fused node (by ``id``) replaces."""
    source, optimized = runs.source, runs.optimized
    if source is None or optimized is None:
        return None, {}
    replacements, removed = find_replacements(source, optimized)
    fusion = Fusion(
        before=sum(node.op != "Constant" for node in source.nodes),
        after=len(optimized.nodes),
        removed=dict(Counter(node.op for node in removed).most_common()),
        added=dict(Counter(one.node.op for one in replacements if not one.replaced).most_common()),
    )
    fused = (one for one in replacements if not one.is_unchanged)
    return fusion, {id(one.node): [_describe(node) for node in one.replaced] for one in fused}


def _describe(node: Node) -> str:
    return f"{node.op} ({node.name or next(filter(None, node.outputs), '')})"


def compare(one: Runs, other: Runs, profile: Profile, other_profile: Profile) -> Comparison:
    """Compare the second profile with the first. Runs on one thread are compared by processor time."""
    on_processor = one.on_one_thread and other.on_one_thread
    count = min(len(one.plain), len(other.plain))
    times, other_times = (times_ns(runs.plain[:count], on_processor=on_processor) for runs in (one, other))
    ratio, low, high = median_interval(other_times / times)
    mine, others = _by_operator(profile), _by_operator(other_profile)
    pairs = ((op, mine.get(op, _NOTHING), others.get(op, _NOTHING)) for op in {**mine, **others})
    differences = [OperatorDifference(op, a[0], b[0], a[1], b[1]) for op, a, b in pairs]
    differences.sort(key=lambda row: -abs(row.other_self_ms - row.self_ms))
    is_beyond = count >= MIN_PAIRS and (high < 1 - _SESSIONS_DIFFER or low > 1 + _SESSIONS_DIFFER)
    return Comparison(ratio, low, high, is_beyond, differences)


def _by_operator(profile: Profile) -> dict[str, tuple[int | None, float]]:
    """Number of nodes and self time by operator, over all providers."""
    found: dict[str, tuple[int | None, float]] = {}
    for operator in profile.operators:
        nodes, self_ms = found.get(operator.op, (0, 0.0))
        found[operator.op] = (nodes or 0) + operator.nodes, self_ms + operator.self_ms
    return found
