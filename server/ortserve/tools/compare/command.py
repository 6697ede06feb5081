"""``ortserve compare``: shows whether a model still computes the outputs of another one, and its gain."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ortserve.core.agreement import parse_bound
from ortserve.errors import invalid_input
from ortserve.tools.command import FAILED, OK, Outcome
from ortserve.tools.compare.measure import compare_models
from ortserve.tools.compare.result import ComparedModel, CompareResult
from ortserve.tools.report import Block, Cell, Facts, Report, Table, Text, bytes_text, number_text, table_of
from ortserve.tools.speed import Speed, Timed, speed_text
from ortserve.tools.subject import find_version

_ABOUT_ERRORS: Final = (
    "max: largest difference of two elements; relative: divided by the largest element of the first model; cosine: 1 "
    "minus the cosine of the worst sample; top1: share of positions whose largest element is another one."
)


def run(given: argparse.Namespace) -> Outcome:
    """Compare two models.

    Raises:
        ServeError: invalid_input: a model or the inputs are wrong, or the models cannot be compared.
    """
    bounds = [parse_bound(text) for text in given.max_error]
    if given.labels is None and any(bound.measure == "accuracy" for bound in bounds):
        raise invalid_input("--max-error accuracy: expected --labels to be given, too")
    if given.min_speedup is not None and not given.seconds:
        raise invalid_input("--min-speedup: expected --seconds above 0")
    reference, candidate = (
        Timed(find_version(text), given.provider, given.threads) for text in (given.reference, given.candidate)
    )
    result = compare_models(reference, candidate, given.inputs, given.labels, seconds=given.seconds, batch=given.batch)
    exceeded = [excess for bound in bounds if (excess := bound.excess(result.agreement))]
    if given.min_speedup is not None and result.speed is not None:
        exceeded += missed_speedup(result.speed, given.min_speedup)
    result = replace(result, exceeded=tuple(exceeded))
    title = f"{_label(result.candidate)} against {_label(result.reference)}"
    return Outcome(result, Report(title, tuple(_blocks(result))), FAILED if exceeded else OK)


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


def _blocks(result: CompareResult) -> Iterator[Block]:
    """The report, the verdict first."""
    yield Text("; ".join(result.exceeded) if result.exceeded else _verdict(result))
    yield Facts("Runs", {"inputs": result.inputs, "samples": result.agreement.samples, "rows of a run": result.rows})
    yield Table("Side by side", ["", "first", "second", "second / first"], list(_rows(result)))
    yield table_of("Errors of the second model", result.agreement.outputs, note=_ABOUT_ERRORS)
    yield from (Text(note) for note in result.notes)
    origins = {"first": result.reference.provenance, "second": result.candidate.provenance}
    if known := {which: text for which, text in origins.items() if text}:
        yield Facts("Provenance", known)


def _verdict(result: CompareResult) -> str:
    worst = max(result.agreement.outputs, key=lambda output: output.max)
    largest = "equal outputs" if not worst.max else f"largest error {number_text(worst.max)} in '{worst.name}'"
    return largest if result.speed is None else f"{largest}; {speed_text(result.speed)}"


def _rows(result: CompareResult) -> Iterator[list[Cell]]:
    first, second = result.reference, result.candidate
    yield ["size", bytes_text(first.nbytes), bytes_text(second.nbytes), second.nbytes / max(1, first.nbytes)]
    yield ["nodes in the file", first.nodes, second.nodes, second.nodes / max(1, first.nodes)]
    if result.agreement.accuracy is not None:
        yield ["accuracy", f"{result.agreement.reference_accuracy:.2%}", f"{result.agreement.accuracy:.2%}", None]
    yield ["execution provider", first.execution_provider, second.execution_provider, None]
    yield ["threads", first.threads, second.threads, None]
    one, other = result.reference_speed, result.speed
    if one is not None and other is not None:
        yield ["time of a run, ms", one.median_ms, other.median_ms, 1 / other.ratio.value]
        yield ["processor time of a run, ms", one.cpu_ms, other.cpu_ms, other.cpu_ms / max(1e-9, one.cpu_ms)]
        yield ["time of opening, s", one.opening_s, other.opening_s, other.opening_s / max(1e-9, one.opening_s)]
        memory = (one.rss_nbytes, other.rss_nbytes)
        yield ["memory of the process", *map(bytes_text, memory), memory[1] / max(1, memory[0])]


def _label(model: ComparedModel) -> str:
    return Path(model.path).name if model.version is None else f"{model.name} version {model.version}"
