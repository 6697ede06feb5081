"""``ortserve compare``: shows whether a model still computes the outputs of another one, and its gain."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ortserve.core.agreement import parse_bound
from ortserve.errors import invalid_input
from ortserve.tools.command import FAILED, OK, Outcome, ToolParser, number, run_tool
from ortserve.tools.compare.measure import BATCH, SECONDS, compare_models
from ortserve.tools.compare.presentation import present
from ortserve.tools.provenance import speed_text
from ortserve.tools.report import number_text
from ortserve.tools.speed import Speed, Timed
from ortserve.tools.subject import find_version


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "compare",
        "Compare two models: their outputs for the same inputs, their speed in turns, size and memory.",
        page_flags=("-o", "--output", "--page"),
        epilog="Exit status: 0 within all bounds, 1 a bound is missed or a failure, 2 wrong arguments or input files.",
    )
    add = parser.add_argument
    text = "model.onnx, or REPOSITORY/name[/version] of a model or an ensemble"
    add("reference", metavar="FIRST", help=f"{text}: the model to compare with")
    add("candidate", metavar="SECOND", help=text)
    add("--inputs", type=Path, metavar="DATA.npz", help="Samples to compare with. Default: synthetic inputs.")
    add("--labels", type=Path, metavar="LABELS.npy", help="Labels for the accuracy: an integer or text per sample.")
    text = (
        "Largest error that is accepted: a number bounds the largest difference, MEASURE=N relative, cosine, top1 or "
    )
    text += "accuracy, such as cosine=0.01; may be repeated."
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


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    logging.getLogger("ortserve").addHandler(logging.NullHandler())
    return run_tool("compare", compare, build_parser().parse_args(arguments))


def compare(arguments: argparse.Namespace) -> Outcome:
    """Compare two models.

    Raises:
        ServeError: invalid_input: a model or the inputs are wrong, or the models cannot be compared.
    """
    bounds = [parse_bound(text) for text in arguments.max_error]
    if arguments.labels is None and any(bound.measure == "accuracy" for bound in bounds):
        raise invalid_input("--max-error accuracy: expected --labels to be given, too")
    if arguments.min_speedup is not None and not arguments.seconds:
        raise invalid_input("--min-speedup: expected --seconds above 0")
    reference, candidate = (
        Timed(find_version(text), arguments.provider, arguments.threads)
        for text in (arguments.reference, arguments.candidate)
    )
    result = compare_models(
        reference, candidate, arguments.inputs, arguments.labels, seconds=arguments.seconds, batch=arguments.batch
    )
    exceeded = [excess for bound in bounds if (excess := bound.excess(result.agreement))]
    if arguments.min_speedup is not None and result.speed is not None:
        exceeded += missed_speedup(result.speed, arguments.min_speedup)
    result = replace(result, exceeded=tuple(exceeded))
    return Outcome(result, present(result), FAILED if exceeded else OK)


def missed_speedup(speed: Speed, least: float) -> list[str]:
    """One text that says why the least speed-up is not reached; empty if it is. Pure.

    A least speed-up above 1 must be reached by a ratio beyond the noise. One up to 1 is only missed beyond the noise.
    """
    ratio = speed.ratio
    if least > 1:
        missed = ratio.value < least or not speed.is_faster
    else:
        missed = ratio.value < least and (ratio.high is None or ratio.high < least)
    if not missed:
        return []
    return [f"expected a speed-up of at least {number_text(least)}, got: {speed_text(speed)}"]
