"""``ortserve compare``: shows whether a model still computes the outputs of another one, and its gain."""

import argparse
from dataclasses import replace

from ortserve.core.agreement import parse_bound
from ortserve.errors import invalid_input
from ortserve.tools.command import FAILED, OK, Outcome
from ortserve.tools.compare.measure import compare_models
from ortserve.tools.compare.presentation import present
from ortserve.tools.provenance import speed_text
from ortserve.tools.report import number_text
from ortserve.tools.speed import Speed, Timed
from ortserve.tools.subject import find_version


def run(arguments: argparse.Namespace) -> Outcome:
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
