"""The result of ``ortserve inspect`` for people."""

import math
from collections.abc import Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING, Final

from ortserve.tools.inspect.result import Figure, InspectResult, Memory, Placement, Replay
from ortserve.tools.pictures import chart
from ortserve.tools.report import (
    Block,
    Cell,
    Facts,
    Findings,
    Picture,
    Report,
    Table,
    bytes_text,
    facts_of,
    table_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS: Final = 20


def present(result: InspectResult) -> Report:
    """The report, the findings first: they are what a reader acts on."""
    return Report(f"{result.model}: {result.path}", tuple(_blocks(result)))


def _blocks(result: InspectResult) -> Iterator[Block]:
    yield Findings(result.findings)
    yield facts_of("Content", result.content, without=("operators", "weights"))
    for title, tensors in (("Inputs", result.inputs), ("Outputs", result.outputs)):
        if tensors:
            yield table_of(title, tensors, most_rows=_MOST_ROWS)
    yield _counts("Operators in the file", result.content.operators)
    if result.content.weights:
        yield table_of("Weights", result.content.weights)
    yield Table(
        f"Execution providers of ONNX Runtime {result.runtime}",
        ["provider", "takes nodes", "left to others", "copies", "nodes after fusions"],
        [_placement(one) for one in result.placement],
        note="Nodes as sessions report them: after simplification, before fusions.",
    )
    for one in result.placement:
        if one.fused:
            yield _counts(f"Operators that run on {one.provider}, after fusions", one.fused)
    if result.rows is not None:
        yield facts_of("Rows of a batch", result.rows)
    yield _replay(result.replay)
    if result.memory is not None:
        yield from _memory(result.memory)


def _counts(title: str, operators: dict[str, int]) -> Table:
    return Table(title, ["operator", "nodes"], list(operators.items()), most_rows=_MOST_ROWS)


def _placement(one: Placement) -> list[Cell]:
    if one.problem:
        return [one.provider, one.problem, None, None, None]
    taken = ", ".join(f"{name}: {count}" for name, count in one.nodes.items())
    copies = None if one.copies is None else len(one.copies)
    return [
        one.provider,
        taken,
        one.elsewhere or "none",
        copies,
        None if one.fused is None else sum(one.fused.values()),
    ]


def _replay(replay: Replay) -> Table:
    source = {
        "graph": "Predicted from the graph and the list of CUDA kernels: CUDA is not here",
        "session": "From the placement of a session here; no graph was captured",
        "capture": f"Captured and replayed here: batches of {', '.join(map(str, replay.captured)) or 'no'} rows",
    }[replay.source]
    note = f"{source}{f'; {replay.because}' if replay.because else ''}."
    return table_of(f"CUDA graphs: {'possible' if replay.possible else 'not possible'}", replay.conditions, note=note)


def _memory(memory: Memory) -> Iterator[Block]:
    weights = {
        "weights, predicted": _size(memory.weights.predicted),
        "weights, measured": _size(memory.weights.measured),
    }
    ran = {"inputs": memory.inputs or None, "threads": memory.threads or None, "not measured": memory.problem or None}
    yield Facts("Memory", weights | ran)
    if not memory.batches:
        return
    rows = [
        [one.rows, *(_size(each) for figure in (one.activations, one.arena, one.process) for each in astuple(figure))]
        for one in memory.batches
    ]
    note = (
        "On the CPU. Predicted from batches of 2 and 4 rows: activations and process by a straight line, the arena by "
        "doubling its extensions; the process includes the weights. Measured in another process, by ONNX Runtime's "
        "profile (activations: peak use of the arena without weights) and by the memory that only this process has."
    )
    columns = ["rows", "activations", "measured", "arena", "measured", "process", "measured"]
    yield Table("Memory by batch size", columns, rows, note)
    if len(memory.batches) > 1:
        yield Picture("Memory by batch size", chart(lambda axes: _draw(axes, memory), name="memory"))


def _size(nbytes: int | None) -> Cell:
    return None if nbytes is None else bytes_text(nbytes)


def _draw(axes: "Axes", memory: Memory) -> None:
    def mib(nbytes: int | None) -> float:
        return math.nan if nbytes is None else nbytes / 1024**2

    rows = [one.rows for one in memory.batches]
    for name in ("activations", "process"):
        figures: list[Figure] = [getattr(one, name) for one in memory.batches]
        (line,) = axes.plot(rows, [mib(one.predicted) for one in figures], "-", label=f"{name}, predicted")
        measured = [mib(one.measured) for one in figures]
        axes.plot(rows, measured, "o", color=line.get_color(), label=f"{name}, measured")
    axes.axhline(mib(memory.weights.predicted), linestyle=":", color="gray", label="weights")
    axes.set_xlabel("rows")
    axes.set_ylabel("MiB")
    axes.legend()
