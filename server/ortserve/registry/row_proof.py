"""What a model's graph says of its rows, where they are to run together along axis 0 of all inputs."""

from pathlib import Path

from ortserve.core.signature import ModelSignature
from ortserve.rows import Outcome, RowVerdict, TooLargeError, TooMuchWorkError, prove_axes, read_graph


def judge_rows(path: Path, signature: ModelSignature) -> RowVerdict:
    """Follow the rows through the graph. Blocks on the file; takes some 50 µs a node, and never raises.

    Args:
        path: The model file.
        signature: Of the model; its inputs name those that carry rows.
    """
    try:
        model = read_graph(path)
        if model is None:
            return RowVerdict(Outcome.UNKNOWN, reason="the file cannot be read as an ONNX model")
        return prove_axes(model, {spec.name: 0 for spec in signature.inputs})
    except (TooLargeError, TooMuchWorkError) as failure:
        return RowVerdict(Outcome.UNKNOWN, reason=f"the model is not analysed: {failure}")


def why_rows_meet(verdict: RowVerdict) -> str:
    """Which node combines rows, and how; empty where none is known to."""
    if verdict.outcome is not Outcome.MIXED:
        return ""
    return f"rows may meet at node '{verdict.node}': {verdict.reason}"
