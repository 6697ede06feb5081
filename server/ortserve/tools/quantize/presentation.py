"""Makes reports of quantized models."""

from collections.abc import Iterator
from typing import Final

from ortserve.tools.quantize.result import NodeCost, QuantizeResult
from ortserve.tools.report import (
    NOTHING,
    Block,
    Cell,
    Facts,
    Report,
    Table,
    Text,
    bytes_text,
    facts_of,
    number_text,
    table_of,
)
from ortserve.tools.speed import speed_text

_MAX_ROWS: Final = 20


def present(result: QuantizeResult) -> Report:
    """The report."""
    return Report(f"{result.model}: {result.path}", tuple(_blocks(result)))


def _blocks(result: QuantizeResult) -> Iterator[Block]:
    yield Facts("Result", _summary(result))
    yield table_of("Errors against the source", result.agreement.outputs)
    yield table_of("Nodes", result.operators)
    if result.ranking:
        columns = ["nodes", "operator", f"{result.ranked_by} error alone", "in the result"]
        about = "Error of a model in which only these nodes are quantized."
        yield Table("Cost of nodes", columns, [_row(part) for part in result.ranking], about, _MAX_ROWS)
    yield facts_of("Settings", result.settings)
    for note in result.notes:
        yield Text(f"Note: {note}")


def _summary(result: QuantizeResult) -> dict[str, Cell]:
    agreement, delivered = result.agreement, result.delivered
    facts: dict[str, Cell] = {}
    if result.missed:
        facts["written"] = f"no model: {'; '.join(result.missed)}"
    elif delivered is not None:
        version = f"{delivered.published} version {delivered.version}" if delivered.published else ""
        facts["written"] = ", ".join(filter(None, (delivered.output, version)))
    share = result.nbytes / result.source_nbytes
    facts["size"] = f"{bytes_text(result.nbytes)}, {share:.0%} of {bytes_text(result.source_nbytes)}"
    if result.speed is not None and result.source_speed is not None:
        times = f"{number_text(result.source_speed.median_ms)} to {number_text(result.speed.median_ms)} ms a run"
        facts["speed"] = f"{speed_text(result.speed)}, {times}"
    facts["accuracy"] = f"{NOTHING} (no labels)"
    if agreement.accuracy is not None and agreement.reference_accuracy is not None:
        facts["accuracy"] = f"{agreement.accuracy:.2%}, source {agreement.reference_accuracy:.2%}"
    facts["errors within"] = ", ".join(result.bounds)
    facts["compared with"] = result.inputs
    if result.calibration:
        facts["calibrated with"] = result.calibration
    facts["in floating point"] = ", ".join(result.floating) or "none of the nodes that can be quantized"
    facts["models tried"] = result.trials
    return facts


def _row(part: NodeCost) -> list[Cell]:
    more = f" and {len(part.nodes) - 3} more" if len(part.nodes) > 3 else ""
    place = "quantized" if part.is_quantized else "floating point"
    return [", ".join(part.nodes[:3]) + more, ", ".join(part.operators), part.error, place]
