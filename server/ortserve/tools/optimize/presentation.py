"""Makes reports of optimized models."""

from collections.abc import Iterator

from ortserve.tools.optimize.result import OptimizeResult
from ortserve.tools.report import (
    NOTHING,
    Block,
    Facts,
    Findings,
    Report,
    Table,
    Text,
    bytes_text,
    number_text,
    table_of,
)
from ortserve.tools.speed import speed_text

_MAX_ROWS = 20


def present(result: OptimizeResult) -> Report:
    """The report: the result, then each step."""
    return Report(f"{result.model}: {result.path}", tuple(_blocks(result)))


def _blocks(result: OptimizeResult) -> Iterator[Block]:
    before, after, delivered = result.before, result.after, result.delivered
    facts = {
        "nodes in the file": f"{before.nodes:,} → {after.nodes:,}",
        "nodes that run": f"{_count(before.nodes_run)} → {_count(after.nodes_run)}",
        "size": f"{bytes_text(before.nbytes)} → {bytes_text(after.nbytes)}",
        "error": f"{number_text(result.agreement.error(result.bound.partition('=')[0]))} (bound {result.bound})",
    }
    if result.speed is not None and result.source_speed is not None:
        times = f"{number_text(result.source_speed.median_ms)} → {number_text(result.speed.median_ms)} ms"
        facts["speed"] = f"{speed_text(result.speed)}; {times} on {result.provider}"
    facts["inputs"] = result.inputs
    if delivered.output:
        facts["output"] = delivered.output
    if delivered.published:
        facts["published"] = f"{delivered.published} version {delivered.version}"
    yield Facts("Result", facts)
    for note in delivered.notes:
        yield Text(note)
    yield _steps(result)
    for title, counts in (("Fused by the steps", result.fused), ("Fused operators that run", result.run_fused)):
        if counts:
            yield Table(title, ["operator", "nodes"], list(counts.items()))
    if result.almost_fused:
        title = "Not fused in the graph that runs"
        yield table_of(title, result.almost_fused, max_rows=_MAX_ROWS)
    yield Findings(result.findings)


def _steps(result: OptimizeResult) -> Table:
    columns = ["step", "kept", "reason", "nodes", "run", "size", "error", "speed", "seconds"]
    rows = []
    for one in result.steps:
        nodes = f"{one.nodes_before:,} → {_count(one.nodes)}"
        reason = "; ".join((one.reason, *one.notes))
        size = None if one.nbytes is None else bytes_text(one.nbytes)
        rows.append((one.name, one.is_kept, reason, nodes, one.nodes_run, size, one.error, one.ratio, one.seconds))
    note = "run: nodes after ONNX Runtime's own optimization; speed: processor time of the source / of the model."
    return Table("Steps", columns, rows, note=note)


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"
