"""The command line of ``ortserve tune``."""

import argparse
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from ortserve import __version__
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.providers import full_name
from ortserve.engine.runtime import Runtime
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE, VERSION
from ortserve.tools.agreement import parse_bound
from ortserve.tools.apart import call_apart
from ortserve.tools.bench.statistics import Estimate
from ortserve.tools.command import Outcome, ToolParser, run_tool
from ortserve.tools.console import Step, progress
from ortserve.tools.doctor.machine import Files, read_processors
from ortserve.tools.provenance import read_provenance
from ortserve.tools.subject import Subject, find_model
from ortserve.tools.tune.budget import KEEPING_PAIRS, Budget
from ortserve.tools.tune.ending import Ending, end_search
from ortserve.tools.tune.journal import Journal, open_journal
from ortserve.tools.tune.lab import ModelProcess, ProcessLab, Requests, prepare_requests
from ortserve.tools.tune.presentation import place_of, present, ratio_text
from ortserve.tools.tune.ratios import Noise, is_too_noisy
from ortserve.tools.tune.result import Trial, TuneResult, Variant
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
_GAINS: Final = {
    "throughput": "Requests per second",
    "latency": "Latency",
    "cost": "CPU time",
    "memory": "Memory",
}
"""What an objective makes better, in words."""
_MODERATE: Final = 0.5
"""Of the rate that the current configuration sustains, for objectives with a constant rate."""
_OFFERED: Final = ("cuda", "tensorrt", "openvino")


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
    add("--objective", choices=_GAINS, default="throughput", help="Default: throughput.")
    add("--rate", type=_positive, metavar="R", help="Requests per second for the other objectives. Default: moderate.")
    add("--inputs", type=Path, metavar="FILE.npz", help="Samples to send; made from the signature if not given.")
    add("--rows", type=_count, default=1, metavar="N", help="Rows of a request. Default: 1.")
    bound = "Of outputs against the model's own: 0.001, or MEASURE=NUMBER. Default: the tolerance of the datatype."
    add("--max-error", metavar="BOUND", help=bound)
    add = parser.add_argument_group("search").add_argument
    add("--max-minutes", type=_positive, default=10.0, metavar="M", help="With confirmation. Default: 10.")
    add("--max-trials", type=_count, default=10_000, metavar="N", help="With those of a search that goes on.")
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
        lab = ProcessLab(subject, requests, goal, bound, variants)
        budget = Budget(given.max_minutes * 60 - (time.monotonic() - began_s), time.monotonic)
        bench = Bench(lab, goal, space, budget, Noise(), _shower(step, budget), given.max_trials)
        with _journal(given, subject, requests, space) as journal:
            found = _search(given, bench, lab, journal)
            measured = _measure_variants(bench, variants, found) if variants else ()
        result = _result(given, subject, requests, bench, journal, found, measured)
        result = _write(given, subject, bench, result, found)
    result = replace(result, seconds=time.monotonic() - began_s)
    return Outcome(result, present(result, has_pictures=given.page is not None))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search found.

    Attributes:
        noise: The current configuration against itself; None if it answers nothing in time.
        guess: The rate that the current configuration sustains.
        ending: None if no trial was better.
    """

    noise: Estimate | None
    guess: float
    ending: Ending | None


def _search(given: argparse.Namespace, bench: Bench, lab: ProcessLab, journal: Journal) -> _Found:
    bench.show("opening the current configuration")
    contender = lab.open({})
    try:
        current = Side(contender, contender.probed_per_s)
        if given.objective != "throughput":
            bench.goal = _with_rate(given, bench.goal, contender)
        noise = measure_floor(bench, current)
        winner = Search(bench, journal, current).run()
    finally:
        contender.close()
    ending = end_search(bench, winner, current.guess) if winner else None
    return _Found(noise, current.guess, ending)


def _with_rate(given: argparse.Namespace, goal: Goal, contender: ModelProcess) -> Goal:
    """The goal with its constant rate: the given one, or half of what the current configuration sustains."""
    rate = given.rate
    if rate is None:
        side = Side(contender, contender.probed_per_s)
        if goal.slo_s is not None:
            side.measure(replace(goal, objective="throughput"), 0, may_fall=True)
        rate = side.guess * _MODERATE
    return replace(goal, rate_per_s=rate)


def _shower(step: Step, budget: Budget) -> Callable[[str], object]:
    return lambda line: step(0, f"{budget.spent_s / 60:.1f} min, {line}")


def _facts(requests: Requests, slo_s: float | None) -> Facts:
    processors = read_processors(Files())
    nodes = tuple(processors.numa_nodes.values()) or (processors.allowed,)
    runtime = Runtime()
    offered = tuple(name for name in _OFFERED if not runtime.offer(full_name(name)).problem)
    return Facts(cpu_budget(), nodes, requests.is_batched, requests.has_convolutions, offered, slo_s)


def _options_file(subject: Subject) -> Path | None:
    """Where the options are or would be; None for a model without a folder."""
    if subject.folder is None:
        return None
    triton = subject.folder / TRITON_OPTIONS_FILE
    return triton if triton.exists() else subject.folder / OPTIONS_FILE


@contextmanager
def _journal(
    given: argparse.Namespace, subject: Subject, requests: Requests, space: Sequence[Parameter]
) -> Iterator[Journal]:
    """The journal of this search. One that was not named is removed when the search has ended or has no trials."""
    file: Path | None = given.journal
    if file is None and subject.folder is not None and not given.dry_run:
        file = subject.folder / JOURNAL
    if file is None and given.resume:
        raise invalid_input("--resume: expected --journal, as without it this search keeps nothing")
    status = subject.path.stat()
    key = {
        "model": [subject.path.name, status.st_size, status.st_mtime_ns],
        "options": subject.options.model_dump(mode="json"),
        "goal": [given.objective, given.slo, given.percentile, given.rate, requests.rows, requests.origin],
        "bound": given.max_error,
        "machine": [platform.node(), cpu_budget()],
        "versions": [__version__, version("onnxruntime")],
    }
    resume = True if given.resume else False if given.fresh else None
    has_ended = True
    with open_journal(file, key, space, resume=resume) as journal:
        try:
            yield journal
        except BaseException:
            has_ended = len(journal.trials) < 2
            raise
        finally:
            if has_ended and file is not None and given.journal is None:
                file.unlink(missing_ok=True)


def _find_variants(subject: Subject) -> dict[int, Path]:
    """The files of other versions that tools made of this model, or that it was made from."""
    if subject.folder is None or subject.version is None:
        raise invalid_input("--variants: expected REPOSITORY/name, got a single file")
    own = read_provenance(subject.path)
    source = own.source.version if own is not None and own.source.name == subject.name else None
    found: dict[int, Path] = {}
    for folder in subject.folder.iterdir():
        file = folder / subject.path.name
        number = int(folder.name) if VERSION.fullmatch(folder.name) and file.is_file() else subject.version
        if number != subject.version and (number == source or read_provenance(file) is not None):
            found[number] = file
    return dict(sorted(found.items()))


def _measure_variants(bench: Bench, variants: Mapping[int, Path], found: _Found) -> tuple[Variant, ...]:
    """Other versions with the best configuration, each in turn with the version that was tuned."""
    changes = changes_of(bench.space, found.ending.point if found.ending else {})
    results: list[Variant] = []
    with closing(bench.open(changes)) as own:
        reference = Side(own, own.probed_per_s)
        for number, file in variants.items():
            bench.show(f"version {number}")
            provenance = read_provenance(file)
            commands = provenance.commands if provenance else ()
            try:
                with closing(bench.open(changes, number)) as other:
                    side = reference.beside(other)
                    logs = bench.compare(reference, side, KEEPING_PAIRS)
                    why = bench.goal.misses(side.readings, reference.readings)
                    ratio = None if why else bench.noise.estimate(logs)
                    results.append(Variant(number, commands, ratio, side.figures(bench.goal).error, why))
            except ServeError as error:
                results.append(Variant(number, commands, None, None, error.message))
    return tuple(results)


def _result(
    given: argparse.Namespace,
    subject: Subject,
    requests: Requests,
    bench: Bench,
    journal: Journal,
    found: _Found,
    variants: Sequence[Variant],
) -> TuneResult:
    ending = found.ending
    trials = mark_front(sorted(journal.trials.values(), key=lambda one: one.number), given.objective)
    has_gain = ending is not None and bool(ending.point)
    conclusion = "No trial was better than the current configuration beyond the noise."
    if len(trials) < 2:
        conclusion = "There was no time for a trial: allow more by --max-minutes."
    elif ending is not None and has_gain:
        ratio = ratio_text(ending.confirmation.ratio)
        conclusion = f"{_GAINS[given.objective]}: {ratio} times as good as before, confirmed by new processes in turn."
    elif ending is not None:
        ratio = ratio_text(ending.confirmation.ratio)
        conclusion = f"The best trial was not confirmed by new processes: {ratio}. The configuration stays."
    comments = _comments(given.objective, ending) if ending else {}
    changes = changes_of(bench.space, ending.point) if ending else {}
    return TuneResult(
        version=__version__,
        model=given.model,
        model_version=subject.version,
        objective=given.objective,
        slo_ms=None if given.slo is None else given.slo * 1e3,
        percentile=given.percentile,
        rate_per_s=bench.goal.rate_per_s,
        machine=f"{cpu_budget()} processors, load {os.getloadavg()[0]:.1f} at the end",
        inputs=requests.origin,
        seconds=0.0,
        noise=found.noise,
        is_too_noisy=found.noise is not None and is_too_noisy(bench.noise),
        conclusion=conclusion,
        has_gain=has_gain,
        confirmation=ending.confirmation if ending else None,
        gains=ending.gains if ending else (),
        yaml=edit_text("", changes, comments) if has_gain else "",
        written="",
        why_not_written="" if has_gain else "nothing is better",
        trials=trials,
        variants=tuple(variants),
    )


def _comments(objective: str, ending: Ending) -> dict[str, str]:
    """The gain of each key that is kept, by key."""
    comments: dict[str, str] = {}
    for gain in ending.gains:
        ratio = gain.ratio or ending.confirmation.ratio
        words = f"ortserve tune: {_GAINS[objective].lower()} {ratio_text(ratio)} times as good"
        if gain.is_kept:
            comments |= dict.fromkeys(gain.changes, words if gain.ratio else f"{words}, all keys together")
    return comments


def mark_front(trials: Sequence[Trial], objective: str) -> tuple[Trial, ...]:
    """The trials, with those marked that no other one beats both in latency and by the objective."""
    places = {one.number: place_of(one, objective) for one in trials if one.figures and one.ratio}

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in places.values())

    front = {number for number, place in places.items() if not is_beaten(*place)}
    return tuple(replace(one, is_on_front=one.number in front) for one in trials)


def _write(given: argparse.Namespace, subject: Subject, bench: Bench, result: TuneResult, found: _Found) -> TuneResult:
    """Write what was found, unless something speaks against it."""
    file = _options_file(subject)
    if not result.has_gain or found.ending is None:
        return result
    if given.dry_run:
        return replace(result, why_not_written="not written, because of --dry-run")
    if file is None:
        return replace(result, why_not_written="a single file has no model.yaml; for a model in a folder it would be")
    if file.name == TRITON_OPTIONS_FILE:
        why = f"the model has a {TRITON_OPTIONS_FILE}, which is not changed; in a {OPTIONS_FILE} it would be"
        return replace(result, why_not_written=why)
    changes = changes_of(bench.space, found.ending.point)
    expected = apply_changes(subject.options, changes)
    write_options(file, changes, _comments(given.objective, found.ending), expected)
    return replace(result, written=str(file))
