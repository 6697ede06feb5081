"""The command ``ortserve profile``."""

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ortserve.config.declaration import describe_problems
from ortserve.config.session import SessionSettings
from ortserve.engine.scratch import scratch_folder
from ortserve.errors import invalid_input
from ortserve.tools.address import address_of
from ortserve.tools.command import Outcome, expect_writable, json_or_text, number
from ortserve.tools.console import progress
from ortserve.tools.profile.arguments import UNCHANGED
from ortserve.tools.profile.measure import WARM_UP, Variant, measure
from ortserve.tools.profile.presentation import present
from ortserve.tools.profile.remote import profile_server
from ortserve.tools.profile.result import ProfileResult
from ortserve.tools.profile.summary import compare, profile_of
from ortserve.tools.staging import replacement
from ortserve.tools.subject import Subject, find_model


def run(given: argparse.Namespace) -> Outcome:
    """Profile models or a server. Raises ServeError."""
    return _run_on_server(given) if given.model is not None else _run_here(given)


def _run_here(given: argparse.Namespace) -> Outcome:
    expect_writable("--trace", given.trace, b"[")
    variants = _variants(given)
    with scratch_folder() as folder, progress("opening", WARM_UP + given.runs) as step:
        runs = measure(variants, folder, given, step)
        traces = [folder / f"{number}.json" for number in range(len(runs))]
        error = _keep(given.trace, *(partial(shutil.copyfile, trace) for trace in traces))
    result = ProfileResult(profile=profile_of(runs[0]))
    if len(runs) > 1:
        other = profile_of(runs[1])
        result = replace(result, other=other, comparison=compare(runs[0], runs[1], result.profile, other))
    return Outcome(result, present(result, runs), error=error)


def _run_on_server(given: argparse.Namespace) -> Outcome:
    address = address_of(given.target, given, needs_http=True)
    expect_writable("--trace", given.trace, b"[")
    with progress(f"waiting for requests of {given.model}, and profiling them"):
        runs, batches, trace = profile_server(address, given)
    result = ProfileResult(profile=profile_of(runs), server=batches)
    return Outcome(result, present(result, [runs]), error=_keep(given.trace, lambda file: file.write_bytes(trace)))


def _keep(target: Path | None, *writers: Callable[[Path], object]) -> OSError | None:
    """Write the traces to the file of ``--trace``, the second one to ``FILE-2``. Returns the error if this fails."""
    if target is None:
        return None
    try:
        for kept, write in zip((target, target.with_name(f"{target.stem}-2{target.suffix}")), writers, strict=False):
            with replacement(kept) as file:
                write(file)
    except OSError as error:
        return error
    return None


def _variants(given: argparse.Namespace) -> list[Variant]:
    """The variants to profile: one or two.

    Raises:
        ServeError: invalid_input: a model is missing, or a setting is unknown.
    """
    if given.target is None:
        return [_variant(given, text, find_model(text), []) for text in given.compare]
    target = find_model(given.target)
    if not given.compare:
        return [_variant(given, target.name, target, [])]
    for text in given.compare:
        if text != UNCHANGED and ("=" not in text or Path(text).exists()):
            raise invalid_input(f"--compare: expected KEY=VALUE settings of {given.target}, got {text!r}")
    return [_variant(given, text, target, [] if text == UNCHANGED else text.split(",")) for text in given.compare]


def _variant(given: argparse.Namespace, label: str, subject: Subject, own: Sequence[str]) -> Variant:
    settings: dict[str, Any] = {}
    provider, threads = given.provider, given.threads
    for text in (*given.set, *own):
        key, is_pair, value = text.partition("=")
        if not is_pair:
            raise invalid_input(f"--set: expected KEY=VALUE, got {text!r}")
        if key == "optimized_model_file":
            raise invalid_input("--set: expected a setting that changes runs, got optimized_model_file")
        if key == "provider":
            provider = value
        elif key == "threads":
            try:
                threads = number(int, 1)(value)
            except argparse.ArgumentTypeError as error:
                raise invalid_input(f"threads: {error}") from None
        else:
            settings |= _setting(key, value, subject.options.session.model_copy(update=settings))
    return Variant(subject, provider, threads, settings, label=label)


def _setting(key: str, text: str, current: SessionSettings) -> dict[str, Any]:
    """Read a session setting, or an entry of the session configuration, which is added to the current entries."""
    value = json_or_text(text)
    given = {"entries": {**current.entries, key: value}} if "." in key else {key: value}
    try:
        valid = SessionSettings.model_validate(given)
    except ValidationError as error:
        problems = describe_problems(error, SessionSettings.model_fields, given)
        problem = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
        raise invalid_input(f"--set {key}={text}: {problem}") from None
    return {name: getattr(valid, name) for name in given}
