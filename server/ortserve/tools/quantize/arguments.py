"""The arguments of ``ortserve quantize``."""

import argparse
from pathlib import Path
from typing import Final

from ortserve.tools.command import ToolParser, add_destination, number

MODES: Final = ("dynamic", "static", "weights")
_DESCRIPTION: Final = """
Make a quantized model, and prove what it costs and gains: its outputs are compared with those of MODEL, and nodes that
cost too much stay in floating point. Nothing is written if the errors exceed --max-error.
"""


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("quantize", _DESCRIPTION, page_flags=("--page",))
    parser.add_argument("model", metavar="MODEL", help="Model file, or REPOSITORY/name[/version].")
    add_destination(parser)
    quantization = parser.add_argument_group("quantization; defaults are those that are fast on this processor")
    add = quantization.add_argument
    text = "dynamic: ranges from each run; static: ranges from calibration; weights: only weights are quantized."
    add("--mode", choices=MODES, required=True, help=text)
    add("--bits", type=int, choices=(4, 8), help="Bits per weight in mode weights. Default: 4.")
    add("--block", type=int, metavar="N", help="Number of weights that share a scale in mode weights. Default: 32.")
    text = "Samples for mode static: an .npz with an array per input, or a folder of such files, as servers record."
    add("--calibration", type=Path, metavar="DATA.npz", help=text)
    text = "Choice of a tensor's range: from all values (minmax), or without rare values (entropy, percentile)."
    add("--calibrator", choices=("minmax", "entropy", "percentile"), help=text)
    channel = quantization.add_mutually_exclusive_group()
    text = "Use one scale per channel of a weight. This is the default."
    channel.add_argument("--per-channel", action="store_true", default=None, help=text)
    text = "Use one scale per weight."
    channel.add_argument("--per-tensor", dest="per_channel", action="store_false", default=None, help=text)
    add("--activations", choices=("uint8", "int8", "uint16", "int16"), help="Type of activations in mode static.")
    add("--weights", choices=("int8", "uint8"), help="Type of weights.")
    text = "Use weights of 7 bits, which processors without VNNI need. Default: auto."
    add("--reduce-range", choices=("auto", "on", "off"), default="auto", help=text)
    text = "Quantize only these operators."
    add("--ops", dest="operators", type=_names, default=(), metavar="MatMul,Conv", help=text)
    text = "Keep these nodes in floating point."
    add("--exclude", type=_names, action="extend", default=[], metavar="NODE,…", help=text)
    add = parser.add_argument_group("comparison with MODEL").add_argument
    text = "Largest error, by max, relative, cosine, top1 or accuracy (--labels), such as cosine=0.02; may be repeated."
    add("--max-error", action="append", default=[], metavar="[MEASURE=]NUMBER", help=text)
    text = "Samples for the comparison. Default: a part of the calibration samples, otherwise synthetic inputs."
    add("--inputs", type=Path, metavar="DATA.npz", help=text)
    text = "Labels of the samples of --inputs, or of --calibration without --inputs: integers or texts."
    add("--labels", type=Path, metavar="LABELS.npy", help=text)
    text = "Maximum number of samples for calibration and for the comparison, each. Default: 256."
    add("--samples", type=number(int, 1), default=256, metavar="N", help=text)
    add("--rank", action="store_true", help="Rank the nodes by their cost even if all can be quantized.")
    text = "Maximum number of models that the ranking tries. Default: 60."
    add("--trials", type=number(int, 1), default=60, metavar="N", help=text)
    text = "Time limit of calibration and search, in minutes. Default: 10."
    add("--minutes", type=number(float, 0), default=10.0, metavar="N", help=text)
    text = "Time for the measurement of speed; 0 for no measurement. Default: 4."
    add("--seconds", type=number(float, 0), default=4.0, metavar="N", help=text)
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names
