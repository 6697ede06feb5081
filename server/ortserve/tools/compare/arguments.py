"""The arguments of ``ortserve compare``."""

from pathlib import Path
from typing import Final

from ortserve.tools.command import ToolParser, number

BATCH: Final = 8
"""Default number of rows of a run."""
SECONDS: Final = 4.0
"""Default time for the measurement of speed."""


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "compare",
        "Compare two models: their outputs for the same inputs, their speed in turns, size and memory.",
        epilog="Exit status: 0 within all bounds, 1 a bound is missed or a failure, 2 wrong arguments or input files.",
    )
    add = parser.add_argument
    text = "Model to compare with: model.onnx, or REPOSITORY/name[/version] of a model or an ensemble."
    add("reference", metavar="FIRST", help=text)
    add("candidate", metavar="SECOND", help="Model to compare, named in the same way.")
    add("--inputs", type=Path, metavar="DATA.npz", help="Samples to compare with. Default: synthetic inputs.")
    add("--labels", type=Path, metavar="LABELS.npy", help="Labels for the accuracy: an integer or text per sample.")
    text = "Largest error: N bounds the largest difference, MEASURE=N relative, cosine, top1 or accuracy. "
    text += "May be repeated."
    add("--max-error", action="append", default=[], metavar="[MEASURE=]N", help=text)
    text = "Least speed of SECOND relative to FIRST: 1.2 requires 1.2 times the speed, 0.9 accepts a tenth less."
    add("--min-speedup", type=number(float, 1e-6, 1000), metavar="X", help=text)
    text = "Rows per run, if both models are batched."
    add("--batch", type=number(int, 1, 65536), default=BATCH, metavar=f"{BATCH}", help=text)
    text = "Time for the measurement of speed; 0 for no measurement."
    add("--seconds", type=number(float, 0, 3600), default=SECONDS, metavar=f"{SECONDS:g}", help=text)
    add("--threads", type=number(int, 1, 65536), metavar="N", help="Threads per run of both models.")
    add("--provider", metavar="NAME", help="Execution provider for both models, such as cuda; no other is used.")
    return parser
