"""``ortserve publish``: makes a model the next version of a model in a repository."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortserve.errors import invalid_input
from ortserve.tools.command import Outcome
from ortserve.tools.opening import read_graph
from ortserve.tools.provenance import (
    Provenance,
    command_line,
    describe_model,
    make_provenance,
    read_provenance,
    with_summary,
)
from ortserve.tools.publish.folder import publish_version
from ortserve.tools.publish.place import find_place
from ortserve.tools.report import Report, Text, facts_of
from ortserve.tools.subject import Subject, find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """A new version of a model.

    Attributes:
        schema: Name and number of this schema.
        model: The name of the model in the repository.
        version: The number of the new version.
        folder: Folder of the version.
        digest: SHA-256 over the model file and its external data.
        nbytes: Size of the model file and its external data.
        provenance: Summary of the provenance, as the server shows it in the model's metadata.
        notes: Facts that may be unexpected, such as a version policy that does not select the version.
    """

    schema: str = "ortserve.publish/1"
    model: str
    version: int
    folder: str
    digest: str
    nbytes: int
    provenance: str
    notes: tuple[str, ...]


def run(given: argparse.Namespace) -> Outcome:
    """Publish a model.

    Raises:
        ServeError: invalid_input: as ``publish_version``.
        OSError: The repository cannot be written.
    """
    source = find_model(given.model)
    find_place(given.target)
    read_graph(source.path)  # first, because a file that cannot be read is a wrong argument
    provenance, notes = trace(source, given.command_line)
    options_text = _read_options(given.options)
    published = publish_version(source.path, given.target, provenance, given, options_text)
    result = PublishResult(
        model=published.name,
        version=published.version,
        folder=str(Path(given.target) / str(published.version)),
        digest=provenance.model.digest,
        nbytes=provenance.model.nbytes,
        provenance=provenance.summary,
        notes=(*notes, *published.notes),
    )
    facts = facts_of("Version", result, without=("schema", "notes"))
    title = f"Published version {published.version} of {published.name}"
    return Outcome(result, Report(title, (facts, *map(Text, result.notes))))


def trace(source: Subject, command: Sequence[str]) -> tuple[Provenance, list[str]]:
    """The provenance of a model with this command added, and notes. A model without a provenance is its own source."""
    before = read_provenance(source.path)
    model = describe_model(source.path, source.path.name, None)
    if before is not None and before.model.digest == model.digest:
        return with_summary(replace(before, commands=(*before.commands, command_line(command)))), []
    notes = [] if before is None else [f"the provenance of {source.path.name} belongs to another file and was left out"]
    return make_provenance(source, source.path, arguments=command), notes


def _read_options(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_input(f"--options {file}: expected a file in UTF-8, got: {error}") from None
