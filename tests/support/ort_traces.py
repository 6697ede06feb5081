"""Traces as ONNX Runtime's profiler writes them: one event per line, in the order in which they end."""

import json
from collections.abc import Sequence
from typing import Any


def event(name: str, start_us: int, total_us: int, *, thread: int = 1, category: str = "Session", **args: Any) -> bytes:
    """An event of any kind."""
    document = {"cat": category, "pid": 1, "tid": thread, "dur": total_us, "ts": start_us, "ph": "X", "name": name}
    return json.dumps(document | {"args": args}).encode() + b",\n"


def node(
    name: str,
    start_us: int,
    total_us: int,
    *,
    op: str = "Add",
    inputs: Sequence[Sequence[int]] = ((1, 4),),
    outputs: Sequence[Sequence[int]] = ((1, 4),),
    thread: int = 1,
    **args: Any,
) -> bytes:
    """A run of a node with FP32 inputs and outputs."""
    return event(
        f"{name}_kernel_time",
        start_us,
        total_us,
        thread=thread,
        category="Node",
        **{
            "op_name": op,
            "provider": "CPUExecutionProvider",
            "node_index": "0",
            "input_type_shape": [{"float": list(dims)} for dims in inputs],
            "output_type_shape": [{"float": list(dims)} for dims in outputs],
            "activation_size": "16",
            "parameter_size": "0",
            "output_size": "16",
            **args,
        },
    )


def execution(start_us: int, total_us: int) -> bytes:
    """The execution of a graph, written after its nodes."""
    return event("SequentialExecutor::Execute", start_us, total_us)


def run(start_us: int, total_us: int) -> bytes:
    """The end of a run."""
    return event("model_run", start_us, total_us)


def trace_file(*events: bytes) -> list[bytes]:
    """The lines of a trace file."""
    return [b"[\n", *events, b"]\n"]


def flat_run(start_us: int, *times_us: int, gap_us: int = 5) -> list[bytes]:
    """A run of the nodes ``n0``, ``n1`` …, each after a gap."""
    lines, now_us = [], start_us
    for number, time_us in enumerate(times_us):
        lines.append(node(f"n{number}", now_us + gap_us, time_us, op=f"Op{number}"))
        now_us += gap_us + time_us
    return [*lines, execution(start_us, now_us - start_us), run(start_us, now_us - start_us)]
