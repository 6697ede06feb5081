"""A profile for people."""

from collections.abc import Iterator, Sequence
from typing import Final

from ortserve.tools.profile.balance import CLOSED_WITHIN, LEAST_MS
from ortserve.tools.profile.drawing import flame_view, tree_map
from ortserve.tools.profile.result import Comparison, Fusion, OperatorCost, Profile, ProfileResult
from ortserve.tools.profile.trace import Run, Trace
from ortserve.tools.report import Block, Cell, Facts, Picture, Report, Table, Text, bytes_text, number_text

_SHOWN: Final = 15
_LONG_GAPS_NOTE: Final = "Longer than five events of the profiler."


def report(result: ProfileResult, flames: Sequence[tuple[Trace, Run]] = ()) -> Report:
    """The report.

    Args:
        result: Of the command.
        flames: Of each profile, its trace and a run of it for the flame view.
    """
    profiles = [result.profile, *([result.other] if result.other else [])]
    blocks: list[Block] = []
    if result.server is not None:
        batches = result.server
        facts: dict[str, Cell] = {
            "server": f"{batches.url}, version {batches.version}",
            "requests": f"{batches.requests:,} of {batches.asked:,} asked for, in {batches.batches:,} batches",
            "served in": f"{number_text(batches.served_ms)} ms per batch by the serving session",
        }
        if batches.ended_because:
            facts["ended"] = batches.ended_because
        blocks.append(Facts("Batches of the server", facts))
    if result.comparison is not None and result.other is not None:
        blocks.extend(_comparison(result.comparison, result.profile.label, result.other.label))
    for number, profile in enumerate(profiles):
        flame = flames[number] if number < len(flames) else None
        blocks.extend(_profile(profile, flame, is_one_of_two=len(profiles) > 1, is_of_server=result.server is not None))
    return Report(f"Profile of {' and '.join(profile.label for profile in profiles)}", blocks)


def _profile(
    profile: Profile, flame: tuple[Trace, Run] | None, *, is_one_of_two: bool, is_of_server: bool
) -> Iterator[Block]:
    of = f" of {profile.label}" if is_one_of_two else ""
    order = " afterwards" if is_of_server else ", alternating"
    facts: dict[str, Cell] = {
        "execution provider": f"{profile.provider}, {profile.threads} thread{'s' if profile.threads > 1 else ''}",
        "inputs": f"{profile.inputs}, {number_text(profile.rows)} row{'s' if profile.rows != 1 else ''} a run",
        "runs": f"{profile.balance.runs:,} with profiling, and the same without{order}",
        "opened in": f"{number_text(profile.opening_ms)} ms",
        "weights": bytes_text(profile.weight_bytes),
    }
    if profile.settings:
        facts["settings"] = ", ".join(f"{name}={value}" for name, value in profile.settings.items())
    for arena in profile.arenas:
        text = f"{bytes_text(arena.peak_bytes)} in use at most, {bytes_text(arena.held_bytes)} held"
        facts[f"arena of {arena.provider}"] = text
    if (threads := profile.threads_use) is not None:
        blocks = ", ".join(number_text(count) for count in threads.blocks)
        facts["threads"] = (
            f"the calling thread waits {_percent(threads.wait_share)} of its time in operators; "
            f"blocks of work per run of the others: {blocks}"
        )
    for number, note in enumerate(profile.notes):
        facts["note" if not number else f"note {number + 1}"] = note
    yield Facts(f"Measurement{of}", facts)
    yield from _balance(profile, of)
    yield _operators(f"Operator types{of}", profile.operators)
    if profile.copies:
        yield _operators(f"Copies between devices{of}", profile.copies)
    yield Table(
        f"Nodes{of}",
        ("node", "operator", "calls", "ms", "%", "µs a call", "GFLOP/s", "GB/s", "outputs", "bytes out"),
        [
            (
                " / ".join((*node.inside, node.name)),
                node.op,
                node.calls,
                node.self_ms,
                100 * node.share,
                node.mean_us,
                node.gflops,
                node.gbytes,
                " or ".join(node.output_shapes),
                node.output_bytes,
            )
            for node in profile.nodes
        ],
        note="A node in a graph of an If, Loop or Scan comes after the nodes that contain it.",
        most_rows=_SHOWN,
    )
    if profile.gaps is not None and profile.gaps.longest:
        rows = [(name, us) for name, us in profile.gaps.longest.items()]
        yield Table(f"Long gaps between operators{of}", ("before", "µs"), rows, note=_LONG_GAPS_NOTE)
    if profile.fusion is not None:
        yield from _fusion(profile.fusion, of)
    yield Picture(
        f"Self times{of}", tree_map(profile.nodes), "Areas are self times; nodes of an operator are together."
    )
    if flame is not None:
        note = "A quiet run, from left to right; inner graphs are below their node."
        yield Picture(f"One run{of}", flame_view(*flame), note)


def _balance(profile: Profile, of: str) -> Iterator[Block]:
    balance = profile.balance
    parts = (
        ("operators (self times)", balance.operators_ms),
        ("profiler", balance.profiler_ms),
        ("rest: between operators, call", balance.rest_ms),
        ("interruptions by other work", balance.interrupted_ms),
        ("run with profiling", balance.profiled_ms),
        ("run without profiling", balance.plain_ms),
    )
    rows = [(part, ms, 100 * ms / balance.profiled_ms) for part, ms in parts]
    if balance.is_closed is not None:
        note = (
            f"Operators and profiler come {'' if balance.is_closed else 'NOT '}within {_percent(CLOSED_WITHIN)} of the "
            f"time without interruptions: the rest is {_percent(balance.rest_share)} ± {_percent(balance.rest_error)}."
        )
    elif balance.operators_ms < LEAST_MS:
        note = (
            f"A run takes less than {LEAST_MS:g} ms: {_percent(balance.profiler_share)} of what a profiled run shows "
            f"is the profiler, {number_text(balance.profiler_event_us)} µs for each operator. Trust shares, not times."
        )
    else:
        note = f"What the profiler adds is known within {_percent(balance.rest_error)} only."
    if profile.gaps is not None:
        note += f" No operator ran for {number_text(profile.gaps.total_ms)} ms of a profiled run."
    yield Table(f"Where the time goes{of}", ("part", "ms", "%"), rows, note=note)


def _operators(title: str, operators: Sequence[OperatorCost]) -> Table:
    providers = len({operator.provider for operator in operators}) > 1
    waits = any(operator.wait_share is not None for operator in operators)
    nests = any(operator.total_ms > operator.self_ms for operator in operators)
    rows: list[tuple[Cell, ...]] = []
    for one in operators:
        row: list[Cell] = [one.op, *([one.provider] if providers else []), one.nodes, one.calls, one.self_ms]
        row += [*([one.total_ms] if nests else []), 100 * one.share, one.mean_us, one.gflops, one.gbytes]
        if waits:
            row.append(None if one.wait_share is None else 100 * one.wait_share)
        rows.append(tuple(row))
    columns = ["operator", *(["provider"] if providers else []), "nodes", "calls", "ms"]
    columns += [
        *(["ms with inner"] if nests else []),
        "%",
        "µs a call",
        "GFLOP/s",
        "GB/s",
        *(["% wait"] if waits else []),
    ]
    return Table(title, columns, rows, note="Per run; ms are self times.", most_rows=_SHOWN)


def _fusion(fusion: Fusion, of: str) -> Iterator[Block]:
    note = f"The file has {fusion.before:,} nodes in its main graph, constants apart; {fusion.after:,} run."
    for text, kinds in (("removed", fusion.removed), ("added", fusion.added)):
        if kinds:
            note += f" {text.capitalize()}: {', '.join(f'{op} x{count:,}' for op, count in kinds.items())}."
    rows = [(one.op, one.name, " + ".join(one.replaces), one.self_ms) for one in fusion.fused]
    if rows:
        columns = ("operator", "node", "in place of", "ms")
        yield Table(f"Fused nodes{of}", columns, rows, note=note, most_rows=_SHOWN)
    else:
        yield Text(f"No nodes were fused. {note}")


def _comparison(comparison: Comparison, one: str, other: str) -> Iterator[Block]:
    faster = (
        "as fast as" if not comparison.is_beyond_noise else "faster than" if comparison.ratio < 1 else "slower than"
    )
    beyond = "beyond" if comparison.is_beyond_noise else "within"
    yield Text(
        f"{other} is {faster} {one}: its runs take {number_text(comparison.ratio)} of the time "
        f"({number_text(comparison.ratio_low)} to {number_text(comparison.ratio_high)} with 95 %), {beyond} the noise."
    )
    yield Table(
        "Operators gained and lost",
        ("operator", "nodes A", "nodes B", "ms A", "ms B", "difference"),
        [
            (row.op, row.nodes, row.other_nodes, row.self_ms, row.other_self_ms, row.difference_ms)
            for row in comparison.operators
        ],
        note=f"A is {one}, B is {other}. Self times per run. A dash: there is no such operator.",
        most_rows=_SHOWN,
    )


def _percent(share: float) -> str:
    return f"{number_text(100 * share)} %"
