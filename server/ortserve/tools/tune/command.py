"""The command line of ``ortserve tune``."""

import argparse
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from ortserve import __version__
from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.core.agreement import WITHOUT_LABELS, parse_bound
from ortserve.core.version_names import version_of
from ortserve.engine.child_process import call_in_child
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.providers import full_name
from ortserve.engine.runtime import Runtime
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.tools.command import Outcome, expect_writable
from ortserve.tools.console import progress
from ortserve.tools.doctor.machine import Files, read_processors
from ortserve.tools.provenance import describe_model, read_provenance
from ortserve.tools.statistics import Estimate
from ortserve.tools.subject import Subject, find_model
from ortserve.tools.tune.arguments import JOURNAL, OBJECTIVES
from ortserve.tools.tune.budget import KEEPING_PAIRS, Budget
from ortserve.tools.tune.ending import Ending, end_search
from ortserve.tools.tune.journal import Journal, open_journal
from ortserve.tools.tune.lab import ProcessLab, Requests, prepare_requests
from ortserve.tools.tune.presentation import mark_front, present
from ortserve.tools.tune.ratios import Noise, is_too_noisy
from ortserve.tools.tune.result import TuneResult, Variant
from ortserve.tools.tune.search import Experiment, Search, measure_floor
from ortserve.tools.tune.sides import Goal, Side
from ortserve.tools.tune.space import Changes, Conditions, Parameter, apply_changes, changes_of, make_space
from ortserve.tools.tune.writing import edit_text, write_options

_PREPARE_LIMIT_S: Final = 1800.0
_MODERATE: Final = 0.5
"""Share of the rate that the current configuration sustains. It is the default rate of objectives with a constant
rate."""
_MIN_PAIRS: Final = 2
"""Minimum number of pairs that compare another version."""
_OFFERED: Final = ("cuda", "tensorrt", "openvino")


def run(given: argparse.Namespace) -> Outcome:
    """Search, confirm the result and write it.

    Raises:
        ServeError: The arguments, the model or the inputs are wrong, or the current configuration fails.
        KeyboardInterrupt: The user interrupted the search. The journal keeps its trials.
    """
    began_s = time.monotonic()
    bound = parse_bound(given.max_error, measures=WITHOUT_LABELS) if given.max_error else None
    subject = find_model(given.model)
    if what := subject.joint_requests:
        expected = f"{given.model}: expected a model that answers requests alone, it has {what}"
        raise invalid_input(f"{expected}: measure its options on a server, by ortserve bench")
    variants = _find_variants(subject) if given.variants else {}
    with progress("preparing inputs") as step:
        requests = call_in_child(_PREPARE_LIMIT_S, prepare_requests, subject, given.inputs, given.rows)
        goal = Goal(given.objective, given.slo, given.percentile)
        space = make_space(subject.options, _conditions(requests, given.slo), given.objective)
        lab = ProcessLab(subject, requests, goal, bound, variants)
        budget = Budget(given.max_minutes * 60 - (time.monotonic() - began_s), time.monotonic)
        budget.later = len(variants)

        def show(line: str) -> None:
            step(0, f"{budget.spent_s / 60:.1f} min, {line}")

        experiment = Experiment(lab, goal, space, budget, Noise(), show, given.max_trials)
        with _journal(given, subject, requests, space) as journal:
            noise, ending = _search(given.rate, experiment, journal)
            changes = changes_of(space, ending.point) if ending else {}
            others = tuple(_measure_variants(experiment, variants, changes))
            trials = sorted(journal.trials.values(), key=lambda one: one.number)
            comments = _comments(given.objective, ending) if ending else {}
            written, why, error = "", "", None
            try:
                written, why = _write(given, subject, changes, comments)
            except OSError as failure:  # the result of a long search is worth more than the file
                why, error = f"not written: {failure.strerror or failure}; the file would get", failure
    result = TuneResult(
        version=__version__,
        model=given.model,
        model_version=subject.version,
        objective=given.objective,
        slo_ms=None if given.slo is None else given.slo * 1e3,
        percentile=given.percentile,
        rate_per_s=experiment.goal.rate_per_s,
        machine=f"{cpu_budget()} processors, load {os.getloadavg()[0]:.1f} at the end",
        inputs=requests.origin,
        seconds=time.monotonic() - began_s,
        noise=noise,
        is_too_noisy=noise is not None and is_too_noisy(experiment.noise),
        conclusion=_conclusion(given.objective, ending, len(trials)),
        has_gain=bool(changes),
        confirmation=ending.confirmation if ending else None,
        gains=ending.gains if ending else (),
        yaml=edit_text("", changes, comments) if changes else "",
        written=written,
        why_not_written=why,
        trials=mark_front(trials, given.objective),
        variants=others,
    )
    return Outcome(result, present(result, has_pictures=given.page is not None), error=error)


def _search(rate: float | None, experiment: Experiment, journal: Journal) -> tuple[Estimate | None, Ending | None]:
    """Search, and end the search.

    Returns:
        The current configuration compared with itself, None if it answers nothing in time; and the end of the search,
        None if no trial was better.
    """
    experiment.show("opening the current configuration")
    with closing(experiment.lab.open({})) as contender:
        current = Side(contender, contender.probed_per_s)
        if experiment.goal.objective != "throughput":
            if rate is None and experiment.goal.slo_s is not None:
                probed = Side(contender, current.guess)
                probed.measure(replace(experiment.goal, objective="throughput"), 0, may_fall=True)
                rate = probed.guess * _MODERATE
            experiment.goal = replace(experiment.goal, rate_per_s=rate or current.guess * _MODERATE)
        noise = measure_floor(experiment, current)
        winner = Search(experiment, journal, current).run()
    return noise, end_search(experiment, winner, current.guess) if winner else None


def _conditions(requests: Requests, slo_s: float | None) -> Conditions:
    processors = read_processors(Files())
    nodes = tuple(processors.numa_nodes.values()) or (processors.allowed,)
    runtime = Runtime()
    offered = tuple(name for name in _OFFERED if not runtime.offer(full_name(name)).problem)
    return Conditions(
        processors=cpu_budget(),
        nodes=nodes,
        is_batched=requests.is_batched,
        has_convolutions=requests.has_convolutions,
        offered=offered,
        slo_s=slo_s,
    )


@contextmanager
def _journal(
    given: argparse.Namespace, subject: Subject, requests: Requests, space: Sequence[Parameter]
) -> Iterator[Journal]:
    """The journal of this search. Without ``--journal``, it is removed if the search ends or has measured no trial."""
    file: Path | None = given.journal
    expect_writable("--journal", file, b"")
    if file is None and subject.folder is not None and not given.dry_run:
        file = subject.folder / JOURNAL
    if file is None and given.resume:
        raise invalid_input("--resume: expected --journal, because without it this search keeps no record")
    resume = True if given.resume else False if given.fresh else None
    has_ended = True
    with open_journal(file, search_key(given, subject, requests), space, resume=resume) as journal:
        try:
            yield journal
        except BaseException:
            has_ended = len(journal.trials) < 2
            raise
        finally:
            if has_ended and file is not None and given.journal is None:
                file.unlink(missing_ok=True)


def search_key(given: argparse.Namespace, subject: Subject, requests: Requests) -> dict[str, Any]:
    """All that the figures of a search depend on. A journal with other values belongs to another search."""
    inputs = given.inputs.stat() if given.inputs else None
    return {
        "model": describe_model(subject.path, subject.name, subject.version).digest,
        "options": subject.options.model_dump(mode="json"),
        "goal": [given.objective, given.slo, given.percentile, given.rate, requests.rows, requests.origin],
        "inputs": [inputs.st_size, inputs.st_mtime_ns] if inputs else [],
        "bound": given.max_error,
        "machine": [platform.node(), cpu_budget(), read_processors(Files()).model],
        "versions": [__version__, version("onnxruntime")],
    }


def _find_variants(subject: Subject) -> dict[int, Path]:
    """Files of other versions, by number: those that tools made, and the one that this version was made from."""
    if subject.folder is None or subject.version is None:
        raise invalid_input("--variants: expected REPOSITORY/name, got a single file")
    own = read_provenance(subject.path)
    source = own.source.version if own is not None and own.source.name == subject.name else None
    found: dict[int, Path] = {}
    for folder in subject.folder.iterdir():
        file = folder / subject.path.name
        number = version_of(folder.name) if file.is_file() else None
        if number is not None and number != subject.version and (number == source or read_provenance(file) is not None):
            found[number] = file
    return dict(sorted(found.items()))


def _measure_variants(experiment: Experiment, variants: Mapping[int, Path], changes: Changes) -> Iterator[Variant]:
    """Compare other versions with the tuned one, all with the best configuration, in alternate rounds."""
    if not variants:
        return
    budget = experiment.budget
    budget.later = 0
    with closing(experiment.open(changes)) as own:
        reference = Side(own, own.probed_per_s)
        for index, (number, file) in enumerate(variants.items()):
            experiment.show(f"version {number}")
            provenance = read_provenance(file)
            ratio, error, why = None, None, "no time was left; allow more with --max-minutes"
            first = len(reference.readings)
            left_s, least_s = budget.left_s, budget.cost_s(1, _MIN_PAIRS)
            share_s = max(left_s / (len(variants) - index), least_s) - budget.cost_s(1, 0)
            pairs = max(_MIN_PAIRS, min(KEEPING_PAIRS, int(share_s / budget.cost_s(0, 1))))
            if left_s >= least_s:
                try:
                    with closing(experiment.open(changes, number)) as other:
                        side = reference.beside(other)
                        logs = experiment.compare(reference, side, pairs)
                        why = experiment.goal.misses(side.readings, reference.readings[first:])
                        ratio = None if why else experiment.noise.estimate(logs)
                        error = experiment.goal.figures(side.readings).error
                except ServeError as failure:
                    why = failure.message
            yield Variant(number, provenance.commands if provenance else (), ratio, error, why)


def _conclusion(objective: str, ending: Ending | None, trials: int) -> str:
    if trials < 2:
        return "No time was left for a trial; allow more with --max-minutes."
    if ending is None:
        return "No trial was better than the current configuration by more than the noise."
    ratio = ending.confirmation.ratio
    if ending.point:
        return f"{OBJECTIVES[objective]}: {ratio} times as good as before, confirmed by new processes in turn."
    return f"The best trial was not confirmed by new processes: {ending.why or ratio}. The configuration stays."


def _comments(objective: str, ending: Ending) -> dict[str, str]:
    """Comments for ``model.yaml`` by key: the gain of each kept key."""
    comments: dict[str, str] = {}
    for gain in ending.gains:
        ratio = gain.ratio or ending.confirmation.ratio
        words = f"ortserve tune: {OBJECTIVES[objective].lower()} {ratio} times as good"
        if gain.is_kept:
            comments |= dict.fromkeys(gain.changes, words if gain.ratio else f"{words}, all keys together")
    return comments


def _write(
    given: argparse.Namespace, subject: Subject, changes: Changes, comments: Mapping[str, str]
) -> tuple[str, str]:
    """Write the confirmed changes. Returns the file and an empty text, or an empty text and why it was not written."""
    if not changes:
        return "", "no configuration is better"
    if given.dry_run:
        return "", "not written, because of --dry-run"
    if subject.folder is None:
        return "", "a single file has no model.yaml; the model.yaml of a model in a folder would get"
    if (subject.folder / TRITON_OPTIONS_FILE).exists():
        return "", f"the model has a {TRITON_OPTIONS_FILE}, which tune does not change; a {OPTIONS_FILE} would get"
    file = subject.folder / OPTIONS_FILE
    present_options = load_model_options(file, LoadOptions()) if file.exists() else ModelOptions()
    # find_model changes the policy for a version that the model's own policy does not select.
    if present_options.model_copy(update={"version_policy": subject.options.version_policy}) != subject.options:
        return "", f"not written, because {OPTIONS_FILE} changed during the search; the earlier file would get"
    write_options(file, changes, comments, apply_changes(present_options, changes))
    return str(file), ""
