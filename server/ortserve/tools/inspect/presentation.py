"""The result of ``ortserve inspect`` for people."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ortserve.tools.inspect.result import InspectResult, Memory, Replay, TensorInfo
from ortserve.tools.pictures import chart
from ortserve.tools.report import Block, Cell, Facts, Findings, Picture, Report, Table, bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS: Final = 20
_CONDITIONS: Final = {
    "no_control_flow": "every run has the same nodes",
    "one_provider": "all nodes but shapes on one provider",
    "no_strings": "tensors of numbers only",
    "shapes_follow_from_rows": "the number of rows fixes all shapes",
    "no_shapes_from_values": "no shapes from values",
    "no_copies": "no copies between providers",
    "memory_stays": "memory stays at its addresses",
}


def present(result: InspectResult) -> Report:
    """The report, the findings first: they are what a reader acts on."""
    return Report(f"{result.model}: {result.path}", tuple(_blocks(result)))


def _blocks(result: InspectResult) -> Iterator[Block]:
    content = result.content
    yield Findings(result.findings)
    yield Facts(
        "Content",
        {
            "file": bytes_text(content.nbytes),
            "external data": ", ".join(f"{one.name} ({bytes_text(one.nbytes)})" for one in content.external_files)
            or "none",
            "producer": content.producer or None,
            "format, opsets": ", ".join(
                [f"IR {content.ir_version}", *(f"{domain} {version}" for domain, version in content.opsets.items())]
            ),
            "nodes": content.nodes,
            "functions": content.functions,
            "parameters": content.parameters,
            "weights": bytes_text(content.weights_nbytes),
            "free dimensions": "; ".join(f"{name}: {', '.join(axes)}" for name, axes in content.free_dimensions.items())
            or "none",
            "ONNX Runtime": result.runtime,
        },
    )
    yield Table(
        "Inputs and outputs",
        ["", "name", "datatype", "shape", "rows on axis"],
        [_tensor("input", one) for one in result.inputs] + [_tensor("output", one) for one in result.outputs],
        most_rows=_MOST_ROWS,
    )
    yield Table(
        "Operators in the file",
        ["operator", "domain", "nodes"],
        [[one.operator, one.domain, one.nodes] for one in content.operators],
        most_rows=_MOST_ROWS,
    )
    if content.weights:
        yield Table(
            "Weights",
            ["type", "tensors", "parameters", "size"],
            [[one.datatype, one.tensors, one.parameters, bytes_text(one.nbytes)] for one in content.weights],
        )
    yield _placement(result)
    for one in result.placement:
        if one.fused:
            title = f"Operators that run on {one.provider}, after fusions"
            yield Table(
                title, ["operator", "nodes"], [[name, count] for name, count in one.fused.items()], most_rows=_MOST_ROWS
            )
    if result.rows is not None:
        rows = result.rows
        yield Facts(
            "Rows of a batch",
            {
                "verdict": rows.verdict,
                "because": rows.because,
                "trial here": rows.tried or "none",
                "drift": None if rows.drift is None else f"{rows.drift:.1e}",
                "worthwhile batch": rows.max_rows,
                "event loop": f"no runs: {rows.event_loop}" if rows.event_loop else "short runs",
            },
        )
    for replay in result.replay:
        yield _replay(replay)
    if result.memory is not None:
        yield from _memory(result.memory)


def _tensor(role: str, one: TensorInfo) -> list[Cell]:
    shape = "any" if one.shape is None else "[" + ", ".join(map(str, one.shape)) + "]"
    rows = "none" if one.batch_axis is None else str(one.batch_axis)
    return [role, one.name, one.datatype, shape, f"{rows}, optional" if one.is_optional else rows]


def _placement(result: InspectResult) -> Table:
    rows: list[list[Cell]] = [
        [
            one.provider,
            one.problem or _counts(one.nodes),
            one.elsewhere or ("none" if not one.problem else None),
            len(one.copies) if one.copies is not None else None,
            sum(one.fused.values()) if one.fused is not None else None,
        ]
        for one in result.placement
    ]
    return Table(
        "Execution providers",
        ["provider", "takes nodes", "left to others", "copies", "nodes after fusions"],
        rows,
        note="Nodes as sessions report them: after simplification, before fusions.",
    )


def _counts(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in nodes.items())


def _replay(replay: Replay) -> Table:
    source = {
        "graph": "predicted from the graph and the list of CUDA kernels: CUDA is not here",
        "session": "from the placement of a session here; no graph was captured",
        "capture": f"captured and replayed here: batches of {', '.join(map(str, replay.captured)) or 'no'} rows",
    }[replay.source]
    return Table(
        f"CUDA graphs: {'possible' if replay.possible else 'not possible'}",
        ["condition", "holds", "because", "nodes"],
        [
            [_CONDITIONS[one.name], "yes" if one.holds else "no", one.because, ", ".join(one.nodes)]
            for one in replay.conditions
        ],
        note=f"{source}{f'; {replay.because}' if replay.because else ''}",
    )


def _memory(memory: Memory) -> Iterator[Block]:
    facts: dict[str, Cell] = {"weights, predicted": bytes_text(memory.weights)}
    if memory.weights_measured is not None and memory.opening_peak is not None:
        facts |= {
            "weights, measured": bytes_text(memory.weights_measured),
            "peak while opening": bytes_text(memory.opening_peak),
            "inputs": memory.inputs,
            "threads": memory.threads,
        }
    if memory.problem:
        facts["not measured"] = memory.problem
    yield Facts("Memory", facts)
    if not memory.batches:
        return
    columns = ["rows", "activations", "measured", "arena", "measured", "process", "measured"]
    cells: list[list[Cell]] = [
        [
            one.rows,
            *(
                None if nbytes is None else bytes_text(nbytes)
                for nbytes in (
                    *(one.activations, one.activations_measured, one.arena, one.arena_measured),
                    *(one.process, one.process_measured),
                )
            ),
        ]
        for one in memory.batches
    ]
    note = (
        "On the CPU. Predicted from batches of 2 and 4 rows: activations and process by a straight line, the arena by "
        "doubling its extensions; the process includes the weights. Measured in another process, by ONNX Runtime's "
        "profile (activations: peak use of the arena without weights) and by the memory that only this process has."
    )
    yield Table("Memory by batch size", columns, cells, note=note)
    if len(memory.batches) > 1:
        yield Picture("Memory by batch size", chart(lambda axes: _draw(axes, memory), name="memory"))


def _draw(axes: "Axes", memory: Memory) -> None:
    mib = 1024**2
    rows = [one.rows for one in memory.batches]
    axes.plot(rows, [one.process / mib for one in memory.batches], "-", label="process, predicted")
    known = [(one.rows, one.process_measured / mib) for one in memory.batches if one.process_measured is not None]
    axes.plot([x for x, _ in known], [y for _, y in known], "o", label="process, measured")
    if all(one.activations is not None for one in memory.batches):
        axes.plot(rows, [(one.activations or 0) / mib for one in memory.batches], "-", label="activations, predicted")
    axes.axhline(memory.weights / mib, linestyle=":", color="gray", label="weights")
    axes.set_xlabel("rows")
    axes.set_ylabel("MiB")
    axes.legend()
