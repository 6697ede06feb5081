"""Makes reports of profiles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ortserve.tools.profile.drawing import flame_view, tree_map
from ortserve.tools.profile.result import (
    Balance,
    Batches,
    Comparison,
    Cost,
    Fusion,
    OperatorCost,
    Profile,
    ProfileResult,
)
from ortserve.tools.profile.runs import CLOSED_WITHIN, MIN_MS, MIN_PAIRS, Runs, is_interrupted
from ortserve.tools.report import Block, Cell, Facts, Picture, Report, Table, Text, number_text

_SHOWN: Final = 15
_KNOWN_WITHIN: Final = 0.25
"""Largest error of the profiler's share of a small model that is shown as known."""
_AREAS: Final = "Areas are self times. Nodes of the same operator are grouped."
_FLAME: Final = "A quiet run, from left to right; inner graphs are below their node."


def present(result: ProfileResult, runs: Sequence[Runs] = ()) -> Report:
    """The report. ``runs`` has the runs of each profile, for flame views."""
    blocks: list[Block] = []
    profiles = [result.profile]
    if result.server is not None:
        blocks.append(_batches(result.server))
    if result.comparison is not None and result.other is not None:
        profiles.append(result.other)
        blocks += _comparison(result.comparison, result.profile.label, result.other.label, result.profile.balance.runs)
    for number, profile in enumerate(profiles):
        own = list(_profile(profile, "afterwards" if result.server else "alternating"))
        if number < len(runs):
            own.append(Picture("One run", flame_view(runs[number].trace, runs[number].quiet_run), _FLAME))
        of = f" of {profile.label}" if len(profiles) > 1 else ""
        blocks += [one if isinstance(one, Text) else replace(one, title=one.title + of) for one in own]
    return Report(f"Profile of {' and '.join(profile.label for profile in profiles)}", blocks)


def _batches(batches: Batches) -> Facts:
    facts = {
        "version": batches.version,
        "requests": f"{batches.requests:,} of {batches.asked:,} asked for, in {batches.batches:,} batches",
        "served in": f"{number_text(batches.served_ms)} ms per batch by the serving session",
    }
    return Facts("Batches of the server", facts | ({"ended": batches.ended_because} if batches.ended_because else {}))


def _profile(profile: Profile, order: str) -> Iterator[Block]:
    rows = f"{profile.rows:,.0f}" if profile.rows == round(profile.rows) else number_text(profile.rows)
    facts: dict[str, Cell] = {
        "execution provider": f"{profile.provider}, {profile.threads} thread{'s' if profile.threads > 1 else ''}",
        "inputs": f"{profile.inputs}, {rows} row{'s' if profile.rows != 1 else ''} a run",
        "runs": f"{profile.balance.runs:,} with profiling, and the same without, {order}",
    }
    if profile.settings:
        facts["settings"] = ", ".join(f"{name}={value}" for name, value in profile.settings.items())
    if profile.wait_share is not None:
        facts["threads"] = (
            f"the calling thread waits {_percent(profile.wait_share)} of its time in parallel sections; blocks of work "
            f"per run of the others: {', '.join(map(number_text, profile.thread_blocks))}"
        )
    for number, note in enumerate(profile.notes, 1):
        facts["note" if number == 1 else f"note {number}"] = note
    yield Facts("Measurement", facts)
    yield _balance(profile)
    yield _operators("Operator types", profile.operators)
    if profile.copies:
        yield _operators("Copies between devices", profile.copies)
    nodes = [
        {
            "node": " / ".join((*node.inside, node.name)),
            "operator": node.op,
            **cells,
            "µs before": node.gap_us,
            "bytes": node.call_bytes,
            "outputs": " or ".join(node.output_shapes),
        }
        for node, cells in zip(profile.nodes, _costs(profile.nodes), strict=True)
    ]
    note = "Per call; µs before are a gap without operators. Nodes of an inner graph are named after those around them."
    yield _table("Nodes", nodes, note)
    if profile.fusion is not None:
        yield _fusion(profile, profile.fusion)
    yield Picture("Self times", tree_map(profile.nodes), _AREAS)


def _balance(profile: Profile) -> Table:
    balance = profile.balance
    parts = {
        "operators (self times)": balance.operators_ms,
        "profiler": balance.profiler_ms,
        "rest: between operators, call": balance.rest_ms,
        "interruptions by other work": balance.interrupted_ms,
        "run with profiling": balance.profiled_ms,
        "run without profiling": balance.plain_ms,
    }
    note = _verdict(balance)
    if balance.is_closed is False and balance.rest_ms < 0:
        slowed = f"Profiling slows the operators down by at least {number_text(-balance.rest_ms)} ms"
        note += f" {slowed}, in addition to its own share of their times."
    if balance.gaps_ms is not None:
        note += f" No operator ran for {number_text(balance.gaps_ms)} ms of a profiled run."
    rows = [(part, ms, 100 * ms / balance.profiled_ms) for part, ms in parts.items()]
    return Table("Where the time goes", ("part", "ms", "%"), rows, note)


def _verdict(balance: Balance) -> str:
    """Whether the parts account for the time, or why this is not known."""
    rest, error, clock = map(_percent, (balance.rest_share, balance.rest_error, balance.clock_error))
    if balance.is_closed is not None:
        how = "account" if balance.is_closed else "do NOT account"
        within = f"{how} for the time without interruptions within {_percent(CLOSED_WITHIN)}"
        return f"Operators and profiler {within}: the rest is {rest} ± {error}."
    if balance.operators_ms < MIN_MS:
        taken = f"the profiler takes {_percent(balance.profiler_share)} of a profiled run"
        if balance.rest_error > _KNOWN_WITHIN or not 0 <= balance.profiler_share <= 1:
            taken = "the profiler's share of a profiled run is not known, because its cost varied too much"
        uncertain = f"Its clock counts whole µs, so up to {clock} may belong to other parts"
        return f"A run takes less than {MIN_MS:g} ms: {taken}. {uncertain}. Rely on shares, not on times."
    if balance.runs < MIN_PAIRS:
        return f"{balance.runs} runs are too few for a verdict on these parts; {MIN_PAIRS} are the least."
    if balance.rest_error > CLOSED_WITHIN:
        return f"The time that the profiler adds is known only within {error}."
    if is_interrupted(balance):
        interrupted = _percent(balance.interrupted_ms / balance.profiled_ms)
        return f"The rest is {rest}. Interruptions took {interrupted} of the time, so they may have caused it."
    if abs(balance.rest_share) - CLOSED_WITHIN <= balance.clock_error:
        uncertain = f"so up to {clock} may belong to operators or to the rest"
        return f"The rest is {rest}. The profiler's clock counts whole µs, {uncertain}."
    return f"A run takes less than {MIN_MS:g} ms without the profiler, too little for a verdict on these parts."


def _operators(title: str, operators: Sequence[OperatorCost]) -> Table:
    pairs = zip(operators, _costs(operators), strict=True)
    rows = [{"operator": one.op, "nodes": one.nodes, **cells} for one, cells in pairs]
    return _table(title, rows, "Per run; ms are self times.")


def _costs(costs: Sequence[Cost]) -> Iterator[dict[str, Cell]]:
    is_mixed = len({one.provider for one in costs}) > 1
    nests = any(one.total_ms > one.self_ms for one in costs)
    for one in costs:
        yield {
            "provider": one.provider if is_mixed else None,
            "calls": one.calls,
            "ms": one.self_ms,
            "ms with inner": one.total_ms if nests else None,
            "%": 100 * one.share,
            "µs a call": one.mean_us,
            "GFLOP/s": one.gflops,
            "GB/s": one.gbytes,
            "% wait": None if one.wait_share is None else 100 * one.wait_share,
        }


def _table(title: str, rows: Sequence[Mapping[str, Cell]], note: str) -> Table:
    """A table without the columns that are empty in all rows."""
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    return Table(title, shown, [[row[name] for name in shown] for row in rows], note, _SHOWN)


def _fusion(profile: Profile, fusion: Fusion) -> Block:
    nodes = f"{fusion.before:,} node{'s' if fusion.before != 1 else ''}"
    note = f"The file has {nodes} in its main graph, without constants; {fusion.after:,} run."
    for text, kinds in (("Removed", fusion.removed), ("Added", fusion.added)):
        if kinds:
            note += f" {text}: {', '.join(f'{op} x{count:,}' for op, count in kinds.items())}."
    rows = [(node.op, node.name, " + ".join(node.replaces), node.self_ms) for node in profile.nodes if node.replaces]
    if not rows:
        return Text(f"No nodes were fused. {note}")
    return Table("Fused nodes", ("operator", "node", "replaces", "ms"), rows, note, _SHOWN)


def _comparison(comparison: Comparison, one: str, other: str, pairs: int) -> Iterator[Block]:
    verdict = f"No difference between {one} and {other} beyond the noise"
    if comparison.is_beyond_noise:
        verdict = f"{other} is {'faster' if comparison.ratio < 1 else 'slower'} than {one}, beyond the noise"
    ratio, low, high = map(number_text, (comparison.ratio, comparison.ratio_low, comparison.ratio_high))
    sure = "with 95 %" if pairs >= MIN_PAIRS else f"in {pairs} pairs, too few for a verdict"
    yield Text(f"{verdict}: the runs of {other} take {ratio} of the time of {one} ({low} to {high} {sure}).")
    rows = [
        (row.op, row.nodes, row.other_nodes, row.self_ms, row.other_self_ms, row.other_self_ms - row.self_ms)
        for row in comparison.operators
    ]
    columns = ("operator", "nodes A", "nodes B", "ms A", "ms B", "difference")
    note = f"A is {one}, B is {other}. Self times per run. A dash means that there is no such operator."
    yield Table("Operators whose times differ", columns, rows, note, _SHOWN)


def _percent(share: float) -> str:
    return f"{number_text(100 * share)} %"
