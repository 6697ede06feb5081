"""The command line of ``ortserve tune``."""

import argparse
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ortserve import __version__
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.runtime import Runtime
from ortserve.engine.providers import full_name
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.tools.agreement import parse_bound
from ortserve.tools.apart import call_apart
from ortserve.tools.command import Outcome, ToolParser, run_tool
from ortserve.tools.console import Step, progress
from ortserve.tools.provenance import read_provenance
from ortserve.tools.subject import Subject, find_model
from ortserve.tools.tune.budget import KEEPING_PAIRS, Budget
from ortserve.tools.tune.ending import Ending, end_search
from ortserve.tools.tune.journal import Journal, open_journal
from ortserve.tools.tune.lab import ProcessLab, Requests, prepare_requests
from ortserve.tools.tune.presentation import place_of, present, ratio_text
from ortserve.tools.tune.ratios import Noise, estimate_ratio, is_too_noisy
from ortserve.tools.tune.result import KeyGain, Trial, TuneResult, Variant
from ortserve.tools.tune.search import Bench, Search, measure_floor
from ortserve.tools.tune.sides import Goal, Side
from ortserve.tools.tune.space import Facts, Parameter, apply_changes, changes_of, make_space
from ortserve.tools.tune.writing import edit_text, write_options

JOURNAL: Final = ".ortserve-tune.journal"
"""In the model's folder. Its name begins with a dot, so that no server takes it for a change of the model."""
_DESCRIPTION: Final = """\
Search for the options of a model that serve a load best on this machine: execution providers, threads, spinning,
instances, batch sizes and others. Trials run in processes of their own, through the server's own batcher, in turn with
the current configuration. What is confirmed to be better is written to model.yaml.
"""
_PREPARE_LIMIT_S: Final = 1800.0
_OBJECTIVES: Final = {"throughput": "requests per second", "latency": "latency", "cost": "CPU time", "memory": "memory"}
_MODERATE: Final = 0.5
"""Of the rate that the current configuration sustains, for objectives with a constant rate."""
_NO_BOUND: Final = 5.0
"""Without a bound, the rate is found within so many times the latency of few callers."""
_OFFERED: Final = ("cuda", "tensorrt", "openvino")
_NOTHING: Final = "Nothing was better than the current configuration beyond the noise, so nothing was written."


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.slo is None and given.objective != "latency":
        parser.error(f"expected --slo with the bound of the latency for the objective {given.objective}")
    return run_tool("tune", tune, given)


def build_parser() -> ToolParser:
    """All arguments, also for the tests of documents."""
    parser = ToolParser("tune", _DESCRIPTION, page_flags=("--page", "-o", "--output"))
    parser.add_argument("model", metavar="MODEL", help="REPOSITORY/name[/version], or a file, which is only measured.")
    add = parser.add_argument_group("what is better").add_argument
    add("--slo", type=_duration, metavar="TIME", help="Bound of the latency: 20ms, 0.5s, or a number of ms.")
    add("--percentile", type=_percent, default=99.0, metavar="P", help="That the bound is for. Default: 99.")
    add("--objective", choices=_OBJECTIVES, default="throughput", help="Default: throughput.")
    add("--rate", type=_positive, metavar="R", help="Requests per second for the other objectives. Default: moderate.")
    add("--inputs", type=Path, metavar="FILE.npz", help="Samples to send; made from the signature if not given.")
    add("--rows", type=_count, default=1, metavar="N", help="Rows of a request. Default: 1.")
    bound = "Of outputs against the model's own: 0.001, or MEASURE=NUMBER. Default: the tolerance of the datatype."
    add("--max-error", metavar="BOUND", help=bound)
    add = parser.add_argument_group("search").add_argument
    add("--max-minutes", type=_positive, default=10.0, metavar="M", help="With confirmation. Default: 10.")
    add("--variants", action="store_true", help="Also measure the other versions that tools made of this model.")
    add("--dry-run", action="store_true", help="Write nothing.")
    add("--journal", type=Path, metavar="FILE", help=f"Of all trials; kept. Default: {JOURNAL}, kept until the end.")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="Fail unless a search can be gone on with.")
    again.add_argument("--fresh", action="store_true", help="Begin anew even if a search could be gone on with.")
    return parser


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)?", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 20ms or 0.5s, got '{text}'")
    return float(found[1]) / (1 if found[2] == "s" else 1e3)


def _positive(text: str) -> float:
    if not re.fullmatch(r"\d{1,7}(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return float(text)


def _percent(text: str) -> float:
    if not 50 <= (value := _positive(text)) < 100:
        raise argparse.ArgumentTypeError(f"expected a percentile from 50 to 99.9, got '{text}'")
    return value


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,4}", text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return int(text)


def tune(given: argparse.Namespace) -> Outcome:
    """Search, confirm, write. Raises ServeError, and KeyboardInterrupt with the journal kept."""
    began_s = time.monotonic()
    bound = parse_bound(given.max_error) if given.max_error else None
    subject = find_model(given.model)
    variants = _find_variants(subject) if given.variants else {}
    with progress("preparing inputs") as step:
        requests = call_apart(_PREPARE_LIMIT_S, prepare_requests, subject, given.inputs, given.rows)
        goal = Goal(given.objective, given.slo, given.percentile)
        space = make_space(subject.options, _facts(requests, given.slo), given.objective)
        lab = ProcessLab(subject, requests, goal, bound, {number: one.path for number, one in variants.items()})
        budget = Budget(given.max_minutes * 60 - (time.monotonic() - began_s), time.monotonic)
        bench = Bench(lab, goal, space, budget, Noise(), _shower(step, budget))
        with _journal(given, subject, requests, space) as journal:
            found = _search(given, bench, lab, journal)
            measured = _measure_variants(bench, variants, found) if variants else ()
        result = _result(given, subject, requests, bench, journal, found, measured)
        result = _write(given, subject, bench, result, found)
    result = replace(result, seconds=time.monotonic() - began_s)
    return Outcome(result, present(result, has_pictures=given.page is not None))


class _Found:
    """What a search found.

    Attributes:
        noise: The current configuration against itself.
        guess: The rate that the current configuration sustains.
        ending: None if no trial was better.
    """

    def __init__(self, noise: Any, guess: float, ending: Ending | None) -> None:
        self.noise = noise
        self.guess = guess
        self.ending = ending


def _search(given: argparse.Namespace, bench: Bench, lab: ProcessLab, journal: Journal) -> _Found:
    bench.show("opening the current configuration")
    contender = bench.open({})
    try:
        current = Side(contender, contender.probed_per_s)
        if given.objective != "throughput":
            bench.goal = lab.goal = _with_rate(given, bench.goal, current)
        noise = measure_floor(bench, current)
        winner = Search(bench, journal, current).run()
    finally:
        contender.close()
    ending = end_search(bench, winner, current.guess) if winner else None
    return _Found(noise, current.guess, ending)
