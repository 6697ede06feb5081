"""Makes the report of ``ortserve inspect``."""

from collections.abc import Iterator
from typing import Final

from ortserve.tools.inspect.result import InspectResult
from ortserve.tools.report import Block, Findings, Report, Table, facts_of, table_of

_MAX_ROWS: Final = 20
_ABOUT_NODES: Final = "Nodes as sessions report them: after simplification, before fusions."
_ABOUT_MEMORY: Final = (
    "Memory on the CPU. Predictions come from batches of 2 and 4 rows: activations and process grow linearly, and "
    "the arena doubles its extensions. The process includes the weights. Another process measures: ONNX Runtime's "
    "profile shows activations (peak of the memory that nodes request) and arena, the operating system shows the "
    "private memory of the process."
)


def present(result: InspectResult) -> Report:
    """The report, with the findings first."""
    return Report(f"{result.model}: {result.path}", tuple(_blocks(result)))


def _blocks(result: InspectResult) -> Iterator[Block]:
    yield Findings(result.findings)
    yield facts_of("Content", result.content, without=("operators", "weights"))
    yield table_of("Inputs", result.inputs, max_rows=_MAX_ROWS)
    yield table_of("Outputs", result.outputs, max_rows=_MAX_ROWS)
    yield _counts("Operators", result.content.operators)
    yield table_of("Weights", result.content.weights)
    title = f"Execution providers of ONNX Runtime {result.runtime}"
    yield table_of(title, result.placement, without=("operators", "fused"), note=_ABOUT_NODES)
    for one in result.placement:
        if one.fused:
            yield _counts(f"Operators after fusions, {one.provider}", one.fused)
    if result.rows is not None:
        yield facts_of("Rows of a batch", result.rows)
    yield facts_of("CUDA graphs", result.replay, without=("conditions",))
    yield table_of("Conditions of CUDA graphs", result.replay.conditions)
    if result.memory is not None:
        yield facts_of("Memory", result.memory, without=("batches",))
        yield table_of("Memory by batch size", result.memory.batches, note=_ABOUT_MEMORY)


def _counts(title: str, operators: dict[str, int]) -> Table:
    return Table(title, ["operator", "nodes"], list(operators.items()), max_rows=_MAX_ROWS)
