"""The arguments of ``ortserve tune``."""

import argparse
import re
from pathlib import Path
from typing import Final

from ortserve.tools.command import ToolParser, number

JOURNAL: Final = ".ortserve-tune.journal"
"""Name of the journal in the model's folder. It begins with a dot, so that servers see no change of the model."""
_DESCRIPTION: Final = """\
Search for the options of a model that serve a load best on this machine: execution providers, threads, spinning,
instances, batch sizes and others. Trials run in processes of their own, through the server's own batcher, in turn with
the current configuration. Changes that are confirmed to be better are written to model.yaml.
"""
OBJECTIVES: Final = {
    "throughput": "Requests per second",
    "latency": "Latency",
    "cost": "CPU time",
    "memory": "Memory",
}
"""The figure that each objective improves, in words."""


def build_parser() -> ToolParser:
    """The arguments. Tests of the documentation use them, too."""
    parser = ToolParser("tune", _DESCRIPTION, check=_check)
    parser.add_argument("model", metavar="MODEL", help="REPOSITORY/name[/version], or a file, which is only measured.")
    add = parser.add_argument_group("what is better").add_argument
    add("--slo", type=_duration, metavar="TIME", help="Bound of the latency: 20ms, 0.5s, or a number of ms.")
    text = "Percentile of the latency that --slo bounds. Default: 99."
    add("--percentile", type=number(float, 50, 99.99), default=99.0, metavar="P", help=text)
    add("--objective", choices=OBJECTIVES, default="throughput", help="What to improve. Default: throughput.")
    text = "Rate for other objectives than throughput. Default: half of what the current configuration sustains."
    add("--rate", type=number(float, 0.001), metavar="R", help=text)
    add("--inputs", type=Path, metavar="FILE.npz", help="Samples to send. Default: synthetic inputs.")
    add("--rows", type=number(int, 1), default=1, metavar="N", help="Rows per request. Default: 1.")
    text = "Largest error of outputs against those of the current configuration: 0.001, or MEASURE=NUMBER. "
    text += "Default: the tolerance of the datatype."
    add("--max-error", metavar="BOUND", help=text)
    search = parser.add_argument_group("search")
    add = search.add_argument
    text = "Time limit, including the confirmation. Default: 10."
    add("--max-minutes", type=number(float, 0.001), default=10.0, metavar="M", help=text)
    text = "Maximum number of trials, including those of a resumed search."
    add("--max-trials", type=number(int, 1), default=10_000, metavar="N", help=text)
    add("--variants", action="store_true", help="Also measure the versions that other tools made of this model.")
    add("--dry-run", action="store_true", help="Do not write model.yaml.")
    text = f"File that records all trials, and is kept. Default: {JOURNAL}, which is removed at the end."
    add("--journal", type=Path, metavar="FILE", help=text)
    again = search.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="Continue an interrupted search; fail if there is none.")
    text = "Start a new search even if an interrupted one could continue."
    again.add_argument("--fresh", action="store_true", help=text)
    return parser


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)?", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 20ms or 0.5s, got '{text}'")
    return float(found[1]) / (1 if found[2] == "s" else 1e3)


def _check(parser: ToolParser, given: argparse.Namespace) -> None:
    if given.slo is None and given.objective != "latency":
        parser.error(f"expected --slo with the bound of the latency for the objective {given.objective}")
