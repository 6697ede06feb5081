"""``ortserve golden``: records golden samples of a version, or checks that the version agrees with existing ones."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from ortserve.core.agreement import WITHOUT_LABELS, parse_bound
from ortserve.engine.child_process import call_in_child
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.golden_samples import MAX_SAMPLES, golden_folder
from ortserve.tools.address import ACCESS_FLAGS, address_of, is_url
from ortserve.tools.command import Outcome
from ortserve.tools.console import progress
from ortserve.tools.control import Control
from ortserve.tools.golden.recording import Recorded, check_version, kept_tolerances, record_samples
from ortserve.tools.report import Report, facts_of
from ortserve.tools.staging import staging_folder, sync
from ortserve.tools.subject import Subject, find_model, find_version

_Result = TypeVar("_Result")
_LIMIT_S: Final = 3600.0
_TIMEOUT_S: Final = 60.0
"""Timeout of a request to a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """The golden samples of a version.

    Attributes:
        schema: Name and number of this schema.
        action: ``record`` or ``check``.
        model: The name of the model.
        version: The number of the version.
        folder: Folder of the samples.
        samples: The number of samples; null if they were not counted.
        inputs: A description of the recorded inputs; empty for a check.
        outputs: The source of the expected outputs; empty for a check.
        agreement: How the version agrees with the samples; empty for an ensemble that was recorded from a server.
    """

    schema: str = "ortserve.golden/1"
    action: str
    model: str
    version: int
    folder: str
    samples: int | None = None
    inputs: str = ""
    outputs: str = ""
    agreement: str = ""


def run(given: argparse.Namespace) -> Outcome:
    """Record or check.

    Raises:
        ServeError: invalid_input: wrong arguments; internal: the version disagrees with the samples.
        OSError: The samples cannot be written.
    """
    _check_options(given)
    subject = find_version(given.target)
    folder = golden_folder(subject.path, subject.folder, subject.options)
    if folder is None or subject.version is None:
        raise invalid_input(f"{given.target}: expected REPOSITORY/name[/version], got a single file")
    result = GoldenResult(action=given.action, model=subject.name, version=subject.version, folder=str(folder))
    if result.action == "check":
        result = replace(result, agreement=_check(subject, folder))
    else:
        recorded = _record(given, subject, folder)
        outputs = given.source or "the version itself"
        samples, agreement = recorded.samples, recorded.agreement
        result = replace(result, samples=samples, inputs=recorded.origin, outputs=outputs, agreement=agreement)
    title = f"Golden samples of version {result.version} of {result.model}"
    hidden = ("schema", "action", *(("samples", "inputs", "outputs") if result.action == "check" else ()))
    return Outcome(result, Report(title, (facts_of("", result, without=hidden),)))


def _check_options(given: argparse.Namespace) -> None:
    """Raise ServeError: invalid_input, for too many samples, and for options that would have no effect."""
    if given.samples > MAX_SAMPLES:
        raise invalid_input(f"--samples: expected at most {MAX_SAMPLES:,}, got {given.samples:,}")
    of_record = {
        "--inputs": given.inputs,
        "--from": given.source,
        "--tolerance": given.tolerance,
        "--replace": given.replace,
    }
    for flag, value in of_record.items():
        if value and given.action == "check":
            raise invalid_input(f"{flag}: expected the action record, got check")
    for flag in ("--model", "--version", *ACCESS_FLAGS):
        if getattr(given, flag[2:].replace("-", "_")) and not is_url(given.source or ""):
            raise invalid_input(f"{flag}: expected --from URL, too, got {given.source or 'none'}")


def _check(subject: Subject, folder: Path) -> str:
    """Describe how the version agrees with its samples."""
    if subject.options.ensemble is not None:
        raise invalid_input(f"{subject.name} is an ensemble: use ortserve check REPOSITORY --model {subject.name}")
    if not folder.is_dir():
        raise invalid_input(
            f"{subject.name}/{subject.version}: expected golden samples, got none; record them with ortserve golden "
            "record"
        )
    with progress("checking in another process"):
        return _apart(check_version, subject)


def _record(given: argparse.Namespace, subject: Subject, folder: Path) -> Recorded:
    if subject.options.is_ragged:
        raise invalid_input(f"{subject.name}: expected a model without ragged batches, whose samples share outputs")
    if folder.exists() and not given.replace:
        raise invalid_input(f"{folder}: expected a version without golden samples; --replace replaces existing ones")
    tolerances = _tolerances(given.tolerance) or kept_tolerances(folder)
    source = _source(given, subject)
    with staging_folder(folder) as staging, progress("recording in another process"):
        staged = staging / folder.name
        recorded = _apart(record_samples, subject, source, given.inputs, given.samples, tolerances, staged)
        for path in (*staged.iterdir(), staged):
            sync(path)
        _install(staged, folder, staging / "before")
    return recorded


def _apart(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function in another process. A version that disagrees is an internal error, not an invalid argument."""
    try:
        return call_in_child(_LIMIT_S, function, *arguments)
    except ServeError as error:
        if error.message.startswith("golden samples: "):
            raise ServeError(ErrorKind.INTERNAL, error.message) from None
        raise


def _install(staged: Path, folder: Path, before: Path) -> None:
    """Move the samples to their place. At worst, a server that polls at this moment sees a version without samples."""
    if folder.exists():
        folder.rename(before)
    try:
        staged.rename(folder)
    except OSError:
        if before.exists():
            before.rename(folder)
        raise
    sync(folder.parent)


def _source(given: argparse.Namespace, subject: Subject) -> Subject | Control | None:
    if given.source is None:
        return None
    if not is_url(given.source):
        return find_model(given.source)
    address = address_of(given.source, given)
    return Control(address, given.model or subject.name, given.version, _TIMEOUT_S)


def _tolerances(given: Sequence[str]) -> dict[str, dict[str, float]]:
    """The largest errors by output and measure. Raises ServeError: invalid_input, without an output or a bound."""
    found: dict[str, dict[str, float]] = {}
    for text in given:
        output, _, bound = text.rpartition(":")
        if not output:
            raise invalid_input(f"--tolerance: expected OUTPUT:[MEASURE=]N, got '{text}'")
        parsed = parse_bound(bound, "--tolerance", WITHOUT_LABELS)
        found.setdefault(output, {})[parsed.measure] = parsed.most
    return found
