"""The arguments of ``ortserve optimize``."""

import argparse
import re
from pathlib import Path
from typing import Final

from ortserve.core.agreement import ErrorBound
from ortserve.tools.command import ToolParser, add_destination, number, several
from ortserve.tools.compare.arguments import SECONDS

_DESCRIPTION: Final = """
Make a model faster or smaller by steps that are each compared with it, and drop those that gain nothing or change its
outputs. Without options for steps: fusions and clean-up, which keep inputs, outputs and datatypes.
"""
MODEL_TYPES: Final = (
    *("bart", "bert", "bert_keras", "bert_tf", "clip", "conformer", "gpt2", "gpt2_tf", "gpt_neox", "mmdit", "phi"),
    *("qwen3", "sam2", "swin", "t5", "tnlr", "unet", "vae", "vit"),
)
"""The model types that ``onnxruntime.transformers`` supports."""
PRECISIONS: Final = ("fp16", "bf16")
DEFAULT_STEPS: Final = ("fusions", "fold", "slim", "share")
FP32_BOUND, HALF_BOUND = ErrorBound("relative", 1e-4), ErrorBound("relative", 0.01)
"""Largest errors without ``--max-error``: of fp32 models, and of models with 16 bits."""
_MAX: Final = (1 << 31) - 1
_LEVELS: Final = ("basic", "extended", "layout", "all")


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("optimize", _DESCRIPTION, page_flags=("--page",))
    parser.add_argument("model", metavar="MODEL", help="Model file, or REPOSITORY/name[/version].")
    add_destination(parser)
    add = parser.add_argument_group("steps").add_argument
    text = "Skip a step that runs by default; may be repeated."
    add("--skip", action="append", default=[], choices=DEFAULT_STEPS, help=text)
    add("--outputs", type=several(str), metavar="A,B", help="Keep only these outputs, and the nodes that they need.")
    text = "Name a free dimension of an input or output; may be repeated."
    add("--name-dim", action="append", default=[], type=_named, metavar="TENSOR:AXIS=NAME", help=text)
    text = "Fix a named dimension; may be repeated."
    add("--dim", action="append", default=[], type=_fixed, metavar="NAME=SIZE", help=text)
    add("--opset", type=number(int, 1), metavar="N", help="Convert the standard operators to this opset.")
    text = f"Model type for onnxruntime.transformers. Default: detected. One of {', '.join(MODEL_TYPES)}."
    add("--model-type", choices=MODEL_TYPES, metavar="TYPE", help=text)
    add("--heads", type=number(int, 1, _MAX), metavar="N", help="Number of attention heads. Default: detected.")
    add("--hidden", type=number(int, 1, _MAX), metavar="N", help="Hidden size of the attention. Default: detected.")
    text = "Compute in 16 bits, except the nodes that need fp32. This is faster only on GPUs."
    add("--precision", choices=PRECISIONS, help=text)
    text = "Save the graph as ONNX Runtime optimizes it on this machine; only for machines of the same kind."
    add("--level", choices=_LEVELS, help=text)
    text = "Write the weights to a file beside the model, as is always done over 2 GB."
    add("--external-data", action="store_true", help=text)
    add = parser.add_argument_group("checks").add_argument
    text = "Largest accepted error against the source; MEASURE is max, relative, cosine or top1. "
    text += f"Default: {FP32_BOUND}, with 16 bits {HALF_BOUND}."
    add("--max-error", metavar="[MEASURE=]NUMBER", help=text)
    add("--inputs", type=Path, metavar="DATA.npz", help="Samples for the comparison. Default: synthetic inputs.")
    add("--provider", metavar="NAME", help="Execution provider that runs the models, such as cuda.")
    add("--threads", type=number(int, 1, _MAX), metavar="N", help="Threads per run.")
    text = f"Time for the final measurement of speed ({SECONDS:g}), without the starts of its processes; "
    text += "0 for no measurement."
    add("--seconds", type=number(float, 0, 3600), default=SECONDS, metavar="S", help=text)
    return parser


def _fixed(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected NAME=SIZE with a size from 1, got {text!r}")
    return name, int(size)


def _named(text: str) -> tuple[tuple[str, int], str]:
    match = re.fullmatch(r"(.+):(\d+)=(.+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected TENSOR:AXIS=NAME, got {text!r}")
    return (match[1], int(match[2])), match[3]
