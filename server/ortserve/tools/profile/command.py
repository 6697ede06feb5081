"""The command ``ortserve profile``."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import orjson
from pydantic import ValidationError

from ortserve.config.expectation import describe_problems
from ortserve.config.session import SessionSettings
from ortserve.errors import invalid_input
from ortserve.tools.command import Outcome, ToolParser, run_tool
from ortserve.tools.console import progress
from ortserve.tools.profile.balance import Runs, middle_run
from ortserve.tools.profile.measure import WARM_UP, Measured, Variant, measure
from ortserve.tools.profile.presentation import report
from ortserve.tools.profile.remote import profile_server
from ortserve.tools.profile.result import SCHEMA, Profile, ProfileResult
from ortserve.tools.profile.summary import compare, profile_of
from ortserve.tools.subject import Subject, find_model, is_url

_DESCRIPTION: Final = """
Show what each operator of a model costs. TARGET is model.onnx or REPOSITORY/name[/version], or the URL of a server and
the name of a model that it serves: then copies of its next batches are profiled there.
"""
_UNCHANGED: Final = "default"
"""The setting of ``--compare`` that changes nothing."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.target is None and given.compare is None:
        parser.error("expected a TARGET, or --compare with two models")
    if given.target is not None and is_url(given.target) is (given.model is None):
        parser.error("expected the name of a MODEL after a URL, and none after a model")
    if given.model is not None and given.compare:
        parser.error("--compare: expected a model in this process, got a URL")
    return run_tool("profile", _run, given)


def _parser() -> ToolParser:
    parser = ToolParser("profile", _DESCRIPTION)
    parser.add_argument("target", nargs="?", metavar="TARGET", help="Model file, REPOSITORY/name[/version], or URL.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="With a URL: the name of the model.")
    runs = parser.add_argument_group("runs in this process")
    runs.add_argument("--runs", type=_count, default=50, metavar="N", help="Runs with and without profiling (50).")
    runs.add_argument("--seconds", type=_positive, default=60.0, help="Time limit of all runs (60).")
    runs.add_argument("--rows", type=_count, default=1, metavar="N", help="Rows of a run (1).")
    runs.add_argument("--inputs", type=Path, metavar="FILE.npz", help="Samples by input, instead of synthetic inputs.")
    runs.add_argument("--provider", metavar="NAME", help="Execution provider: cpu, cuda, tensorrt, openvino.")
    runs.add_argument("--threads", type=_count, metavar="N", help="Threads of a run.")
    runs.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Session setting of model.yaml, or an entry such as session.dynamic_block_base; may be repeated.",
    )
    runs.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help=f"Two models, or two settings of TARGET: KEY=VALUE[,…], also threads and provider, {_UNCHANGED}.",
    )
    server = parser.add_argument_group("batches of a server")
    server.add_argument("--requests", type=_count, default=100, metavar="N", help="Requests to copy (100).")
    server.add_argument("--timeout", type=_positive, default=30.0, metavar="S", help="Time to wait for them (30).")
    server.add_argument("--key-file", type=Path, metavar="FILE", help="File with a control key of the server.")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="Keep ONNX Runtime's trace, for Perfetto.")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return value


def _run(given: argparse.Namespace) -> Outcome:
    trace: Path | None = given.trace
    if trace is not None and not trace.absolute().parent.is_dir():
        raise invalid_input(f"--trace: expected a file in an existing folder, got '{trace}'")
    if given.target is not None and is_url(given.target):
        return _profile_server(given)
    variants = _variants(given)
    with (
        TemporaryDirectory(prefix="ortserve-profile-") as folder,
        progress("opening", WARM_UP + given.runs) as step,
    ):
        measured = measure(
            variants,
            Path(folder),
            runs=given.runs,
            rows=given.rows,
            seconds=given.seconds,
            inputs=given.inputs,
            step=step,
        )
        for number, one in enumerate(measured):
            if trace is not None:
                kept = trace if not number else trace.with_name(f"{trace.stem}-{number + 1}{trace.suffix}")
                shutil.copyfile(one.trace_file, kept)
    runs = [Runs(one.plain, one.profiled, one.trace, one.groups, one.is_single_threaded) for one in measured]
    profiles = [_profile(one, held) for one, held in zip(measured, runs, strict=True)]
    result = ProfileResult(SCHEMA, profiles[0])
    if len(profiles) > 1:
        comparison = compare(profiles[0], profiles[1], runs[0], runs[1])
        result = ProfileResult(SCHEMA, profiles[0], profiles[1], comparison)
    return Outcome(result, report(result, [(held.trace, middle_run(held)) for held in runs]))


def _profile(measured: Measured, runs: Runs) -> Profile:
    model = measured.model
    return profile_of(
        runs,
        label=measured.variant.label,
        provider=model.choice.name,
        threads=model.threads,
        settings={name: str(value) for name, value in measured.variant.settings.items()},
        inputs=measured.inputs,
        rows=measured.rows,
        source=model.graph.graph,
        optimized=measured.optimized,
        notes=measured.notes,
    )


def _profile_server(given: argparse.Namespace) -> Outcome:
    with progress(f"waiting for requests of {given.model}, and profiling them"):
        result, runs = profile_server(
            given.target,
            given.model,
            requests=given.requests,
            timeout_s=given.timeout,
            key_file=given.key_file,
            keep=given.trace,
        )
    return Outcome(result, report(result, [(runs.trace, middle_run(runs))]))


def _variants(given: argparse.Namespace) -> list[Variant]:
    """What to profile: one model, or two.

    Raises:
        ServeError: invalid_input, for a model that is not there, or a setting that is none.
    """
    target = None if given.target is None else find_model(given.target)
    chosen: list[tuple[str, Subject, list[str]]] = []
    for text in given.compare or ():
        if target is not None and (text == _UNCHANGED or ("=" in text and not Path(text).exists())):
            chosen.append((text, target, [] if text == _UNCHANGED else text.split(",")))
        elif target is not None:
            raise invalid_input(f"--compare: expected KEY=VALUE settings of {given.target}, got {text!r}")
        else:
            chosen.append((text, find_model(text), []))
    if target is not None and not chosen:
        chosen = [(target.name, target, [])]
    return [_variant(given, *one) for one in chosen]


def _variant(given: argparse.Namespace, label: str, subject: Subject, own: Sequence[str]) -> Variant:
    settings: dict[str, Any] = {}
    provider, threads = given.provider, given.threads
    for text in (*given.set, *own):
        key, is_pair, value = text.partition("=")
        if not is_pair:
            raise invalid_input(f"--set: expected KEY=VALUE, got {text!r}")
        if key == "provider":
            provider = value
        elif key == "threads":
            try:
                threads = _count(value)
            except argparse.ArgumentTypeError as error:
                raise invalid_input(f"threads: {error}") from None
        elif key == "optimized_model_file":
            raise invalid_input("--set: expected a setting that changes runs, got optimized_model_file")
        else:
            settings |= _setting(key, value, subject.options.session.model_copy(update=settings))
    return Variant(label, subject, provider, threads, settings)


def _setting(key: str, text: str, current: SessionSettings) -> dict[str, Any]:
    """A session setting by its name, or an entry of the session configuration, beside those that are set."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    name, given = ("entries", {**current.entries, key: value}) if "." in key else (key, value)
    try:
        return {name: getattr(SessionSettings.model_validate({name: given}), name)}
    except ValidationError as error:
        problems = describe_problems(error, SessionSettings.model_fields, {name: given})
        problem = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
        raise invalid_input(f"--set {key}={text}: {problem}") from None
    except AttributeError:
        raise invalid_input(f"--set {key}={text}: unknown setting") from None
